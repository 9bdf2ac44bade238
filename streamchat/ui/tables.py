"""Tables: drawn on a terminal, Markdown elsewhere, or JSON and CSV on request."""

import csv
import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from streamchat.ui.lines import to_json

Cells = Sequence[Sequence[str]]


def print_table(console: Console, header: Sequence[str], rows: Cells) -> None:
    """Draw a table on a terminal."""
    table = Table()
    for name in header:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown_table(header: Sequence[str], rows: Cells) -> str:
    """A Markdown table, columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = [("-" * (width - 1)) + ":" for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, rule, *rows]
    )


def json_lines(records: Sequence[dict[str, object]]) -> str:
    """One JSON object a line."""
    return "\n".join(to_json(record) for record in records)


def csv_text(records: Sequence[dict[str, object]]) -> str:
    """Comma-separated values with a header."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue().rstrip("\n")
