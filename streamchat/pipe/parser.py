"""Pieces of lines to pieces of cues: finds out the format, and applies it.

Plain text keeps its pieces. In other formats a line is put together again, up to a length that no
line of these formats has; what is longer passes as text.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from streamchat.events import UNKNOWN, Origin
from streamchat.pipe.formats.cue import Cue, Format
from streamchat.pipe.formats.detect import PLAIN, guess
from streamchat.pipe.formats.plain import PlainText
from streamchat.pipe.formats.table import AUTO, FORMATS
from streamchat.pipe.lines import MAX_PIECE_CHARS, Piece, cut

MAX_LINE_CHARS = 1 << 20
"""Messages of speech recognition may have every word in them, with its times."""

MAX_BLANK_LINES = 64
"""Blank lines that wait for the format to be known."""


class Parser:
    """Reads one input.

    Args:
        name: Of the format, or `auto`.
        max_piece_chars: Where the text of long cues is cut.
        file: Name of the input, for the origin of its lines.
        on_format: Called with the name of a format that was found out, before its first cue.
    """

    def __init__(
        self,
        name: str,
        *,
        max_piece_chars: int = MAX_PIECE_CHARS,
        file: str | None = None,
        on_format: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._format: Format | None = None if name == AUTO else FORMATS[name].make()
        self._max_chars = max_piece_chars
        self._file = file
        self._on_format = on_format
        self._first_line = 0
        # Pieces from before the format is known; later, those of a line that is not yet whole.
        self._waiting: list[Piece] = []
        self._num_waiting_chars = 0
        self._is_too_long = False
        self._origin = UNKNOWN

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Add pieces of lines; returns the cues that they complete."""
        return [cue for piece in pieces for cue in self._push(piece)]

    def pause(self) -> list[Piece]:
        """Nothing has come for a while; returns what need not wait for more."""
        if self._format is not None:
            return self._pieces(self._format.pause())
        if not self._waiting or not self._waiting[-1].ends_line:
            return []
        if self._first_lines():
            return self._decide(PLAIN)
        return [self._as_text(piece) for piece in self._take()]

    def flush(self) -> list[Piece]:
        """The input has ended; returns everything that is left."""
        pieces = self._decide(PLAIN) if self._format is None and self._waiting else []
        pieces += self._pieces(self._format.flush()) if self._format else []
        return pieces + [self._as_text(piece) for piece in self._take()]

    def _push(self, piece: Piece) -> list[Piece]:
        self._first_line = self._first_line or piece.line
        if isinstance(self._format, PlainText):
            return [self._as_text(piece)]
        if self._is_too_long:
            self._is_too_long = not piece.ends_line
            return [self._as_text(piece)]
        self._waiting.append(piece)
        self._num_waiting_chars += len(piece.text)
        too_long = not piece.ends_line and self._num_waiting_chars > MAX_LINE_CHARS
        if self._format is None:
            # Joining a long line for each of its pieces would take the square of its length.
            if piece.part > 1 and not piece.ends_line and not too_long:
                return []
            name = PLAIN if too_long else self._guess()
            return [] if name is None else self._decide(name)
        if too_long:
            self._is_too_long = True
            before = self._pieces(self._format.pause())
            return before + [self._as_text(part) for part in self._take()]
        if not piece.ends_line:
            return []
        text = "".join(part.text for part in self._take())
        return self._pieces(self._format.push(text, piece.line))

    def _guess(self) -> str | None:
        lines = self._first_lines()
        if lines:
            return guess(lines, is_whole=self._waiting[-1].ends_line)
        return PLAIN if len(self._waiting) > MAX_BLANK_LINES else None

    def _first_lines(self) -> list[str]:
        """The lines that wait, without blank ones."""
        text = "".join(p.text + ("\n" if p.ends_line else "") for p in self._waiting)
        return [line for line in text.split("\n") if line.strip()]

    def _decide(self, name: str) -> list[Piece]:
        """Read what waits, and what comes, in this format."""
        self._format = FORMATS[name].make()
        self._on_format(name)
        return self.push(self._take())

    def _take(self) -> list[Piece]:
        waiting, self._waiting, self._num_waiting_chars = self._waiting, [], 0
        return waiting

    def _as_text(self, piece: Piece) -> Piece:
        """A piece as it is, with its origin."""
        if piece.part == 1:
            plain = self._format if isinstance(self._format, PlainText) else PlainText()
            (cue,) = plain.push(piece.text, piece.line)
            self._origin = self._origin_of(cue)
        return piece if self._origin == UNKNOWN else replace(piece, origin=self._origin)

    def _pieces(self, cues: Sequence[Cue]) -> list[Piece]:
        """Cues as pieces, long ones cut."""
        pieces: list[Piece] = []
        for cue in cues:
            origin, texts = self._origin_of(cue), cut(cue.text, self._max_chars)
            lead = f"{cue.speaker}: " if cue.speaker and not cue.text_names_speaker else ""
            pieces += [
                Piece(text, cue.line, part, part == len(texts), origin, lead if part == 1 else "")
                for part, text in enumerate(texts, start=1)
            ]
        return pieces

    def _origin_of(self, cue: Cue) -> Origin:
        return Origin(
            file=self._file,
            file_line=None if self._file is None else cue.line - self._first_line + 1,
            last_line=None if cue.last_line == cue.line else cue.last_line,
            start=cue.start,
            end=cue.end,
            speaker=cue.speaker,
            turn=cue.turn,
        )
