"""Whole lines as turns, each answered before the next is taken."""

from collections.abc import Callable, Iterator

from streamchat.pipe.reader import Reader
from streamchat.pipe.score import POLL_SECONDS

MAX_TURN_CHARS = 1 << 18
"""A line that is longer becomes several turns: a line without an end must not fill the memory."""


def whole_lines(
    reader: Reader, should_stop: Callable[[], bool]
) -> Iterator[tuple[int, str] | None]:
    """Lines with their numbers; None while nothing comes, so that the caller gets control."""
    parts: list[str] = []
    while not should_stop():
        pieces = reader.get(POLL_SECONDS)
        if not pieces and reader.at_end:
            return
        if not pieces:
            yield None
        for piece in pieces:
            parts.append(piece.text)
            if piece.ends_line or sum(map(len, parts)) >= MAX_TURN_CHARS:
                yield piece.line, "".join(parts)
                parts.clear()
            if should_stop():
                return
