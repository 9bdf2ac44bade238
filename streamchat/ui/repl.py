"""The interactive chat: prompt-toolkit while the user types, Rich while the model answers."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

from prompt_toolkit.formatted_text import FormattedText
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
from streamchat.ui.commands import COMMANDS, TAKES_PATH, WORDS, Commands
from streamchat.ui.completion import SlashCompleter
from streamchat.ui.console import can_animate, visible
from streamchat.ui.lines import turns_evicted
from streamchat.ui.loading import Background
from streamchat.ui.output import Output
from streamchat.ui.prompt import Prompt, no_echo, prompt_mark
from streamchat.ui.status import status_text
from streamchat.ui.theme import style

if TYPE_CHECKING:
    from streamchat.chat.conversation import Conversation
    from streamchat.chat.session import ChatSession


class Repl:
    """Reads turns, shows answers.

    Args:
        load: Loads the model and returns the chat; runs in the background.
        console: The terminal.
        answers: Standard output, where it is not the terminal.
        announce: Called once with the chat, before the first answer.
        show_thinking: Show what a model thinks before it answers.
        markdown: Style answers as Markdown, where rows are redrawn while they grow.
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
        markdown: bool = False,
        interruptible: Callable[[], Any],
        keeps_history: bool = True,
    ) -> None:
        self._announce: Callable[[ChatSession], None] | None = announce
        self._console = console
        self._answers = answers
        self._show_thinking = show_thinking
        self._markdown = markdown
        self._interruptible = interruptible
        self._commands = Commands(console)
        self._prompt = Prompt(
            console,
            completer=SlashCompleter(COMMANDS, WORDS, TAKES_PATH),
            toolbar=self._toolbar,
            keeps_history=keeps_history,
        )
        self._loading: Background[ChatSession] = Background(load, self._prompt.end)
        self._draft = ""  # behind the next prompt
        self._is_leaving = False

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
                self._turn(self._commands.turn_of(text))

    def leave(self) -> None:
        """End the chat soon: what is in hand is finished. Called by a signal's handler."""
        self._is_leaving = True
        self._prompt.leave()

    def close(self) -> list[str]:
        """Keep what waits to be kept; gives what could not be written."""
        if not self._loading.has_result():
            return []
        chat = self._loading.result()
        chat.close()
        return chat.take_errors()

    def _read(self) -> str | None:
        """The next turn, or None to leave."""
        draft, self._draft = self._draft, ""
        try:
            return self._prompt.read(draft)
        except EOFError:
            if self._loading.is_done():
                self._loading.result()  # raises, if that is why the prompt ended
            return None

    def _command(self, text: str) -> bool:
        """Run a slash command; false leaves."""
        chat = self._wait()
        if chat is None:
            return True
        try:
            with self._interruptible():  # half a command would leave half a change behind
                outcome = self._commands.run(text, chat)
        except StreamchatError as error:
            self._console.print(Text(visible(str(error)), style=style("error")))
            return True
        self._draft = outcome.draft
        if outcome.ask is not None:
            if outcome.is_new:
                self._prompt.remember(outcome.ask)
                shown = visible(f"{prompt_mark()}{outcome.ask}", keep="\n")
                self._console.print(Text(shown, style=style("question")))
                self._turn(self._commands.turn_of(outcome.ask))
            else:
                self._turn(outcome.ask)
        self._show_errors(chat)
        return not outcome.leave

    def _turn(self, question: str) -> None:
        chat = self._wait()
        if chat is None:
            return
        conversation = chat.conversation
        speed = _Speed(conversation)
        view = AnswerView(
            self._console,
            lambda width: _status(conversation, speed, width),
            self._answers,
            markdown=self._markdown,
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
            what = "it" if event.first == event.last else "them"
            view.notice(f"{turns_evicted(event)} (/evicted shows {what})")
        elif isinstance(event, QuestionEvicted):
            view.notice("the question is leaving the model's memory")
        elif isinstance(event, Finished) and event.reason == "length":
            view.notice("stopped at the cap on new tokens (/set max_new N)", is_last=True)
        view.refresh()

    def _wait(self) -> "ChatSession | None":
        """The chat, once the model is there; None if the user would not wait."""
        try:
            if not self._loading.is_done():
                with no_echo(), self._loading_shown():
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
