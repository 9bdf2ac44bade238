"""Does recall find what was said long ago, and how fast?

    python benchmarks/recall.py TEXT.txt

A log is filled with passages of a text, and the facts of `facts.py` are said in between, at random
places. Half of them are asked for in their own words, half in others. A fact counts as found if it
is among the first three. Then each search is timed, the first of all apart: it reads the index.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from common import RESULTS, SEED, environment, markdown, say, seconds, write_csv
from facts import LITERAL, PARAPHRASED

PASSAGE_CHARS = 400
CHARS_PER_TOKEN = 4.5
"""Of the default text and the built-in model's tokenizer: 10.8 MB are 2.4 million tokens."""

LIMIT = 3
QUESTIONS = {"in its own words": LITERAL, "in other words": PARAPHRASED}


def main(arguments: Sequence[str] | None = None) -> None:
    from streamchat.store.log import Log

    args = parse(arguments)
    text = args.file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, Log(Path(folder) / "log.sqlite") as log:
        num_passages, taken = fill(log, text, args.tokens)
        say(f"logged {num_passages:,} passages in {taken:.1f} s")
        megabytes = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
        first_ms = 1e3 * seconds(lambda: found_at(log, *LITERAL[0]))
        rows = []
        for name, facts in QUESTIONS.items():
            places, times = asked(log, facts)
            rows.append(
                {
                    "questions": name,
                    "facts": len(facts),
                    "first": sum(place == 1 for place in places) / len(facts),
                    "first_three": sum(place is not None for place in places) / len(facts),
                    "median_ms": 1e3 * statistics.median(times),
                    "max_ms": 1e3 * max(times),
                    "first_search_ms": first_ms,
                    "append_ms": 1e3 * taken / num_passages,
                    "passages": num_passages,
                    "tokens": args.tokens,
                    "megabytes": megabytes,
                    **environment(threads=1, dtype=""),
                }
            )
    write_csv(args.output, rows)
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))


def fill(log: Any, text: str, num_tokens: int) -> tuple[int, float]:
    """Log so many tokens of a text, with the facts in between; how many passages, and seconds."""
    from streamchat.store.log import Passage

    rng = random.Random(SEED)
    said = [*islice(passages_of(text), int(num_tokens * CHARS_PER_TOKEN / PASSAGE_CHARS))]
    for facts in QUESTIONS.values():
        for statement, _ in facts:
            said.insert(rng.randrange(len(said) + 1), statement)
    logged = [
        Passage(role="input", text=text, created=0.0, first_position=i, last_position=i)
        for i, text in enumerate(said)
    ]
    batches = [logged[begin : begin + 100] for begin in range(0, len(logged), 100)]
    return len(logged), seconds(lambda: [log.append(batch) for batch in batches])


def passages_of(text: str) -> Iterator[str]:
    """The text in passages, again and again, cut at spaces."""
    words = text.split()
    if not words:
        raise SystemExit("the file is empty")
    while True:
        passage: list[str] = []
        size = 0
        for word in words:
            passage.append(word)
            size += len(word) + 1
            if size >= PASSAGE_CHARS:
                yield " ".join(passage)
                passage, size = [], 0
        yield " ".join(passage)


def asked(log: Any, facts: Sequence[tuple[str, str]]) -> tuple[list[int | None], list[float]]:
    """Where each fact stands in what is found for its question, and how long that took."""
    places: list[int | None] = []
    times = []
    for statement, question in facts:
        times.append(seconds(lambda s=statement, q=question: places.append(found_at(log, s, q))))
    return places, times


def found_at(log: Any, statement: str, question: str) -> int | None:
    """Place of a statement among what is found, from 1; None if it is not there."""
    from streamchat.store.recall import search

    texts = [recalled.text for recalled in search(log, question, before=1 << 60, limit=LIMIT)]
    return texts.index(statement) + 1 if statement in texts else None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="plain text in UTF-8, to say between the facts")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="length of the log")
    parser.add_argument("--output", type=Path, default=RESULTS / "recall.csv")
    return parser.parse_args(arguments)


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a line for each way of asking."""
    return markdown(
        ["facts asked for", "first", "among the first three", "ms, median", "ms, longest"],
        [
            [
                f"{row['questions']} ({row['facts']})",
                f"{float(row['first']):.0%}",
                f"{float(row['first_three']):.0%}",
                f"{float(row['median_ms']):.1f}",
                f"{float(row['max_ms']):.1f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
