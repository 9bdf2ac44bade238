"""An answer on a terminal: text that is only ever appended, and one status line below it.

Finished rows are printed and never touched again; the row that is still growing is redrawn together
with the status line. Nothing that has scrolled is repainted, however long the answer.
"""

from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from streamchat.ui.console import can_animate, is_plain, visible
from streamchat.ui.output import Output
from streamchat.ui.theme import style as style_of

REFRESH_PER_SECOND = 10


class AnswerView:
    """Where the text of one answer goes.

    Args:
        console: Standard output, on a terminal.
        status: Makes the status line for a width.
        output: Where the text goes instead, where standard output is not the terminal.
    """

    def __init__(
        self, console: Console, status: Callable[[int], Text], output: Output | None = None
    ) -> None:
        self._output = output
        self._console = console
        self._status = status
        self._row = ""
        self._style = ""
        self._after_notice = False
        self._live: Live | None = None
        if can_animate() and output is None:
            self._live = Live(
                console=console,
                get_renderable=self._bottom,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()

    def write(self, text: str, style: str = "") -> None:
        """Append text, which is shown as it is: no markup, no control codes."""
        if style != self._style:
            self._end_row()
            self._style = style
        if self._after_notice:
            text = text.lstrip(" ")
            self._after_notice = not text
        if self._output is not None:
            self._output.write(text)
            return
        if self._live is None:
            self._write_plain(visible(text, keep="\n\t"))
            return
        *rows, self._row = (self._row + visible(text, keep="\n\t").expandtabs(4)).split("\n")
        for row in rows:
            self._print_wrapped(row)
        while cell_len(self._row) > self._width():
            head, self._row = wrap_once(self._row, self._width())
            self._print_row(head)

    def notice(self, text: str) -> None:
        """A line of the program's own, above what grows."""
        self._end_row()
        self._after_notice = True
        if is_plain():
            self._console.print(Text(f"({text})", style=style_of("notice")))
            return
        rule = f"── {text} "
        room = max(0, self._console.width - cell_len(rule) - 1)
        self._console.print(
            Text(rule + "─" * room, style=style_of("notice")),
            no_wrap=True,
            overflow="ellipsis",
            crop=True,
        )

    def close(self) -> None:
        """End the answer: the last row stays, the status line goes."""
        self._end_row()
        if self._live is not None:
            self._live.stop()
        if self._output is not None:
            self._output.line("")

    def _write_plain(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
        self._row = (self._row + text).rpartition("\n")[2]

    def _end_row(self) -> None:
        row, self._row = self._row, ""
        if row and self._live is None:
            self._write_plain("\n")
        elif row:
            self._print_row(row)

    def _print_wrapped(self, row: str) -> None:
        while cell_len(row) > self._width():
            head, row = wrap_once(row, self._width())
            self._print_row(head)
        self._print_row(row)

    def _print_row(self, row: str) -> None:
        if self._live is not None:
            self._live.refresh()  # it still shows this row as the growing one
        self._console.print(
            Text(row, style=self._style), no_wrap=True, overflow="ignore", crop=False
        )

    def _bottom(self) -> Group:
        cursor = Text(self._row + "▌", style=self._style, no_wrap=True, overflow="crop")
        return Group(cursor, self._status(max(1, self._console.width - 1)))

    def _width(self) -> int:
        # One cell is left for the cursor.
        return max(1, self._console.width - 1)


def wrap_once(text: str, width: int) -> tuple[str, str]:
    """Cut a row of at most `width` cells off `text`, after a space where there is one."""
    end = cells = 0
    while end < len(text):
        size = cell_len(text[end])
        if cells + size > width:
            break
        cells += size
        end += 1
    end = max(1, end)
    space = text.rfind(" ", 0, end + 1)
    if 0 < space < len(text):
        return text[:space], text[space + 1 :]
    return text[:end], text[end:]
