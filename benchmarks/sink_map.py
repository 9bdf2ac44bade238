"""Does the built-in model have attention sinks, and how many does it need?

    python benchmarks/sink_map.py [TEXT.txt]

`streamchat bench --sink-map`, as rows for the README.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common import (
    RESULTS,
    environment,
    load_options,
    main_dtype,
    markdown,
    physical_cores,
    say,
    write_csv,
)


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    import streamchat
    from streamchat.bench.sample import TEXT
    from streamchat.bench.sinkmap import TEXT_PER_CACHE, cache_size_for, map_sinks, verdict

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    loaded = streamchat.load(args.model, device="cpu", **load_options(args.quantize))
    text = TEXT if args.file is None else args.file.read_text(encoding="utf-8")
    ids = [*loaded.tokenizer.bos_ids(), *loaded.tokenizer.encode(text)]
    ids = ids[: TEXT_PER_CACHE * args.cache]
    found = map_sinks(loaded, ids, cache_size_for(len(ids), args.cache), say)
    where = environment(threads=args.threads, dtype=main_dtype(loaded.model))
    sizes = {"prompt": found.prompt_length, "cache_size": found.cache_size, "alike": found.alike}
    rows = [{**asdict(figure), **sizes, **where} for figure in found.figures()]
    write_csv(args.output, rows)
    say(verdict(loaded.source.name, found))
    print(table([{key: _text(value) for key, value in row.items()} for row in rows]))


def _text(value: object) -> str:
    return "" if value is None else str(value)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="plain text in UTF-8; one of our own")
    parser.add_argument("--cache", type=int, default=1024, help="cache size at most")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--model", help="as for `streamchat --model`")
    parser.add_argument("--quantize", help="as for `streamchat.load`")
    parser.add_argument("--output", type=Path, default=RESULTS / "sink_map.csv")
    return parser.parse_args(arguments)


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a column for each number of first tokens; what these draw and are worth."""

    def values(measure: str, count: str) -> list[float]:
        kept = [row for row in rows if row["measure"] == measure and row["num_first"] == count]
        return [float(row["value"]) for row in kept]

    counts = [row["num_first"] for row in rows if row["measure"] == "perplexity"]
    first, alike = rows[0], float(rows[0]["alike"])
    drawn = [values("attention", count) for count in counts]
    lines = [
        [
            f"attention drawn, of {int(first['prompt']):,} tokens",
            *(f"{statistics.fmean(own):.0%}" if own else "" for own in drawn),
        ],
        ["in the head where most", *(f"{max(own):.0%}" if own else "" for own in drawn)],
        ["if all drew alike", *(f"{int(n) * alike:.1%}" if int(n) else "" for n in counts)],
        [
            f"perplexity when kept, cache {int(first['cache_size']):,}",
            *(f"{values('perplexity', count)[0]:.2f}" for count in counts),
        ],
    ]
    return markdown(["first tokens", *counts], lines)


if __name__ == "__main__":
    main()
