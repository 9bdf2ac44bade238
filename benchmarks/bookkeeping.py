"""What a cache costs in itself: all that a one-token step does to it, but for the attention.

    python benchmarks/bookkeeping.py

Geometry of the built-in model, float32, the cache full. Per step and layer, in microseconds, for
windows of growing size. A measurement is one step over all layers, so that large windows come from
memory as they do in a model:

* streamchat: begin, rotation tables, the new key and the query rotated, the row that is overwritten
  kept for undo, slots written, commit. Its attention is replaced by nothing.
* cat and rotate: concatenate, cut the oldest, rotate every key held for its place in the cache, as
  StreamingLLM's own code and attention_sinks 0.4.0 do.
* roll: move the window one slot down, write the last.
* transformers' layers: DynamicLayer at a constant length, DynamicSlidingWindowLayer, StaticLayer.
  They rotate nothing: the model does that before.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    SEED,
    SINKS,
    Spread,
    environment,
    interleaved,
    markdown,
    physical_cores,
    seconds,
    write_csv,
)
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

import streamchat
from streamchat.cache.snapshot import CacheSnapshot
from streamchat.ops.rotary import default_inv_freq, rope_tables, rotate

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
WINDOWS = (256, 1024, 4096, 16384, 32768)
NAMES = (
    "streamchat",
    "cat and rotate",
    "roll",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "StaticLayer",
)

Step = Callable[[], float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", default=",".join(map(str, WINDOWS)))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--output", type=Path, default=RESULTS / "bookkeeping.csv")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    where = environment(threads=args.threads, dtype="float32")
    rows = []
    for window in map(int, args.windows.split(",")):
        # One after the other: together they would need the memory of six caches.
        for name in NAMES:
            with torch.no_grad():
                step = MAKERS[name](window, args.layers)
                step()
                taken = interleaved({name: step}, args.rounds)[name]
            spread = Spread.of([1e6 * value / args.layers for value in taken])
            rows.append(
                {
                    "cache": name,
                    "window": window,
                    "us_per_layer": spread.median,
                    "low": spread.low,
                    "high": spread.high,
                    "rounds": args.rounds,
                    "layers": args.layers,
                    **where,
                }
            )
            del step
    write_csv(args.output, rows)
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))


def new_states(num_layers: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of one token, for each layer."""
    return [
        (
            torch.randn(1, HEADS, 1, HEAD_DIM),
            torch.randn(1, KV_HEADS, 1, HEAD_DIM),
            torch.randn(1, KV_HEADS, 1, HEAD_DIM),
        )
        for _ in range(num_layers)
    ]


def no_attention(_for_sinks: Tensor, for_window: Tensor, *_args: object) -> Tensor:
    """In the place of attention, so that the rest is measured."""
    return for_window


def ours(window: int, num_layers: int) -> Step:
    geometry = streamchat.CacheGeometry(
        num_layers=num_layers,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        inv_freq=default_inv_freq(HEAD_DIM, theta=100_000.0),
    )
    cache = streamchat.SinkCache(
        streamchat.CacheConfig(sink_size=SINKS, window_size=window), geometry
    )
    cache._kernels = dataclasses.replace(cache._kernels, decode=no_attention)
    shape = (num_layers, 1, KV_HEADS, cache.config.cache_size, HEAD_DIM)
    held = torch.ones(1).expand(shape)  # takes no memory, and is written to every slot
    num_seen = 2 * cache.config.cache_size
    cache.restore(CacheSnapshot(cache.config, num_seen, 0, {"keys": held, "values": held}))
    states = new_states(num_layers)

    def step() -> None:
        with cache.step(1):
            for layer_idx, (query, key, value) in enumerate(states):
                cache.attend(layer_idx, query, key, value)

    return lambda: seconds(step)


def cat_and_rotate(window: int, num_layers: int) -> Step:
    """As attention_sinks does it, whose window does not count the token being fed."""
    size = SINKS + window
    states = new_states(num_layers)
    past = [tuple(torch.ones(1, KV_HEADS, size - 1, HEAD_DIM) for _ in "kv") for _ in states]
    inv_freq = default_inv_freq(HEAD_DIM, theta=100_000.0)
    cos, sin = rope_tables(torch.arange(size), inv_freq)

    def without_the_oldest(x: Tensor) -> Tensor:
        return torch.cat((x[:, :, :SINKS], x[:, :, size - (window - 1) :]), dim=2)

    def step() -> None:
        grown = []
        for (query, key, value), (keys, values) in zip(states, past, strict=True):
            keys, values = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
            rotate(query, cos[-1:], sin[-1:])
            rotate(keys, cos, sin)
            grown.append((keys, values))
        past[:] = [(without_the_oldest(keys), without_the_oldest(values)) for keys, values in grown]

    return lambda: seconds(step)


def roll(window: int, num_layers: int) -> Step:
    states = new_states(num_layers)
    held = [[torch.ones(1, KV_HEADS, SINKS + window, HEAD_DIM) for _ in "kv"] for _ in states]

    def step() -> None:
        for (_, key, value), buffers in zip(states, held, strict=True):
            for buffer, new in zip(buffers, (key, value), strict=True):
                buffer[:, :, SINKS:] = buffer[:, :, SINKS:].roll(-1, dims=2)
                buffer[:, :, -1:] = new

    return lambda: seconds(step)


def stock(
    make: Callable[[int], Any], undo: Callable[[Any], None], window: int, layers: int
) -> Step:
    """A layer of transformers: one update, and off the clock back to the length before."""
    states = new_states(layers)
    filling = torch.ones(1, KV_HEADS, SINKS + window - 1, HEAD_DIM)
    caches = [make(SINKS + window) for _ in states]
    for cache in caches:
        cache.update(filling, filling)

    def step() -> None:
        for (_, key, value), cache in zip(states, caches, strict=True):
            cache.update(key, value)

    def measured() -> float:
        taken = seconds(step)
        for cache in caches:
            undo(cache)
        return taken

    return measured


MAKERS: Mapping[str, Callable[[int, int], Step]] = {
    "streamchat": ours,
    "cat and rotate": cat_and_rotate,
    "roll": roll,
    "DynamicLayer": lambda window, layers: stock(
        lambda _size: DynamicLayer(), lambda cache: cache.crop(-1), window, layers
    ),
    "DynamicSlidingWindowLayer": lambda window, layers: stock(
        lambda size: DynamicSlidingWindowLayer(sliding_window=size),
        lambda _cache: None,
        window,
        layers,
    ),
    "StaticLayer": lambda window, layers: stock(
        lambda size: StaticLayer(max_cache_len=size), lambda cache: cache.crop(-1), window, layers
    ),
}


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a line a cache, a column a window, and how much dearer the largest is."""
    windows = sorted({int(row["window"]) for row in rows})
    found = {(row["cache"], int(row["window"])): float(row["us_per_layer"]) for row in rows}
    lines = []
    for name in dict.fromkeys(row["cache"] for row in rows):
        costs = [found[name, window] for window in windows]
        lines.append([name, *(f"{cost:,.1f}" for cost in costs), f"{costs[-1] / costs[0]:,.2f}x"])
    last = f"{windows[-1]:,} / {windows[0]:,}"
    return markdown(["µs per step and layer, window", *(f"{w:,}" for w in windows), last], lines)


if __name__ == "__main__":
    main()
