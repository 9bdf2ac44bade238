"""Perplexity of one text under each cache policy, with the same number of tokens held.

    python benchmarks/policies.py TEXT.txt [--keep FOLDER]
    python benchmarks/policies.py TEXT.txt --speed

The first command writes `policies.csv`: `sink` and `window` see all of the text that is asked for,
the scored policies the beginning of it, `dense` as much as the model was trained for. For
`recompute`, whose every token takes a forward pass over the whole window, the first tokens of
segments spread over the text are computed, and `sink`'s loss on the very same tokens stands beside
them. With
`--keep`, an interrupted run goes on where it was. The second command writes `policies-speed.csv`:
prefill and decode of each policy with its cache full, measured apart, best on an idle machine.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    SINKS,
    environment,
    load_options,
    main_dtype,
    markdown,
    physical_cores,
    say,
    write_csv,
)

NUM_SINKS = (1, 2, 8)
"""Beside the default, at the largest cache."""


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    import streamchat

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    loaded = streamchat.load(args.model, device="cpu", **load_options(args.quantize))
    where = environment(threads=args.threads, dtype=main_dtype(loaded.model))
    if args.speed:
        rows = [{**row, **where} for row in speeds(loaded, args)]
    else:
        text = args.file.read_text(encoding="utf-8")
        ids = loaded.tokenizer.encode(text[: 16 * args.tokens])[: args.tokens]
        if len(ids) < args.tokens:
            raise SystemExit(f"{args.file} is too short: {len(ids)} tokens, {args.tokens} wanted")
        rows = [{**row, **where} for row in perplexities(loaded, ids, args)]
    write_csv(args.output / ("policies-speed.csv" if args.speed else "policies.csv"), rows)
    written = [{key: str(value) for key, value in row.items()} for row in rows]
    print(speed_table(written) if args.speed else table(written))


def perplexities(loaded: Any, ids: list[int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each policy and size."""
    sinks: list[Any] = []
    for config, limit in plan(loaded, args):
        if config.policy == "recompute":
            yield sampled(loaded, config, ids, sinks, args)
            continue
        segments = list(segments_of(loaded, config, ids[:limit], args))
        if config.policy == "sink":
            sinks = segments
        yield streamed(config, segments, limit)


def plan(loaded: Any, args: argparse.Namespace) -> Iterator[tuple[Any, int]]:
    """What is run, and on how many tokens."""
    import streamchat
    from streamchat.model.families import trained_length

    sizes = sorted(args.caches)
    for size in sizes:
        sink = streamchat.CacheConfig(sink_size=SINKS, window_size=size - SINKS)
        for policy, limit in (
            ("sink", args.tokens),
            ("window", args.tokens),
            ("h2o", args.scored_tokens),
            ("snapkv", args.scored_tokens),
            ("recompute", 0),
        ):
            yield replace(sink, policy=policy), limit
    for number in NUM_SINKS:
        config = streamchat.CacheConfig(sink_size=number, window_size=sizes[-1] - number)
        yield config, args.scored_tokens
    length = min(args.tokens, trained_length(loaded.model.config) or args.tokens)
    yield streamchat.CacheConfig(sink_size=0, window_size=length, policy="dense"), length


def segments_of(
    loaded: Any, config: Any, ids: list[int], args: argparse.Namespace
) -> Iterator[Any]:
    """A policy on the text from its beginning."""
    from streamchat.bench.perplexity import SEGMENT, stream_text

    def tell(segment: Any, left: float) -> None:
        if segment.position // SEGMENT % 8 == 0:
            say(f"{config.describe()}: {segment.position:,} tokens, {left:,.0f} s left")

    return stream_text(loaded, config, ids, tell, folder=args.keep)


def streamed(config: Any, rows: list[Any], num_tokens: int) -> dict[str, Any]:
    """What a policy made of the text."""
    from streamchat.bench.perplexity import mean_perplexity

    def upto(length: int) -> float:
        early = [row for row in rows if row.position < length]
        return mean_perplexity(early) if num_tokens >= length else math.nan

    return {
        "policy": config.policy,
        "cache_size": config.cache_size,
        "sink_size": config.sink_size,
        "tokens": num_tokens,
        "perplexity": mean_perplexity(rows),
        "perplexity_16384": upto(16_384),
        "perplexity_8192": upto(8_192),
        "sampled_tokens": "",
        "sink_on_sample": "",
        "cache_megabytes": max(row.cache_megabytes for row in rows),
        "work_per_token": 1,
    }


def sampled(
    loaded: Any, config: Any, ids: list[int], rows: Sequence[Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Recomputation on the first tokens of segments spread over the text, and `sink` on the same.

    Args:
        loaded: The model.
        config: Of recomputation.
        ids: The text.
        rows: Segments of `sink`, with as many tokens held.
        args: How many segments, and tokens of each.
    """
    pairs = list(recomputed(loaded, config, ids, rows, args.samples, args.sample_tokens))
    own = [loss for _, losses in pairs for loss in losses]
    others = [loss for row, losses in pairs for loss in row.first_losses[: len(losses)]]
    return {
        "policy": config.policy,
        "cache_size": config.cache_size,
        "sink_size": 0,
        "tokens": len(ids),
        "perplexity": math.exp(sum(own) / len(own)),
        "perplexity_16384": math.nan,
        "perplexity_8192": math.nan,
        "sampled_tokens": len(own),
        "sink_on_sample": math.exp(sum(others) / len(others)),
        "cache_megabytes": 0,
        "work_per_token": config.cache_size,
    }


def recomputed(
    loaded: Any, config: Any, ids: list[int], rows: Sequence[Any], samples: int, length: int
) -> Iterator[tuple[Any, list[float]]]:
    """Segments spread over those whose window is full, and recomputation's losses in them.

    Args:
        loaded: The model.
        config: Of recomputation.
        ids: The text.
        rows: Its segments.
        samples: How many to take.
        length: Losses of each, of its first tokens.
    """
    import streamchat

    full = [row for row in rows if row.position >= config.cache_size]
    count = min(samples, len(full))
    for row in (full[i * (len(full) - 1) // max(1, count - 1)] for i in range(count)):
        begin, number = row.position, min(length, len(row.first_losses))
        stream = streamchat.Stream(loaded, config)
        stream.feed(ids[begin - config.cache_size : begin])
        losses = [x for x in stream.score(ids[begin : begin + number]) if x is not None]
        say(f"{config.describe()}: sampled at {begin:,} of {len(ids):,} tokens")
        yield row, losses


def speeds(loaded: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prefill and decode of each policy, its cache full."""
    import streamchat
    from streamchat.bench.measure import BenchConfig, measure

    for size in sorted(args.caches):
        sink = streamchat.CacheConfig(sink_size=SINKS, window_size=size - SINKS)
        for policy in ("sink", "window", "dense", "h2o", "snapkv", "recompute"):
            cache = replace(sink, policy=policy)
            is_slow = policy == "recompute"
            config = BenchConfig(
                cache=replace(cache, window_size=size + 8192) if policy == "dense" else cache,
                budget=size,
                depths=(2,),
                batch_size=1,
                prefill_tokens=512,
                decode_tokens=4 if is_slow else args.decode_tokens,
                repeats=2 if is_slow else 3,
                seed=0,
            )
            for row in measure(loaded, config, say):
                yield {
                    "policy": policy,
                    "cache_size": size,
                    "held": row.cache_size,
                    "prefill_rate": row.prefill_rate,
                    "decode_ms": row.step_ms_p50,
                    "decode_rate": row.decode_rate,
                    "cache_megabytes": row.cache_megabytes,
                }


def table(rows: Sequence[dict[str, str]]) -> str:
    """Perplexities, for the README."""
    sizes = sorted({int(row["cache_size"]) for row in rows if row["policy"] != "dense"})
    header = ["policy", *(f"{size:,} tokens held" for size in sizes), "on tokens"]
    cells = []
    for policy in ("sink", "window", "h2o", "snapkv"):
        own = {int(r["cache_size"]): r for r in rows if _is_default(r, policy)}
        for field in ("perplexity", "perplexity_16384"):
            length = own[sizes[-1]]["tokens"] if field == "perplexity" else "16384"
            if field == "perplexity" and int(length) <= 16_384:
                continue
            figures = [f"{float(own[size][field]):,.2f}" for size in sizes]
            cells.append([f"`{policy}`", *figures, f"{int(length):,}"])
    for row in rows:
        if row["policy"] == "sink" and not _is_default(row, "sink"):
            figures = ["" if int(row["cache_size"]) != size else _short(row) for size in sizes]
            name = f"`sink`, S = {row['sink_size']}"
            cells.append([name, *figures, f"{int(row['tokens']):,}"])
        if row["policy"] == "dense":
            held = f"`dense` ({int(row['cache_size']):,} held)"
            cells.append([held, *([""] * (len(sizes) - 1)), _short(row), f"{int(row['tokens']):,}"])
    samples = {int(row["cache_size"]): row for row in rows if row["policy"] == "recompute"}
    count = samples[sizes[-1]]["sampled_tokens"]
    for name, field in (("`recompute`", "perplexity"), ("`sink` on the same", "sink_on_sample")):
        figures = [f"{float(samples[size][field]):,.2f}" for size in sizes]
        cells.append([name, *figures, f"{int(count):,}, sampled"])
    return markdown(header, cells)


def speed_table(rows: Sequence[dict[str, str]]) -> str:
    """Speeds, for the README."""
    header = ["policy", "held", "prefill, tok/s", "decode, ms", "cache, MB", "work a token"]
    cells = [
        [
            f"`{row['policy']}`",
            f"{int(row['held']):,}",
            "" if row["policy"] == "recompute" else f"{float(row['prefill_rate']):,.0f}",
            f"{float(row['decode_ms']):,.1f}",
            f"{float(row['cache_megabytes']):,.1f}",
            f"{int(row['held']):,} tokens" if row["policy"] == "recompute" else "1 token",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def _is_default(row: dict[str, str], policy: str) -> bool:
    return row["policy"] == policy and row["sink_size"] == (str(SINKS) if policy == "sink" else "0")


def _short(row: dict[str, str]) -> str:
    return f"{float(row['perplexity']):,.2f}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="text in UTF-8")
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--quantize")
    parser.add_argument("--caches", type=_numbers, default=[256, 1024], help="sizes, with commas")
    parser.add_argument("--tokens", type=int, default=65_536, help="for sink and window")
    parser.add_argument("--scored-tokens", type=int, default=16_384, help="for h2o and snapkv")
    parser.add_argument("--samples", type=int, default=16, help="segments of recompute")
    parser.add_argument("--sample-tokens", type=int, default=16, help="tokens of each, at most 32")
    parser.add_argument("--decode-tokens", type=int, default=32, help="with --speed")
    parser.add_argument("--speed", action="store_true", help="measure speed, not perplexity")
    parser.add_argument("--keep", type=Path, help="folder in which runs are kept")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the CSV file")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
