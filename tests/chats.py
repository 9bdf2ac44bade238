"""The chat on a pseudo terminal, for the tests that look at it: pyte says what is on the screen."""

import os
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import streamchat

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")

PROGRAM = [sys.executable, "-m", "streamchat"]
PROMPT = "›"  # noqa: RUF001 - the chat's own

WAIT_SECONDS = 90
"""How long a start or an answer may take before a test gives up; it is seconds where idle."""


def environment_in(home):
    """The developer's environment without what would change a run, and with a home of its own."""
    names = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED", "PY_COLORS", "TMUX")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("STREAMCHAT_") and name not in names
    }
    return kept | {
        "PYTHONPATH": str(Path(streamchat.__file__).parents[1]),
        "PYTHONIOENCODING": "utf-8",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "STREAMCHAT_CONFIG": "",
        "STREAMCHAT_DATA": str(home / "data"),
        "TERM": "xterm-256color",
    }


class Terminal:
    """The program in a terminal of its own.

    Args:
        args: Of the program, or a whole shell command.
        environment: Its environment.
        columns: Width of the screen.
    """

    def __init__(self, args, environment, columns=80, rows=30):
        self.raw = b""
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        command = [*PROGRAM, *args] if isinstance(args, list) else ["/bin/sh", "-c", args]
        self.child = pexpect.spawn(
            command[0], command[1:], env=environment, dimensions=(rows, columns), timeout=None
        )
        self.child.delaybeforesend = None
        # prompt-toolkit asks the terminal where its cursor is.
        self.screen.write_process_input = lambda data: self.child.send(data)

    def send(self, text):
        self.child.send(text)

    def _read(self):
        try:
            data = self.child.read_nonblocking(1 << 16, 0.05)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def until(self, happened, what="", timeout=WAIT_SECONDS):
        """Read until something has happened on the screen."""
        end = time.monotonic() + timeout
        while not happened():
            is_open = self._read()
            if happened():
                return
            assert is_open, f"the program ended before: {what}\n{self.text()}"
            assert time.monotonic() < end, f"did not happen: {what}\n{self.text()}"

    def see(self, text, timeout=WAIT_SECONDS):
        self.until(lambda: text in self.text(), text, timeout)

    def text(self):
        """All rows, those that have scrolled out included."""
        columns = range(self.screen.columns)
        rows = ["".join(row[x].data for x in columns) for row in self.screen.history.top]
        return "\n".join(row.rstrip() for row in [*rows, *self.screen.display])

    def num_prompts(self):
        return sum(row.startswith(PROMPT) for row in self.text().splitlines())

    def since(self, num_prompts):
        """What is below so many prompts, and above the newest one."""
        rows = self.text().splitlines()
        prompts = [index for index, row in enumerate(rows) if row.startswith(PROMPT)]
        return "\n".join(rows[prompts[num_prompts - 1] + 1 : prompts[-1]])

    def is_idle(self):
        """An empty prompt with the cursor behind it, and the toolbar below."""
        row = self.screen.display[self.screen.cursor.y].strip()
        return row == PROMPT and "/help" in self.screen.display[-1]

    def enter(self, text):
        """Type something, let it be answered; returns what came on the screen."""
        before = self.num_prompts()
        self.send(f"{text}\r")
        self.until(lambda: self.num_prompts() > before and self.is_idle(), f"answer to {text!r}")
        return self.since(before)

    def stat(self, name):
        """A number of `/stats`."""
        match = re.search(rf"^{name} +([\d,]+)", self.enter("/stats"), re.MULTILINE)
        assert match, self.text()
        return int(match[1].replace(",", ""))

    def leave(self, key="\x04"):
        """Press a key that should end the program; returns its exit code."""
        self.send(key)
        self.until(lambda: not self.child.isalive(), "the end")
        while self._read() and self.child.isalive():
            pass
        self.child.close()
        return self.child.exitstatus

    def resize(self, columns):
        """As a window's edge that is pulled."""
        self.screen.resize(columns=columns)
        self.child.setwinsize(self.screen.lines, columns)

    def end(self):
        self.child.close(force=True)


@contextmanager
def terminal(args, environment, **size):
    started = Terminal(args, environment, **size)
    try:
        yield started
    finally:
        started.end()
