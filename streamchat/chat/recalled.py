"""What the model is told again of what has left its memory: the words, and where they come from.

In the log stands which pieces of which passages these were, and not their text once more.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta

from streamchat.store.log import Log, Passage
from streamchat.store.recall import Recalled, within_budget

ROLE = "recalled"
"""Role of the log's passages that say what was told again."""

FIRST_LINE = "[Recalled from earlier:]"
LAST_LINE = "[End of what was recalled.]"


def choose(
    found: Iterable[Recalled], budget: int, num_tokens: Callable[[str], int]
) -> list[Recalled]:
    """The best of what was found whose `told` text has at most `budget` tokens.

    Args:
        found: Best first.
        budget: Tokens.
        num_tokens: How many a text takes.
    """
    return within_budget(found, lambda taken: num_tokens(told(taken)) <= budget)


def told(pieces: Sequence[Recalled]) -> str:
    """What the model is told, in front of the question; empty if there is nothing."""
    if not pieces:
        return ""
    lines = [f"[{whence(piece.passage)}] {' '.join(piece.text.split())}" for piece in pieces]
    return "\n".join([FIRST_LINE, *lines, LAST_LINE, "", ""])


def whence(passage: Passage) -> str:
    """Turn or line, time and speaker of a passage, as far as the log has them."""
    parts = []
    if passage.turn is not None:
        parts.append(f"turn {passage.turn}")
    if passage.first_line is not None:
        parts.append(f"line {passage.first_line}")
    parts.append(f"{datetime.fromtimestamp(passage.created):%Y-%m-%d %H:%M}")
    if passage.start_time is not None:
        parts.append(f"at {timedelta(seconds=int(passage.start_time))}")
    parts.append(passage.speaker or passage.role)
    return ", ".join(parts)


def references(pieces: Sequence[Recalled]) -> str:
    """Which pieces these are, for the log."""
    begins = [piece.passage.text.find(piece.text) for piece in pieces]
    return json.dumps(
        [[p.passage.id, b, b + len(p.text)] for p, b in zip(pieces, begins, strict=True)]
    )


def referred(log: Log, text: str) -> list[Recalled]:
    """The pieces that `references` wrote down; none if that cannot be read."""
    try:
        wanted = [(int(id_), int(begin), int(end)) for id_, begin, end in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return []
    return [
        Recalled(passage, passage.text[begin:end], 0.0)
        for id_, begin, end in wanted
        for passage in log.get([id_])
    ]
