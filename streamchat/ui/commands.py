"""The slash commands of the chat."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from streamchat.errors import ConfigError, SessionError, StreamchatError, UsageError
from streamchat.store.folder import Sessions
from streamchat.ui import clipboard, memory
from streamchat.ui.cells import cells, wrap_once
from streamchat.ui.console import visible
from streamchat.ui.editor import edit
from streamchat.ui.prompt import EDIT, prompt_mark
from streamchat.ui.theme import style as style_of

if TYPE_CHECKING:
    from streamchat.chat.session import ChatSession

HELP = {
    "/help": "this list (also /?)",
    "/set NAME VALUE": "change a setting; /show has their names",
    "/show": "model, system prompt, settings",
    "/read FILE": "put a file's text in front of your next turn",
    f"{EDIT} [TEXT]": "write a turn in your editor, from this text or your last turn (Ctrl-X "
    "Ctrl-E: from what stands behind the prompt)",
    "/copy": "the last answer to the clipboard",
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
KEYS = {
    '"""': "begins and ends a text of several lines",
    "Alt-Enter": "starts a new line",
    "Ctrl-R": "searches what you typed before",
    "Tab": "completes a command and what comes after it",
    "Ctrl-C": "ends an answer, which is kept",
    "a space before /": "makes it a question",
}
COMMANDS = [*(name.split()[0] for name in HELP), "/?"]
TAKES_WORDS = tuple(name.split()[0] for name in HELP if " " in name)
HELP_COLUMN = 18
MAX_READ_BYTES = 1_000_000
"""Of a file for `/read`: more than the largest memory holds."""

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

OWN_SYSTEM = "(the model's own)"


def setting_names() -> list[str]:
    """What `/set` can set."""
    return ["max_new", *SAMPLING]


def session_names() -> list[str]:
    """What `/load` can load; nothing if they cannot be listed."""
    try:
        return Sessions().names()
    except SessionError:
        return []


WORDS: dict[str, Callable[[], Iterable[str]]] = {"/set": setting_names, "/load": session_names}
"""What may come after a command."""

TAKES_PATH = ("/read",)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the chat does after a command.

    Attributes:
        leave: Whether it ends.
        ask: What it asks the model; None for nothing.
        is_new: Whether that is a turn that the user has not seen on the screen yet.
        draft: What stands behind the next prompt already.
    """

    leave: bool = False
    ask: str | None = None
    is_new: bool = False
    draft: str = ""


class Commands:
    """Runs slash commands.

    Args:
        console: Where they answer.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: list[str] = []  # of files, for the next turn
        self._raw: dict[str, Callable[[ChatSession, str], Outcome | None]] = {
            "/read": self._read,
            EDIT: self._edit,
        }
        self._run: dict[str, Callable[[ChatSession, list[str]], Outcome | None]] = {
            "/help": self._help,
            "/?": self._help,
            "/set": self._set,
            "/show": self._show,
            "/copy": self._copy,
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
        raw, command = self._raw.get(name), self._run.get(name)
        if raw is not None:
            return raw(chat, text[len(name) :].lstrip(" ")) or Outcome()
        if command is None:
            raise UsageError(f"unknown command '{name}', type /? for help")
        if args and name not in TAKES_WORDS:
            raise UsageError(f"{name} takes no words after it, got '{' '.join(args)}'")
        return command(chat, args) or Outcome()

    def turn_of(self, question: str) -> str:
        """A question with what was read for it in front."""
        texts, self._texts = self._texts, []
        return "\n\n".join([*texts, question])

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(visible(text, keep="\n"), style=style))

    def _help(self, _chat: "ChatSession", _args: list[str]) -> None:
        self._list([*HELP.items(), ("", ""), *KEYS.items()])

    def _list(self, rows: Sequence[tuple[str, str]]) -> None:
        """Two columns, the second one wrapped; below each other where there is no room for both."""
        width = max(1, self._console.width - 1)
        column, room = HELP_COLUMN, width - HELP_COLUMN
        is_narrow = room < HELP_COLUMN
        if is_narrow:
            column, room = 2, max(1, width - 2)
        for name, meaning in rows:
            if is_narrow:
                self._say(name)
            begin = "" if is_narrow else name
            while cells(meaning) > room:
                line, meaning = wrap_once(meaning, room)
                self._say(f"{begin:<{column}}{line}")
                begin = ""
            if meaning or begin or not is_narrow:
                self._say(f"{begin:<{column}}{meaning}".rstrip())

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

    def _read(self, chat: "ChatSession", rest: str) -> None:
        name = rest.strip()
        if not name:
            raise UsageError("usage: /read FILE, for example /read notes.txt")
        file = Path(name).expanduser()
        text = _text_of(file)
        conversation = chat.conversation
        number = len(conversation.loaded.tokenizer.encode(text))
        self._texts.append(text)
        self._say(f"{file.name}: {number:,} tokens, for your next turn", style_of("notice"))
        room = conversation.cache_config.window_size
        if number > room and conversation.cache_config.policy != "dense":
            self._say(
                f"the model holds the newest {room:,} only: the beginning will have left its "
                "memory before your question comes",
                style_of("error"),
            )

    def _edit(self, chat: "ChatSession", rest: str) -> Outcome:
        turns = chat.conversation.turns
        text = rest or (turns[-1].question if turns else "")
        try:
            turn = edit(text, self._console.file)
        except StreamchatError as error:
            self._say(str(error), style_of("error"))
            return Outcome(draft=rest)
        if turn == text.rstrip("\n") or not turn.strip():
            self._say("nothing new was saved, nothing is asked", style_of("notice"))
            return Outcome(draft=rest)
        return Outcome(ask=turn, is_new=True)

    def _copy(self, chat: "ChatSession", _args: list[str]) -> None:
        turns = chat.conversation.turns
        if not turns:
            raise UsageError("there is no answer yet")
        said = clipboard.copy(turns[-1].answer, self._console.file)
        self._say(f"the answer to turn {turns[-1].number}: {said}", style_of("notice"))

    def _clear(self, chat: "ChatSession", _args: list[str]) -> None:
        self._texts.clear()
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
        config = conversation.cache_config
        what = config.describe()
        if config.policy == "sink":
            newest = stats.num_held - stats.num_pinned
            what = f"{stats.num_pinned:,} pinned (system prompt, sinks) and the newest {newest:,}"
        self._say(f"{stats.num_held:,} of {stats.cache_size:,} tokens held: {what}")
        memory.show(conversation, self._console)

    def _evicted(self, chat: "ChatSession", args: list[str]) -> None:
        conversation = chat.conversation
        gone = conversation.num_turns_gone()
        first, last = _turn_range(args, gone)
        shown = [t for t in conversation.turns if first <= t.number <= min(last, gone)]
        if not shown:
            problem = "no such turn" if gone else "no turn has left the model's memory"
            self._say(problem, style_of("notice"))
        for turn in shown:
            self._say(f"{turn.number} {prompt_mark()}{turn.question}", style_of("question"))
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


def _text_of(file: Path) -> str:
    """The text of a file; what is no UTF-8 in it is U+FFFD.

    Raises:
        UsageError: If it cannot be read, is no file, is too large, or has nothing in it.
    """
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is no file")
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_READ_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if len(content) > MAX_READ_BYTES:
        raise UsageError(
            f"{file} is too large to be read at once; see streamchat pipe --mode listen"
        )
    text = content.decode("utf-8-sig", "replace").replace("\r\n", "\n").rstrip("\n")
    if not text.strip():
        raise UsageError(f"{file} is empty")
    return text


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
