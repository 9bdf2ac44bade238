"""The interactive chat: prompt-toolkit while the user types, Rich while the model answers."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from rich.console import Console
from rich.text import Text

from streamchat.errors import StreamchatError
from streamchat.events import (
    Event,
    Finished,
    PassagesRecalled,
    Prefilled,
    QuestionEvicted,
    TextDelta,
    ThinkingDelta,
    TurnsEvicted,
)
from streamchat.ui.answer import AnswerView
from streamchat.ui.commands import COMMANDS, Commands, prompt
from streamchat.ui.console import can_animate, is_plain, is_tty, visible
from streamchat.ui.lines import turns_evicted
from streamchat.ui.output import Output
from streamchat.ui.status import status_text
from streamchat.ui.theme import style

if TYPE_CHECKING:
    from streamchat.chat.conversation import Conversation
    from streamchat.chat.session import ChatSession

LEAVE_SECONDS = 2.0
"""A second Ctrl-C on an empty prompt within this time leaves."""

HINT = "Ctrl-C again or Ctrl-D to leave, /help for commands"
BLOCK = '"""'


class Repl:
    """Reads turns, shows answers.

    Args:
        load: Loads the model and returns the chat; runs in the background.
        console: The terminal.
        answers: Standard output, where it is not the terminal.
        announce: Called once with the chat, before the first answer.
        show_thinking: Show what a model thinks before it answers.
        interruptible: Context in which SIGINT sets the flag it returns.
        keeps_history: Whether what is typed is kept for the next chat.
    """

    def __init__(
        self,
        load: "Callable[[], ChatSession]",
        console: Console,
        *,
        answers: Output | None = None,
        announce: "Callable[[ChatSession], None]",
        show_thinking: bool,
        interruptible: Callable[[], Any],
        keeps_history: bool = True,
    ) -> None:
        self._announce: Callable[[ChatSession], None] | None = announce
        self._console = console
        self._answers = answers
        self._show_thinking = show_thinking
        self._interruptible = interruptible
        self._loading = _Background(load, self._load_failed)
        self._commands = Commands(console)
        self._last_interrupt = 0.0
        # A terminal that redraws nothing gets Python's own input().
        self._session = self._make_session(keeps_history) if can_animate() else None
        self._is_leaving = False
        self._reads_plain = False

    def _make_session(self, keeps_history: bool) -> PromptSession[str]:
        return PromptSession(
            history=_history() if keeps_history else InMemoryHistory(),
            completer=WordCompleter(COMMANDS, sentence=True),
            complete_while_typing=False,
            key_bindings=_key_bindings(),
            multiline=True,
            prompt_continuation="… ",
            bottom_toolbar=self._toolbar,
            refresh_interval=0.5,
            output=create_output(stdout=cast(TextIO, self._console.file)),
        )

    def run(self) -> None:
        """Until the user leaves.

        Raises:
            StreamchatError: If the model cannot be loaded.
        """
        while not self._is_leaving and (text := self._read()) is not None:
            if not text.strip():
                continue
            if text.startswith("/"):
                if not self._command(text):
                    return
            else:
                self._turn(text)

    def leave(self) -> None:
        """End the chat soon: what is in hand is finished. Called by a signal's handler."""
        self._is_leaving = True
        self._end_prompt()
        if self._reads_plain:
            raise EOFError

    def close(self) -> list[str]:
        """Keep what waits to be kept; gives what could not be written."""
        if not self._loading.has_result():
            return []
        chat = self._loading.result()
        chat.close()
        return chat.take_errors()

    def _read(self) -> str | None:
        """The next turn, or None to leave."""
        while True:
            try:
                text = self._prompt(prompt())
                while text.startswith(BLOCK) and not _is_closed(text):
                    text += "\n" + self._prompt("... " if is_plain() else "… ")
            except KeyboardInterrupt:
                now = time.monotonic()
                if now - self._last_interrupt < LEAVE_SECONDS:
                    return None
                self._last_interrupt = now
                self._console.print(Text(HINT, style=style("notice")))
                continue
            except EOFError:
                if self._loading.is_done():
                    self._loading.result()  # raises, if that is why the prompt ended
                return None
            return _unblock(text)

    def _prompt(self, mark: str) -> str:
        if self._session is not None:
            return self._session.prompt(mark, pre_run=self._end_if_leaving)
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

    def _command(self, text: str) -> bool:
        """Run a slash command; false leaves."""
        chat = self._wait()
        if chat is None:
            return True
        try:
            outcome = self._commands.run(text, chat)
        except StreamchatError as error:
            self._console.print(Text(str(error), style=style("error")))
            return True
        if outcome.ask is not None:
            self._turn(outcome.ask)
        self._show_errors(chat)
        return not outcome.leave

    def _turn(self, question: str) -> None:
        chat = self._wait()
        if chat is None:
            return
        self._last_interrupt = 0.0
        conversation = chat.conversation
        speed = _Speed(conversation)
        view = AnswerView(
            self._console, lambda width: _status(conversation, speed, width), self._answers
        )
        events = chat.say(question)
        problem = ""
        try:
            # Closing takes a token's time, too: a second Ctrl-C must not end the program in it.
            with no_echo(), self._interruptible() as interrupted, closing(events):
                for event in events:
                    self._show(event, view)
                    if isinstance(event, Prefilled):
                        speed.start()
                    if interrupted() or self._is_leaving:
                        break
        except StreamchatError as error:  # a dense cache is full, say; /clear and /undo still work
            problem = str(error)
        finally:
            view.close()
        if problem:
            self._console.print(Text(problem, style=style("error")))
        self._show_errors(chat)
        self._console.print()

    def _show_errors(self, chat: "ChatSession") -> None:
        """What could not be kept, a line each."""
        for error in chat.take_errors():
            self._console.print(Text(visible(error), style=style("error")))

    def _show(self, event: Event, view: AnswerView) -> None:
        if isinstance(event, TextDelta):
            view.write(event.text)
        elif isinstance(event, ThinkingDelta) and self._show_thinking:
            view.write(event.text, style=style("thinking"))
        elif isinstance(event, PassagesRecalled):
            view.write(event.text.rstrip("\n") + "\n", style=style("notice"))
        elif isinstance(event, TurnsEvicted):
            view.notice(f"{turns_evicted(event)} (/evicted shows them)")
        elif isinstance(event, QuestionEvicted):
            view.notice("the question is leaving the model's memory")
        elif isinstance(event, Finished) and event.reason == "length":
            view.notice("stopped at the cap on new tokens (/set max_new N)")

    def _wait(self) -> "ChatSession | None":
        """The chat, once the model is there; None if the user would not wait."""
        try:
            if not self._loading.is_done():
                with self._loading_shown():
                    self._loading.wait(lambda: self._is_leaving)
            if self._is_leaving:
                return None
            chat = self._loading.result()
        except KeyboardInterrupt:
            return None
        if self._announce is not None:
            self._announce(chat)
            self._announce = None
        return chat

    def _loading_shown(self) -> AbstractContextManager[object]:
        if can_animate():
            return self._console.status("loading the model …")
        self._console.print(Text("loading the model", style=style("notice")))
        return nullcontext()

    def _toolbar(self) -> FormattedText:
        if not self._loading.is_done():
            return FormattedText([("", " loading the model … ")])
        width = max(1, self._console.width - 2)
        text = status_text(self._loading.result().conversation.stream.stats(), ["/help"], width)
        return FormattedText([("", f" {text.plain}")])

    def _load_failed(self) -> None:
        """Leave the prompt: there will be no model. Called in the loading thread."""
        self._end_prompt()

    def _end_prompt(self) -> None:
        app = self._session.app if self._session is not None else None
        if app is not None and app.is_running and app.loop is not None:
            app.loop.call_soon_threadsafe(_exit, app)


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
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(number, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


class _Speed:
    """Tokens a second of one answer, the prompt left out."""

    def __init__(self, conversation: "Conversation") -> None:
        self._conversation = conversation
        self._started: float | None = None
        self._first = 0

    def start(self) -> None:
        """The prompt has been fed."""
        self._started = time.perf_counter()
        self._first = self._conversation.stream.position

    def rate(self) -> float:
        if self._started is None:
            return 0.0
        elapsed = time.perf_counter() - self._started
        return (self._conversation.stream.position - self._first) / max(elapsed, 1e-3)


def _status(conversation: "Conversation", speed: _Speed, width: int) -> Text:
    stats = conversation.stream.stats()
    return status_text(stats, [f"{speed.rate():.1f} tok/s", "^C stop"], width)


class _Background:
    """A function's result, computed in a thread."""

    def __init__(self, compute: "Callable[[], ChatSession]", failed: Callable[[], None]) -> None:
        self._result: ChatSession | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

        def run() -> None:
            try:
                self._result = compute()
            except BaseException as error:  # raised again in the thread that asks
                self._error = error
            self._done.set()
            if self._error is not None:
                failed()

        threading.Thread(target=run, name="load", daemon=True).start()

    def is_done(self) -> bool:
        return self._done.is_set()

    def has_result(self) -> bool:
        return self.is_done() and self._error is None

    def wait(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        while not self._done.wait(0.1) and not gives_up():
            pass

    def result(self) -> "ChatSession":
        self.wait()
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise StreamchatError("loading gave no result")
        return self._result


def _key_bindings() -> KeyBindings:
    """Enter sends; Alt-Enter starts a new line; a paste stays one turn."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("c-c")
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()  # a draft is cleared, and nothing else happens
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

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
