"""Plain text and logs: each line is a cue, as it is."""

import re
from datetime import date

from streamchat.pipe.formats.cue import Cue, Format
from streamchat.pipe.formats.speakers import named_speaker
from streamchat.pipe.formats.times import seconds

TIME = re.compile(
    r"\s*(?P<open>[\[(])?"
    r"(?:(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})[T ]|[A-Z][a-z]{2}\ +[0-9]{1,2}\ )?"
    r"(?P<clock>(?:[0-9]{1,3}:)?[0-9]{1,2}:[0-9]{2}(?:[.,][0-9]{1,9})?)"
    r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?[\])]?(?:[\s:,]+|$)"
)
"""In front of a line: `[0:12:34]`, `(12:34)`, `10:20:30.5`, `2026-01-31T10:20:30Z`, `Jan 31 …`."""

DAY_SECONDS = 86_400.0


class PlainText(Format):
    """Lines as they are, with the time in front of them and the name before a colon, if any.

    A time is seconds from the start, or from the midnight before the first line. Where a time
    without a date falls back by more than half a day, a day has passed.
    """

    def __init__(self) -> None:
        self._first_day: int | None = None
        self._num_days = 0
        self._last = 0.0

    def push(self, text: str, line: int) -> list[Cue]:
        """The line, whole."""
        match = TIME.match(text)
        start = self._start(match) if match else None
        speaker = named_speaker(text[match.end() :] if match and start is not None else text)
        return [Cue(text, line, line, start, None, speaker, speaker is not None)]

    def _start(self, match: re.Match[str]) -> float | None:
        clock = match["clock"]
        # "12:34" alone may be anything; in brackets it is minutes and seconds.
        if clock.count(":") < 2 and not match["open"]:
            return None
        time = seconds(clock)
        if match["date"]:
            try:
                day = date.fromisoformat(match["date"]).toordinal()
            except ValueError:
                return None
            self._first_day = day if self._first_day is None else self._first_day
            return time + (day - self._first_day) * DAY_SECONDS
        if time < self._last - DAY_SECONDS / 2:
            self._num_days += 1
        self._last = time
        return time + self._num_days * DAY_SECONDS
