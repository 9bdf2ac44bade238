"""How far an input has been taken: what a checkpoint compares a file with."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from streamchat.pipe.lines import Piece


@dataclass(slots=True)
class Place:
    """Where a pipe stands in its input. Everything before it is in the stream, nothing behind it.

    Attributes:
        num_pieces: Pieces taken.
        num_lines: Lines, cues or turns that ended among them.
        last_line: Number of the input's line that the last one ends in; 0 before the first.
        digest: Of all that was taken. Each piece's is over the digest before it, so that going on
            needs nothing else.
        busy_seconds: Time the model has worked.
    """

    num_pieces: int = 0
    num_lines: int = 0
    last_line: int = 0
    digest: str = ""
    busy_seconds: float = 0.0

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take pieces; the caller counts the lines, for a line is not the same in every mode."""
        for piece in pieces:
            self.num_pieces += 1
            self.last_line = piece.origin.last_line or piece.line
            # Not the file's name: the same text is the same input.
            said = repr((self.digest, piece.line, piece.ends_line, piece.lead, piece.text))
            self.digest = hashlib.blake2b(
                said.encode("utf-8", "surrogatepass"), digest_size=16
            ).hexdigest()

    def is_at(self, other: "Place") -> bool:
        """Whether the same pieces were taken."""
        return (self.num_pieces, self.digest) == (other.num_pieces, other.digest)
