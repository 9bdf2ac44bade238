"""When a note is due, apart from what the window demands: the first of several reasons counts.

Time is the input's own where it says times, so that notes of a recording do not depend on how fast
it is read; a live input is judged by the clock as well.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from streamchat.pipe.interval import Interval
from streamchat.pipe.lines import Piece
from streamchat.pipe.voice import Voice


class Due:
    """Says when a note is due.

    Args:
        interval: How often.
        idle_seconds: After so long without input, if it is live; None never.
        on_turn: When another speaker begins.
    """

    def __init__(self, interval: Interval, idle_seconds: float | None, *, on_turn: bool) -> None:
        self.interval = interval
        self._idle_seconds = idle_seconds
        self._on_turn = on_turn
        self._noted = time.monotonic()
        self._begin: float | None = None
        self._voice = Voice()

    def before(self, piece: Piece) -> bool:
        """Whether a note is due before a piece is added to what no note covers."""
        start, seconds = piece.origin.start, self.interval.seconds
        if self._on_turn and self._voice.changes(piece.origin):
            return True
        if seconds is None or start is None or self._begin is None:
            return False
        return start - self._begin >= seconds

    def add(self, piece: Piece) -> None:
        """A piece is added to what no note covers."""
        start = piece.origin.start
        # A time that runs back begins another recording.
        if start is not None and (self._begin is None or start < self._begin):
            self._begin = start
        self._voice.hear(piece.origin)

    def after(self, num_unnoted: int, idle_seconds: float, *, is_live: bool) -> bool:
        """Whether a note is due on what has been added.

        Args:
            num_unnoted: Tokens that no note covers.
            idle_seconds: How long nothing has come.
            is_live: Whether the input is.
        """
        tokens, seconds = self.interval.tokens, self.interval.seconds
        if tokens is not None and num_unnoted >= tokens:
            return True
        is_timed = is_live or self._begin is None
        if seconds is not None and is_timed and time.monotonic() - self._noted >= seconds:
            return True
        is_idle = self._idle_seconds is not None and idle_seconds >= self._idle_seconds
        return is_idle and is_live and num_unnoted > 0

    def note(self) -> None:
        """What had been added is covered now."""
        self._noted, self._begin = time.monotonic(), None

    def pack(self) -> dict[str, Any]:
        """Where it stands, as JSON can say it."""
        return {
            "seconds_since_note": time.monotonic() - self._noted,
            "begin": self._begin,
            "voice": asdict(self._voice),
        }

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave."""
        self._noted = time.monotonic() - packed["seconds_since_note"]
        self._begin, self._voice = packed["begin"], Voice(**packed["voice"])
