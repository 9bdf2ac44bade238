"""Every supported family, at any cut of the stream: the README counts its families here.

Oracle A is a stock forward pass over the retained ids (one layer), B a slow stream that rotates
with the model's own functions and attends in float64 (two layers), C stock `generate` before any
eviction.
"""

import pytest
import torch
from conftest import random_ids
from families import ROWS, family_model, family_of
from oracles import SlowCache, assert_logits_equal, greedy_oracle, one_layer_oracle

from streamchat import CacheConfig, SinkCache, prepare
from streamchat.model.families import FAMILIES
from streamchat.model.prepare import forward
from streamchat.model.selfcheck import self_check

LENGTH, WINDOW = 60, 11
CUTS = {"1": 1, "7": 7, "past the window": 25}

every_family = pytest.mark.parametrize("name", ROWS)
any_sinks = pytest.mark.parametrize("sink_size", [0, 4])
any_cut = pytest.mark.parametrize("size", CUTS.values(), ids=CUTS)


def test_each_family_of_the_table_has_a_row():
    """Nothing is called supported that is not in the matrix."""
    assert {family_of(name) for name in ROWS} == set(FAMILIES)


def streamed(model, ids, sink_size, size):
    """Logits after the last token, fed in chunks of `size`."""
    cache = SinkCache.for_model(model, CacheConfig(sink_size=sink_size, window_size=WINDOW))
    for chunk in ids.split(size, dim=1):
        logits = forward(model, chunk, cache)
    return logits[0, -1]


@every_family
@any_sinks
@any_cut
def test_one_layer_is_a_pass_over_what_is_held(name, sink_size, size):
    """Oracle A, five windows into the stream."""
    model = prepare(family_model(name, num_layers=1))
    ids = random_ids(LENGTH)
    expected = one_layer_oracle(model, ids[0].tolist(), sink_size, WINDOW)
    assert_logits_equal(streamed(model, ids, sink_size, size), expected)


@every_family
@any_sinks
@any_cut
def test_two_layers_are_the_slow_stream(name, sink_size, size):
    """Oracle B: keys and values stay what they were when their token was fed."""
    model = prepare(family_model(name))
    ids = random_ids(LENGTH)
    slow = SlowCache(model, sink_size, WINDOW)
    for token in ids.split(1, dim=1):
        expected = forward(model, token, slow)[0, -1]
    assert_logits_equal(streamed(model, ids, sink_size, size), expected, 3e-5)


@every_family
def test_greedy_ids_before_any_eviction(name):
    """Oracle C: what stock `generate` says."""
    model = prepare(family_model(name))
    ids = random_ids(6)
    expected = greedy_oracle(model, ids, 8)[0].tolist()
    cache = SinkCache.for_model(model, CacheConfig(sink_size=2, window_size=14))
    got, token = [], forward(model, ids, cache)[:, -1:].argmax(-1)
    for _ in range(8):
        got.append(int(token))
        token = forward(model, token, cache)[:, -1:].argmax(-1)
    assert got == expected


@every_family
def test_bfloat16_differs_by_no_more_than_the_stock_cache_does(name):
    """Two cuts of a stream, against the stock cache's same two cuts before any eviction.

    Past the window there is no stock cache to ask; the noise of 16 bit is the same there.
    """
    model = prepare(family_model(name, dtype=torch.bfloat16))
    ids = random_ids(LENGTH)
    by_token, chunked = (streamed(model, ids, 4, size).float() for size in (1, 7))
    scale = float(by_token.abs().max())
    assert float((by_token - chunked).abs().max()) <= 0.1 * scale


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_self_check_accepts_it(name, dtype):
    """What runs at each load."""
    self_check(prepare(family_model(name, dtype=dtype)))
