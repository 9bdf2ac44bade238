"""Text to ids and back, the same way however the text is cut.

* Special tokens written in the text stay text: `<|im_end|>` in a transcript ends nothing.
* BOS is added by nobody but `bos_ids`, once, at stream position 0, where the tokenizer wants one.
* A piece that continues a line is encoded without the space that SentencePiece tokenizers put in
  front of each text.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamchat.errors import ModelError

SURROGATE = re.compile("[\ud800-\udfff]")

SAMPLE = 'The year 1492: naïve Zürich, 東京, שלום! x += 3.14;\t"quoted"\n\nI\'m re-tokenizing 🙂.'
"""Words, digits, white space and scripts that tokenizers cut differently."""


def mended(text: str) -> str:
    """The text with U+FFFD for half a character, which no tokenizer takes.

    Bytes of a command line that are no UTF-8 become such halves.
    """
    if not SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True, slots=True)
class Marked:
    """A piece of a conversation.

    Attributes:
        text: The piece.
        is_text: Written by a person, so that special tokens in it are text. Otherwise by a
            template, whose special tokens are meant.
    """

    text: str
    is_text: bool = False


class Tokenizer:
    """A transformers tokenizer, narrowed to what a stream needs.

    Args:
        inner: Fast or slow tokenizer of transformers.
        num_ids: Rows of the model's embedding, where it is known: ids from there on have none.
    """

    def __init__(self, inner: Any, num_ids: int | None = None) -> None:
        self.inner = inner
        self._num_ids = num_ids
        self._anchor = self.encode("\n")
        added = [str(token) for token in getattr(inner, "added_tokens_decoder", {}).values()]
        special = sorted({*added, *getattr(inner, "all_special_tokens", [])}, key=len, reverse=True)
        # One group, so that splitting keeps the tokens. "(?!)" matches nothing.
        self._special = re.compile(f"({'|'.join(map(re.escape, special)) or '(?!)'})")

    def encode(self, text: str) -> list[int]:
        """Ids of a text that starts a line, without BOS or EOS."""
        if not text:
            return []
        ids: list[int] = self.inner.encode(
            mended(text), add_special_tokens=False, split_special_tokens=True
        )
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that goes on where another ended, in the same line."""
        ids = self.encode("\n" + text)
        length = len(self._anchor)
        return ids[length:] if ids[:length] == self._anchor else self.encode(text)

    def lead(self, ids: list[int], text: str) -> str:
        """Spaces that stand before `text` in a stream, where decoding `ids` alone left them out."""
        before = self.decode(self._anchor)
        whole = self.decode([*self._anchor, *ids])[len(before) :]
        lead = whole.removesuffix(text)
        return lead if lead.strip(" ") == "" else ""

    def bos_ids(self) -> list[int]:
        """The ids that the tokenizer puts before a text: BOS where it adds one, else nothing.

        GLM's puts two there.
        """
        whole: list[int] = self.inner.encode("a")
        plain: list[int] = self.inner.encode("a", add_special_tokens=False)
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((i for i in starts if whole[i : i + len(plain)] == plain), 0)]

    def check_ids(self, ids: list[int], whose: str) -> None:
        """Refuse ids that the model has no embedding for.

        Args:
            ids: To be fed.
            whose: What writes them, for the message.

        Raises:
            ModelError: With the token.
        """
        if self._num_ids is not None and ids and max(ids) >= self._num_ids:
            token = self.inner.convert_ids_to_tokens(max(ids))
            raise ModelError(
                f"the model and its tokenizer do not belong together: {whose} '{token}', id "
                f"{max(ids):,}, and the model's embedding has {self._num_ids:,} rows"
            )

    def fingerprint(self) -> str:
        """Tells tokenizers apart, by the size of the vocabulary and the ids of a sample."""
        ids = [len(self.inner), *self.encode(SAMPLE)]
        return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=16).hexdigest()

    def decode(self, ids: list[int]) -> str:
        """Text of all ids, special tokens left out, spaces as they were."""
        text: str = self.inner.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(self.chat_template_text)

    @property
    def chat_template_text(self) -> str:
        """The template's source; empty where there is none."""
        template = getattr(self.inner, "chat_template", None)
        if isinstance(template, dict):  # several, by name
            template = template.get("default", "")
        return template or ""

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """A conversation as the template writes it, up to where the next answer begins."""
        text: str = self.inner.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def knows(self, token: str) -> bool:
        """Whether a token of this very text is in the vocabulary."""
        return token in self.inner.get_vocab()

    def encode_marked(self, pieces: Sequence[Marked], *, continues: bool) -> list[int]:
        """Ids of markup and texts in turn, as of one string, but for special tokens in the texts.

        Args:
            pieces: What a template wrote, and what people wrote.
            continues: Something stands before: no space is put in front.
        """
        whole = "".join(piece.text for piece in pieces)
        texts = [piece.text for piece in pieces if piece.is_text]
        if not any(self._special.search(text) for text in texts):
            return self._encode_markup(whole, continues=continues)
        ids: list[int] = []
        run = ""
        for piece in pieces:
            parts = [piece.text] if piece.is_text else self._special.split(piece.text)
            # With one group in the pattern, every second part is a special token.
            for index, part in enumerate(parts):
                if index % 2 == 0:
                    run += part
                    continue
                ids += self._encode_run(run, continues=continues or bool(ids))
                ids += self._encode_markup(part, continues=True)
                run = ""
        return ids + self._encode_run(run, continues=continues or bool(ids))

    def _encode_run(self, text: str, *, continues: bool) -> list[int]:
        return self.encode_continuation(text) if continues and text else self.encode(text)

    def _encode_markup(self, text: str, *, continues: bool) -> list[int]:
        """Ids of text whose special tokens are meant."""
        text = mended(text)
        if not continues:
            ids: list[int] = self.inner.encode(text, add_special_tokens=False)
            return ids
        ids = self.inner.encode("\n" + text, add_special_tokens=False)
        length = len(self._anchor)
        if ids[:length] == self._anchor:
            return ids[length:]
        return self._encode_markup(text, continues=False)
