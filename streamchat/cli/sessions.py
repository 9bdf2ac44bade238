"""`streamchat sessions`: what is kept on this machine, without any model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamchat.cli.expand import expand
from streamchat.cli.options import JsonOption
from streamchat.cli.program import ProgramOptions, program_of
from streamchat.errors import DamagedError, SessionError, UsageError
from streamchat.ui.lines import to_json
from streamchat.ui.output import Output

if TYPE_CHECKING:
    from streamchat.store.folder import Sessions
    from streamchat.store.log import Log, Passage

EPILOG = """
Examples:

    streamchat sessions list

    streamchat sessions search "name of the ship"

    streamchat sessions export tea --format jsonl > tea.jsonl

    streamchat sessions rm tea
"""

LIST_EPILOG = """
Examples:

    streamchat sessions list

    streamchat sessions list --json | jq -r .name
"""

SHOW_EPILOG = """
Examples:

    streamchat sessions show tea
"""

SEARCH_EPILOG = """
Examples:

    streamchat sessions search "name of the ship"

    streamchat sessions search whale --session tea --limit 3
"""

EXPORT_EPILOG = """
Examples:

    streamchat sessions export tea > tea.md

    streamchat sessions export tea --format jsonl > tea.jsonl
"""

RM_EPILOG = """
Examples:

    streamchat sessions rm tea lunch
"""

FIRST_WORDS = 40
"""Characters of a session's first question in the list."""

app = typer.Typer(
    name="sessions",
    help="List, show, search, export and delete what chats have kept.",
    epilog=EPILOG,
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The session's name.")]


class Format(str, Enum):
    """Values of --format."""

    md = "md"
    jsonl = "jsonl"


@app.callback(invoke_without_command=True)
def top(ctx: typer.Context) -> None:
    """List, show, search, export and delete what chats have kept."""
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


@app.command("list", epilog=LIST_EPILOG)
@expand()
def list_(
    ctx: typer.Context,
    json: JsonOption = False,
    *,
    program: ProgramOptions,
) -> int:
    """All sessions, the last used one first."""
    messages = program_of(ctx).start(ctx, program)
    sessions, output = _sessions(), Output()
    infos = sessions.infos()
    for info in infos:
        turns, first = _summary(sessions, info.name)
        if json:
            found = {"name": info.name, "used": info.used, "bytes": info.num_bytes}
            output.line(to_json({**found, "turns": turns, "first": first}))
        else:
            used = f"{datetime.fromtimestamp(info.used):%Y-%m-%d %H:%M}" if info.used else "never"
            number = "damaged" if turns is None else f"{turns:,} turn{'s' * (turns != 1)}"
            if not _has_log(sessions, info.name):
                number = "pipe" if info.used else "empty"
            size = f"{info.num_bytes / 1e6:,.1f} MB"
            output.line(f"{info.name:<20}  {used:<16}  {number:>11}  {size:>10}  {first}".rstrip())
    if not infos:
        messages.say(f"there is no session in {sessions.folder}")
    return 0


@app.command("show", epilog=SHOW_EPILOG)
@expand()
def show(
    ctx: typer.Context,
    name: NameArgument,
    *,
    program: ProgramOptions,
) -> int:
    """What was said in a session, and what the model was told again."""
    program_of(ctx).start(ctx, program)
    output = Output()
    with _log(_sessions(), name) as log:
        for line in _as_text(log):
            output.line(line)
    return 0


@app.command("search", epilog=SEARCH_EPILOG)
@expand()
def search(
    ctx: typer.Context,
    query: Annotated[list[str], typer.Argument(metavar="WORDS...", help="What to look for.")],
    session: Annotated[
        str | None, typer.Option("--session", metavar="NAME", help="Only in this one.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many of a session at most.")] = 5,
    json: JsonOption = False,
    *,
    program: ProgramOptions,
) -> int:
    """Find passages by their words, the best match first."""
    messages = program_of(ctx).start(ctx, program)
    from streamchat.chat.recalled import ROLE, whence
    from streamchat.store import recall

    sessions, output = _sessions(), Output()
    every = [info.name for info in sessions.infos()]
    names = [name for name in every if _has_log(sessions, name)] if session is None else [session]
    num_found = 0
    for name in names:
        try:
            with _log(sessions, name) as log:
                found = recall.search(log, " ".join(query), limit=2 * limit)
        except DamagedError as error:
            if session is not None:
                raise
            messages.error(str(error))
            continue
        for hit in [hit for hit in found if hit.passage.role != ROLE][:limit]:
            num_found += 1
            if json:
                output.line(to_json({"session": name, **_fields(hit.passage), "text": hit.text}))
            else:
                text = " ".join(hit.text.split())
                output.line(f"{name}: [{whence(hit.passage)}] {text}")
    if not num_found:
        messages.say("nothing matches")
    return 0


@app.command("export", epilog=EXPORT_EPILOG)
@expand()
def export(
    ctx: typer.Context,
    name: NameArgument,
    output_format: Annotated[
        Format, typer.Option("--format", help="Markdown, or one JSON object a passage.")
    ] = Format.md,
    *,
    program: ProgramOptions,
) -> int:
    """A whole session on standard output."""
    program_of(ctx).start(ctx, program)
    output = Output()
    with _log(_sessions(), name) as log:
        for line in _as_markdown(name, log) if output_format is Format.md else _as_json(log):
            output.line(line)
    return 0


@app.command("rm", epilog=RM_EPILOG)
@expand()
def rm(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of sessions.")],
    *,
    program: ProgramOptions,
) -> int:
    """Delete sessions wholly: log, state, and what was put aside."""
    messages = program_of(ctx).start(ctx, program)
    sessions = _sessions()
    for name in names:
        sessions.find(name)  # a name that is wrong deletes none of them
    for name in names:
        sessions.delete(name)
        messages.say(f"deleted session {name}")
    return 0


def _sessions() -> "Sessions":
    from streamchat.store.folder import Sessions

    return Sessions()


@contextmanager
def _log(sessions: "Sessions", name: str) -> "Iterator[Log]":
    """The log of a session, which another process may be writing.

    Raises:
        UsageError: If it has none.
        DamagedError: If it cannot be read.
    """
    from streamchat.store.folder import LOG_NAME
    from streamchat.store.log import Log

    if not _has_log(sessions, name):
        raise UsageError(
            f"session {name} keeps no text, only how far pipe is: "
            f"streamchat pipe --session {name} --resume goes on from there"
        )
    with Log(sessions.find(name) / LOG_NAME, read_only=True) as log:
        yield log


def _has_log(sessions: "Sessions", name: str) -> bool:
    """Whether a session keeps what was said: of pipe's, only those of `listen` do."""
    from streamchat.store.folder import LOG_NAME

    return (sessions.find(name) / LOG_NAME).exists()


def _summary(sessions: "Sessions", name: str) -> tuple[int | None, str]:
    """How many turns a session has, and how it begins; no number if it cannot be read."""
    if not _has_log(sessions, name):
        return 0, ""
    try:
        with _log(sessions, name) as log:
            first = next((p.text for p in log.passages() if p.role in ("user", "input")), "")
            words = " ".join(first.split())
            short = words if len(words) <= FIRST_WORDS else f"{words[: FIRST_WORDS - 1]}…"
            return log.num_passages("user"), short
    except SessionError:
        return None, ""


def _as_text(log: "Log") -> Iterator[str]:
    from streamchat.chat.recalled import ROLE, whence

    for passage in log.passages():
        if passage.role == ROLE:
            yield from [*_told(log, passage).splitlines(), ""]
            continue
        yield f"[{whence(passage)}]"
        yield passage.text
        yield ""


def _as_markdown(name: str, log: "Log") -> Iterator[str]:
    from streamchat.chat.recalled import ROLE, whence

    yield f"# {name}"
    for passage in log.passages():
        yield ""
        if passage.role == ROLE:
            yield "The model was told again:"
            yield ""
            yield from (f"> {line}" for line in _told(log, passage).splitlines())
        else:
            yield f"## {whence(passage)}"
            yield ""
            yield passage.text


def _as_json(log: "Log") -> Iterator[str]:
    from streamchat.chat.recalled import ROLE, referred

    for passage in log.passages():
        fields = _fields(passage)
        if passage.role == ROLE:
            pieces = referred(log, passage.text)
            fields |= {"pieces": [p.passage.id for p in pieces], "text": _told(log, passage)}
        yield to_json(fields)


def _told(log: "Log", passage: "Passage") -> str:
    """What the model was told again, in the very words."""
    from streamchat.chat.recalled import referred, told

    return told(referred(log, passage.text)).rstrip("\n")


def _fields(passage: "Passage") -> dict[str, Any]:
    """What is known of a passage."""
    return {name: value for name, value in asdict(passage).items() if value is not None}
