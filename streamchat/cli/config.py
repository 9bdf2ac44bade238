"""`streamchat config`: where the settings file is, what holds, and an editor for it."""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from streamchat.cli.config_file import (
    PROMPTS,
    THEME,
    VARIABLE,
    Table,
    config_path,
    load,
    single_words,
)
from streamchat.cli.options import JsonOption
from streamchat.cli.program import program_of
from streamchat.cli.settings import Setting
from streamchat.errors import UsageError
from streamchat.ui import theme
from streamchat.ui.editor import open_in_editor
from streamchat.ui.lines import to_json
from streamchat.ui.output import Output

EPILOG = """
Examples:

    streamchat config edit

    streamchat config show

    streamchat config path
"""

PATH_EPILOG = """
Examples:

    streamchat config path

    cp "$(streamchat config path)" backup.toml
"""

SHOW_EPILOG = """
Examples:

    streamchat config show

    streamchat config show chat --window 4092

    streamchat config show --json pipe
"""

EDIT_EPILOG = """
Examples:

    streamchat config edit

    EDITOR="code --wait" streamchat config edit

    STREAMCHAT_CONFIG=meetings.toml streamchat config edit
"""

SOURCES = {
    "COMMANDLINE": "flag",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "file",
    "DEFAULT": "default",
}

COMMENT_WIDTH = 88

HEAD = f"""\
# Settings of streamchat, in TOML. Take the # away in front of an option to set it.
#
# A flag wins over STREAMCHAT_*, which wins over this file, which wins over the default, shown here.
# An option holds for every command that has it, or in a command's own table for that command.
# `streamchat config show` says what holds and why; {VARIABLE} names another file.
"""

TAIL = f"""
[{PROMPTS}]
# Instructions by name.
#minutes = "Write minutes: decisions, and who does what by when."

[{THEME}]
# Rich styles, as in "bold cyan" or "#ffaa00 on black".
"""

app = typer.Typer(
    name="config",
    help="Show or change the settings file.",
    epilog=EPILOG,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def top(ctx: typer.Context) -> None:
    """Show or change the settings file."""
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


@app.command("path", epilog=PATH_EPILOG)
def path(ctx: typer.Context) -> int:
    """Print where the settings file is, or would be."""
    found = config_path()
    if found is None:
        program_of(ctx).messages().say(f"no settings file is read: {VARIABLE} is empty")
    else:
        Output().line(str(found))
    return 0


@app.command(
    "show",
    epilog=SHOW_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def show(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND", help="With options, as it would be called; without it, all."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Show what holds, and why: flag, environment, file or default.

    What several commands share is shown once where it is the same for all.
    """
    program, output = program_of(ctx), Output()
    known = single_words(program.table)
    if command and command[0] not in known:
        raise UsageError(f"no such command: {command[0]}; there are {', '.join(known)}")
    calls = {command[0]: command[1:]} if command else {name: [] for name in known}
    held = {name: _held(ctx, name, args) for name, args in calls.items()}
    file = program.config
    texts = {PROMPTS: dict(file.prompts), THEME: dict(file.styles)}
    if json:
        where = None if file.path is None else str(file.path)
        output.line(to_json({"file": where, "settings": held, **texts}))
        return 0
    rows = _rows(held)
    rows += [
        (f"{kind}.{name}", toml(text), "file")
        for kind, own in texts.items()
        for name, text in own.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for key, value, source in rows:
        output.line(f"{key:<{widths[0]}}  {value:<{min(widths[1], 24)}}  {source}")
    return 0


@app.command("edit", epilog=EDIT_EPILOG)
def edit(ctx: typer.Context) -> int:
    """Open the settings file in an editor, and check it afterwards.

    The editor is $VISUAL or $EDITOR. Where there is no file yet, one is made with every option, its
    meaning and its default, commented out.
    """
    program = program_of(ctx)
    file = config_path()
    if file is None:
        raise UsageError(f"{VARIABLE} is empty: no settings file is read")
    messages = program.messages()
    if _make(file, program.table):
        messages.say(f"made {file}")
    open_in_editor(file, otherwise=f", or open {file} yourself")
    load(program.table)
    messages.say(f"{file} is all right")
    return 0


def _held(ctx: typer.Context, name: str, args: Sequence[str]) -> dict[str, dict[str, object]]:
    """What holds for a call of a command: of each setting its value, and where it comes from."""
    root: Any = ctx.find_root()
    program = program_of(ctx)
    # Parsed as the call itself would be: there is no second opinion on what wins.
    with root.command.commands[name].make_context(name, [*args], parent=root) as call:
        sources = {part: call.get_parameter_source(part).name for part in call.params}
        held = {}
        for setting in program.table[name]:
            if not setting.envvar:
                continue
            value, source = call.params[setting.name], SOURCES[sources[setting.name]]
            if source != "flag" and setting.name in program.given:
                value, source = program.given[setting.name], "flag"
            value = getattr(value, "value", value)
            held[setting.key] = {"value": value, "source": source}
            if source == "environment":
                held[setting.key]["variable"] = setting.envvar
    return held


def _rows(held: Mapping[str, Mapping[str, Mapping[str, object]]]) -> list[tuple[str, str, str]]:
    """Key, value and source; one row for what is the same in all commands that have it."""
    rows = []
    for command, settings in held.items():
        for key, own in settings.items():
            owners = [name for name, other in held.items() if key in other]
            is_shared = len(owners) > 1 and all(held[name][key] == own for name in owners)
            if is_shared and command != owners[0]:
                continue
            source = " ".join(str(own[part]) for part in ("source", "variable") if part in own)
            rows.append((key if is_shared else f"{command}.{key}", toml(own["value"]), source))
    # As they would stand in the file: what is shared at the top.
    return sorted(rows, key=lambda row: "." in row[0])


def _make(file: Path, table: Table) -> bool:
    """Write a settings file that changes nothing; false if there is one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(template(table))
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    return True


def template(table: Table) -> str:
    """A settings file with every option, its meaning and its default, all commented out."""
    table = {command: table[command] for command in single_words(table)}
    defaults: dict[str, list[object]] = {}
    for settings in table.values():
        for setting in settings:
            if setting.envvar:
                defaults.setdefault(setting.key, []).append(setting.default)
    shared = {k for k, own in defaults.items() if len(own) > 1 and own.count(own[0]) == len(own)}
    sections: dict[str, dict[str, Setting]] = {"": {}}
    for command, settings in table.items():
        for setting in settings:
            if setting.envvar:
                section = "" if setting.key in shared else command
                sections.setdefault(section, {}).setdefault(setting.key, setting)
    parts = [HEAD]
    for section, own in sections.items():
        if section:
            parts.append(f"\n[{section}]")
        parts += [_commented(setting) for setting in own.values()]
    styles = [
        f"#{name} = {toml(style)}  # {theme.MEANINGS[name]}" for name, style in theme.STYLES.items()
    ]
    return "\n".join([*parts, TAIL + "\n".join(styles), ""])


def _commented(setting: Setting) -> str:
    choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
    lines = textwrap.wrap(setting.help + choices, COMMENT_WIDTH)
    value = "" if setting.default is None else f" {toml(setting.default)}"
    return "\n".join([*(f"# {line}" for line in lines), f"#{setting.key} ={value}", ""])


def toml(value: object) -> str:
    """A value as it stands in a settings file; a dash for none."""
    # For text, numbers and lists of text, TOML and JSON are the same.
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
