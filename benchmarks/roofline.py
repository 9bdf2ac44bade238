"""How near a decode step comes to the time that reading its bytes from memory takes.

    python benchmarks/roofline.py [--batch 1,4] [--sizes 256,1024,4096]

Bandwidth: best of several sums over an array far larger than the caches, with all threads
(`streamchat.bench.roofline`), taken before and after; the larger counts. NumPy's sum, on one
thread, is shown beside it as a check. Bytes: every weight once as it is stored, and the keys and
values held. Time: median over steps with the cache full.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    SEED,
    SINKS,
    Spread,
    environment,
    load_options,
    main_dtype,
    markdown,
    physical_cores,
    say,
    seconds,
    write_csv,
)

GIGA, MEGA = 1e9, 1e6
WARM_UP_STEPS = 4
FILL_CHUNK = 256


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    import streamchat
    from streamchat.bench.roofline import read_bandwidth

    args = parse(arguments)
    torch.set_num_threads(args.threads)
    loaded = streamchat.load(args.model, device=args.device, **load_options(args.quantize))
    model = loaded.model
    device = model.device
    measured = []
    before = read_bandwidth(device)
    for batch in numbers(args.batch):
        for size in numbers(args.sizes):
            say(f"cache {size}, batch {batch}")
            measured.append((size, batch, *step_of(model, size, batch, args.steps)))
    bandwidth = max(before, read_bandwidth(device))
    check = numpy_bandwidth() if device.type == "cpu" else 0.0
    where = environment(threads=args.threads, dtype=main_dtype(model), device=str(device))
    rows = [
        {
            "cache_size": size,
            "batch": batch,
            "step_megabytes": moved / MEGA,
            "bandwidth_gb_s": bandwidth / GIGA,
            "numpy_one_thread_gb_s": check / GIGA,
            "least_ms": 1e3 * moved / bandwidth,
            "step_ms": spread.median,
            "low": spread.low,
            "high": spread.high,
            "steps": args.steps,
            "share": 1e3 * moved / bandwidth / spread.median,
            **where,
        }
        for size, batch, moved, spread in measured
    ]
    write_csv(args.output, rows)
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))


def step_of(model: Any, size: int, batch: int, steps: int) -> tuple[int, Spread]:
    """Bytes that a decode step with a full cache must read, and how long it takes, in ms."""
    import torch

    import streamchat
    from streamchat.bench.roofline import bytes_per_step
    from streamchat.model.prepare import forward

    config = streamchat.CacheConfig(sink_size=SINKS, window_size=size - SINKS)
    cache = streamchat.SinkCache.for_model(model, config, batch_size=batch)
    generator = torch.Generator().manual_seed(SEED)
    while cache.num_seen < size:
        shape = (batch, min(FILL_CHUNK, size - cache.num_seen))
        ids = torch.randint(model.config.vocab_size, shape, generator=generator)
        logits = forward(model, ids.to(model.device), cache)
    ids = logits[:, -1:].argmax(dim=-1)

    def step() -> None:
        nonlocal ids
        ids = forward(model, ids, cache)[:, -1:].argmax(dim=-1)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP_STEPS):
        step()
    taken = [1e3 * seconds(step) for _ in range(steps)]
    return bytes_per_step(model, cache), Spread.of(taken)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="256,1024,4096", help="cache sizes")
    parser.add_argument("--batch", default="1", help="rows")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="as for `streamchat --model`")
    parser.add_argument("--quantize", help="as for `streamchat.load`")
    parser.add_argument("--output", type=Path, default=RESULTS / "roofline.csv")
    return parser.parse_args(arguments)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def numpy_bandwidth(num_bytes: int = 1 << 29, repeats: int = 8) -> float:
    """Bytes per second that NumPy's sum reads, on one thread, best of several."""
    import numpy

    array = numpy.ones(num_bytes // 4, dtype=numpy.float32)
    return array.nbytes / min(seconds(array.sum) for _ in range(repeats))


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a line a cache size and batch."""
    return markdown(
        ["weights", "cache", "batch", "MB a step", "GB/s", "least ms", "step ms", "roofline"],
        [
            [
                row["dtype"],
                f"{int(row['cache_size']):,}",
                row["batch"],
                f"{float(row['step_megabytes']):,.1f}",
                f"{float(row['bandwidth_gb_s']):,.1f}",
                f"{float(row['least_ms']):.2f}",
                f"{float(row['step_ms']):.2f}",
                f"{float(row['share']):.0%}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
