"""What is special about Llama 4: chunks, layers without RoPE, and queries that grow in these.

Oracle A of `oracles.py` for one layer of either kind; the family's row is in the matrix as well.
"""

import pytest
import torch
from conftest import random_ids
from families import family_config
from oracles import assert_logits_equal, one_layer_oracle
from transformers import AutoModelForCausalLM

from streamchat import CacheConfig, SinkCache, UnsupportedModelError, prepare
from streamchat.model.compat import cache_argument
from streamchat.model.families import check_config, check_fits, describe_positions, trained_length
from streamchat.model.prepare import forward
from streamchat.model.selfcheck import self_check

LENGTH, WINDOW = 60, 11
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 16

# Fields of a model with one layer.
LAYERS = {
    "rope": {"no_rope_layers": [1]},
    "rope without norm": {"no_rope_layers": [1], "use_qk_norm": False},
    "rope scaled as in Scout": {"no_rope_layers": [1], "rope_parameters": LLAMA3},
    "rope by yarn": {"no_rope_layers": [1], "rope_parameters": YARN, "use_qk_norm": False},
    "rope by yarn with norm": {"no_rope_layers": [1], "rope_parameters": YARN},
    "no rope": {"no_rope_layers": [0]},
    "no rope, no growth": {"no_rope_layers": [0], "attn_temperature_tuning": False},
}


def config_with(num_layers=1, **fields):
    """The family's tiny configuration, some of its fields set anew."""
    config = family_config("llama4_text", num_layers=num_layers)
    kept = config.to_dict()
    del kept["layer_types"]
    return type(config)(**{**kept, **fields})


def model_with(num_layers=1, **fields):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_with(num_layers, **fields)).eval()


def stock_logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sink_size", [0, 4])
@pytest.mark.parametrize("size", [1, 7, 25])
def test_a_layer_of_either_kind_is_a_pass_over_what_is_held(name, sink_size, size):
    """Oracle A: rotated in pairs and normalized, or grown by the place among what is held."""
    model = prepare(model_with(**LAYERS[name]))
    ids = random_ids(LENGTH)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=sink_size, window_size=WINDOW))
    for chunk in ids.split(size, dim=1):
        logits = forward(model, chunk, cache)
    expected = one_layer_oracle(model, ids[0].tolist(), sink_size, WINDOW)
    assert_logits_equal(logits[0, -1], expected)


def test_oracle_a_would_see_queries_that_do_not_grow():
    """The check above has teeth: without the growth a logit moves by far more than is allowed."""
    ids = random_ids(15)
    grown = stock_logits(model_with(**LAYERS["no rope"]), ids)[0, -1]
    not_grown = stock_logits(model_with(**LAYERS["no rope, no growth"]), ids)[0, -1]
    assert float((grown - not_grown).abs().max()) > 1e-3 * float(grown.abs().max())


def test_a_prepared_model_grows_its_own_queries_with_other_caches():
    """In between steps of ours, and after one that an exception has ended."""
    stock, model = model_with(2), prepare(model_with(2))
    ids = random_ids(20)
    expected = stock_logits(stock, ids)
    assert torch.equal(stock_logits(model, ids), expected)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=WINDOW))
    forward(model, ids, cache)
    assert torch.equal(stock_logits(model, ids), expected)

    def broken(*_args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        forward(model, ids, cache)
    hook.remove()
    assert torch.equal(stock_logits(model, ids), expected)
    own = stock.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(
        model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None), own
    )


def test_generate_with_the_cache_is_stock_generate_before_any_eviction():
    """Oracle C, through transformers' own loop."""
    stock, model = model_with(2), prepare(model_with(2))
    ids = random_ids(6)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    cache = SinkCache.for_model(model, CacheConfig(sink_size=2, window_size=14))
    argument = {cache_argument(type(model).forward): cache}
    assert torch.equal(model.generate(ids, **argument, **options), stock.generate(ids, **options))


# Chunks


def test_a_cache_larger_than_a_chunk_is_refused_with_the_largest_window():
    """S + W may be the chunk; one more, and a query would see what its chunk has no more."""
    config = config_with(2)
    check_config(config)
    assert trained_length(config) == 64
    check_fits(config, CacheConfig(sink_size=4, window_size=60))
    with pytest.raises(UnsupportedModelError, match=r"above the 64 .*largest --window is 60$") as e:
        check_fits(config, CacheConfig(sink_size=4, window_size=61))
    assert e.value.exit_code == 3


def test_a_chunk_that_no_layer_has_bounds_nothing():
    """Where all layers see all tokens, the trained length is what the configuration says."""
    config = config_with(2, layer_types=["full_attention"] * 2)
    assert trained_length(config) == 512
    assert "chunks" not in describe_positions(config)


def test_a_cache_as_large_as_a_chunk_is_one_chunk_however_far_the_stream_is():
    """Oracle A at the limit, where the stream has left its first chunk long ago."""
    model = prepare(model_with(no_rope_layers=[1], attention_chunk_size=16))
    ids = random_ids(90)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=12))
    for chunk in ids.split(25, dim=1):
        logits = forward(model, chunk, cache)
    assert_logits_equal(logits[0, -1], one_layer_oracle(model, ids[0].tolist(), 4, 12))


def test_the_self_check_asks_within_one_chunk():
    """A chunk shorter than its usual prompt is no fault of ours."""
    self_check(prepare(model_with(2, attention_chunk_size=8)))


def test_the_description_names_chunks_and_layers_without_rope():
    """What `info` says."""
    words = describe_positions(config_with(2))
    assert "RoPE" in words
    assert "in pairs, none in 1 of 2 layers, chunks of 64 in 1 of 2 layers; " in words
