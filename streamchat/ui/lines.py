"""Events as lines: text or JSON on standard output, words on standard error."""

import dataclasses
import json

from streamchat.events import LineScored, Note, Origin, Reply, TurnsEvicted


def plain_line(event: LineScored | Note | Reply) -> str:
    """An event as text.

    A score is nats per token (a dash where nothing predicts the line), a tab, and the line. A reply
    is one line. A note names the lines it covers, the files and the times where there are any, and
    ends with a blank line.
    """
    if isinstance(event, Note):
        return f"[{', '.join([covered(event), *whence(event)])}]\n{event.text}\n"
    if isinstance(event, Reply):
        return " ".join(event.text.split())
    score = event.nats_per_token
    return f"{'-' if score is None else f'{score:.3f}'}\t{event.text}"


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
    if note.start is not None and note.end is not None:
        found.append(" to ".join(dict.fromkeys(map(clock, (note.start, note.end)))))
    return found


def clock(seconds: float) -> str:
    """Whole seconds as hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def json_line(event: LineScored | Note | Reply) -> str:
    """One JSON object."""
    if isinstance(event, Note):
        # What the input does not say is left out.
        fields = {key: value for key, value in fields_of(event).items() if value not in (None, ())}
        return to_json({"event": "note", **fields})
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
            **known(event.origin),
        }
    )


def known(origin: Origin) -> dict[str, object]:
    """What the input says, without what it does not."""
    return {key: value for key, value in fields_of(origin).items() if value is not None}


def fields_of(event: Note | Reply | Origin) -> dict[str, object]:
    """The fields of an event as they are."""
    return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}


def turns_evicted(event: TurnsEvicted) -> str:
    """The notice for turns that have left."""
    if event.first == event.last:
        return f"turn {event.first} left the model's memory"
    return f"turns {event.first} to {event.last} left the model's memory"


def to_json(fields: dict[str, object]) -> str:
    """One line of JSON, text as it is."""
    return json.dumps(fields, ensure_ascii=False)
