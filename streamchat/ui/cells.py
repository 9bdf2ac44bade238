"""How wide text is on a terminal, and where it may be cut.

Terminals do not agree: an emoji of several parts takes two cells on some, and two for each part on
others. Text is taken to be as wide as on the one that makes most of it, so that it fits on all.
"""

from collections.abc import Callable

from prompt_toolkit.utils import get_cwidth

JOINER = "\u200d"
EMOJI_STYLE = "\ufe0f"
"""Behind a narrow character: draw it as an emoji, which some terminals make wide."""


def cells(text: str) -> int:
    """How many cells a text takes at most; it has no control characters."""
    if text.isascii():
        return len(text)
    return get_cwidth(text) + text.count(EMOJI_STYLE)


def cluster_ends(text: str) -> list[int]:
    """Where text may be cut without taking a mark from its letter or an emoji apart."""
    ends = []
    num_flags = 0
    for index in range(1, len(text)):
        before, char = text[index - 1], text[index]
        num_flags = num_flags + 1 if _is_flag_half(before) else 0
        is_joined = (
            before == JOINER
            or get_cwidth(char) == 0
            or "\U0001f3fb" <= char <= "\U0001f3ff"  # skin tones
            or (_is_flag_half(char) and num_flags % 2 == 1)
        )
        if not is_joined:
            ends.append(index)
    return [*ends, len(text)] if text else []


def _is_flag_half(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def wrap_once(
    text: str, width: int, size: Callable[[str], int] = cells, *, at_spaces: bool = True
) -> tuple[str, str]:
    """Cut a row of at most `width` cells off a text that is wider.

    Args:
        text: One line.
        width: Cells.
        size: How many cells the beginning of the text takes.
        at_spaces: Cut at a space if there is one, which is then in neither part.

    Returns:
        The row, never empty, and the rest.
    """
    if at_spaces:
        space = text.rfind(" ")
        while space > 0 and text[:space].strip():
            if size(text[:space]) <= width:
                return text[:space], text[space + 1 :]
            space = text.rfind(" ", 0, space)
    for end in reversed(cluster_ends(text)[:-1]):
        if size(text[:end]) <= width:
            return text[:end], text[end:]
    # The first cluster alone is wider than the row.
    end = next((n for n in range(len(text), 0, -1) if size(text[:n]) <= width), 1)
    return text[:end], text[end:]
