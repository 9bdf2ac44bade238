"""Lines put together to what is answered at once: lines, turns or paragraphs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from streamchat.errors import InputError
from streamchat.pipe.lines import Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import POLL_SECONDS

Unit = Literal["line", "turn", "paragraph"]
"""A line (or a cue); what one speaker says at a time; what stands between blank lines or pauses."""

MAX_TURN_CHARS = 1 << 18
"""What is longer becomes several turns: a line without an end must not fill the memory."""

PAUSE_SECONDS = 2.0
"""So long a silence between two cues ends a paragraph."""

IDLE_SECONDS = 2.0
"""After so long without input, a live turn or paragraph is taken for complete."""

Line = list[Piece]
"""The pieces of a line."""


def units(
    reader: Reader,
    should_stop: Callable[[], bool],
    place: Place | None = None,
    *,
    unit: Unit = "line",
    idle_seconds: float = IDLE_SECONDS,
) -> Iterator[Piece | None]:
    """Whole units; None while nothing comes, so that the caller gets control.

    Args:
        reader: Where the lines come from.
        should_stop: Asked between lines. A unit that is not complete then is not given.
        place: Moved on to behind each unit as it is given.
        unit: What a unit is.
        idle_seconds: After so long without input, a live unit is taken for complete.

    Raises:
        InputError: If the input cannot be read, after what came before.
    """
    place = place or Place()
    waiting: list[Line] = []
    failure: InputError | None = None
    try:
        for line in _lines(reader, should_stop):
            is_idle = line is None and reader.is_live and reader.idle_seconds >= idle_seconds
            if waiting and (is_idle or (line is not None and _begins_anew(unit, waiting, line))):
                yield _taken(waiting, place)
                if should_stop():
                    return
            if line is None:
                yield None
                continue
            waiting.append(line)
            if _is_complete(unit, waiting):
                yield _taken(waiting, place)
    except InputError as error:
        failure = error
    if waiting and not should_stop() and not (failure and reader.is_replayed):
        yield _taken(waiting, place)
    if failure is not None:
        raise failure


def _lines(reader: Reader, should_stop: Callable[[], bool]) -> Iterator[Line | None]:
    """Whole lines; None while nothing comes."""
    parts: Line = []
    while not should_stop():
        pieces = reader.get(POLL_SECONDS)
        if not pieces and reader.at_end:
            return
        if not pieces:
            yield None
        for piece in pieces:
            parts.append(piece)
            if piece.ends_line or _num_chars(parts) >= MAX_TURN_CHARS:
                yield parts
                parts = []
            if should_stop():
                return


def _begins_anew(unit: Unit, waiting: Sequence[Line], line: Line) -> bool:
    """Whether a line is the first of another unit than those that wait."""
    before, origin = waiting[-1][0].origin, line[0].origin
    if before.file != origin.file:
        return True
    if unit == "turn":
        return origin.speaker is not None and origin.speaker != _speaker(waiting)
    return (
        before.end is not None
        and origin.start is not None
        and origin.start - before.end >= PAUSE_SECONDS
    )


def _is_complete(unit: Unit, waiting: Sequence[Line]) -> bool:
    """Whether nothing can follow the last line that waits."""
    return (
        unit == "line"
        or (unit == "paragraph" and not any(piece.text.strip() for piece in waiting[-1]))
        or sum(map(_num_chars, waiting)) >= MAX_TURN_CHARS
    )


def _taken(waiting: list[Line], place: Place) -> Piece:
    """The lines that wait as one piece; a speaker is named where another one begins."""
    place.add(piece for line in waiting for piece in line)
    place.num_lines += len(waiting)
    first, last = waiting[0][0], waiting[-1][-1]
    texts, lead = [], first.lead
    for line in waiting:
        own = line[0].lead
        text = "".join(part.text for part in line)
        texts.append(own + text if own != lead else text)
        lead = own or lead
    speakers = {line[0].origin.speaker for line in waiting} - {None}
    last_line = last.origin.last_line or last.line
    ends = [end for line in waiting if (end := line[0].origin.end) is not None]
    origin = replace(
        first.origin,
        last_line=None if last_line == first.line else last_line,
        end=ends[-1] if ends else None,
        speaker=next(iter(speakers)) if len(speakers) == 1 else None,
    )
    text = texts[0] if len(texts) == 1 else "\n".join(texts).strip("\n")
    waiting.clear()
    return replace(first, text=text, ends_line=last.ends_line, origin=origin)


def _speaker(waiting: Sequence[Line]) -> str | None:
    """Who has spoken last: lines that name nobody are the last one's."""
    named = (line[0].origin.speaker for line in reversed(waiting))
    return next((speaker for speaker in named if speaker is not None), None)


def _num_chars(line: Line) -> int:
    return sum(len(part.text) for part in line)
