"""How `bench` writes what it measured."""

import dataclasses
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from streamchat.cli.options import ColorChoice
from streamchat.ui.console import is_tty, make_console
from streamchat.ui.output import Output
from streamchat.ui.tables import csv_text, json_lines, markdown_table, print_table


class Format(str, Enum):
    """Values of --output."""

    auto = "auto"
    table = "table"
    md = "md"
    csv = "csv"
    json = "json"


FormatOption = Annotated[
    Format,
    typer.Option("--output", "-o", help="auto: a table on a terminal, else Markdown."),
]


def print_records(
    rows: Sequence[Any],
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    output: Format,
    color: ColorChoice,
) -> None:
    """Write rows, dataclasses, in the format asked for: whole for a program, cells for people."""
    records = [
        {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in dataclasses.asdict(row).items()
        }
        for row in rows
    ]
    if output is Format.json:
        Output().line(json_lines(records))
    elif output is Format.csv:
        Output().line(csv_text(records))
    elif output is Format.table or (output is Format.auto and is_tty(sys.stdout)):
        print_table(make_console(color.value, stderr=False), header, cells)
    else:
        Output().line(markdown_table(header, cells))
