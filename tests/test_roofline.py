"""The roofline's bytes against sums written out by hand; its bandwidth against arithmetic.

Hand-written sums name every weight, so that one counted twice, or left out, is seen; the measured
bandwidth is only held to what no memory can be.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB_SIZE, random_ids, tiny_model
from torch import nn

from streamchat import CacheConfig, SinkCache
from streamchat.bench import roofline
from streamchat.bench.roofline import bytes_per_step, read_bandwidth
from streamchat.model.prepare import forward

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 2, 8
LAYER_FLOATS = (
    HIDDEN * HEADS * HEAD_DIM * 2  # queries and output
    + HIDDEN * KV_HEADS * HEAD_DIM * 2  # keys and values
    + HIDDEN * INNER * 3  # gate, up and down
    + HIDDEN * 2  # two norms
)
INV_FREQ_FLOATS = HEAD_DIM // 2 * 2  # transformers keeps the frequencies twice
TABLE_FLOATS = VOCAB_SIZE * HIDDEN
KV_FLOATS_PER_TOKEN = 2 * KV_HEADS * HEAD_DIM  # in each layer


def cache_with(model, num_tokens, batch_size=1):
    cache = SinkCache.for_model(model, CacheConfig(window_size=12), batch_size=batch_size)
    if num_tokens:
        forward(model, random_ids(num_tokens, batch_size=batch_size), cache)
    return cache


@pytest.mark.parametrize(("num_tokens", "num_held"), [(0, 0), (5, 5), (40, 16)])
def test_a_step_reads_each_weight_once_and_what_is_held(num_tokens, num_held):
    """Untied: all of the head, one entry of the embedding table, and the tokens held now."""
    model = tiny_model(num_layers=2)
    weights = 2 * LAYER_FLOATS + HIDDEN + INV_FREQ_FLOATS + TABLE_FLOATS + HIDDEN
    expected = 4 * (weights + num_held * 2 * KV_FLOATS_PER_TOKEN)
    assert bytes_per_step(model, cache_with(model, num_tokens)) == expected


def test_a_table_that_is_the_head_as_well_counts_once_and_whole():
    """Tied: the head reads all of the table, so its one entry is not counted beside it."""
    model = tiny_model(num_layers=1, tie_word_embeddings=True)
    expected = 4 * (LAYER_FLOATS + HIDDEN + INV_FREQ_FLOATS + TABLE_FLOATS)
    assert bytes_per_step(model, cache_with(model, 0)) == expected


def test_rows_share_the_weights_and_have_their_own_entries_and_keys():
    """A second and a third row add an entry of the table each, and their keys and values."""
    model = tiny_model(num_layers=1)
    one, three = (bytes_per_step(model, cache_with(model, 40, rows)) for rows in (1, 3))
    assert three - one == 2 * 4 * (HIDDEN + 16 * KV_FLOATS_PER_TOKEN)


def test_weights_count_as_they_are_stored():
    """An 8-bit weight in a buffer counts a byte a number, and what it replaced no more."""
    model = tiny_model(num_layers=1)
    before = bytes_per_step(model, cache_with(model, 0))
    down = model.model.layers[0].mlp.down_proj
    packed = nn.Module()
    packed.register_buffer("weight", down.weight.detach().to(torch.int8))
    model.model.layers[0].mlp.down_proj = packed
    assert before - bytes_per_step(model, cache_with(model, 0)) == 3 * HIDDEN * INNER


def test_keys_count_as_the_cache_stores_them():
    """Weights and cache in bfloat16 are half the bytes; the frequencies stay in float32."""
    model = tiny_model(num_layers=1, tie_word_embeddings=True).to(torch.bfloat16)
    model.streamchat_binding.geometry = SinkCache.for_model(model).geometry.__class__(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        inv_freq=model.streamchat_binding.geometry.inv_freq,
        dtype=torch.bfloat16,
    )
    inv_freq = sum(b.nbytes for b in model.buffers())
    expected = 2 * (LAYER_FLOATS + HIDDEN + TABLE_FLOATS + 16 * KV_FLOATS_PER_TOKEN) + inv_freq
    assert bytes_per_step(model, cache_with(model, 40)) == expected


def test_bandwidth_is_bytes_over_the_best_time(monkeypatch):
    """The array's bytes over the shortest of all timings, whichever kind of reading gave it."""
    timings = iter([0.5, 0.25, 0.4] * 99)
    monkeypatch.setattr(roofline, "CPU_ARRAY_BYTES", 1 << 21)
    monkeypatch.setattr(roofline, "_seconds", lambda read, device: next(timings))
    assert read_bandwidth("cpu") == (1 << 21) / 0.25


def test_the_array_is_read_from_memory():
    """The real measurement: a plausible number, from an array far above a last-level cache."""
    assert roofline.CPU_ARRAY_BYTES >= 1 << 28
    assert 1e8 < read_bandwidth() < 1e13


def test_the_array_leaves_room_where_memory_is_short(monkeypatch):
    """A quarter of what is free at most, and never less than can be timed."""
    for free, expected in [(1 << 40, 1 << 29), (1 << 28, 1 << 26), (0, 1 << 20)]:
        memory = SimpleNamespace(available=free)
        monkeypatch.setattr(roofline.psutil, "virtual_memory", lambda memory=memory: memory)
        assert roofline._array_bytes(torch.device("cpu")) == expected


@pytest.mark.gpu
def test_a_gpu_reads_faster_than_any_cpu():
    """Device memory, not what crosses the bus; and nothing stays allocated."""
    assert 1e11 < read_bandwidth("cuda") < 1e14
    assert torch.cuda.memory_reserved() < roofline.CPU_ARRAY_BYTES
