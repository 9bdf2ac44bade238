"""Questions typed at the terminal while the program works and standard input streams.

The terminal gives keys one by one and does not echo them: the draft is shown where the status line
is, so that what is typed and what is written never mix. Keys: Enter asks, Backspace and Ctrl-U take
back; Ctrl-C still stops the run.
"""

import codecs
import os
import queue
import re
import sys
import threading
from types import TracebackType

from streamchat.errors import UsageError
from streamchat.ui.console import can_animate

if sys.platform != "win32":
    import termios
    import tty

TERMINAL = "/dev/tty"
BACKSPACE = "\x08\x7f"
CLEAR = "\x15"
ESCAPED = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
"""An arrow, or another key that says nothing here."""


class Typed:
    """Reads the terminal in the background; a context that gives it back as it was.

    Raises:
        UsageError: If there is no terminal whose lines can be redrawn.
    """

    def __init__(self) -> None:
        if sys.platform == "win32" or not can_animate():
            raise UsageError("--ask needs a terminal, and standard error on it")
        try:
            self._terminal = os.open(TERMINAL, os.O_RDONLY | os.O_NOCTTY)
        except OSError as error:
            raise UsageError(f"--ask needs a terminal: {error.strerror}") from error
        self._before = termios.tcgetattr(self._terminal)
        self._questions: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._draft = ""

    def __enter__(self) -> "Typed":
        tty.setcbreak(self._terminal, termios.TCSANOW)
        threading.Thread(target=self._read, name="typed", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)

    def draft(self) -> str:
        """What has been typed since the last Enter."""
        return self._draft

    def take(self) -> str | None:
        """The next question, if one waits."""
        try:
            return self._questions.get_nowait()
        except queue.Empty:
            return None

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            try:
                data = os.read(self._terminal, 1024)
            except OSError:  # the terminal is gone
                return
            if not data:
                return
            for char in ESCAPED.sub("", decoder.decode(data)):
                self._press(char)

    def _press(self, char: str) -> None:
        if char in "\r\n":
            if self._draft.strip():
                self._questions.put(self._draft.strip())
            self._draft = ""
        elif char in BACKSPACE:
            self._draft = self._draft[:-1]
        elif char == CLEAR:
            self._draft = ""
        elif char.isprintable():
            self._draft += char
