"""The last rows on a terminal: one that grows and a status line, drawn anew each time.

Between two drawings the cursor stands at the beginning of the first of them. So when the window is
resized, and a terminal wraps these rows anew, all of them are still behind the cursor.
"""

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from streamchat.ui.cells import cells

REDRAW_SECONDS = 0.05
CURSOR = "▌"
ERASE_BELOW = "\r\x1b[J"
UP = "\r\x1b[A"


class Bottom:
    """What is redrawn below text that is only ever appended.

    Args:
        console: The terminal.
        status: Makes the status line for a width.
    """

    def __init__(self, console: Console, status: Callable[[int], Text]) -> None:
        self._console = console
        self._status = status
        self._next = 0.0
        console.show_cursor(False)

    def append(self, row: Text) -> None:
        """A row that is final, above what is redrawn."""
        self._write(self._rendered(row) + "\n")
        self._next = 0.0

    def draw(self, growing: Text) -> None:
        """Draw, unless it was done just now."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + REDRAW_SECONDS
        width = self._console.width
        row = growing.copy()
        if cells(row.plain) >= width:  # the window has become narrower
            row.truncate(width - 1)
        row.append(CURSOR if width > 1 else "")
        if self._console.height < 2:
            self._write(self._rendered(row) + "\r")
            return
        # One cell is left: a terminal may wrap behind the last one.
        status = self._status(max(1, width - 1))
        self._write(f"{self._rendered(row)}\n{self._rendered(status)}{UP}")

    def close(self) -> None:
        """Nothing of it stays."""
        self._write("")
        self._console.show_cursor()

    def _write(self, rendered: str) -> None:
        self._console.file.write(ERASE_BELOW + rendered)
        self._console.file.flush()

    def _rendered(self, row: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(row, end="", no_wrap=True, overflow="ignore", crop=False)
        return capture.get()
