"""The slash commands of the chat."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from streamchat.errors import ConfigError, UsageError
from streamchat.events import StreamStats
from streamchat.ui.console import is_plain, visible
from streamchat.ui.theme import style as style_of

if TYPE_CHECKING:
    from streamchat.chat.session import ChatSession

HELP = {
    "/help": "this list (also /?)",
    "/set NAME VALUE": "change a setting; /show has their names",
    "/show": "model, system prompt, settings",
    "/clear": "start anew, with the same system prompt",
    "/regen": "answer the last question once more",
    "/undo": "take the last turn back",
    "/cache": "what the model holds, as a picture",
    "/evicted [A-B]": "turns that have left the model's memory",
    "/recall WORDS": "find what has left, and tell it to the model with your next turn",
    "/save [NAME]": "write all that waits; with a name, keep a copy of the session",
    "/load NAME": "go on with another session",
    "/stats": "tokens, turns, memory",
    "/bye": "leave (also Ctrl-D)",
}
COMMANDS = [*(name.split()[0] for name in HELP), "/?"]
TAKES_WORDS = ("/set", "/evicted", "/recall", "/save", "/load")
PICTURE_CELLS = 40
SAMPLING: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}
"""Settings of `SamplingConfig`, and their types."""

KEPT_AS_THEY_ARE = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Those that a session knows by the same name."""

PROMPT = "› "  # noqa: RUF001 - meant
PLAIN_PROMPT = "> "
OWN_SYSTEM = "(the model's own)"


def prompt() -> str:
    """What stands in front of a turn of the user's."""
    return PLAIN_PROMPT if is_plain() else PROMPT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the chat does after a command: leave, or ask something."""

    leave: bool = False
    ask: str | None = None


class Commands:
    """Runs slash commands.

    Args:
        console: Where they answer.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run: dict[str, Callable[[ChatSession, list[str]], Outcome | None]] = {
            "/help": self._help,
            "/?": self._help,
            "/set": self._set,
            "/show": self._show,
            "/clear": self._clear,
            "/regen": self._regen,
            "/undo": self._undo,
            "/cache": self._cache,
            "/evicted": self._evicted,
            "/recall": self._recall,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/quit": lambda _chat, _args: Outcome(leave=True),
            "/exit": lambda _chat, _args: Outcome(leave=True),
            "/bye": lambda _chat, _args: Outcome(leave=True),
        }

    def run(self, text: str, chat: "ChatSession") -> Outcome:
        """Run one command.

        Raises:
            UsageError: If there is no such command, or its words are off.
            StateError: If it cannot be done now.
            SessionError: If the session does not let it.
        """
        name, *args = text.split()
        command = self._run.get(name)
        if command is None:
            raise UsageError(f"unknown command '{name}', type /? for help")
        if args and name not in TAKES_WORDS:
            raise UsageError(f"{name} takes no words after it, got '{' '.join(args)}'")
        return command(chat, args) or Outcome()

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(visible(text, keep="\n"), style=style))

    def _help(self, _chat: "ChatSession", _args: list[str]) -> None:
        for name, meaning in HELP.items():
            self._say(f"{name:<18}{meaning}")
        self._say('""" begins and ends a text of several lines; Alt-Enter starts a new line')
        self._say("a space before / makes it a question; Ctrl-C ends an answer, which is kept")

    def _set(self, chat: "ChatSession", args: list[str]) -> None:
        conversation = chat.conversation
        if len(args) != 2:
            raise UsageError("usage: /set NAME VALUE, for example /set temperature 0.7")
        name, value = args
        if name == "max_new":
            number = _number(name, value, int)
            if number < 1:
                raise ConfigError(f"max_new must be at least 1, got {value}")
            conversation.max_new_tokens = int(number)
        elif name in SAMPLING:
            options: dict[str, Any] = {name: SAMPLING[name](_number(name, value, SAMPLING[name]))}
            conversation.set_sampling(replace(conversation.sampling, **options))
        else:
            raise UsageError(f"unknown setting '{name}'; there are max_new, {', '.join(SAMPLING)}")
        sampling = conversation.sampling
        kept = {name: getattr(sampling, name) for name in SAMPLING if name in KEPT_AS_THEY_ARE}
        chat.remember(
            {
                **kept,
                "repeat_penalty": sampling.repetition_penalty,
                "max_new": conversation.max_new_tokens,
            }
        )
        self._say(f"{name} is now {value}", style_of("notice"))

    def _show(self, chat: "ChatSession", _args: list[str]) -> None:
        conversation = chat.conversation
        sampling = conversation.sampling
        self._say(f"model        {conversation.loaded.source.name}")
        self._say(f"system       {conversation.template.system or OWN_SYSTEM}")
        self._say(f"max_new      {conversation.max_new_tokens}")
        for name in SAMPLING:
            self._say(f"{name:<12} {getattr(sampling, name)}")

    def _clear(self, chat: "ChatSession", _args: list[str]) -> None:
        chat.clear()
        self._say("started anew", style_of("notice"))

    def _regen(self, chat: "ChatSession", _args: list[str]) -> Outcome:
        turns = chat.conversation.turns
        question = turns[-1].question if turns else None
        self._take_back(chat, asks_again=True)
        return Outcome(ask=question)

    def _undo(self, chat: "ChatSession", _args: list[str]) -> None:
        self._take_back(chat, asks_again=False)

    def _take_back(self, chat: "ChatSession", *, asks_again: bool) -> None:
        number = chat.conversation.num_turns
        exact = chat.undo(asks_again=asks_again)
        note = "" if exact else "; what was retained was fed again, older text is forgotten"
        self._say(f"turn {number} taken back{note}", style_of("notice"))

    def _cache(self, chat: "ChatSession", _args: list[str]) -> None:
        conversation = chat.conversation
        stats = conversation.stream.stats()
        if not is_plain():
            self._console.print(_picture(stats))
        config = conversation.cache_config
        what = config.describe()
        if config.policy == "sink":
            newest = stats.num_held - stats.num_pinned
            what = f"{stats.num_pinned:,} pinned (system prompt, sinks) and the newest {newest:,}"
        self._say(
            f"{stats.num_held:,} of {stats.cache_size:,} tokens held: {what}; "
            f"{stats.num_evicted:,} have left"
        )
        gone = conversation.num_turns_gone()
        if gone:
            self._say(f"turns 1 to {gone} have left; the model cannot see them any more")

    def _evicted(self, chat: "ChatSession", args: list[str]) -> None:
        conversation = chat.conversation
        gone = conversation.num_turns_gone()
        first, last = _turn_range(args, gone)
        shown = [t for t in conversation.turns if first <= t.number <= min(last, gone)]
        if not shown:
            problem = "no such turn" if gone else "no turn has left the model's memory"
            self._say(problem, style_of("notice"))
        for turn in shown:
            self._say(f"{turn.number} {prompt()}{turn.question}", style_of("question"))
            self._say(turn.answer)

    def _recall(self, chat: "ChatSession", args: list[str]) -> None:
        if not args:
            raise UsageError("usage: /recall WORDS, for example /recall name of the ship")
        told = chat.recall(" ".join(args))
        self._say(told.rstrip("\n") or "nothing that has left matches", style_of("notice"))
        if told:
            self._say("the model will be told this with your next turn", style_of("notice"))

    def _save(self, chat: "ChatSession", args: list[str]) -> None:
        name = _one_name("/save", args) if args else None
        chat.save_as(name)
        self._say(f"saved as session {name or chat.name}", style_of("notice"))

    def _load(self, chat: "ChatSession", args: list[str]) -> None:
        notices = chat.open(_one_name("/load", args))
        turns = chat.conversation.num_turns
        self._say(f"session {chat.name}, {turns:,} turn{'s' * (turns != 1)}", style_of("notice"))
        for notice in notices:
            self._say(notice, style_of("error"))

    def _stats(self, chat: "ChatSession", _args: list[str]) -> None:
        conversation = chat.conversation
        stats = conversation.stream.stats()
        self._say(f"turns        {conversation.num_turns:,}")
        self._say(f"tokens fed   {stats.num_tokens:,}")
        self._say(f"held         {stats.num_held:,} of {stats.cache_size:,}")
        self._say(f"evicted      {stats.num_evicted:,}")
        self._say(f"cache        {conversation.stream.cache.num_bytes / 1e6:,.1f} MB")


def _picture(stats: StreamStats) -> Text:
    """What is pinned, what else is held, and what is free, in this order."""
    pinned = round(PICTURE_CELLS * stats.num_pinned / stats.cache_size)
    pinned = max(pinned, 1 if stats.num_pinned else 0)
    window = round(PICTURE_CELLS * (stats.num_held - stats.num_pinned) / stats.cache_size)
    free = max(0, PICTURE_CELLS - pinned - window)
    picture = Text("█" * pinned, style=style_of("pinned"))
    picture.append("█" * window, style=style_of("window"))
    return picture.append("░" * free, style=style_of("free"))


def _one_name(command: str, args: list[str]) -> str:
    if len(args) != 1:
        raise UsageError(f"usage: {command} NAME, where NAME is a session's")
    return args[0]


def _number(name: str, value: str, kind: type[float] | type[int]) -> float:
    try:
        return kind(value)
    except ValueError as error:
        raise UsageError(f"{name} must be a number, got '{value}'") from error


def _turn_range(args: list[str], gone: int) -> tuple[int, int]:
    if not args:
        return 1, gone
    first, _, last = args[0].partition("-")
    if not first.isdigit() or (last and not last.isdigit()):
        raise UsageError(f"usage: /evicted or /evicted 3-7, got '{args[0]}'")
    return int(first), int(last or first)
