"""Who may see what: colours, widths, and messages on standard error.

Each stream is judged by itself. Whatever the environment asks for, nothing is animated where
standard error is not a terminal.
"""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.text import Text

PLAIN_SECONDS = 10.0
"""Off a terminal, lines about the same step come no more often than this."""

Color = Literal["auto", "always", "never"]

_plain = False


def set_plain(plain: bool) -> None:
    """Whether, in this process, nothing is redrawn and no lines or boxes are drawn."""
    global _plain
    _plain = plain


def is_plain() -> bool:
    """Whether only words are wanted, as a screen reader reads them."""
    return _plain


def make_console(color: Color = "auto", *, stderr: bool = True) -> Console:
    """A console for standard error (or output) by the rules for colour.

    `never` and NO_COLOR take colour away; `always` and FORCE_COLOR give it; NO_COLOR wins over
    FORCE_COLOR, and the flag wins over both.
    """
    # Not None: rich would take that for standard output.
    stream = (sys.stderr if stderr else sys.stdout) or io.StringIO()
    is_terminal = is_tty(stream)
    wanted = color == "always" or (
        color == "auto" and bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    )
    no_color = color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
    return _Console(
        file=stream,
        force_terminal=True if wanted else is_terminal,
        no_color=no_color,
        highlight=False,
        markup=False,
        emoji=False,
    )


class _Console(Console):
    """Rich's own ends the process, and closes standard output, where a reader went away."""

    def on_broken_pipe(self) -> None:
        """Called while a BrokenPipeError is handled: let the caller decide."""
        raise


def is_tty(stream: object) -> bool:
    """Whether a standard stream is there and is a terminal."""
    try:
        return bool(stream and stream.isatty())  # type: ignore[attr-defined]
    except ValueError:  # closed
        return False


def can_animate() -> bool:
    """Whether lines on standard error may be redrawn."""
    return not _plain and is_tty(sys.stderr) and os.environ.get("TERM", "") not in ("", "dumb")


def can_draw() -> bool:
    """Whether tables and pictures may be drawn on standard output."""
    return not _plain and is_tty(sys.stdout)


def visible(text: str, keep: str = "\t") -> str:
    """Text for a terminal: control characters shown as symbols instead of being obeyed.

    Args:
        text: Anything.
        keep: Control characters that stay.
    """
    return "".join(
        _picture(char) if _is_control(char) and char not in keep else char for char in text
    )


def _is_control(char: str) -> bool:
    return char < " " or "\x7f" <= char <= "\x9f"


def _picture(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


class Messages:
    """One-line messages on standard error.

    Args:
        color: The colour rule.
        quiet: Leave out everything but errors.
    """

    def __init__(self, color: Color = "auto", *, quiet: bool = False) -> None:
        self.console = make_console(color)
        self.quiet = quiet

    def say(self, text: str) -> None:
        """Something the user may like to know."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Why it failed, in one line, whatever the width."""
        line = visible(" ".join(text.split()))
        try:
            self.console.print(
                Text(f"streamchat: {line}"), soft_wrap=True, no_wrap=True, overflow="ignore"
            )
        except OSError:  # standard error is closed or full: there is nobody left to tell
            return

    @contextmanager
    def working(self) -> Iterator["Working"]:
        """Show what is being done while it is done."""
        working = Working(self)
        try:
            yield working
        finally:
            working.done()


class Working:
    """A spinner on a terminal; elsewhere a line for each step, and one now and then within it."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._step, self._said = "", 0.0
        self._status = None
        if can_animate() and not messages.quiet:
            self._status = messages.console.status("starting …")
            self._status.start()

    def __call__(self, text: str) -> None:
        """Say what is being done from now on."""
        if self._status is None:
            step, now = text.split(":")[0], time.monotonic()
            if step != self._step or now - self._said >= PLAIN_SECONDS:
                self._step, self._said = step, now
                self._messages.say(text)
        else:
            self._status.update(Text(f"{text} …"))

    def done(self) -> None:
        """Take the spinner away."""
        if self._status is not None:
            self._status.stop()
