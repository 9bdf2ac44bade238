"""Which scores stand out: against those of the lines before, or a given least."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamchat.errors import UsageError
from streamchat.events import LineScored

HORIZON = 1000
"""Lines that the running mean looks back, about: what is usual changes with time."""

FEWEST = 8
"""Lines before the first standard score."""

STANDARD = "sd"

LEAST_VARIANCE = 1e-12
"""Below it, the lines before are alike, and a standard score says nothing."""


class RunningMean:
    """Mean and variance of the scores so far, the newest `HORIZON` lines weighing most.

    Over the first `HORIZON` lines they are the plain ones of all of them; then weights decay
    exponentially (West 1979, incremental form).
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._variance = 0.0

    def z_score(self, value: float) -> float | None:
        """Standard deviations above the mean of what was added; None while that says nothing."""
        if self._count < FEWEST or self._variance < LEAST_VARIANCE:
            return None
        return (value - self._mean) / math.sqrt(self._variance)

    def add(self, value: float) -> None:
        """Take a line's score in."""
        self._count = min(self._count + 1, HORIZON)
        weight, difference = 1 / self._count, value - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference**2)

    def pack(self) -> dict[str, Any]:
        """All there is, as JSON can say it."""
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave."""
        self._count = packed["count"]
        self._mean, self._variance = packed["mean"], packed["variance"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """The least that passes a filter.

    Attributes:
        value: Nats per token, or standard deviations above the running mean.
        is_standard: Whether it is the latter.
    """

    value: float
    is_standard: bool = False

    def passes(self, line: LineScored) -> bool:
        """Whether a line reaches it; one without a score does not."""
        own = line.z_score if self.is_standard else line.nats_per_token
        return own is not None and own >= self.value


def parse_threshold(text: str) -> Threshold:
    """Read nats per token, `4.5`, or standard deviations, `2sd`.

    Raises:
        UsageError: If it is something else.
    """
    number = text.strip().removesuffix(STANDARD)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(
            f"--min must be nats per token, as 4.5, or standard deviations, as 2sd, got '{text}'"
        )
    return Threshold(value, is_standard=text.strip().endswith(STANDARD))
