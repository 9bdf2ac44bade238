"""Ids to text as they come: never half a character, and joined equal to one full decode.

A character may take several tokens, each of which alone decodes to U+FFFD; and what a token decodes
to may depend on the one before it (the space that SentencePiece puts in front of words). So each
new token is decoded together with a few before it, and text is given out once it no longer ends in
an unfinished character.
"""

from collections import deque
from collections.abc import Callable

REPLACEMENT = "\ufffd"

CONTEXT_GROUPS = 4
"""How many given-out pieces are decoded again in front of the new ids. Whole pieces, not ids: one
that began inside a character would decode to U+FFFD for ever after."""

MAX_UNFINISHED = 32
"""Ids held back for one character at most. No encoded character is that long: most of them are
bytes that make no character, and come out as U+FFFD."""

MAX_UNFINISHED_BYTES = 3
"""Ids that may still be the start of a character after that: UTF-8 takes four bytes at most."""


class Detokenizer:
    """Turns ids into text one at a time, in constant time a token.

    Args:
        decode: A tokenizer's decode function.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: deque[list[int]] = deque(maxlen=CONTEXT_GROUPS)
        self._context_text = ""
        self._pending: list[int] = []

    @property
    def num_pending(self) -> int:
        """Ids whose text has not been given out."""
        return len(self._pending)

    def push(self, token_id: int) -> str:
        """Add a token.

        Returns:
            The text that has become certain; empty inside a character.
        """
        self._pending.append(token_id)
        text = self._decode(self._ids())
        # Ids without text of their own (special tokens, a space at the start) wait for some: they
        # must not push real context out, and may decide what the next one looks like.
        if text.endswith(REPLACEMENT) or text == self._context_text:
            if self.num_pending < MAX_UNFINISHED:
                return ""
            if text.endswith(REPLACEMENT):
                return self._give_out_broken(text)
        return self._give_out(text)

    def flush(self) -> str:
        """The rest, at the end: an unfinished character comes out as U+FFFD."""
        return self._give_out(self._decode(self._ids())) if self._pending else ""

    def _ids(self) -> list[int]:
        return [*(i for group in self._context for i in group), *self._pending]

    def _give_out(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new:
            self._context.append(self._pending)
        self._pending = []
        self._context_text = self._decode(self._ids())
        return new

    def _give_out_broken(self, text: str) -> str:
        """Give out all but what may still become a character, and begin anew with that."""
        new = text[len(self._context_text) :]
        self._context.clear()
        self._context_text = ""
        self._pending = self._pending[-MAX_UNFINISHED_BYTES:]
        return new.removesuffix(self._decode(self._pending))
