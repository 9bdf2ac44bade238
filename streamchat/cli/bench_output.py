"""How `bench` writes what it measured."""

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from streamchat.cli.program import ColorChoice
from streamchat.ui.console import can_draw, make_console
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
    typer.Option(
        "--output",
        "-o",
        envvar="STREAMCHAT_OUTPUT",
        metavar="FORMAT",
        help="table, md (Markdown), csv, json; auto: a table on a terminal, else Markdown.",
    ),
]


def print_records(
    rows: Sequence[Any],
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    output: Format,
    color: ColorChoice,
) -> None:
    """Write rows, dataclasses, in the format asked for: whole for a program, cells for people."""
    if print_data(rows, output):
        return
    if is_drawn(output):
        print_table(make_console(color.value, stderr=False), header, cells)
    else:
        Output().line(markdown_table(header, cells))


def print_data(rows: Sequence[Any], output: Format) -> bool:
    """Write rows, dataclasses, as JSON or CSV; false where neither was asked for."""
    if output not in (Format.json, Format.csv):
        return False
    records = [
        {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in dataclasses.asdict(row).items()
        }
        for row in rows
    ]
    Output().line(json_lines(records) if output is Format.json else csv_text(records))
    return True


def is_drawn(output: Format) -> bool:
    """Whether tables are drawn, where they are neither data nor Markdown."""
    return output is Format.table or (output is Format.auto and can_draw())
