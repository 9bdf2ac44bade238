"""A heat map in the terminal: shares between 0 and 1, by colour and as numbers.

Where a row has more shares than the terminal has room for, a cell is a character; where it has more
than that, a cell is the mean of neighbours.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

NUMBER_CELLS = 3
"""Characters of a share as a number: percent, and a space."""

SHADES = " ░▒▓█"

COLD, WARM, HOT = (22, 22, 60), (190, 50, 90), (255, 225, 90)


@dataclass(frozen=True, slots=True)
class HeatRow:
    """A row of the map.

    Attributes:
        label: In front of it.
        shares: Its cells, 0 to 1.
        notes: Behind it.
    """

    label: str
    shares: Sequence[float]
    notes: Sequence[str]


def print_heat_map(
    console: Console, caption: str, header: Sequence[str], rows: Sequence[HeatRow]
) -> None:
    """Draw a map.

    Args:
        console: Where.
        caption: Above it.
        header: Over the labels and each column of notes.
        rows: All of one length.
    """
    console.print(Text(caption))
    label, *notes = header
    widths = [max(len(text) for text in [label, *(row.label for row in rows)])]
    for index, note in enumerate(notes):
        widths.append(max(len(text) for text in [note, *(row.notes[index] for row in rows)]))
    # Two spaces between columns.
    room = console.width - sum(widths) - 2 * len(widths)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(label, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for note in notes:
        table.add_column(note, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.label, _cells(row.shares, max(1, room)), *row.notes)
    console.print(table)


def _cells(shares: Sequence[float], room: int) -> Text:
    text = Text()
    if NUMBER_CELLS * len(shares) <= room:
        for share in shares:
            text.append(f"{min(99, round(100 * share)):>2} ", _style(share))
        return text
    size = math.ceil(len(shares) / room)
    for start in range(0, len(shares), size):
        share = statistics.fmean(shares[start : start + size])
        text.append(SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))], _style(share))
    return text


def _style(share: float) -> Style:
    share = min(max(share, 0.0), 1.0)
    low, high, part = (COLD, WARM, 2 * share) if share < 0.5 else (WARM, HOT, 2 * share - 1)
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
    # Read on any of the colours: light on dark, dark on light.
    front = "black" if red + green > 300 else "white"
    return Style(color=front, bgcolor=Color.from_rgb(red, green, blue).name)
