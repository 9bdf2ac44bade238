"""An answer on a terminal: text that is only ever appended, and one status line below it.

Finished rows are printed and never touched again; the row that is still growing is redrawn together
with the status line. Nothing that has scrolled is repainted, however long the answer.
"""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from streamchat.ui.bottom import Bottom
from streamchat.ui.cells import cells, wrap_once
from streamchat.ui.console import can_animate, is_plain, visible
from streamchat.ui.markdown import Markdown
from streamchat.ui.output import Output
from streamchat.ui.rows import Rows
from streamchat.ui.theme import style as style_of


class AnswerView:
    """Where the text of one answer goes.

    Args:
        console: Standard output, on a terminal.
        status: Makes the status line for a width.
        output: Where the text goes instead, where standard output is not the terminal.
        markdown: Style it as Markdown, where rows are redrawn while they grow.
    """

    def __init__(
        self,
        console: Console,
        status: Callable[[int], Text],
        output: Output | None = None,
        *,
        markdown: bool = False,
    ) -> None:
        self._output = output
        self._console = console
        self._rows = Rows(Markdown() if markdown else None)
        self._style = ""
        self._after_notice = False
        self._is_in_row = False  # where nothing is redrawn
        self._bottom: Bottom | None = None
        if can_animate() and output is None:
            self._bottom = Bottom(console, status)
            self.refresh()

    def write(self, text: str, style: str = "") -> None:
        """Append text, which is shown as it is: no markup of rich's, no control codes."""
        if style != self._style:
            self._end_row()
            self._style = style
            self._rows.set_style(style)
        if self._after_notice:
            text = text.lstrip(" ")
            self._after_notice = not text
        if self._output is not None:
            self._output.write(text)
            return
        text = visible(text, keep="\n\t")
        if self._bottom is None:
            self._write_plain(text)
            return
        # One cell is left for the cursor.
        for row in self._rows.feed(text, max(1, self._console.width - 1)):
            self._bottom.append(row)
        self.refresh()

    def refresh(self) -> None:
        """Draw the status line anew."""
        if self._bottom is not None:
            self._bottom.draw(self._rows.growing())

    def notice(self, text: str, *, is_last: bool = False) -> None:
        """A line of the program's own, above what grows, so that no word is taken apart.

        Args:
            text: What it says.
            is_last: It belongs behind all that has been written.
        """
        if is_last or self._bottom is None:
            self._end_row()
            self._after_notice = True
        style = style_of("notice")
        if is_plain():
            self._console.print(Text(f"({text})", style=style))
            return
        width = max(1, self._console.width - 1)
        rule = f"── {text} "
        if self._bottom is None:
            self._console.print(Text(rule + "─" * (width - cells(rule)), style=style))
            return
        row, rest = (rule, "") if cells(rule) <= width else wrap_once(rule.strip(), width)
        while rest:
            self._bottom.append(Text(row, style=style))
            row, rest = (rest, "") if cells(rest) <= width else wrap_once(rest, width)
        self._bottom.append(Text(f"{row.rstrip()} ".ljust(width, "─")[:width], style=style))

    def close(self) -> None:
        """End the answer: the last row stays, the status line goes."""
        self._end_row()
        if self._bottom is not None:
            self._bottom.close()
        if self._output is not None:
            self._output.line("")

    def _write_plain(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
        if text:
            self._is_in_row = not text.endswith("\n")

    def _end_row(self) -> None:
        if self._bottom is not None:
            for row in self._rows.end_row():
                self._bottom.append(row)
        elif self._is_in_row:
            self._write_plain("\n")
