"""The settings file: TOML, checked against the options of the commands before any of it holds.

At the top stand options, for every command that has them; a table with a command's name has options
of that command alone, which win. `[prompts]` has texts by name, `[theme]` styles.
"""

import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from streamchat.cli.settings import Setting, shown
from streamchat.errors import UsageError
from streamchat.ui import theme

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "STREAMCHAT_CONFIG"
PROMPTS, THEME = "prompts", "theme"

Table = Mapping[str, Sequence[Setting]]
"""The settings of each command, by what is typed to call it. A single word may be a table of the
file."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a settings file says; by default that of no file.

    Attributes:
        path: Where it is; None if none is read.
        defaults: For each command, values of its parameters.
        prompts: Texts by name.
        styles: Names of `ui.theme` and their Rich styles.
    """

    path: Path | None = None
    defaults: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    styles: Mapping[str, str] = field(default_factory=dict)


def config_path() -> Path | None:
    """Where the settings file is, or would be; None if STREAMCHAT_CONFIG is empty."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named.strip() else None
    return Path(user_config_path("streamchat", appauthor=False)) / "config.toml"


def load(table: Table) -> ConfigFile:
    """Read and check the settings file.

    Args:
        table: What may stand in it.

    Raises:
        UsageError: If the file that STREAMCHAT_CONFIG names is not there, or what is in a file
            is no TOML or not allowed; in one line, with the file and the key.
    """
    path = config_path()
    if path is None:
        return ConfigFile()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if VARIABLE in os.environ:
            raise UsageError(f"no such file: {path}, named by {VARIABLE}") from error
        return ConfigFile()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    try:
        return _checked(path, content, table)
    except _KeyError as error:
        raise UsageError(f"{path}: {error}") from error


class _KeyError(UsageError):
    """What is wrong, with the key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")


def _checked(path: Path, content: Mapping[str, Any], table: Table) -> ConfigFile:
    prompts = _texts(PROMPTS, content.get(PROMPTS, {}))
    styles = _texts(THEME, content.get(THEME, {}))
    for name, style in styles.items():
        try:
            theme.check(name, style)
        except UsageError as error:
            raise _KeyError(f"{THEME}.{name}", str(error)) from error
    rest = {key: value for key, value in content.items() if key not in (PROMPTS, THEME)}
    shared = {key: value for key, value in rest.items() if key not in single_words(table)}
    by_command: dict[str, dict[str, Any]] = {name: {} for name in table}
    every = [setting for settings in table.values() for setting in settings]
    for key, value in shared.items():
        _find(every, key, key, table)
        for command, settings in table.items():
            for setting in settings:
                if setting.key == _spelled(key):
                    by_command[command][setting.name] = _read(setting, key, value)
    for command in single_words(table):
        own = rest.get(command, {})
        if not isinstance(own, dict):
            raise _KeyError(command, f"must be a table, [{command}], got {shown(own)}")
        for key, value in own.items():
            where = f"{command}.{key}"
            setting = _find(table[command], key, where, table)
            by_command[command][setting.name] = _read(setting, where, value)
    return ConfigFile(path, by_command, prompts, styles)


def single_words(table: Table) -> list[str]:
    """Commands that the file may have a table for."""
    return [command for command in table if " " not in command]


def _read(setting: Setting, where: str, value: Any) -> Any:
    try:
        return setting.read(value)
    except UsageError as error:
        raise _KeyError(where, str(error)) from error


def _find(settings: Iterable[Setting], key: str, where: str, table: Table) -> Setting:
    """The setting with a key.

    Raises:
        _KeyError: If there is none, or it may not stand in a file.
    """
    known = {setting.key: setting for setting in settings if setting.envvar}
    found = known.get(_spelled(key))
    if found is not None:
        return found
    owners = [
        command
        for command in single_words(table)
        for setting in table[command]
        if setting.key == _spelled(key) and setting.envvar
    ]
    if owners:
        raise _KeyError(where, f"belongs into {' or '.join(f'[{owner}]' for owner in owners)}")
    if any(setting.key == _spelled(key) for own in table.values() for setting in own):
        raise _KeyError(where, "can be given on the command line only")
    names = [*known, *single_words(table), PROMPTS, THEME] if where == key else [*known]
    raise _KeyError(where, f"unknown key{suggestion(_spelled(key), names)}")


def _spelled(key: str) -> str:
    """As the flag is; `max_new` is taken, too."""
    return key.replace("_", "-")


def _texts(table: str, values: Any) -> dict[str, str]:
    """A table of texts.

    Raises:
        _KeyError: If it is something else.
    """
    if not isinstance(values, dict):
        raise _KeyError(table, f"must be a table, [{table}], got {shown(values)}")
    for name, value in values.items():
        if not isinstance(value, str) or not value.strip():
            raise _KeyError(f"{table}.{name}", f"must be a text in quotes, got {shown(value)}")
    return values


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, where known words are near."""
    near = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
