"""One very long stream through `sink`: are loss, time and memory flat, are angles exact?

    python benchmarks/long_stream.py TEXT.txt --tokens 500000 --keep FOLDER
    python benchmarks/long_stream.py TEXT.txt --model FOLDER --tokens 4200000 --name long_tiny

Writes one row for each run of 1,024 tokens, and a picture. A text that is too short is read again
from its beginning. With `--samples`, the first tokens of some runs are predicted once more from the
newest tokens alone (`recompute`), and both losses stand in these rows. In the end the newest tokens
are fed to two fresh caches, one that starts at position 0 and one that starts where the stream
ended: with exact angles their logits are equal. Then chunks go to both in turn: their times are
compared on the same machine at the same moment, which rows that lie an hour apart are not.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from policies import recomputed

CHUNK = 256
ROUNDS = 20


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    import streamchat
    from streamchat.bench.perplexity import (
        NUM_FIRST,
        SEGMENT,
        Segment,
        mean_perplexity,
        stream_text,
    )

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    loaded = streamchat.load(args.model, device="cpu", **load_options(args.quantize))
    config = streamchat.CacheConfig(sink_size=SINKS, window_size=args.cache - SINKS)
    ids = tokens_of(loaded, args.file, args.tokens)

    def tell(segment: Segment, left: float) -> None:
        if segment.position // SEGMENT % 16 == 0:
            say(
                f"{segment.position:,} of {len(ids):,} tokens, perplexity "
                f"{segment.perplexity:.2f}, {left / 60:,.1f} min left"
            )

    rows = list(stream_text(loaded, config, ids, tell, folder=args.keep))
    again = replace(config, policy="recompute")
    samples = {
        row.position: (losses, row.first_losses[: len(losses)])
        for row, losses in recomputed(loaded, again, ids, rows, args.samples, NUM_FIRST)
    }
    error, time_ratio = end_against_beginning(loaded, config, ids)
    where = environment(threads=args.threads, dtype=main_dtype(loaded.model))
    records = [
        {
            "position": row.position,
            "tokens": row.num_tokens,
            "perplexity": row.perplexity,
            "ms_per_token": 1e3 * row.seconds / max(1, row.num_tokens),
            "memory_megabytes": row.memory_megabytes,
            "cache_megabytes": row.cache_megabytes,
            "cache_size": config.cache_size,
            "sampled_tokens": len(samples[row.position][0]) if row.position in samples else "",
            "recompute_nats": sum(samples[row.position][0]) if row.position in samples else "",
            "sink_nats": sum(samples[row.position][1]) if row.position in samples else "",
            "logit_error_at_end": error,
            "time_ratio_at_end": time_ratio,
            **where,
        }
        for row in rows
    ]
    write_csv(args.output / f"{args.name}.csv", records)
    say(f"perplexity {mean_perplexity(rows):.3f}; {summary(records)}")
    if args.plot is not None:
        from streamchat.bench.plot import draw

        draw(args.plot, [(config.describe(), rows)])


def tokens_of(loaded: Any, file: Path, count: int) -> list[int]:
    """The text's tokens, again and again if it has fewer; encoded line by line."""
    ids = list(loaded.tokenizer.bos_ids())
    while len(ids) < count:
        before = len(ids)
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                ids += loaded.tokenizer.encode(line)
                if len(ids) >= count:
                    break
        if len(ids) == before:
            raise SystemExit(f"{file} is empty")
    return ids[:count]


def end_against_beginning(loaded: Any, config: Any, ids: list[int]) -> tuple[float, float]:
    """The same tokens at the stream's end and at position 0.

    Returns:
        The largest difference of logits, as a share of the largest one, and the ratio of the times
        that a chunk takes.
    """
    import torch

    import streamchat
    from streamchat.model.prepare import forward

    newest = torch.tensor([ids[-2 * config.cache_size :]])
    caches = {
        name: streamchat.SinkCache.for_model(loaded.model, config, start_position=start)
        for name, start in (("beginning", 0), ("end", len(ids)))
    }
    logits = {}
    for name, cache in caches.items():
        for chunk in newest.split(CHUNK, dim=1):
            logits[name] = forward(loaded.model, chunk, cache)
    scale = float(logits["beginning"].abs().max())
    error = float((logits["beginning"] - logits["end"]).abs().max()) / scale
    chunk = newest[:, :CHUNK]

    def timed(cache: Any) -> Callable[[], float]:
        return lambda: seconds(lambda: forward(loaded.model, chunk, cache))

    times = interleaved({name: timed(cache) for name, cache in caches.items()}, ROUNDS)
    return error, statistics.median(times["end"]) / statistics.median(times["beginning"])


def table(rows: Sequence[dict[str, str]]) -> str:
    """First against last tenth of a run, for the README; the first row fills the cache."""
    tenth = max(1, len(rows) // 10)
    parts = {"first tenth": rows[1 : tenth + 1], "last tenth": rows[-tenth:], "all": rows[1:]}
    header = ["", "tokens", "perplexity", "process, MB", "cache, MB"]
    cells = []
    for name, part in parts.items():
        tokens = [int(row["tokens"]) for row in part]
        nats = [math.log(float(row["perplexity"])) * int(row["tokens"]) for row in part]
        cells.append(
            [
                name,
                f"{sum(tokens):,}",
                f"{math.exp(sum(nats) / sum(tokens)):.2f}",
                f"{statistics.fmean(float(row['memory_megabytes']) for row in part):,.0f}",
                f"{max(float(row['cache_megabytes']) for row in part):,.1f}",
            ]
        )
    taken = [row for row in rows if row["sampled_tokens"]]
    count = sum(int(row["sampled_tokens"]) for row in taken)
    size, ratio = int(rows[0]["cache_size"]), float(rows[0]["time_ratio_at_end"])
    facts = [
        f"at {size:,} held, a chunk at the end takes {ratio:.3f} times as long as one at the "
        f"beginning, and its logits differ by {float(rows[0]['logit_error_at_end']):.1e}"
    ]
    if taken:
        own, other = (
            math.exp(sum(float(row[field]) for row in taken) / count)
            for field in ("sink_nats", "recompute_nats")
        )
        facts.append(
            f"on {count:,} tokens sampled in {len(taken)} places the perplexity is {own:.2f}, and "
            f"{other:.2f} with `recompute`"
        )
    said = "; ".join(facts)
    return f"{markdown(header, cells)}\n\n{said[0].upper()}{said[1:]}."


def summary(records: Sequence[dict[str, Any]]) -> str:
    """First tenth against last tenth."""
    tenth = max(1, len(records) // 10)
    # The first rows fill the cache.
    early, late = records[1 : tenth + 1], records[-tenth:]

    def mean(rows: Sequence[dict[str, Any]], field: str) -> float:
        return sum(row[field] for row in rows) / len(rows)

    facts = [
        f"{field}: first tenth {mean(early, field):.4g}, last {mean(late, field):.4g}"
        for field in ("perplexity", "ms_per_token", "memory_megabytes")
    ]
    taken = [row for row in records if row["sampled_tokens"]]
    if taken:
        count = sum(row["sampled_tokens"] for row in taken)
        own, others = (
            math.exp(sum(row[field] for row in taken) / count)
            for field in ("sink_nats", "recompute_nats")
        )
        facts.append(f"on {count:,} sampled tokens sink {own:.3f}, recompute {others:.3f}")
    facts.append(f"a chunk at the end takes {records[0]['time_ratio_at_end']:.3f} times as long")
    return "; ".join([*facts, f"angles: logits differ by {records[0]['logit_error_at_end']:.1e}"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="text in UTF-8")
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--quantize")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--cache", type=int, default=1024, help="tokens held, 4 sinks among them")
    parser.add_argument("--keep", type=Path, help="folder in which the run is kept")
    parser.add_argument("--name", default="long_stream", help="of the CSV file")
    parser.add_argument("--plot", type=Path, help="picture to draw")
    parser.add_argument("--samples", type=int, default=0, help="runs to compute anew in part")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the CSV file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
