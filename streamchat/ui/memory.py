"""What the model holds, turn by turn: counted in integers, then drawn, or said in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamchat.ui.cells import cells, wrap_once
from streamchat.ui.console import is_plain, visible
from streamchat.ui.theme import style

if TYPE_CHECKING:
    from streamchat.chat.conversation import Conversation

MAX_LISTED = 8
"""Turns that have a line of their own: the oldest one and the newest."""

MAX_BAR_CELLS = 78
MIN_TABLE_CELLS = 30
PINNED, OTHER, FREE, GONE = "█", "▒", "░", " "
TURNS = "▓▒"
"""Turns in turn, so that each is told from its neighbours without colours."""

SCORED = ("h2o", "snapkv")
"""Policies under which each head holds tokens of its own: a turn is in part everywhere."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory.

    Attributes:
        name: What it is.
        num_tokens: How many tokens of it.
        sign: What it is drawn with.
        style: Name of its style.
        about: More about it.
    """

    name: str
    num_tokens: int
    sign: str
    style: str
    about: str = ""


def parts(conversation: "Conversation") -> list[Part]:
    """What the memory holds, oldest first, what is free, and what has left it.

    All but the last add up to the size of the memory.
    """
    stats, config = conversation.stream.stats(), conversation.cache_config
    found = []
    if stats.num_pinned:
        found.append(
            Part("pinned", stats.num_pinned, PINNED, "pinned", "system prompt, sinks; never leave")
        )
    first = max(conversation.window_start(), config.sink_size)
    turns = []
    for turn in conversation.turns if config.policy not in SCORED else ():
        held = turn.end - max(turn.start, first)
        if held > 0:
            # The first turn begins with what is pinned.
            cut = " (part)" if first > max(turn.start, config.sink_size) else ""
            sign = TURNS[turn.number % len(TURNS)]
            name = f"turn {turn.number}{cut}"
            turns.append(Part(name, held, sign, "window", " ".join(turn.question.split())))
    rest = stats.num_held - stats.num_pinned - sum(part.num_tokens for part in turns)
    if rest > 0:
        name = "tokens" if config.policy in SCORED else "other"
        about = "of all turns" if config.policy in SCORED else "heard or said before"
        found.append(Part(name, rest, OTHER, "window", about))
    found += turns
    found.append(
        Part("free", stats.cache_size - stats.num_held, FREE, "free", f"of {stats.cache_size:,}")
    )
    return [*found, Part("left", stats.num_evicted, GONE, "notice", _gone(conversation))]


def _gone(conversation: "Conversation") -> str:
    number = conversation.num_turns_gone()
    if not number:
        return "no whole turn yet"
    return "turn 1 (/evicted shows it)" if number == 1 else f"turns 1 to {number} (/evicted)"


def show(conversation: "Conversation", console: Console) -> None:
    """Draw what the memory holds; in plain words, where nothing is drawn."""
    found = parts(conversation)
    listed = shortened(found)
    width = max(1, console.width - 1)
    if is_plain():
        for part in listed:
            more = f", {part.about}" if part.about else ""
            console.print(Text(visible(f"{part.name}: {part.num_tokens:,} tokens{more}")))
        return
    console.print(bar(found[:-1], min(width, MAX_BAR_CELLS)))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    names = max(len(part.name) for part in listed)
    numbers = max(len(f"{part.num_tokens:,}") for part in listed)
    room = width - names - numbers - 4
    for part in listed:
        sign = Text(part.sign, style(part.style))
        about = Text(_fitting(visible(part.about), room), style("notice"))
        row = [sign, Text(part.name), Text(f"{part.num_tokens:,}")]
        if width < MIN_TABLE_CELLS:
            console.print(Text(" ").join(row))
        else:
            table.add_row(*row, about)
    if width >= MIN_TABLE_CELLS:
        console.print(table)


def shortened(found: Sequence[Part]) -> list[Part]:
    """The parts, with turns between the oldest and the newest as one."""
    turns = [index for index, part in enumerate(found) if part.name.startswith("turn ")]
    if len(turns) <= MAX_LISTED:
        return list(found)
    begin, end = turns[1], turns[-(MAX_LISTED - 2)]
    between = found[begin:end]
    tokens = sum(part.num_tokens for part in between)
    middle = Part(f"{len(between)} turns", tokens, GONE, "window", "between them")
    return [*found[:begin], middle, *found[end:]]


def bar(found: Sequence[Part], width: int) -> Text:
    """The parts side by side, in proportion, on exactly `width` cells."""
    total = sum(part.num_tokens for part in found)
    text = Text()
    tokens = drawn = 0
    for part in found:
        tokens += part.num_tokens
        end = round(width * tokens / total)
        if part.name == "pinned":  # few, and never to be missed
            end = max(end, 1)
        text.append(part.sign * (end - drawn), style(part.style))
        drawn = max(drawn, end)
    return text


def _fitting(text: str, width: int) -> str:
    """A text, or its beginning and an ellipsis."""
    if cells(text) <= width:
        return text
    return f"{wrap_once(text, width - 1, at_spaces=False)[0]}…" if width > 1 else ""
