"""Lines put together to what is answered at once: lines, turns or paragraphs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from streamchat.errors import InputError
from streamchat.pipe.lines import Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import POLL_SECONDS
from streamchat.pipe.voice import Voice

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
    waiting = _Waiting(unit)
    failure: InputError | None = None
    try:
        for line in _lines(reader, should_stop):
            is_idle = line is None and reader.is_live and reader.idle_seconds >= idle_seconds
            if waiting.lines and (is_idle or (line is not None and waiting.ends_before(line))):
                yield waiting.take(place)
                if should_stop():
                    return
            if line is None:
                yield None
                continue
            waiting.add(line)
            if waiting.is_complete():
                yield waiting.take(place)
    except InputError as error:
        failure = error
    if waiting.lines and not should_stop() and not (failure and reader.is_replayed):
        yield waiting.take(place)
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


class _Waiting:
    """Lines of a unit that may go on."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.lines: list[Line] = []
        self._num_chars = 0
        self._voice = Voice()

    def add(self, line: Line) -> None:
        """A line of the unit."""
        if not self.lines:
            self._voice, self._num_chars = Voice(), 0
        self.lines.append(line)
        self._num_chars += _num_chars(line)
        self._voice.hear(line[0].origin)

    def ends_before(self, line: Line) -> bool:
        """Whether a line is the first of another unit."""
        before, origin = self.lines[-1][0].origin, line[0].origin
        if before.file != origin.file:
            return True
        if self._unit == "turn":
            is_named = self._voice.speaker is None and origin.speaker is not None
            return is_named or self._voice.changes(origin)
        return (
            before.end is not None
            and origin.start is not None
            and origin.start - before.end >= PAUSE_SECONDS
        )

    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return (
            self._unit == "line"
            or (self._unit == "paragraph" and not any(p.text.strip() for p in self.lines[-1]))
            or self._num_chars >= MAX_TURN_CHARS
        )

    def take(self, place: Place) -> Piece:
        """All of it as one piece; a speaker is named where another one begins."""
        lines, self.lines = self.lines, []
        place.add(piece for line in lines for piece in line)
        place.num_lines += len(lines)
        first, last = lines[0][0], lines[-1][-1]
        texts, lead = [], first.lead
        for line in lines:
            own = line[0].lead
            text = "".join(part.text for part in line)
            texts.append(own + text if own != lead else text)
            lead = own or lead
        speakers = {line[0].origin.speaker for line in lines} - {None}
        last_line = last.origin.last_line or last.line
        ends = [end for line in lines if (end := line[0].origin.end) is not None]
        origin = replace(
            first.origin,
            last_line=None if last_line == first.line else last_line,
            end=ends[-1] if ends else None,
            speaker=next(iter(speakers)) if len(speakers) == 1 else None,
        )
        text = texts[0] if len(texts) == 1 else "\n".join(texts).strip("\n")
        return replace(first, text=text, ends_line=last.ends_line, origin=origin)


def _num_chars(line: Line) -> int:
    return sum(len(part.text) for part in line)
