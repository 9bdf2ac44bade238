"""What does each policy remember, from how far back?

    python benchmarks/streameval.py

`streamchat bench --streameval` with the built-in model, as rows for the README. Each policy is
asked the same questions about the same stream, with caches of one size; `dense` holds all of it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common import (
    RESULTS,
    SEED,
    SINKS,
    environment,
    load_options,
    main_dtype,
    markdown,
    physical_cores,
    say,
    write_csv,
)

POLICIES = "sink,window,dense,h2o,snapkv"
DISTANCES = "0.25x,0.5x,0.9x,1.1x,2x"


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    import streamchat
    from streamchat.bench.perplexity import with_policies
    from streamchat.bench.streameval import form_for, make_exam, scores, take
    from streamchat.cli.bench_eval import parse_distances

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    loaded = streamchat.load(args.model, device="cpu", **load_options(args.quantize))
    form = form_for(loaded.tokenizer, plain=args.plain)
    cache = streamchat.CacheConfig(sink_size=SINKS, window_size=args.cache - SINKS)
    cache = cache.pin(len(form.header))
    distances = parse_distances(args.distances, cache.cache_size)
    exam = make_exam(loaded.tokenizer, form, cache, distances, args.questions, SEED)
    where = environment(threads=args.threads, dtype=main_dtype(loaded.model))
    rows = []
    for config in with_policies(cache, args.policies.split(","), exam.num_tokens):
        say(f"{config.policy}: {exam.num_questions} questions")
        for score in scores(config, list(take(loaded, config, exam))):
            rows.append(
                {
                    **asdict(score),
                    "cache_size": cache.cache_size,
                    "stream": exam.num_tokens,
                    "plain": args.plain,
                    **where,
                }
            )
    write_csv(args.output, rows)
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=int, default=512, help="cache size, the header not counted")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--distances", default=DISTANCES, help="as for `streamchat bench`")
    parser.add_argument("--questions", type=int, default=20, help="at each distance")
    parser.add_argument("--plain", action="store_true", help="without the chat template")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--model", help="as for `streamchat --model`")
    parser.add_argument("--quantize", help="as for `streamchat.load`")
    parser.add_argument("--output", type=Path, default=RESULTS / "streameval.csv")
    return parser.parse_args(arguments)


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a line a policy, a column a distance, answered and chosen rightly."""
    distances = sorted({int(row["distance"]) for row in rows})
    found = {(row["policy"], int(row["distance"])): row for row in rows}
    size, first = int(rows[0]["cache_size"]), rows[0]
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [found.get((policy, distance)) for distance in distances]
        lines.append([policy, *("" if cell is None else _both(cell) for cell in cells)])
    chance = [f"{float(first['answered_by_chance']):.0%} / {float(first['chosen_by_chance']):.0%}"]
    lines.append(["by chance", *chance * len(distances)])
    header = [f"{distance:,} ({distance / size:.2g}x)" for distance in distances]
    return markdown([f"answered / chosen, cache {size:,}", *header], lines)


def _both(row: dict[str, str]) -> str:
    return f"{float(row['answered']):.0%} / {float(row['chosen']):.0%}"


if __name__ == "__main__":
    main()
