"""Text as the index of words sees it: pieces of bounded length, and the words of a question.

SQLite's `unicode61` tokenizer takes a run of letters for a word. Scripts that put no spaces
between words would become one word a sentence, so each of their characters is made one, and a
question looks for pairs of neighbours.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

PIECE_CHARS = 600
"""What is found and given back at once: some 150 tokens. Shorter ones lose the context of a fact,
longer ones take the room of others."""

# Thai, Lao, Burmese, Khmer; kana; Chinese characters.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_UNSPACED_CHAR = re.compile(f"([{_UNSPACED}])")
_RUNS = re.compile(f"([{_UNSPACED}]+)")
_SENTENCE_END = re.compile(r"[.!?\u2026][\"')\]\u201d\u2019]*\s|[\n\u3002\uff01\uff1f]")
_WORD_CATEGORIES = "LNM"
"""Letters, digits, marks."""


def pieces(text: str) -> Iterator[range]:
    """Cut a text into pieces of up to `PIECE_CHARS` characters.

    Yields:
        Where each begins and ends; together they are the whole text. A piece ends behind the last
        sentence, or else the last space, of its second half.
    """
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        half = begin + PIECE_CHARS // 2
        ends = [match.end() for match in _SENTENCE_END.finditer(text, half, begin + PIECE_CHARS)]
        space = text.rfind(" ", half, begin + PIECE_CHARS)
        end = ends[-1] if ends else space + 1 if space >= 0 else begin + PIECE_CHARS
        yield range(begin, end)
        begin = end
    yield range(begin, len(text))


def spaced(text: str) -> str:
    """The text with spaces around each character of a script that has none."""
    return _UNSPACED_CHAR.sub(r" \1 ", text)


def query_words(text: str) -> Iterator[str]:
    """What a question asks for: words, and pairs of characters in scripts without spaces.

    Yields:
        Letters, digits, marks and single spaces alone, so that quotation marks around it make a
        phrase that SQLite can parse, whatever the text was.
    """
    plain = "".join(c if unicodedata.category(c)[0] in _WORD_CATEGORIES else " " for c in text)
    for word in plain.split():
        for run in _RUNS.split(word):
            if not _RUNS.fullmatch(run):
                if run:
                    yield run
            elif len(run) == 1:
                yield run
            else:
                yield from (f"{a} {b}" for a, b in pairwise(run))
