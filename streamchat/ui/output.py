"""Standard output: data only, one flushed line for each event."""

import os
import select
import sys
from typing import Any

from streamchat.errors import OutputError
from streamchat.ui.console import is_tty, visible


class ReaderGone(Exception):  # noqa: N818 - no error: whoever read our output has had enough
    """The reader of standard output went away."""


class Output:
    """Lines on standard output."""

    def __init__(self) -> None:
        self.is_terminal = is_tty(sys.stdout)

    def line(self, text: str) -> None:
        """Write a line and flush it; errors as for `write`."""
        self.write(text + "\n")

    def write(self, text: str) -> None:
        """Write text and flush it.

        Raises:
            ReaderGone: If the other end of the pipe is closed.
            OutputError: If it cannot be written.
        """
        if self.is_terminal:
            text = visible(text, keep="\n\t")
        try:
            stream = self._stream()
            stream.write(text.encode("utf-8", "replace"))
            stream.flush()
        except BrokenPipeError:
            _discard_stdout()
            raise ReaderGone from None
        except (OSError, ValueError) as error:
            _discard_stdout()
            reason = getattr(error, "strerror", None) or error
            raise OutputError(f"cannot write to standard output: {reason}") from error

    def check_reader(self) -> None:
        """Notice that the reader went away, while there is nothing to write.

        Raises:
            ReaderGone: If so. Where the system cannot tell, nothing happens.
        """
        if sys.stdout is None or self.is_terminal or not hasattr(select, "poll"):
            return
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLERR)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            _discard_stdout()
            raise ReaderGone

    def _stream(self) -> Any:
        if sys.stdout is None:
            raise OutputError("standard output is closed")
        return sys.stdout.buffer


def _discard_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere instead of failing once more."""
    if sys.stdout is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
