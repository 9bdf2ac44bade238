"""Options of sessions, and how a command opens the one it is told to."""

import contextlib
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamchat.cli.program import was_given
from streamchat.errors import DamagedError, SessionError, UsageError
from streamchat.model.launch import is_one_of_several
from streamchat.ui.console import Messages

if TYPE_CHECKING:
    from streamchat.chat.journal import Journal
    from streamchat.store.folder import Sessions

SessionOption = Annotated[
    str | None,
    typer.Option(
        "--session", metavar="NAME", help="Keep the chat under this name, and go on if it is there."
    ),
]
ContinueOption = Annotated[
    bool, typer.Option("--continue", "-c", help="Go on with the session that was used last.")
]
NoLogOption = Annotated[
    bool,
    typer.Option(
        "--no-log/--log",
        envvar="STREAMCHAT_NO_LOG",
        show_default=False,
        help="Keep nothing; write no session.",
    ),
]
RecallOption = Annotated[
    bool,
    typer.Option(
        "--recall/--no-recall",
        envvar="STREAMCHAT_RECALL",
        show_default=False,
        help="Look for each turn in what has left the model's memory, and tell it what matches.",
    ),
]
RecallBudgetOption = Annotated[
    int,
    typer.Option(
        min=16,
        metavar="N",
        envvar="STREAMCHAT_RECALL_BUDGET",
        help="Tokens of what is recalled in a turn, at most; and never more than half the window.",
    ),
]
RecallModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_FOLDER",
        envvar="STREAMCHAT_RECALL_MODEL",
        help="Recall by meaning as well as by words, with this static embedding model "
        "(pip install 'streamchat-cli[embeddings]'); '' for words alone.",
    ),
]

NUMBER = (int, float)
KINDS: Mapping[str, tuple[type, ...]] = {
    "model": (str, type(None)),
    "system": (str, type(None)),
    "sinks": (str,),
    "window": (str,),
    "policy": (str,),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": (int,),
    "min_p": NUMBER,
    "repeat_penalty": NUMBER,
    "max_new": (int,),
    "stop": (list, type(None)),
    "seed": (int, type(None)),
    "device": (str,),
    "dtype": (str,),
    "quantize": (str,),
    "recall": (bool,),
    "recall_budget": (int,),
    "recall_model": (str, type(None)),
}
"""Options that a session remembers, and what their values are."""


def open_journal(
    name: str | None, *, continues: bool, no_log: bool, messages: Messages
) -> "Journal | None":
    """Open the session that a chat is kept in; None if it is kept in none.

    Raises:
        UsageError: If the options contradict each other, or there is no such session.
        SessionError: If the session that was asked for cannot be opened. Where none was asked for,
            the chat goes on unlogged, and says so.
    """
    if no_log:
        if name is not None or continues:
            raise UsageError("--no-log keeps nothing: leave out --session and --continue")
        return None
    if name is not None and continues:
        raise UsageError("choose --session NAME or --continue")
    if is_one_of_several():
        if name is not None or continues:
            raise UsageError("a chat of several processes cannot be kept: leave out the session")
        messages.say("this chat is not logged: none of its processes has all of its state")
        return None
    from streamchat.chat.journal import Journal
    from streamchat.store.folder import Sessions

    sessions = Sessions()
    if continues:
        name = last_used(sessions)
    if name is not None:
        return Journal(sessions, name)
    try:
        return Journal(sessions, sessions.new_name(datetime.fromtimestamp(time.time())))
    except SessionError as error:
        messages.error(f"this chat is not logged: {error}")
        return None


def last_used(sessions: "Sessions") -> str:
    """Name of the session that was used last, those left out in which nothing was ever said.

    Raises:
        UsageError: If there is none.
    """
    from streamchat.store.folder import LOG_NAME, STATE_NAME
    from streamchat.store.log import Log

    for info in sessions.infos():
        folder = sessions.find(info.name)
        if (folder / STATE_NAME).exists():
            return info.name
        with contextlib.suppress(SessionError), Log(folder / LOG_NAME, read_only=True) as log:
            if log.num_passages():
                return info.name
    raise UsageError("there is no session to go on with; see streamchat sessions list")


def remembered(
    ctx: typer.Context, journal: "Journal | None", options: dict[str, Any]
) -> dict[str, Any]:
    """The options of a command: those of its session, where the command line gives none.

    Args:
        ctx: Of the command.
        journal: Its session; keeps them from now on.
        options: By name, as typer gave them.

    Raises:
        DamagedError: If the session holds something that is no value of the option.
    """
    if journal is None:
        return options
    settings = journal.log.settings()
    chosen = dict(options)
    for name in KINDS.keys() & settings.keys():
        if not was_given(ctx, name):
            chosen[name] = _checked(journal, name, settings[name])
    for name in ("model", "recall_model"):
        if chosen[name] and Path(chosen[name]).exists():
            chosen[name] = str(Path(chosen[name]).resolve())
    journal.set_settings(chosen)
    return chosen


def _checked(journal: "Journal", name: str, value: object) -> object:
    is_flag_for_number = isinstance(value, bool) and bool not in KINDS[name]
    items = value if isinstance(value, list) else []
    if (
        not isinstance(value, KINDS[name])
        or is_flag_for_number
        or not all(isinstance(item, str) for item in items)
    ):
        raise DamagedError(f"{journal.log.path} is damaged: its setting {name} is {value!r}")
    return value
