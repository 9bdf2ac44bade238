"""Whole lines as turns, each answered before the next is taken."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from streamchat.pipe.lines import Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import POLL_SECONDS

MAX_TURN_CHARS = 1 << 18
"""A line that is longer becomes several turns: a line without an end must not fill the memory."""


def whole_lines(
    reader: Reader, should_stop: Callable[[], bool], place: Place | None = None
) -> Iterator[Piece | None]:
    """Whole lines; None while nothing comes, so that the caller gets control.

    Args:
        reader: Where the lines come from.
        should_stop: Asked between lines.
        place: Moved on to behind each line as it is given.
    """
    place = place or Place()
    parts: list[Piece] = []
    while not should_stop():
        pieces = reader.get(POLL_SECONDS)
        if not pieces and reader.at_end:
            return
        if not pieces:
            yield None
        for piece in pieces:
            parts.append(piece)
            if piece.ends_line or sum(len(part.text) for part in parts) >= MAX_TURN_CHARS:
                place.add(parts)
                place.num_lines += 1
                text = "".join(part.text for part in parts)
                yield replace(parts[0], text=text, ends_line=piece.ends_line)
                parts.clear()
            if should_stop():
                return
