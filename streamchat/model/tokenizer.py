"""Text to ids and back, the same way however the text is cut.

* Special tokens written in the text stay text: `<|im_end|>` in a transcript ends nothing.
* BOS is added by nobody but `bos_ids`, once, at stream position 0, where the tokenizer wants one.
* A piece that continues a line is encoded without the space that SentencePiece tokenizers put in
  front of each text.
"""

from typing import Any


class Tokenizer:
    """A transformers tokenizer, narrowed to what a stream needs.

    Args:
        inner: Fast or slow tokenizer of transformers.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._anchor = self.encode("\n")

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` behind a fast tokenizer, or None."""
        return getattr(self.inner, "backend_tokenizer", None)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that starts a line, without BOS or EOS."""
        if not text:
            return []
        ids: list[int] = self.inner.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that goes on where another ended, in the same line."""
        ids = self.encode("\n" + text)
        length = len(self._anchor)
        return ids[length:] if ids[:length] == self._anchor else self.encode(text)

    def bos_ids(self) -> list[int]:
        """The ids that the tokenizer puts before a text: BOS where it adds one, else nothing."""
        bos = self.inner.bos_token_id
        with_special: list[int] = self.inner.encode("a")
        return [bos] if bos is not None and with_special[:1] == [bos] else []

    def decode(self, ids: list[int]) -> str:
        """Text of all ids, special tokens left out, spaces as they were."""
        text: str = self.inner.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
