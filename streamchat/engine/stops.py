"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in text that arrives in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [s for s in stop if s]
        self.pending = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns what is certainly no part of a stop string, and whether one came."""
        self.pending += text
        found = [i for i in (self.pending.find(s) for s in self._stop) if i >= 0]
        if found:
            certain, self.pending = self.pending[: min(found)], ""
            return certain, True
        keep = max((overlap(self.pending, s) for s in self._stop), default=0)
        cut = len(self.pending) - keep
        certain, self.pending = self.pending[:cut], self.pending[cut:]
        return certain, False


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`, the whole of it left out."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
