"""Rolling captions: lines that a cue shows again because the one before it has shown them.

Captions that were made live roll up: each new line is shown below the one before, which is
repeated; YouTube's also repeat a finished line in a cue of 10 ms. Only what is new counts. Captions
that repeat themselves for that reason are told from a thing that is said twice by the file as a
whole: nothing is taken for a repetition until the file has shown that it rolls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

HOLD_SECONDS = 0.05
"""A cue no longer than this is not there to be read."""

GAP_SECONDS = 0.1
"""Cues that roll follow each other without a pause."""

NUM_ROLLS = 2
"""So many cues in a row that repeat the last line and add one: no accident."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A line of a cue: its words, and whether it has the times of single words."""

    words: str
    is_timed: bool


class Rolling:
    """Tells the new lines of one input's cues from those that are shown again."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._end: float | None = None
        self._was_readable = False
        self._num_rolls = 0
        self._is_rolling = False

    def num_repeated(self, lines: Sequence[Shown], start: float, end: float) -> int:
        """How many of a cue's first lines were shown before.

        Args:
            lines: Those of the cue, white space included.
            start: Seconds.
            end: Seconds.
        """
        words = [line.words for line in lines if line.words]
        if not words:
            return 0
        is_readable = end - start > HOLD_SECONDS
        is_hold = not (is_readable and lines[-1].words)
        # A line whose words have times is spoken now, and so is the last one of a cue that is there
        # to be read.
        timed = [line.is_timed for line in lines if line.words]
        num_above = timed.index(True) if True in timed else len(words) - (not is_hold)
        repeated = _overlap(self._words, words[:num_above])
        follows = self._end is not None and start - self._end <= GAP_SECONDS
        if repeated and follows and repeated < len(words):
            self._num_rolls += 1
        elif not (repeated and is_hold):
            self._num_rolls = 0
        if any(timed) or self._num_rolls >= NUM_ROLLS:
            self._is_rolling = True
        if repeated and follows and self._was_readable and not is_readable:
            self._is_rolling = True
        self._words, self._end, self._was_readable = words, end, is_readable
        return repeated if self._is_rolling else 0


def _overlap(before: list[str], words: list[str]) -> int:
    """The largest number of words' first lines that are the last ones before."""
    for size in range(min(len(before), len(words)), 0, -1):
        if before[-size:] == words[:size]:
            return size
    return 0
