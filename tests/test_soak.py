"""A stream of 200,000 tokens: memory, cache and step time stay where they were.

Minutes long, so marked `slow`. What it measured is printed.
"""

import gc
import statistics
import time

import psutil
import pytest
import torch
from conftest import tiny_model

from streamchat import CacheConfig, Stream
from streamchat.model.load import LoadedModel, Source

NUM_TOKENS = 200_000
BLOCK = 10_000
"""Tokens between two looks at the memory; the first block is warm-up."""

ROUND = (1,) * 150 + (7, 256, 1, 2, 84)
"""How the stream is cut, over and over: 500 tokens, 151 of them alone."""

LONGEST_RATIO = 1.1
"""How much longer a late step may take than an early one."""


def full_stream(loaded, window_size):
    """A stream whose cache has just become full."""
    stream = Stream(loaded, CacheConfig(sink_size=4, window_size=window_size))
    stream.feed(torch.randint(3, 101, (4 + window_size,)).tolist())
    return stream


def seconds_of(stream, token):
    started = time.perf_counter()
    stream.feed([token])
    return time.perf_counter() - started


@pytest.mark.slow
@pytest.mark.parametrize("window_size", [124, 1020])
def test_a_long_stream_takes_what_a_short_one_takes(window_size, capsys):
    """Over 200,000 tokens: less than 1 MB of growth per 10,000, the same bytes, the same pace.

    Every logit is finite. In the last tenth, each step of the long stream is timed beside one of a
    stream whose cache has just become full; the medians are within 10 %. Side by side, because the
    speed of a shared machine changes more than that within minutes.
    """
    model = tiny_model(max_position_embeddings=2048)
    loaded = LoadedModel(Source("tiny", "tiny"), model, None, frozenset())
    stream = Stream(loaded, CacheConfig(sink_size=4, window_size=window_size))
    generator = torch.Generator().manual_seed(0)
    process = psutil.Process()
    cache_bytes, rss, open_files = stream.cache.num_bytes, [], []
    steps, beside, young = [], [], None
    assert sum(ROUND) == 500
    while stream.position < NUM_TOKENS:
        steps.append([])
        if stream.position >= 0.9 * NUM_TOKENS and young is None:
            young = full_stream(loaded, window_size)
        for _ in range(BLOCK // 500):
            ids = torch.randint(3, 101, (500,), generator=generator).tolist()
            for size in ROUND:
                if size == 1:
                    steps[-1].append(seconds_of(stream, ids[0]))
                    if young is not None:
                        beside.append(seconds_of(young, ids[0]))
                else:
                    stream.feed(ids[:size])
                ids = ids[size:]
                assert bool(stream.logits.isfinite().all())
        gc.collect()
        rss.append(process.memory_info().rss / 1e6)
        open_files.append(process.num_fds() if hasattr(process, "num_fds") else 0)
        assert stream.cache.num_bytes == cache_bytes
        assert stream.cache.num_held == 4 + window_size
        assert not stream.logits.requires_grad
        assert len(stream.recent_ids) <= BLOCK
    assert stream.position == NUM_TOKENS
    growth = statistics.linear_regression(range(len(rss) - 1), rss[1:]).slope
    tenths = [1e3 * statistics.median(steps[n] + steps[n + 1]) for n in range(0, len(steps), 2)]
    late, early = tenths[-1], 1e3 * statistics.median(beside)
    with capsys.disabled():
        print(
            f"\n4 + {window_size}: RSS {rss[1]:.1f} to {rss[-1]:.1f} MB, slope {growth:+.3f} MB "
            f"per 10,000 tokens; cache {cache_bytes:,} bytes; last tenth {late:.3f} ms a token, "
            f"beside a stream just full {early:.3f} (ratio {late / early:.3f}); "
            f"all tenths {' '.join(f'{tenth:.3f}' for tenth in tenths)}"
        )
    assert growth < 1
    assert open_files[-1] == open_files[1]
    assert late <= LONGEST_RATIO * early
