"""Bytes to lines, incrementally and in bounded memory. The result depends on the bytes alone.

How the bytes were cut into reads never shows: neither a multi-byte character nor a CR LF pair that
straddles a boundary makes a difference. Lines end with LF or CR LF. A byte-order mark at the start
is dropped, and what is not UTF-8 becomes U+FFFD.

The cut rule for long lines: a line of more than `MAX_PIECE_CHARS` + 1 characters comes in pieces. A
piece ends before the last space of its second half that stands between two other characters, so
that words stay whole and their ids are those of the whole line; where there is none, it ends at the
limit, but not inside a cluster of a base character and its marks or joiners.
"""

import codecs
import unicodedata
from dataclasses import dataclass

from streamchat.events import UNKNOWN, Origin

MAX_PIECE_CHARS = 4096
"""Longer than any line that people write, and short enough for tokenizers whose time grows faster
than the length of a run without spaces."""

MAX_CLUSTER_CHARS = 32
"""How far a cut moves back to spare a cluster; a longer one is no text."""

JOINER = "\u200d"
"""Zero-width joiner: it ties both its neighbours."""

BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class Piece:
    """A line or a cue, or a part of a long one.

    Attributes:
        text: Without its line end.
        line: Number of the line in the input, from 1.
        part: Number of the piece in its line, from 1.
        ends_line: Whether the line ends here.
        origin: What the input says about it.
        lead: What the model reads in front of it: who speaks, where the text does not say so.
    """

    text: str
    line: int
    part: int
    ends_line: bool
    origin: Origin = UNKNOWN
    lead: str = ""


class LineSplitter:
    """Cuts bytes into lines as they come.

    Args:
        first_line: Number of the first line.
        max_piece_chars: Where long lines are cut.
    """

    def __init__(self, first_line: int = 1, max_piece_chars: int = MAX_PIECE_CHARS) -> None:
        self._max_chars = max_piece_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._text = ""
        self._line, self._part = first_line, 1

    @property
    def next_line(self) -> int:
        """Number of the line that the next byte belongs to."""
        return self._line

    def push(self, data: bytes) -> list[Piece]:
        """Add bytes; returns the pieces that they complete."""
        return self._take(self._decode(data))

    def close(self) -> list[Piece]:
        """End of the input; returns the last line where it had no line end."""
        pieces = self._take(self._decode(b"", final=True))
        if self._text:
            pieces.append(self._piece(self._text.removesuffix("\r"), ends_line=True))
            self._text = ""
        return pieces

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        """Text of the bytes, without a byte-order mark at the start of the input."""
        text = self._decoder.decode(data, final)
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(BYTE_ORDER_MARK)
        return text

    def _take(self, text: str) -> list[Piece]:
        *complete, rest = text.split("\n")
        pieces: list[Piece] = []
        for line in complete:
            self._text += line
            self._cut_long(pieces)
            pieces.append(self._piece(self._text.removesuffix("\r"), ends_line=True))
            self._text = ""
        self._text += rest
        self._cut_long(pieces)
        return pieces

    def _cut_long(self, pieces: list[Piece]) -> None:
        """Cut pieces off while more than a piece and one character wait.

        One character more, because it may be the CR of a line end, which must not make a piece.
        """
        *parts, self._text = cut(self._text, self._max_chars)
        pieces.extend(self._piece(part, ends_line=False) for part in parts)

    def _piece(self, text: str, *, ends_line: bool) -> Piece:
        piece = Piece(text, self._line, self._part, ends_line)
        if ends_line:
            self._line, self._part = self._line + 1, 1
        else:
            self._part += 1
        return piece


def cut(text: str, max_chars: int) -> list[str]:
    """The pieces of a text by the cut rule; the last one may have a character more."""
    parts, begin = [], 0
    while len(text) - begin > max_chars + 1:
        end = begin + cut_point(text[begin : begin + max_chars + 1])
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


def cut_point(text: str) -> int:
    """Where a piece that begins `text` ends, by the cut rule; `text` is one above a piece long."""
    size = len(text) - 1
    space = text.rfind(" ", size // 2, size)
    while space > size // 2:
        if not text[space - 1].isspace() and not text[space + 1].isspace():
            return space
        space = text.rfind(" ", size // 2, space)
    for cut in range(size, max(1, size - MAX_CLUSTER_CHARS), -1):
        if not _joins(text[cut]) and text[cut - 1] != JOINER:
            return cut
    return size


def _joins(char: str) -> bool:
    """Whether a character belongs to the one before it: marks, joiners, skin tones, flags, tags."""
    return (
        unicodedata.category(char).startswith("M")
        or char == JOINER
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or "\U0001f1e6" <= char <= "\U0001f1ff"
        or "\U000e0020" <= char <= "\U000e007f"
    )
