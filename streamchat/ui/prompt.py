"""Reading turns from a terminal: prompt-toolkit where it redraws, Python's `input` elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.completion import Completer
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from rich.console import Console
from rich.text import Text

from streamchat.ui.console import can_animate, is_plain, is_tty
from streamchat.ui.theme import style

LEAVE_SECONDS = 2.0
"""A second Ctrl-C on an empty prompt within this time leaves."""

HINT = "Ctrl-C again or Ctrl-D to leave, /help for commands"
BLOCK = '"""'
EDIT = "/edit"
"""The command that Ctrl-X Ctrl-E stands for, the draft behind it."""

MARK = "› "  # noqa: RUF001 - meant
PLAIN_MARK = "> "
MORE = "… "
PLAIN_MORE = "... "


def prompt_mark() -> str:
    """What stands in front of a turn of the user's."""
    return PLAIN_MARK if is_plain() else MARK


class Prompt:
    """Reads turns.

    Args:
        console: The terminal.
        completer: Completes what is typed.
        toolbar: What stands below the prompt.
        keeps_history: Whether what is typed is kept for the next chat.
    """

    def __init__(
        self,
        console: Console,
        *,
        completer: Completer,
        toolbar: Callable[[], FormattedText],
        keeps_history: bool,
    ) -> None:
        self._console = console
        self._history = _history() if keeps_history else InMemoryHistory()
        self._last_interrupt = 0.0
        self._is_leaving = False
        self._reads_plain = False
        # A terminal that redraws nothing gets Python's own input().
        self._session: PromptSession[str] | None = None
        if can_animate():
            self._session = PromptSession(
                history=self._history,
                completer=completer,
                complete_while_typing=False,
                key_bindings=_key_bindings(),
                multiline=True,
                prompt_continuation=lambda _width, _line, wraps: "  " if wraps else MORE,
                bottom_toolbar=toolbar,
                refresh_interval=0.5,
                enable_suspend=True,
                output=create_output(stdout=cast(TextIO, console.file)),
            )

    def read(self, draft: str = "") -> str:
        """The next turn, or a command.

        Args:
            draft: What stands behind the prompt already.

        Raises:
            EOFError: If the user leaves, or `end` or `leave` was called.
        """
        while True:
            try:
                text = self._line(prompt_mark(), draft)
                while text.startswith(BLOCK) and not _is_closed(text):
                    text += "\n" + self._line(PLAIN_MORE if is_plain() else MORE)
            except KeyboardInterrupt:
                draft = ""
                now = time.monotonic()
                if now - self._last_interrupt < LEAVE_SECONDS:
                    raise EOFError from None
                self._last_interrupt = now
                self._console.print(Text(HINT, style=style("notice")))
                continue
            self._last_interrupt = 0.0
            return _unblock(text)

    def remember(self, text: str) -> None:
        """A turn that was not typed here: it is in the history, too."""
        self._history.append_string(text)

    def leave(self) -> None:
        """Read nothing more. Called by a signal's handler."""
        self._is_leaving = True
        self.end()
        if self._reads_plain:
            raise EOFError

    def end(self) -> None:
        """End the prompt that is being read, from whatever thread."""
        app = self._session.app if self._session is not None else None
        if app is not None and app.is_running and app.loop is not None:
            app.loop.call_soon_threadsafe(_exit, app)

    def _line(self, mark: str, draft: str = "") -> str:
        if self._session is not None:
            return self._session.prompt(mark, default=draft, pre_run=self._end_if_leaving)
        try:
            self._reads_plain = True  # from here on, `leave` raises
            if self._is_leaving:
                raise EOFError
            self._console.file.write(mark)
            self._console.file.flush()
            return input()
        finally:
            self._reads_plain = False

    def _end_if_leaving(self) -> None:
        if self._is_leaving:
            _exit(get_app())


def _exit(app: Application[Any]) -> None:
    """End a prompt, unless something else has just done so."""
    if app.future is not None and not app.future.done():
        app.exit(exception=EOFError())


@contextmanager
def no_echo() -> Iterator[None]:
    """Keys pressed meanwhile wait for the next prompt, and do not show in the answer."""
    if not is_tty(sys.stdin) or os.name != "posix":
        yield
        return
    import termios

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    silent = [*before]
    # Key by key: the terminal's own line editor would keep Ctrl-D and Backspace for itself.
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(number, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


def _key_bindings() -> KeyBindings:
    """Enter sends; Alt-Enter starts a new line; a paste stays one turn."""
    bindings = KeyBindings()
    is_typing = has_focus(DEFAULT_BUFFER)  # a search through the history has its own keys

    @bindings.add("enter", filter=is_typing)
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("c-c", filter=is_typing)
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()  # a draft is cleared, and nothing else happens
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    @bindings.add("escape", "enter", filter=is_typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-x", "c-e", filter=is_typing)
    def _edit(event: KeyPressEvent) -> None:
        event.app.exit(result=f"{EDIT} {event.current_buffer.text}")

    return bindings


def _history() -> History:
    """What was typed before; kept in memory only where the file cannot be written."""
    path = Path(user_state_path("streamchat", appauthor=False)) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _is_closed(text: str) -> bool:
    return len(text) >= 2 * len(BLOCK) and text.rstrip().endswith(BLOCK)


def _unblock(text: str) -> str:
    """A turn without the marks of a block."""
    if text.startswith(BLOCK) and _is_closed(text):
        return text.rstrip()[len(BLOCK) : -len(BLOCK)].strip("\n")
    return text
