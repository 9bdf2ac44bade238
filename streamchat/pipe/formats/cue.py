"""What a reader of a format gives, and what it has to offer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cue:
    """Words that were said or written together.

    Attributes:
        text: In one line.
        line: Number of the line of the input that the words begin in.
        last_line: Number of the line that they end in.
        start: Seconds at which they begin, or None.
        end: Seconds at which they end, or None.
        speaker: Who says them, or None.
        text_names_speaker: Whether the text itself begins with the speaker's name.
        turn: Number of the turn, from 1, where turns are marked without a name.
    """

    text: str
    line: int
    last_line: int
    start: float | None = None
    end: float | None = None
    speaker: str | None = None
    text_names_speaker: bool = False
    turn: int | None = None


class Format(ABC):
    """A reader of one input in one format."""

    @abstractmethod
    def push(self, text: str, line: int) -> list[Cue]:
        """Add a line; returns the cues that it completes.

        Args:
            text: Without its line end.
            line: Its number.
        """

    def pause(self) -> list[Cue]:
        """Nothing has come for a while; returns what may as well be taken for complete."""
        return []

    def flush(self) -> list[Cue]:
        """The input has ended; returns everything that is left."""
        return self.pause()
