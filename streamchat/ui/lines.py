"""Events as lines: text or JSON on standard output, words on standard error."""

import dataclasses
import json

from streamchat.events import (
    Answer,
    FellBehind,
    LineScored,
    Note,
    Origin,
    Reply,
    Summary,
    TurnsEvicted,
)

Written = LineScored | Note | Summary | Reply | Answer
"""Events that are data."""


def plain_line(event: Written) -> str:
    """An event as text.

    A score is nats per token, a tab, the standard score, a tab, and the line; a dash stands for
    what is not known. A reply is one line. A note names the lines it covers, the files and the
    times where there are any, and ends with a blank line; so do summaries and answers.
    """
    if isinstance(event, Note):
        return f"[{', '.join([covered(event), *whence(event)])}]\n{event.text}\n"
    if isinstance(event, Summary):
        return f"[{', '.join([summarized(event), *period(event)])}]\n{event.text}\n"
    if isinstance(event, Answer):
        return f"[asked after line {event.line}: {event.question}]\n{event.text}\n"
    if isinstance(event, Reply):
        return " ".join(event.text.split())
    score, standard = event.nats_per_token, event.z_score
    return (
        f"{'-' if score is None else f'{score:.3f}'}\t"
        f"{'-' if standard is None else f'{standard:+.2f}'}\t{event.text}"
    )


def text_of(event: Written) -> str:
    """A line that passed, as it is."""
    return event.text


def covered(note: Note) -> str:
    """The lines a note covers, in words."""
    # A long line is covered by several notes: say which parts of it.
    cut_first, cut_last = note.first_part > 1, note.last_part > 1 or not note.ends_line
    if note.first_line == note.last_line:
        if not (cut_first or cut_last):
            return f"line {note.first_line}"
        if note.first_part == note.last_part:
            return f"line {note.first_line}, part {note.first_part}"
        return f"line {note.first_line}, parts {note.first_part} to {note.last_part}"
    first = f"{note.first_line} (from part {note.first_part})" if cut_first else note.first_line
    last = f"{note.last_line} (to part {note.last_part})" if cut_last else note.last_line
    return f"lines {first} to {last}"


def whence(note: Note) -> list[str]:
    """The files and the times a note covers, in words."""
    found = [" to ".join(dict.fromkeys((note.files[0], note.files[-1])))] if note.files else []
    return found + period(note)


def period(event: Note | Summary) -> list[str]:
    """The times that an event covers, in words."""
    if event.start is None or event.end is None:
        return []
    return [" to ".join(dict.fromkeys(map(clock, (event.start, event.end))))]


def summarized(summary: Summary) -> str:
    """The notes and lines that a summary covers, in words."""
    what = "summary of all notes" if summary.is_whole else "summary of notes"
    lines = " to ".join(dict.fromkeys(map(str, (summary.first_line, summary.last_line))))
    return f"{what}, {summary.first_note} to {summary.last_note}, lines {lines}"


def clock(seconds: float) -> str:
    """Whole seconds as hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def json_line(event: Written | TurnsEvicted | FellBehind) -> str:
    """One JSON object."""
    if isinstance(event, Note | Summary):
        # What the input does not say is left out.
        fields = {key: value for key, value in fields_of(event).items() if value not in (None, ())}
        return to_json({"event": "note" if isinstance(event, Note) else "summary", **fields})
    if isinstance(event, Answer):
        return to_json({"event": "answer", **fields_of(event)})
    if isinstance(event, TurnsEvicted):
        return to_json({"event": "evicted", "first_turn": event.first, "last_turn": event.last})
    if isinstance(event, FellBehind):
        fields = fields_of(event)
        return to_json({"event": "lag", **fields, "lag_seconds": round(event.lag_seconds, 3)})
    if isinstance(event, Reply):
        fields = fields_of(event)
        del fields["origin"]
        return to_json({"event": "reply", **fields, **known(event.origin)})
    score = event.nats_per_token
    return to_json(
        {
            "event": "score",
            "line": event.line,
            "part": event.part,
            "ends_line": event.ends_line,
            "text": event.text,
            "position": event.position,
            "num_tokens": event.num_tokens,
            "nats": None if score is None else round(event.nats, 3),
            "nats_per_token": None if score is None else round(score, 4),
            "z_score": None if event.z_score is None else round(event.z_score, 3),
            **known(event.origin),
        }
    )


def known(origin: Origin) -> dict[str, object]:
    """What the input says, without what it does not."""
    return {key: value for key, value in fields_of(origin).items() if value is not None}


def fields_of(event: Note | Summary | Reply | Answer | FellBehind | Origin) -> dict[str, object]:
    """The fields of an event as they are."""
    return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}


def turns_evicted(event: TurnsEvicted) -> str:
    """The notice for turns that have left."""
    if event.first == event.last:
        return f"turn {event.first} left the model's memory"
    return f"turns {event.first} to {event.last} left the model's memory"


def fell_behind(event: FellBehind) -> str:
    """The notice for what was left out."""
    lines = " to ".join(dict.fromkeys(map(str, (event.first_line, event.last_line))))
    what = "not read" if event.skipped == "lines" else "not noted"
    return f"{event.lag_seconds:.1f} s behind: lines {lines} {what}"


def to_json(fields: dict[str, object]) -> str:
    """One line of JSON, text as it is."""
    return json.dumps(fields, ensure_ascii=False)
