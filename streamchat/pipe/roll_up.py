"""Notes of notes: what a long stream came to, in ever larger pieces, in bounded memory.

Level 0 are the notes. A level is rolled up into one entry of the level above after a number of
entries or a time, and in any case before it would no longer fit into one question. At the end, all
that has not been rolled up becomes a summary of the whole.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from streamchat.errors import UsageError
from streamchat.events import Note, Summary
from streamchat.pipe.interval import parse_seconds

MIN_ENTRIES = 2
"""Fewer are not worth a summary."""


@dataclass(frozen=True, slots=True)
class Level:
    """When entries of a level are rolled up; both None for: when no more would fit.

    Attributes:
        count: After so many of them.
        seconds: After so long a time, the input's own where it says times.
    """

    count: int | None = None
    seconds: float | None = None


def parse_levels(text: str) -> tuple[Level, ...]:
    """Read `10` (notes), `1h`, or several with commas, the lowest level first.

    Raises:
        UsageError: If it is something else.
    """
    levels = []
    for part in map(str.strip, text.split(",")):
        if part.isdecimal() and int(part) >= MIN_ENTRIES:
            levels.append(Level(count=int(part)))
        elif part[:1].isdecimal() and not part.isdecimal():
            levels.append(Level(seconds=parse_seconds(part, "--roll-up")))
        else:
            raise UsageError(
                f"--roll-up must be a number of notes from {MIN_ENTRIES} on, a time like 10m or "
                f"1h, or both with a comma, got '{text}'"
            )
    times = [level.seconds for level in levels if level.seconds is not None]
    if times != sorted(set(times)):
        raise UsageError(f"--roll-up takes the shorter time first, as 10m,1h, got '{text}'")
    return tuple(levels)


@dataclass(frozen=True, slots=True)
class Entry:
    """A note or a summary that waits.

    Attributes:
        text: What it says.
        size: Its tokens.
        first_note: Number of the first note in it.
        last_note: Number of the last.
        first_line: Number of the first line it covers.
        last_line: Number of the last.
        start: Seconds at which what it covers begins, where the input says so.
        end: Seconds at which that ends.
        begun: When the note was written, on the clock that goes on when the program is not running.
        done: When the last note in it was written.
    """

    text: str
    size: int
    first_note: int
    last_note: int
    first_line: int
    last_line: int
    start: float | None
    end: float | None
    begun: float = field(default_factory=time.time)
    done: float = field(default_factory=time.time)


class RollUp:
    """Rolls notes up.

    Args:
        levels: When, the lowest level first; those above are rolled up when no more would fit.
        room: Tokens of entries that are put into one question, one more entry left out.
        size: Tokens of a text, as an entry.
        summarize: Makes one text of several.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        room: int,
        size: Callable[[str], int],
        summarize: Callable[[Sequence[str]], str],
    ) -> None:
        self._levels, self._room = levels, room
        self._size, self._summarize = size, summarize
        self._waiting: list[list[Entry]] = [[]]

    def add(self, note: Note) -> Iterator[Summary]:
        """Take a note in; yields the summaries that it completes."""
        entry = Entry(
            note.text,
            self._size(note.text),
            note.number,
            note.number,
            note.first_line,
            note.last_line,
            note.start,
            note.end,
        )
        yield from self._add(entry, 0)

    def whole(self) -> Iterator[Summary]:
        """A summary of everything, unless there is one note or none. Nothing changes by it."""
        entries: list[Entry] = []
        for level, waiting in enumerate(self._waiting):
            is_full = sum(entry.size for entry in [*waiting, *entries]) > self._room
            if is_full and len(entries) >= MIN_ENTRIES:
                entries = [self._rolled(entries)]
                yield _summary(entries[0], level)
            entries = [*waiting, *entries]
        if len(entries) >= MIN_ENTRIES:
            yield _summary(self._rolled(entries), len(self._waiting), is_whole=True)

    def pack(self) -> list[list[dict[str, Any]]]:
        """All that waits, as JSON can say it."""
        return [[asdict(entry) for entry in waiting] for waiting in self._waiting]

    def unpack(self, packed: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Go on from what `pack` gave."""
        self._waiting = [[Entry(**entry) for entry in waiting] for waiting in packed]

    def _add(self, entry: Entry, level: int) -> Iterator[Summary]:
        if level == len(self._waiting):
            self._waiting.append([])
        waiting = self._waiting[level]
        if sum(other.size for other in [*waiting, entry]) > self._room:
            yield from self._roll(level)
        waiting.append(entry)
        if self._is_due(level):
            yield from self._roll(level)

    def _is_due(self, level: int) -> bool:
        waiting = self._waiting[level]
        if level >= len(self._levels) or len(waiting) < MIN_ENTRIES:
            return False
        count, seconds = self._levels[level].count, self._levels[level].seconds
        if count is not None:
            return len(waiting) >= count
        first, last = waiting[0], waiting[-1]
        if first.start is not None and last.end is not None and last.end >= first.start:
            return seconds is not None and last.end - first.start >= seconds
        return seconds is not None and last.done - first.begun >= seconds

    def _roll(self, level: int) -> Iterator[Summary]:
        entry = self._rolled(self._waiting[level])
        self._waiting[level].clear()
        yield _summary(entry, level + 1)
        yield from self._add(entry, level + 1)

    def _rolled(self, entries: Sequence[Entry]) -> Entry:
        """Several entries as one; one stays as it is."""
        first, last = entries[0], entries[-1]
        if len(entries) == 1:
            return first
        text = self._summarize([entry.text for entry in entries])
        return Entry(
            text,
            self._size(text),
            first.first_note,
            last.last_note,
            first.first_line,
            last.last_line,
            first.start,
            last.end,
            first.begun,
            last.done,
        )


def _summary(entry: Entry, level: int, *, is_whole: bool = False) -> Summary:
    return Summary(
        level=level,
        is_whole=is_whole,
        text=entry.text,
        first_note=entry.first_note,
        last_note=entry.last_note,
        first_line=entry.first_line,
        last_line=entry.last_line,
        start=entry.start,
        end=entry.end,
    )
