"""Does a token cost the same for ever, and what does an eviction cost?

    python benchmarks/flat.py TEXT.txt

Two ratios, both of medians of decode steps that are measured in turn:

* last / first: a stream decodes 20 times its cache size. The last 1,000 tokens are measured in
  turn, 10 and 10, with those of a stream whose cache has just filled, so that both meet the same
  machine; the plain ratio to the first 1,000 tokens with the cache full is given beside it.
* eviction / none: the step that fills the last slot, against a step that evicts. Each is taken
  back and repeated.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    SINKS,
    environment,
    interleaved,
    load_options,
    main_dtype,
    markdown,
    physical_cores,
    say,
    seconds,
    write_csv,
)

BLOCK = 10


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    import streamchat

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    loaded = streamchat.load(args.model, device="cpu", **load_options(args.quantize))
    config = streamchat.CacheConfig(sink_size=SINKS, window_size=args.cache - SINKS)
    ids = loaded.tokenizer.encode(args.file.read_text(encoding="utf-8")[: 16 * args.cache])
    if len(ids) < args.cache:
        raise SystemExit(f"{args.file} is too short: {len(ids)} tokens, the cache {args.cache}")
    where = environment(threads=args.threads, dtype=main_dtype(loaded.model))

    def filled(num_tokens: int) -> Any:
        stream = streamchat.Stream(loaded, config)
        stream.feed(ids[:num_tokens])
        return stream

    ratios = {
        **decay(filled, args.cache, args.times, args.count),
        **eviction(filled, args.cache, args.rounds),
    }
    rows = [
        {
            "ratio": name,
            "value": over / under,
            "over_ms": 1e3 * over,
            "under_ms": 1e3 * under,
            "cache_size": args.cache,
            "times": args.times,
            "count": args.rounds if name.startswith("eviction") else args.count,
            **where,
        }
        for name, (over, under) in ratios.items()
    ]
    write_csv(args.output, rows)
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))


def decode(stream: Any) -> float:
    """Seconds of one step, the most likely token."""
    return seconds(lambda: stream.feed([int(stream.logits.argmax())]))


def decay(
    filled: Callable[[int], Any], size: int, times: int, count: int
) -> dict[str, tuple[float, float]]:
    """Medians of the last and the first tokens, in seconds."""
    total = times * size
    if total < count:
        raise SystemExit(f"{times} times {size} tokens are fewer than the {count} to be measured")
    old = filled(size)
    first = [decode(old) for _ in range(count)]
    while (left := total - count - old.position) > 0:
        if left % 1000 == 0:
            say(f"decoded {old.position:,} of {total:,} tokens")
        decode(old)
    say("decoding the last tokens, in turn with a fresh stream's first")
    fresh = filled(size)
    last, beside = [], []
    while len(last) < count:
        last += [decode(old) for _ in range(BLOCK)]
        beside += [decode(fresh) for _ in range(BLOCK)]
    middle = statistics.median
    return {
        "last / first, in turn": (middle(last), middle(beside)),
        "last / first, apart": (middle(last), middle(first)),
    }


def eviction(
    filled: Callable[[int], Any], size: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Medians of a step that evicts and of one that fills the last slot, in seconds."""
    almost, full = filled(size - 1), filled(size)
    if (almost.cache.num_held, full.cache.num_held) != (size - 1, size):
        raise SystemExit("the caches are not as full as they should be")

    def repeatable(stream: Any) -> float:
        before, token = stream.logits, int(stream.logits.argmax())
        taken = seconds(lambda: stream.feed([token]))
        if stream.cache.num_held != size:
            raise SystemExit("a step ended with a cache that is not full")
        stream.rewind(1, before)
        return taken

    works = {"none": lambda: repeatable(almost), "eviction": lambda: repeatable(full)}
    for work in works.values():
        work()
    taken = interleaved(works, rounds)
    return {
        "eviction / none": (statistics.median(taken["eviction"]), statistics.median(taken["none"]))
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="plain text in UTF-8, to fill the caches with")
    parser.add_argument("--cache", type=int, default=1024, help="cache size")
    parser.add_argument("--times", type=int, default=20, help="cache sizes to go")
    parser.add_argument("--count", type=int, default=1000, help="tokens that are compared")
    parser.add_argument("--rounds", type=int, default=200, help="steps with and without eviction")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--model", help="as for `streamchat --model`")
    parser.add_argument("--quantize", help="as for `streamchat.load`")
    parser.add_argument("--output", type=Path, default=RESULTS / "flat.csv")
    return parser.parse_args(arguments)


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a line a ratio."""
    return markdown(
        ["decode step", "ratio", "ms", "against ms"],
        [
            [
                f"{row['ratio']} (cache {int(row['cache_size']):,})",
                f"{float(row['value']):.3f}",
                f"{float(row['over_ms']):.2f}",
                f"{float(row['under_ms']):.2f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
