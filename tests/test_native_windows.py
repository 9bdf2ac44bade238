"""Models in which some layers have a native window: what each kind of layer holds.

The native window is 8. Below S + W it stays as trained, the newest 8 tokens and no sinks; from
S + W on such a layer is bounded like any other. The oracle is the slow stream of `oracles.py`.
"""

import pytest
import torch
from conftest import random_ids, tiny_model
from families import NATIVE_WINDOW, family_model
from oracles import SlowCache, assert_logits_equal, one_layer_oracle

from streamchat import CacheConfig, SinkCache, StateError, prepare
from streamchat.model.prepare import forward

# Native window below W, between W and S + W, equal to S + W, above it, and one token each.
SIZES = [(4, 32), (4, 28), (4, 8), (0, 9), (4, 6), (4, 4), (0, 8), (2, 3), (0, 4), (0, 1), (7, 1)]
TOLERANCE = 3e-5


def prepared(name="gemma3_text"):
    return prepare(family_model(name))


def expected_after_each(model, ids, sink_size, window_size):
    slow = SlowCache(model, sink_size, window_size)
    return torch.cat([forward(model, token, slow)[0] for token in ids.split(1, dim=1)])


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "cohere2"])
@pytest.mark.parametrize(("sink_size", "window_size"), SIZES)
@pytest.mark.parametrize("cuts", [(1,) * 60, (60,), (3, 1, 20, 1, 1, 7, 27)], ids=str)
def test_every_size_and_cut(name, sink_size, window_size, cuts):
    """Token by token, in one chunk, and mixed: the logits are the slow stream's."""
    model, ids = prepared(name), random_ids(60)
    expected = expected_after_each(model, ids, sink_size, window_size)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=sink_size, window_size=window_size))
    for piece in ids.split(cuts, dim=1):
        got = forward(model, piece, cache)[0, -1]
        assert_logits_equal(got, expected[cache.num_seen - 1], TOLERANCE)


@pytest.mark.parametrize(("sink_size", "window_size"), [(4, 28), (4, 6), (4, 4)])
def test_steps_can_be_taken_back_forked_and_restored(sink_size, window_size):
    """Past the window of both kinds of layer, what follows is as though nothing had been."""
    model, ids = prepared(), random_ids(70)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=sink_size, window_size=window_size))
    cache.set_undo_depth(12)
    forward(model, ids[:, :50], cache)
    snapshot, fork = cache.snapshot(), cache.fork()
    expected = [forward(model, token, fork) for token in ids[:, 50:].split(1, dim=1)]
    for token in random_ids(12, seed=5).split(1, dim=1):
        forward(model, token, cache)
    cache.rewind(12)
    for token, logits in zip(ids[:, 50:].split(1, dim=1), expected, strict=True):
        assert torch.equal(forward(model, token, cache), logits)
    cache.restore(snapshot)
    assert_logits_equal(forward(model, ids[:, 50:], cache), expected[-1], TOLERANCE)


@pytest.mark.parametrize("cuts", [(1,) * 60, (60,), (3, 1, 20, 1, 1, 7, 27)], ids=str)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_window_of_the_native_size_is_the_models_own(num_layers, cuts):
    """The first Mistral's kind, where every layer has a window of 8: no sinks and W = 8.

    The oracle is the stock model, which hides older tokens itself, in every layer.
    """
    model = tiny_model("mistral", num_layers=num_layers, sliding_window=NATIVE_WINDOW)
    ids = random_ids(60)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0]
    cache = SinkCache.for_model(model, CacheConfig(sink_size=0, window_size=NATIVE_WINDOW))
    for piece in ids.split(cuts, dim=1):
        got = forward(model, piece, cache)[0, -1]
        assert_logits_equal(got, expected[cache.num_seen - 1], TOLERANCE)


@pytest.mark.parametrize("chunk_size", [1, 7, 60])
def test_sinks_within_a_native_window_of_every_layer(chunk_size):
    """S + W = 8 = the window: four sinks and the newest four, as a stock pass over these sees."""
    model = tiny_model("mistral", sliding_window=NATIVE_WINDOW)
    ids = random_ids(60)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=4))
    for piece in ids.split(chunk_size, dim=1):
        got = forward(model, piece, cache)[0, -1]
    assert_logits_equal(got, one_layer_oracle(model, ids[0].tolist(), 4, 4))


def test_a_local_layer_holds_what_it_was_trained_to_see():
    """Its window ends where the native one does; a full layer's goes on."""
    model = prepared()
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=20))
    forward(model, random_ids(40), cache)
    local, full = 0, 1
    cache.window_key(local, 40 - NATIVE_WINDOW)
    cache.window_key(full, 20)
    with pytest.raises(StateError, match="not in the window"):
        cache.window_key(local, 40 - NATIVE_WINDOW - 1)
