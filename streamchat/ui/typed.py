"""Questions typed at the terminal while the program works and standard input streams.

The terminal gives keys one by one and does not echo them: the draft is shown where the status line
is, so that what is typed and what is written never mix. Keys: Enter asks, Backspace and Ctrl-U take
back; Ctrl-C still stops the run.
"""

import codecs
import os
import queue
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from streamchat.errors import UsageError
from streamchat.ui.console import can_animate

if sys.platform != "win32":
    import termios

TERMINAL = "/dev/tty"
BACKSPACE = "\x08\x7f"
CLEAR = "\x15"
ESCAPED = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
"""An arrow, or another key that says nothing here."""

LOCAL_FLAGS, CHARACTERS = 3, 6
"""Places in what `termios.tcgetattr` gives."""

DISABLED = b"\0"
"""No key."""

BACKGROUND_SECONDS = 0.5
"""How often to ask whether the terminal gives keys again."""


class Typed:
    """Reads the terminal in the background; a context that gives it back as it was.

    Only in the main thread, since it listens to signals.

    Raises:
        UsageError: If there is no terminal whose lines can be redrawn.
    """

    def __init__(self) -> None:
        if not can_animate():
            raise UsageError(
                "--ask needs a terminal that standard error can redraw a line of: "
                "not with --plain, TERM=dumb or 2> FILE"
            )
        if sys.platform == "win32":
            raise UsageError("--ask needs a terminal of POSIX systems")
        try:
            self._terminal = os.open(TERMINAL, os.O_RDONLY | os.O_NOCTTY)
        except OSError as error:
            raise UsageError(f"--ask needs a terminal: {error.strerror}") from error
        self._before = termios.tcgetattr(self._terminal)
        self._questions: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._draft = ""
        self._signals: dict[int, Any] = {}

    def __enter__(self) -> "Typed":
        # In the background, a terminal neither gives keys nor takes settings: both fail then, and
        # do not stop the run. It may even come to be there by the end of what feeds our input.
        self._signals = {
            signal.SIGTTIN: signal.signal(signal.SIGTTIN, signal.SIG_IGN),
            signal.SIGTTOU: signal.signal(signal.SIGTTOU, signal.SIG_IGN),
            signal.SIGCONT: signal.signal(signal.SIGCONT, self._resume),
        }
        self._resume()
        threading.Thread(target=self._read, name="typed", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(termios.error, OSError):  # it is gone
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)
        for number, handler in self._signals.items():
            signal.signal(number, handler)

    def _resume(self, *_: object) -> None:
        """Ask for keys one by one; a shell has taken that back while we were stopped."""
        if not self._is_ours():
            return
        with suppress(termios.error, OSError):
            keys = termios.tcgetattr(self._terminal)
            keys[LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
            # The quit key ends a program where it stands, and would leave the terminal like this.
            keys[CHARACTERS] = [*keys[CHARACTERS]]
            keys[CHARACTERS][termios.VQUIT] = DISABLED
            keys[CHARACTERS][termios.VMIN], keys[CHARACTERS][termios.VTIME] = 1, 0
            termios.tcsetattr(self._terminal, termios.TCSANOW, keys)

    def _is_ours(self) -> bool:
        """Whether we are in the foreground."""
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # a terminal that controls nobody
            return True

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
            except OSError:  # we are in the background, or the terminal is gone
                time.sleep(BACKGROUND_SECONDS)
                continue
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
