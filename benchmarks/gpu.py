"""Everything that needs a GPU, in one run of six minutes at most: `python benchmarks/gpu.py`.

Random weights of the shape of Llama 3.1 8B in bfloat16, made on the device, and the built-in model
where it is there. The tokens are whatever comes out. A decode step does the same work whatever the
cache holds, so a cache is declared full instead of being filled; what it holds then is zeros.

Measured: read bandwidth; ms per token at several windows and numbers of rows, replayed and eager,
and its share of what the bandwidth allows; prefill; memory after many steps; how far replayed and
eager logits are apart; and decoding against computing the whole window anew for each token, which
the paper puts at 22.2 times as long for 4,096 tokens (Xiao et al. 2023, section 4.5).

Writes benchmarks/results/gpu.csv, one figure a row. A measurement is skipped where the time that is
left, or the device's memory, does not suffice for it.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from common import RESULTS, SEED, environment, say, write_csv
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from streamchat import CacheConfig, SinkCache, StreamchatError, load
from streamchat.model.decode import why_not_captured
from streamchat.model.prepare import forward, prepare

BUDGET_SECONDS = 330
"""After that nothing new is begun: six minutes, less the longest measurement."""

WINDOWS = (1020, 4092, 16380)
BATCH_SIZES = (1, 8, 32)
SINK_SIZE = 4
CHUNK_SIZES = (256, 2048)
DECODE_STEPS = 40
MANY_STEPS = 1000
BANDWIDTH_BYTES = 4 * 2**30
GIGA = 1e9


@dataclass(slots=True)
class Report:
    """The figures so far, and how much time is left for more."""

    started: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, object]] = field(default_factory=list)
    where: dict[str, object] = field(default_factory=dict)

    @property
    def has_time(self) -> bool:
        """Whether another measurement may begin."""
        return time.perf_counter() - self.started < BUDGET_SECONDS

    def add(
        self,
        model: str,
        figure: str,
        value: float,
        unit: str,
        *,
        window_size: int = 0,
        batch_size: int = 0,
    ) -> None:
        """Note a figure, and tell it."""
        facts = {"model": model, "figure": figure}
        sizes = {"window_size": window_size, "batch_size": batch_size}
        self.rows.append({**facts, **sizes, "value": value, "unit": unit, **self.where})
        say(f"{model}: {figure}, window {window_size}, rows {batch_size}: {value:.4g} {unit}")

    def measure(self, what: str, work: Callable[[], object]) -> None:
        """Take one measurement; one that fails costs the others nothing."""
        if not self.has_time:
            say(f"{what}: skipped, no time left")
            return
        try:
            work()
        except (RuntimeError, StreamchatError) as error:  # out of memory is a RuntimeError
            say(f"{what}: failed: {(str(error).splitlines() or [type(error).__name__])[0]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def seconds_each(work: Callable[[], object], repeats: int, *, warm_ups: int = 3) -> float:
    """Seconds of one call, the mean of many in a row; the device has finished them all."""
    for _ in range(warm_ups):
        work()
    _wait()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait()
    return (time.perf_counter() - started) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_bandwidth(device: torch.device, num_bytes: int = BANDWIDTH_BYTES) -> float:
    """Bytes read per second: the better of a sum and of a copy, whose writing counts too."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    of_sum = source.nbytes / seconds_each(source.sum, 10)
    of_copy = 2 * source.nbytes / seconds_each(lambda: target.copy_(source), 10)
    return max(of_sum, of_copy)


def step_bytes(model: nn.Module, cache: SinkCache) -> int:
    """Bytes that one decode step must read: all weights once, and all keys and values held.

    An embedding table of its own is left out, as only a row of it is read.
    """
    weights = sum(p.nbytes for p in model.parameters())
    table = model.get_input_embeddings().weight
    if table is not model.get_output_embeddings().weight:
        weights -= table.nbytes
    return weights + cache.num_bytes


def full_cache(model: nn.Module, window_size: int, batch_size: int) -> SinkCache:
    """A cache that counts as full: zeros for its tokens."""
    config = CacheConfig(sink_size=SINK_SIZE, window_size=window_size)
    cache = SinkCache.for_model(model, config, batch_size=batch_size)
    cache.num_seen = 2 * config.cache_size
    return cache


def decode_seconds(model: nn.Module, cache: SinkCache, steps: int) -> float:
    """Seconds of a decode step that feeds the most likely token, which never leaves the device."""
    ids = torch.zeros((cache.batch_size, 1), dtype=torch.int64, device=model.device)

    def step() -> None:
        ids.copy_(forward(model, ids, cache)[:, -1:].argmax(dim=-1))

    return seconds_each(step, steps)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Decode by the model's own forward pass for a while."""
    binding = model.streamchat_binding
    step, binding.decode_step = binding.decode_step, None
    try:
        yield
    finally:
        binding.decode_step = step


def prefill_rate(model: nn.Module, window_size: int, chunk_size: int) -> float:
    """Tokens fed per second in chunks, one row, the cache full."""
    cache = full_cache(model, window_size, 1)
    ids = torch.zeros((1, chunk_size), dtype=torch.int64, device=model.device)
    return chunk_size / seconds_each(lambda: forward(model, ids, cache), 8, warm_ups=2)


def recompute_seconds(model: nn.Module, num_tokens: int) -> float:
    """Seconds of a token when the whole window is computed anew for it, by the model's own path."""
    ids = torch.zeros((1, num_tokens), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        return seconds_each(lambda: model(ids, use_cache=False, logits_to_keep=1), 5, warm_ups=2)


def difference(model: nn.Module, window_size: int, num_tokens: int) -> float:
    """How far replayed and eager logits are apart at most, as a share of the largest logit."""
    config = CacheConfig(sink_size=SINK_SIZE, window_size=window_size)
    caches = [SinkCache.for_model(model, config) for _ in range(2)]
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(model.config.vocab_size, (1, num_tokens), generator=generator)
    worst = 0.0
    for token in ids.to(model.device).split(1, dim=1):
        replayed = forward(model, token, caches[0]).float()
        with eager(model):
            expected = forward(model, token, caches[1]).float()
        worst = max(worst, float((replayed - expected).abs().max() / expected.abs().max()))
    return worst


def memory_growth(model: nn.Module, window_size: int, steps: int) -> float:
    """Bytes by which allocated memory grows in many replayed steps."""
    cache = full_cache(model, window_size, 1)
    decode_seconds(model, cache, 10)
    before = torch.cuda.memory_allocated()
    decode_seconds(model, cache, steps)
    return float(torch.cuda.memory_allocated() - before)


def has_room(model: nn.Module, window_size: int, batch_size: int) -> bool:
    """Whether the device has memory for two caches of these sizes: one moves into the other."""
    token = model.streamchat_binding.geometry.bytes_per_token()
    needed = 2 * batch_size * (window_size + SINK_SIZE) * token
    return needed < 0.9 * torch.cuda.mem_get_info()[0]


def measure_decode(
    report: Report, name: str, model: nn.Module, bandwidth: float, window_size: int, batch_size: int
) -> None:
    """Note time and share of the limit of replayed steps."""
    cache = full_cache(model, window_size, batch_size)
    taken = decode_seconds(model, cache, DECODE_STEPS)
    limit = step_bytes(model, cache) / bandwidth
    sizes = {"window_size": window_size, "batch_size": batch_size}
    report.add(name, "decode step", 1e3 * taken, "ms", **sizes)
    report.add(name, "decode rate", batch_size / taken, "tokens/s", **sizes)
    report.add(name, "share of the bandwidth limit", limit / taken, "1", **sizes)


def measure_eager(report: Report, name: str, model: nn.Module, window_size: int) -> None:
    """Note eager steps of one row beside replayed ones."""
    sizes = {"window_size": window_size, "batch_size": 1}
    with eager(model):
        taken = decode_seconds(model, full_cache(model, window_size, 1), DECODE_STEPS)
    replayed = decode_seconds(model, full_cache(model, window_size, 1), DECODE_STEPS)
    report.add(name, "eager decode step", 1e3 * taken, "ms", **sizes)
    report.add(name, "eager over replayed", taken / replayed, "1", **sizes)


def measure_recompute(report: Report, name: str, model: nn.Module, window_size: int) -> None:
    """Note how much longer than a decode step it takes to compute the window anew."""
    sizes = {"window_size": window_size, "batch_size": 1}
    anew = recompute_seconds(model, window_size + SINK_SIZE)
    step = decode_seconds(model, full_cache(model, window_size, 1), DECODE_STEPS)
    report.add(name, "window computed anew", 1e3 * anew, "ms", **sizes)
    report.add(name, "window computed anew over decode step", anew / step, "1", **sizes)


def measure_model(report: Report, name: str, model: nn.Module, bandwidth: float) -> None:
    """All figures of one model, the most important first."""
    report.measure(
        f"{name}: replayed against eager logits",
        lambda: report.add(
            name,
            "replayed and eager logits apart",
            difference(model, 60, 100),
            "of the largest",
            window_size=60,
            batch_size=1,
        ),
    )
    reason = why_not_captured(model, model.streamchat_binding.geometry)
    say(f"{name}: decode steps are {'replayed' if reason is None else f'eager: {reason}'}")

    def decode(window_size: int, batch_size: int) -> None:
        what = f"{name}: decode, window {window_size}, rows {batch_size}"
        if not has_room(model, window_size, batch_size):
            say(f"{what}: skipped, not enough memory")
            return
        report.measure(
            what,
            lambda: measure_decode(report, name, model, bandwidth, window_size, batch_size),
        )

    for window_size in WINDOWS:
        decode(window_size, 1)
    for window_size in WINDOWS[:2]:
        report.measure(
            f"{name}: eager, window {window_size}",
            lambda w=window_size: measure_eager(report, name, model, w),
        )
    report.measure(f"{name}: recompute", lambda: measure_recompute(report, name, model, WINDOWS[1]))
    for chunk_size in CHUNK_SIZES:
        report.measure(
            f"{name}: prefill, chunks of {chunk_size}",
            lambda c=chunk_size: report.add(
                name,
                f"prefill in chunks of {c}",
                prefill_rate(model, WINDOWS[0], c),
                "tokens/s",
                window_size=WINDOWS[0],
                batch_size=1,
            ),
        )
    for batch_size in BATCH_SIZES[1:]:
        for window_size in WINDOWS:
            decode(window_size, batch_size)
    report.measure(
        f"{name}: memory",
        lambda: report.add(
            name,
            f"memory growth in {MANY_STEPS} steps",
            memory_growth(model, WINDOWS[0], MANY_STEPS),
            "bytes",
            window_size=WINDOWS[0],
            batch_size=1,
        ),
    )


def llama_8b(device: torch.device) -> nn.Module:
    """Random weights in the shape of Llama 3.1 8B, bfloat16, made on the device."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    with device:
        return prepare(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())


def main() -> int:
    """Measure what there is time for."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    device, report = torch.device("cuda", 0), Report()
    report.where = environment(
        threads=torch.get_num_threads(), dtype="bfloat16", device=str(device)
    )
    bandwidth = read_bandwidth(device)
    report.add("", "read bandwidth", bandwidth / GIGA, "GB/s")
    try:
        measure_model(report, "Llama 3.1 8B, random", llama_8b(device), bandwidth)
        gc.collect()  # a prepared model is a cycle
        report.measure(
            "the built-in model",
            lambda: measure_model(
                report,
                "SmolLM2-135M-Instruct",
                load(device="cuda", dtype="bfloat16").model,
                bandwidth,
            ),
        )
    finally:
        write_csv(RESULTS / "gpu.csv", report.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
