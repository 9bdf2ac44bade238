"""Options that several commands share are declared once, as the fields of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from streamchat.cli.settings import Command


def expand(**defaults: Any) -> Callable[[Command], Command]:
    """Let a command take groups of options, declared once, as dataclasses.

    A parameter whose type is a dataclass becomes one option for each field, of the field's type and
    default.

    Args:
        defaults: Of options that have another default in this command.
    """

    def decorate(command: Command) -> Command:
        groups: dict[str, Any] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            group = parameter.annotation
            if is_dataclass(group):
                groups[parameter.name] = group
                hints = get_type_hints(group, include_extras=True)
                parameters += [
                    parameter.replace(
                        name=field.name,
                        default=defaults.get(field.name, field.default),
                        annotation=hints[field.name],
                    )
                    for field in fields(group)
                ]
            else:
                parameters.append(parameter)

        def run(**values: Any) -> int:
            for name, group in groups.items():
                own = {field.name: values.pop(field.name) for field in fields(group)}
                values[name] = group(**own)
            return command(**values)

        run.__doc__, run.__name__ = command.__doc__, command.__name__
        run.__module__ = command.__module__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in parameters]
        )
        run.__annotations__ = {part.name: part.annotation for part in parameters}
        return run

    return decorate
