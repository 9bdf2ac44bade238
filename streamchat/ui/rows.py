"""Text that comes in pieces, as rows of a terminal: which are final, and the one that grows."""

from rich.text import Text

from streamchat.ui.cells import cells, wrap_once
from streamchat.ui.markdown import Markdown

TAB = 4


class Rows:
    """Cuts text into rows.

    The rows of a text do not depend on the pieces it comes in.

    Args:
        markdown: Styles them; None leaves them as they are.
    """

    def __init__(self, markdown: Markdown | None = None) -> None:
        self._markdown = markdown
        self._style = ""
        self._row = ""
        self._before = ""  # in the same line

    def set_style(self, style: str) -> None:
        """From now on; a style of its own is no Markdown. The row that grows has been ended."""
        self._style = style

    def feed(self, text: str, width: int) -> list[Text]:
        """Add text of no control characters but line feeds and tabs; returns rows that are final.

        Args:
            text: What comes next.
            width: Cells of a row; it may change between two calls.
        """
        rows = []
        for char in text:
            if char == "\n":
                if self._row.strip() or not self._before:
                    rows.append(self._styled(self._row))
                self._end_line()
                continue
            self._row += " " * (TAB - cells(self._row) % TAB) if char == "\t" else char
            while self._size(self._row) > width and len(self._row) > 1:
                at_spaces = self._markdown is None or not self._markdown.is_code
                row, rest = wrap_once(self._row, width, self._size, at_spaces=at_spaces)
                rows.append(self._styled(row))
                self._before += self._row[: len(self._row) - len(rest)]
                self._row = rest
        return rows

    def end_row(self) -> list[Text]:
        """End the row that grows, if there is one, in the middle of its line."""
        row, self._row = self._row, ""
        if not row:
            return []
        shown = self._styled(row)
        self._before += row
        return [shown]

    def growing(self) -> Text:
        """The row that grows, as it is now."""
        return self._styled(self._row)

    def _end_line(self) -> None:
        if self._markdown is not None and not self._style:
            self._markdown.end_line(self._before + self._row)
        self._row = self._before = ""

    def _styled(self, row: str) -> Text:
        if self._markdown is None or self._style or not row:
            return Text(row, self._style)
        return self._markdown.styled(row, self._before)

    def _size(self, row: str) -> int:
        size = cells(row)
        if self._markdown is None or self._style or "*" not in row:
            return size
        return cells(self._styled(row).plain)
