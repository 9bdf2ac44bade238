"""Markdown that is styled row by row, as the rows become final.

A row is styled by what stands in it and in the line before it, never by what is still to come:
nothing is drawn twice. Every character stays but for stars that make a word bold or italic, and
these go only where both ends stand in the row and no letter touches them from outside: `2**3**4`
and `__init__` are shown as they are. Marks of blocks and of code stay.
"""

import re
from functools import cache
from typing import TYPE_CHECKING

from rich.text import Text

from streamchat.ui.theme import style

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

HEADING = re.compile(r" {0,3}#{1,6}(?: |$)")
QUOTE = re.compile(r" {0,3}(?:> ?)+")
ITEM = re.compile(r" *(?:[-*+]|\d{1,9}[.)]) +")
RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *")
# Models indent the code of a list's item, so any number of spaces is taken.
FENCE = re.compile(r" *(?P<marks>`{3,}(?=[^`]*$)|~{3,})")

STYLES = {"strong": "strong", "em": "emphasis"}


class Markdown:
    """Where a text stands that comes line by line."""

    def __init__(self) -> None:
        self._fence = ""  # what has opened the block of code that we are in

    @property
    def is_code(self) -> bool:
        """Whether the line is one of a block of code."""
        return bool(self._fence)

    def styled(self, row: str, before: str) -> Text:
        """A row as it is shown.

        Args:
            row: The row, not empty.
            before: What stands in front of it in its line.
        """
        line = before + row
        if self._fence:
            return Text(row, style("marks" if self._closes(line) else "listing"))
        if FENCE.match(line) or RULE.fullmatch(line):
            return Text(row, style("marks"))
        if HEADING.match(line):
            return _inline(row, style("heading"))
        mark, base = QUOTE.match(line), style("quote")
        if mark is None:
            mark, base = ITEM.match(line), ""
        if mark is None:
            return _inline(row, "")
        end = max(0, mark.end() - len(before))
        return Text.assemble((row[:end], style("marks")), _inline(row[end:], base))

    def end_line(self, line: str) -> None:
        """A line is complete."""
        if self._fence:
            self._fence = "" if self._closes(line) else self._fence
        elif match := FENCE.match(line):
            self._fence = match["marks"]

    def _closes(self, line: str) -> bool:
        marks = line.strip()
        return len(marks) >= len(self._fence) and set(marks) == {self._fence[0]}


def _inline(row: str, base: str) -> Text:
    """A row with what stands between marks in their style."""
    shown = Text(style=base)
    if not row:
        return shown
    if not any(mark in row for mark in "*_`"):
        return shown.append(row)
    tokens = [token for token in _parser().parseInline(row)[0].children or () if _source(token)]
    pairs = _pairs(tokens)
    styles: list[str] = []
    position = 0
    for index, token in enumerate(tokens):
        source = _source(token)
        if token.type == "code_inline":
            begin, size = position + len(token.markup), len(token.content)
            if row[begin : begin + size] != token.content:
                size += 2  # the parser has stripped a space at both ends
            source = row[position : begin + size + len(token.markup)]
        if index in pairs and token.nesting > 0:
            styles.append(style(STYLES[token.tag]))
        if index not in pairs or token.markup.startswith("_"):
            code = [style("code")] if token.type == "code_inline" else []
            shown.append(source, " ".join([*styles, *code]))
        if index in pairs and token.nesting < 0:
            styles.pop()
        position += len(source)
    return shown


def _source(token: "Token") -> str:
    """How a token was written, code apart."""
    return token.content if token.type == "text" else token.markup


def _pairs(tokens: "list[Token]") -> set[int]:
    """Which tokens begin and end what is bold or in italics."""
    found: set[int] = set()
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.nesting > 0:
            opened.append(index)
        elif token.nesting < 0:
            first = opened.pop()
            touches = (first > 0 and _source(tokens[first - 1])[-1].isalnum()) or (
                index + 1 < len(tokens) and _source(tokens[index + 1])[0].isalnum()
            )
            if not touches:
                found |= {first, index}
    return found


@cache
def _parser() -> "MarkdownIt":
    # Imported late: the prompt comes first.
    from markdown_it import MarkdownIt

    return MarkdownIt("zero").enable(["emphasis", "backticks", "escape"]).disable("text_join")
