"""Prefill and decode rates with the cache full, at several depths of the stream.

How it measures: random ids; one warm-up that is thrown away; prefill and decode apart; decode one
token after the other, end tokens ignored; every figure taken with the cache full. Depth d x means
that d times the cache size has been fed. On CUDA each timing waits for the device. A decode step is
also set against the roofline: the time that reading weights and cache from memory takes at least.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from streamchat.bench.roofline import bytes_per_step
from streamchat.config import CacheConfig, Policy
from streamchat.engine.stream import CHUNK_SIZE
from streamchat.errors import ConfigError
from streamchat.model.dispatch import home_of
from streamchat.model.load import LoadedModel
from streamchat.model.policies import StreamCache, forward, make_cache
from streamchat.model.recompute import RecomputeCache

PROMPT_TOKENS = 128
"""Length of the prompt whose time to first token is measured."""

WARM_UP_TOKENS = 8
MEGA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What to measure.

    Attributes:
        cache: Policy and sizes.
        budget: Tokens that depths are multiples of: the size of a bounded cache.
        depths: Multiples of the budget, ascending.
        batch_size: Rows.
        prefill_tokens: Tokens of one prefill measurement.
        decode_tokens: Tokens of one decode measurement.
        repeats: Measurements of each kind at each depth.
        seed: Of the random ids.

    Raises:
        ConfigError: If a number is below 1.
    """

    cache: CacheConfig
    budget: int
    depths: Sequence[int]
    batch_size: int
    prefill_tokens: int
    decode_tokens: int
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        numbers = {
            "batch": self.batch_size,
            "prefill": self.prefill_tokens,
            "tokens": self.decode_tokens,
            "repeat": self.repeats,
            "depth": min(self.depths, default=0),
        }
        for name, value in numbers.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @property
    def headroom(self) -> int:
        """Tokens that are fed to a copy: to warm up, or to measure at one depth."""
        measured = self.prefill_tokens + PROMPT_TOKENS + self.decode_tokens + 1
        return max(CHUNK_SIZE + WARM_UP_TOKENS, self.repeats * measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """The figures at one depth. Rates count the tokens of all rows.

    Attributes:
        policy: Which tokens stay.
        depth: Multiple of the budget.
        position: Stream position where the measurements began.
        batch_size: Rows.
        cache_size: Tokens held.
        prefill_tokens: Prefilled in each measurement, per row.
        prefill_rate: Tokens per second, mean over the repeats.
        prefill_rate_sd: Standard deviation of it.
        decode_tokens: Decoded in each measurement, per row.
        decode_rate: Tokens per second, mean over the repeats.
        decode_rate_sd: Standard deviation of it.
        step_ms_p50: Median time of a decode step, over all repeats.
        step_ms_p99: 99th percentile.
        step_ms_max: Longest.
        first_token_ms: Median time from a prompt of `PROMPT_TOKENS` tokens to its first token.
        peak_megabytes: Highest memory seen: allocated on the device, or resident on a CPU.
        cache_megabytes: Allocated by the cache.
        step_megabytes: Weights and cache that a decode step must read.
        roofline_share: Time that reading them takes at least, over the median step; None if the
            bandwidth is not known, or the policy computes more than a step.
    """

    policy: Policy
    depth: int
    position: int
    batch_size: int
    cache_size: int
    prefill_tokens: int
    prefill_rate: float
    prefill_rate_sd: float
    decode_tokens: int
    decode_rate: float
    decode_rate_sd: float
    step_ms_p50: float
    step_ms_p99: float
    step_ms_max: float
    first_token_ms: float
    peak_megabytes: float
    cache_megabytes: float
    step_megabytes: float
    roofline_share: float | None


def measure(
    loaded: LoadedModel,
    config: BenchConfig,
    progress: Callable[[str], None],
    bandwidth: float | None = None,
) -> Iterator[BenchRow]:
    """Measure at each depth in turn, in one stream; a dense cache ends where it is full.

    Args:
        loaded: The model.
        config: What to measure.
        progress: Called with a few words as the work goes on.
        bandwidth: Bytes per second that the device reads (`roofline.read_bandwidth`), if known.

    Yields:
        One row for each depth.
    """
    room = config.cache.cache_size if config.cache.policy == "dense" else math.inf
    depths = [d for d in sorted(config.depths) if d * config.budget + config.headroom <= room]
    if not depths:
        return
    bench = _Bench(loaded.model, config)
    progress("warming up")
    bench.warm_up()
    for depth in depths:
        target = depth * config.budget
        while bench.cache.num_seen < target:
            progress(f"depth {depth}x: fed {bench.cache.num_seen:,} of {target:,} tokens")
            bench.feed(min(CHUNK_SIZE, target - bench.cache.num_seen))
        # On a copy: what is measured must not carry the stream past the next depth.
        with bench.on_a_copy():
            row = _row(bench, depth, progress, bandwidth)
        yield row


def _row(
    bench: "_Bench", depth: int, progress: Callable[[str], None], bandwidth: float | None
) -> BenchRow:
    config = bench.config
    position = bench.cache.num_seen
    prefills, decodes, firsts, steps = [], [], [], []
    for repeat in range(1, config.repeats + 1):
        progress(f"depth {depth}x: measuring {repeat} of {config.repeats}")
        prefills.append(config.batch_size * config.prefill_tokens / bench.prefill())
        firsts.append(bench.first_token())
        own = bench.decode()
        decodes.append(config.batch_size * len(own) / sum(own))
        steps += own
    cache = bench.cache
    step_bytes = 0 if isinstance(cache, RecomputeCache) else bytes_per_step(bench.model, cache)
    median = percentile(steps, 50)
    return BenchRow(
        policy=config.cache.policy,
        depth=depth,
        position=position,
        batch_size=config.batch_size,
        cache_size=bench.cache.num_held,
        prefill_tokens=config.prefill_tokens,
        prefill_rate=statistics.fmean(prefills),
        prefill_rate_sd=_deviation(prefills),
        decode_tokens=config.decode_tokens,
        decode_rate=statistics.fmean(decodes),
        decode_rate_sd=_deviation(decodes),
        step_ms_p50=1e3 * median,
        step_ms_p99=1e3 * percentile(steps, 99),
        step_ms_max=1e3 * max(steps),
        first_token_ms=1e3 * statistics.median(firsts),
        peak_megabytes=bench.peak_bytes / MEGA,
        cache_megabytes=bench.cache.num_bytes / MEGA,
        step_megabytes=step_bytes / MEGA,
        roofline_share=step_bytes / bandwidth / median if bandwidth and step_bytes else None,
    )


class _Bench:
    """A stream of random ids and a stopwatch."""

    def __init__(self, model: Any, config: BenchConfig) -> None:
        self.model, self.config, self.device = model, config, home_of(model)
        self.cache: StreamCache = make_cache(model, config.cache, batch_size=config.batch_size)
        self._copy = self.cache.fork()
        self.peak_bytes = 0.0
        self._generator = torch.Generator().manual_seed(config.seed)
        self._process = psutil.Process()

    def warm_up(self) -> None:
        """Feed a little through a cache that is thrown away."""
        with self.on_a_copy():
            self.feed(CHUNK_SIZE)
            for _ in range(WARM_UP_TOKENS):
                self.feed(1)
        self.peak_bytes = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def on_a_copy(self) -> Iterator[None]:
        """Work on a copy of the cache for a while: always the same, so that memory stays put."""
        self._copy.restore(self.cache.snapshot())
        self.cache, self._copy = self._copy, self.cache
        try:
            yield
        finally:
            self.cache, self._copy = self._copy, self.cache

    def feed(self, num_tokens: int) -> Tensor:
        """Feed one chunk of random ids; the logits after it."""
        shape = (self.config.batch_size, num_tokens)
        ids = torch.randint(self.model.config.vocab_size, shape, generator=self._generator)
        logits = forward(self.model, ids.to(self.device), self.cache)
        self._note_memory()
        return logits

    def prefill(self) -> float:
        """Seconds for one prefill measurement."""
        started = self._now()
        left = self.config.prefill_tokens
        while left:
            size = min(left, CHUNK_SIZE)
            self.feed(size)
            left -= size
        return self._now() - started

    def first_token(self) -> float:
        """Seconds from a prompt to the choice of its first token."""
        started = self._now()
        int(self.feed(PROMPT_TOKENS)[0, -1].argmax())
        return self._now() - started

    def decode(self) -> list[float]:
        """Seconds of each step of one decode measurement; each feeds the most likely token."""
        ids = self.feed(1)[:, -1:].argmax(dim=-1)
        seconds = []
        for _ in range(self.config.decode_tokens):
            started = self._now()
            ids = forward(self.model, ids, self.cache)[:, -1:].argmax(dim=-1)
            seconds.append(self._now() - started)
        self._note_memory()
        return seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _note_memory(self) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = float(torch.cuda.max_memory_allocated())
        else:
            self.peak_bytes = max(self.peak_bytes, float(self._process.memory_info().rss))


def verdict(rows: Sequence[BenchRow]) -> str:
    """What the rows of one policy say, in a sentence."""
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return (
            f"decode {first.decode_rate:.1f} tok/s with {first.cache_size:,} "
            "tokens held; one depth only: add another with --depth to see whether speed and "
            "memory stay flat"
        )
    speed = last.decode_rate / first.decode_rate
    growth = last.peak_megabytes - first.peak_megabytes
    return (
        f"keeps {speed:.0%} of its {first.depth}x decode speed at {last.depth}x; "
        f"peak memory {growth:+.0f} MB"
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * percent // 100) - 1)]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
