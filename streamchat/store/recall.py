"""Finding what has left the window: passages of the log that match a question.

BM25 (Robertson and Zaragoza 2009) over stemmed words, as SQLite's FTS5 computes it. A question is
looked for by its rarest words, so that its length and its "the"s cost nothing. A passage that says
the same in other words is not found; `vectors` finds it.
"""

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from streamchat.store.log import Log, Passage
from streamchat.store.words import query_words

MAX_ASKED = 2000
"""Words of a question that are looked at."""

MAX_WORDS = 24
"""A question's words that are looked for: the rarest ones that the log has."""

COMMON_SHARE = 4
"""A word in more than one of so many pieces tells them apart no more."""

FEW_PIECES = 8
"""A word in no more pieces than this is never too common: a young log has few."""

FINDABLE = """(:before IS NULL OR coalesce(pieces.last_position < :before, 0))
    AND NOT coalesce(
        pieces.last_position >= :pinned AND pieces.last_position < :pinned_end, 0
    )"""
"""Of a row of `pieces`: whether it has wholly left, see `search`."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """A piece of a passage that matches a question.

    Attributes:
        passage: Where it stands, with its turn, lines and times.
        text: The piece: the whole text, unless that is long.
        score: Higher is better; comparable within one search.
    """

    passage: Passage
    text: str
    score: float


def search(
    log: Log,
    question: str,
    *,
    before: int | None = None,
    pinned: range = range(0),
    limit: int = 3,
) -> list[Recalled]:
    """Find what matches a question, best first.

    Args:
        log: The session's log.
        question: Any text; its words count, not their order.
        before: Position of the oldest token that the window holds: only what has wholly left is
            found, and nothing that was never in the stream. None finds everything.
        pinned: Positions that never leave: what ends among these is not found.
        limit: How many pieces at most.

    Raises:
        DamagedError: If the log is damaged.
        SessionError: If it cannot be read.
    """
    with log.using() as connection:
        query = _query(connection, question)
        rows = [] if query is None else _best(connection, query, before, pinned, limit)
        found = []
        for passage_id, first, end, score in rows:
            chars = slice(log.checked("first_char", first, int), log.checked("end_char", end, int))
            found += [Recalled(p, p.text[chars], score) for p in log.get([passage_id])]
        return found


def within_budget(
    found: Iterable[Recalled], fits: Callable[[list[Recalled]], bool]
) -> list[Recalled]:
    """The best of what was found that fit into a budget together, in the order of the log.

    Args:
        found: Best first.
        fits: Whether these do, which are in that order.
    """
    taken: list[Recalled] = []
    for recalled in found:
        more = sorted([*taken, recalled], key=lambda r: (r.passage.id, r.passage.text.find(r.text)))
        if fits(more):
            taken = more
    return taken


def _query(connection: sqlite3.Connection, question: str) -> str | None:
    """The rarest words of a question, for FTS5; None if the log has none of them."""
    words = list(dict.fromkeys(islice(query_words(question), MAX_ASKED)))
    connection.execute("DELETE FROM temp.asked")
    connection.executemany("INSERT INTO temp.asked (rowid, text) VALUES (?, ?)", enumerate(words))
    terms: dict[int, list[str]] = {}
    for number, term in connection.execute("SELECT doc, term FROM temp.asked_terms").fetchall():
        terms.setdefault(number, []).append(term)
    frequency = {
        number: min(_frequency(connection, term) for term in of_word)
        for number, of_word in terms.items()
    }
    rarest = sorted((n for n in frequency if frequency[n]), key=lambda n: (frequency[n], n))
    (num_pieces,) = connection.execute("SELECT count(*) FROM pieces").fetchone()
    limit = max(FEW_PIECES, num_pieces // COMMON_SHARE)
    chosen = [n for n in rarest if frequency[n] <= limit][:MAX_WORDS] or rarest[:1]
    # Letters, digits, marks and spaces alone: nothing in there ends the quotation.
    return " OR ".join(f'"{words[number]}"' for number in chosen) or None


def _frequency(connection: sqlite3.Connection, term: str) -> int:
    """In how many pieces a term occurs."""
    query = "SELECT doc FROM temp.frequencies WHERE term = ?"
    row = connection.execute(query, (term,)).fetchone()
    return int(row[0]) if row else 0


def _best(
    connection: sqlite3.Connection, query: str, before: int | None, pinned: range, limit: int
) -> list[tuple[int, int, int, float]]:
    """The best pieces: passage, first character, character after the last, and score."""
    return connection.execute(
        "SELECT passage, first_char, end_char, -bm25(words) AS score"
        " FROM words JOIN pieces ON pieces.id = words.rowid"
        f" WHERE words MATCH :query AND {FINDABLE}"
        " ORDER BY score DESC, pieces.id LIMIT :limit",
        {
            "query": query,
            "before": before,
            "pinned": pinned.start,
            "pinned_end": pinned.stop,
            "limit": limit,
        },
    ).fetchall()
