"""Times as transcripts write them, in seconds."""

import re

CLOCK = r"(?:[0-9]{1,6}:)?[0-9]{1,2}:[0-9]{1,2}(?:[.,][0-9]{1,9})?"
"""`1:02:03.4`, `02:03,400` and the like."""

TIMING = re.compile(rf"\s*({CLOCK})\s*--+>\s*({CLOCK})(?:\s.*)?$", re.DOTALL)
"""The timing line of a cue; settings may follow."""


def seconds(clock: str) -> float:
    """Seconds of a `CLOCK`, or of a plain number."""
    total = 0.0
    for field in clock.replace(",", ".").split(":"):
        total = total * 60 + float(field)
    return round(total, 3)


def timing(text: str) -> tuple[float, float] | None:
    """Start and end of a timing line, or None if it is none."""
    match = TIMING.match(text)
    return (seconds(match[1]), seconds(match[2])) if match else None
