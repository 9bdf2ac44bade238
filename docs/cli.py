"""Write docs/cli.md from the code: every command, option, variable, example and exit code.

python docs/cli.py            # write
python docs/cli.py --check    # say whether it is out of date, and exit with 1 if so
"""

import inspect
from pathlib import Path

import pages
from typer.models import CommandInfo

from streamchat import errors
from streamchat.cli.app import app, commands
from streamchat.cli.config_file import PROMPTS, THEME, VARIABLE
from streamchat.cli.settings import Setting, settings_of
from streamchat.store.folder import FOLDER_VARIABLE
from streamchat.ui import theme

PAGE = Path(__file__).parent / "cli.md"

HEAD = f"""\
# Command line

Made by `python docs/cli.py` from `streamchat/cli/`.

Data goes to standard output, everything else to standard error. `--help` behind a command shows
what stands here.

## Where a setting comes from

A flag wins over its environment variable, which wins over the settings file, which wins over the
default. `streamchat config show` says what holds, and which of the four it came from.

The settings file is TOML. `streamchat config edit` makes one in which every option stands with its
meaning and its default; `streamchat config path` says where it is. An option that has a variable
may stand in it under the flag's name (`max-new` or `max_new`): at the top for every command that
has it, or in a command's table, which wins.

```toml
model = "Qwen/Qwen3-0.6B"
window = 4092

[chat]
system = "You answer in one short sentence."
temperature = 0.5

[{PROMPTS}]
minutes = "Write minutes: decisions, and who does what by when."

[{THEME}]
pinned = "bold yellow"
```

The file is checked as a whole before any of it holds. What is wrong in it is one line with the file
and the key, and exit code 2; `streamchat config edit` still works then. `--no-config`, in front of
a command or behind it, reads no file; `{VARIABLE}=FILE` reads another one, and `{VARIABLE}=`
(empty) none.

A chat or a pipe that goes on with a session takes from it what the command line does not say.
`{FOLDER_VARIABLE}` names the folder that sessions are kept in.

The variable of a switch is `1` or `0`. That of an option that may be given several times has words;
in the file it is a list, as in `stop = ["User:", "\\n\\n"]`. What lets foreign code run, or a check
be left out, can be said on the command line only.

`[{PROMPTS}]` has texts by name. `[{THEME}]` has
[Rich styles](https://rich.readthedocs.io/en/stable/style.html):

| name | default | of what |
| --- | --- | --- |
{{styles}}

## Colours and plain words

`NO_COLOR` takes colours away and wins over `FORCE_COLOR`, which asks for them where there is no
terminal; `--color` wins over both. Nothing is redrawn where standard error is no terminal, or with
`TERM=dumb`. `--plain` (`STREAMCHAT_PLAIN=1`, or `plain = true` in the settings file) is for screen
readers: nothing is redrawn, no boxes, bars or pictures are drawn, and where a stream stands is said
in words, every ten seconds at most.

## Shell completion

`streamchat --install-completion` sets it up for the shell it is called in (bash, zsh, fish,
PowerShell), and `streamchat --show-completion` prints what it would set up. Start a new shell
afterwards. It completes commands, options and the values of choices, and loads no model code.

## Exit codes

| code | meaning |
| ---: | --- |
"""

PROGRAM = CommandInfo(
    callback=app.registered_callback and app.registered_callback.callback, epilog=app.info.epilog
)

MEANINGS = {
    0: "done, end of input, or the reader of our output went away",
    errors.StreamchatError.exit_code: "failed while running",
    errors.UsageError.exit_code: "usage: bad flag, value or settings file, missing file",
    errors.ModelError.exit_code: "the model cannot be found, loaded or streamed exactly",
    129: "hung up: the terminal is gone",
    130: "interrupted",
    143: "terminated",
}


def page() -> str:
    """The text of docs/cli.md."""
    styles = "\n".join(
        f"| `{name}` | `{style}` | {theme.MEANINGS[name]} |" for name, style in theme.STYLES.items()
    )
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in MEANINGS.items())
    return (
        HEAD.format(styles=styles)
        + codes
        + "\n"
        + "\n".join(section(*own) for own in [("", PROGRAM), *commands().items()])
    )


def section(name: str, command: CommandInfo) -> str:
    """A command: what it does, its options, its examples."""
    if command.callback is None:
        raise SystemExit(f"{name} does nothing")
    settings = settings_of(command.callback)
    title = f"streamchat {name}".strip()
    arguments = [usage(setting) for setting in settings if not setting.flags]
    options = [setting for setting in settings if setting.flags]
    examples = (command.epilog or "").split("Examples:")[-1].split("Exit codes:")[0]
    return "\n".join(
        [
            f"## {title}",
            "",
            f"`{' '.join([title, *(['[OPTIONS]'] if options else []), *arguments])}`",
            "",
            inspect.getdoc(command.callback) or "",
            "",
            "```bash",
            *(line.strip() for line in examples.split("\n") if line.strip()),
            "```",
            "",
            *table(settings),
        ]
    )


def usage(setting: Setting) -> str:
    """An argument in a line of usage."""
    name = setting.metavar or setting.name.upper()
    return f"[{name.strip('[]')}]{'...' if setting.is_list else ''}"


def table(settings: list[Setting]) -> list[str]:
    """Arguments and options, one a row."""
    if not settings:
        return []
    return [
        "| option | default | variable | meaning |",
        "| --- | --- | --- | --- |",
        *(row(setting) for setting in settings),
        "",
    ]


def row(setting: Setting) -> str:
    """An option as a row of the table."""
    name = ", ".join(f"`{flag}`" for flag in setting.flags) or f"`{usage(setting)}`"
    if setting.flags and setting.value_name:
        name += f" `{setting.value_name}`"
    default = "" if setting.default is None or setting.default is False else f"`{setting.default}`"
    variable = f"`{setting.envvar}`" if setting.envvar else ""
    return (
        "| "
        + " | ".join(part.replace("|", "\\|") for part in (name, default, variable, setting.help))
        + " |"
    )


def wanted() -> dict[Path, str]:
    """What the file should hold."""
    return {PAGE: page()}


def main() -> None:
    pages.run(__file__, __doc__, wanted)


if __name__ == "__main__":
    main()
