"""Intervals as users write them: `600tok`, `60s`, `5m`, `1h`."""

import re
from dataclasses import dataclass

from streamchat.errors import UsageError

PART = re.compile(r"(?P<number>\d+)\s*(?P<unit>tok|s|m|h)")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Interval:
    """How often something happens, whichever comes first.

    Attributes:
        tokens: After so many, or None.
        seconds: After so many, or None.
    """

    tokens: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> "Interval":
        """Read `600tok`, `60s`, `5m`, `1h`, two of them with a comma, or `auto` for neither.

        Raises:
            UsageError: If it is something else.
        """
        if text.strip() == AUTO:
            return cls()
        found: dict[str, float] = {}
        for part in text.split(","):
            match = PART.fullmatch(part.strip())
            if match is None or int(match["number"]) < 1:
                raise UsageError(f"{option} must be like 600tok, 60s, 5m or 1h, got '{text}'")
            kind, factor = ("tokens", 1.0) if match["unit"] == "tok" else ("seconds", None)
            if kind in found:
                raise UsageError(f"{option} takes one number of tokens and one time, got '{text}'")
            found[kind] = int(match["number"]) * (factor or SECONDS[match["unit"]])
        tokens = found.get("tokens")
        return cls(None if tokens is None else int(tokens), found.get("seconds"))


def parse_seconds(text: str, option: str) -> float:
    """Read a time, as `5s`, `5m` or `1h`.

    Raises:
        UsageError: If it is something else.
    """
    match = PART.fullmatch(text.strip())
    if match is None or match["unit"] == "tok" or int(match["number"]) < 1:
        raise UsageError(f"{option} must be a time like 5s, 5m or 1h, got '{text}'")
    return int(match["number"]) * SECONDS[match["unit"]]
