"""The options of a command as data, read off its signature.

The settings file is checked against them, and docs/cli.md is written from them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

from streamchat.errors import UsageError

Command = Callable[..., int]
"""A function whose parameters are options."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Beside an option, in `Annotated`: raises a UsageError for a value that it does not allow."""

    check: Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An option or an argument of a command.

    Attributes:
        name: The parameter.
        flags: As on the command line, the long one first; none for an argument.
        kind: bool, int, float, str or Path.
        choices: Of a choice, what there is.
        is_list: Whether it may be given several times.
        default: Without it; None for nothing.
        least: Smallest number.
        metavar: How its value is called in the help, if that says more than `kind`.
        envvar: Its environment variable; only what has one may stand in the settings file.
        help: One or more sentences.
        check: What else is checked, see `Checked`.
    """

    name: str
    flags: tuple[str, ...]
    kind: type
    choices: tuple[str, ...]
    is_list: bool
    default: Any
    least: float | None
    metavar: str | None
    envvar: str | None
    help: str
    check: Callable[[Any], object] | None

    @property
    def key(self) -> str:
        """Its name in the settings file: the flag without dashes in front."""
        return self.flags[0].lstrip("-") if self.flags else ""

    @property
    def value_name(self) -> str:
        """What stands for its value in a line of help; nothing for a switch."""
        if self.metavar:
            return self.metavar
        if self.kind is bool:
            return ""
        if self.choices:
            return "|".join(self.choices)
        return {int: "N", float: "X", Path: "FILE"}.get(self.kind, "TEXT")

    def read(self, value: Any) -> Any:
        """A value of the settings file as the command line would have it.

        Raises:
            UsageError: If it is of another type or out of range; the message says what is allowed.
        """
        if self.is_list:
            if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
                raise UsageError(f'must be a list such as ["one", "two"], got {shown(value)}')
            return value
        if not self._has_kind(value) or (self.choices and value not in self.choices):
            raise UsageError(f"must be {self._allowed()}, got {shown(value)}")
        if self.least is not None and value < self.least:
            raise UsageError(f"must be {self._allowed()}, got {shown(value)}")
        if self.kind is str:
            value = str(value)
        if self.check is not None:
            self.check(value)
        return value

    def _has_kind(self, value: Any) -> bool:
        if isinstance(value, bool):
            return self.kind is bool
        if self.kind is float or (self.kind is str and self._takes_numbers()):
            return isinstance(value, int | float | self.kind)
        return isinstance(value, self.kind)

    def _takes_numbers(self) -> bool:
        return bool(self.metavar) and "N" in str(self.metavar).split("|")

    def _allowed(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is str and self._takes_numbers():
            return "a whole number, or a text in quotes"
        names = {bool: "true or false", int: "a whole number", float: "a number"}
        least = "" if self.least is None else f" from {self.least:g} on"
        return names.get(self.kind, "a text in quotes") + least


def settings_of(command: Command) -> list[Setting]:
    """All options and arguments of a command, in their order."""
    found = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if get_origin(parameter.annotation) is Annotated:
            found.append(_setting(parameter))
    return found


def _setting(parameter: inspect.Parameter) -> Setting:
    annotation, *metadata = get_args(parameter.annotation)
    [info] = [part for part in metadata if isinstance(part, OptionInfo | ArgumentInfo)]
    checks = [part.check for part in metadata if isinstance(part, Checked)]
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not type(None)]
    is_list = get_origin(annotation) is list
    if is_list:
        [annotation] = get_args(annotation)
    choices: tuple[str, ...] = ()
    if get_origin(annotation) is Literal:
        choices, annotation = get_args(annotation), str
    elif issubclass(annotation, Enum):
        choices, annotation = tuple(str(member.value) for member in annotation), str
    default = None if parameter.default is parameter.empty else parameter.default
    return Setting(
        name=parameter.name,
        flags=_flags(parameter.name, info) if isinstance(info, OptionInfo) else (),
        kind=annotation,
        choices=choices,
        is_list=is_list,
        default=default.value if isinstance(default, Enum) else default,
        least=info.min,
        metavar=info.metavar,
        envvar=info.envvar if isinstance(info.envvar, str) else None,
        help=info.help or "",
        check=checks[0] if checks else None,
    )


def _flags(name: str, info: OptionInfo) -> tuple[str, ...]:
    # Inside `Annotated`, typer has the first name in the place of the default.
    names = [part for part in (info.default, *(info.param_decls or ())) if isinstance(part, str)]
    flags = [flag for part in names for flag in part.split("/")] or [f"--{name.replace('_', '-')}"]
    return tuple(sorted(flags, key=lambda flag: not flag.startswith("--")))


def shown(value: Any) -> str:
    """A value of the settings file, as it is written there."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("\n", "\\n") + "'"
    return str(value)
