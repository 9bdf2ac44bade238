"""How what the program draws is styled: names for what a style means, and Rich styles for them.

Like the environment, the styles hold for the whole process; the settings file may change them.
"""

from collections.abc import Mapping

from rich.errors import StyleSyntaxError
from rich.style import Style

from streamchat.errors import UsageError

STYLES = {
    "notice": "dim",
    "thinking": "dim italic",
    "question": "bold",
    "error": "red",
    "pinned": "yellow",
    "window": "cyan",
    "full": "green",
    "free": "dim",
    "heading": "bold underline",
    "strong": "bold",
    "emphasis": "italic",
    "code": "cyan",
    "listing": "cyan",
    "quote": "italic",
    "marks": "dim",
}
MEANINGS = {
    "notice": "what the program says among answers",
    "thinking": "what a model thinks",
    "question": "turns of yours that `/evicted` shows",
    "error": "why something failed",
    "pinned": "what never leaves the model's memory",
    "window": "what else it holds",
    "full": "the bar of a memory that is full",
    "free": "what of it is free",
    "heading": "Markdown in answers: headings",
    "strong": "bold words",
    "emphasis": "words in italics",
    "code": "code among words",
    "listing": "blocks of code",
    "quote": "quotations",
    "marks": "list signs, quotation signs, what stands around a block of code",
}
"""What a style is for."""

_chosen: dict[str, str] = {}


def check(name: str, style: str) -> None:
    """Whether a style may have this name and this value.

    Raises:
        UsageError: If not; the message says what is allowed.
    """
    if name not in STYLES:
        raise UsageError(f"unknown style; there are {', '.join(STYLES)}")
    try:
        Style.parse(style)
    except StyleSyntaxError as error:
        raise UsageError(f"must be a Rich style such as 'bold cyan', got '{style}'") from error


def use(styles: Mapping[str, str]) -> None:
    """From now on these styles hold, and for names that are not among them the default."""
    _chosen.clear()
    _chosen.update(styles)


def style(name: str) -> str:
    """The Rich style of a name."""
    return _chosen.get(name, STYLES[name])
