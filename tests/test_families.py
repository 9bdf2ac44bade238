"""Which models are streamed and which are refused, from configurations alone; and scaled RoPE.

The oracle for scaled RoPE is A of `oracles.py`: a stock forward pass of a one-layer model over the
retained ids. It uses the model's own table on both sides, so it would miss one that transformers
itself makes wrongly.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import random_ids, tiny_model
from oracles import assert_logits_equal, one_layer_oracle, retained_ids

from streamchat import CacheConfig, ConfigError, SinkCache, UnsupportedModelError, prepare
from streamchat.model.families import (
    check_config,
    check_fits,
    describe_positions,
    geometry_from_config,
    geometry_of,
    native_window,
)
from streamchat.model.prepare import forward

MLA = "latent attention"
STATE = "state-space or linear-attention"
CONVOLUTION = "convolution layers"
LEARNED = "learned and absolute"
NOT_YET = "not supported yet"

# From each family's configuration class: the fields, and words of a reason that is true of it.
REFUSED = {
    "Mamba": ({}, STATE),
    "Mamba2": ({}, STATE),
    "Jamba": ({}, STATE),
    "Bamba": ({}, STATE),
    "FalconH1": ({}, STATE),
    "Qwen3Next": ({}, STATE),
    "NemotronH": ({}, STATE),
    "RecurrentGemma": ({}, STATE),
    "Rwkv": ({}, STATE),
    "xLSTM": ({}, STATE),
    "Lfm2": ({}, CONVOLUTION),
    "DeepseekV2": ({}, MLA),
    "DeepseekV3": ({}, MLA),
    "Llama4": ({}, r"multimodal.*text model alone \('llama4_text'\) is"),
    "Qwen2VL": (
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        "multimodal positions",
    ),
    "T5": ({}, "encoder-decoder"),
    "Whisper": ({}, "encoder-decoder"),
    "GPT2": ({}, r"learned and absolute \(n_positions is 1,024\)"),
    "OpenAIGPT": ({}, LEARNED),
    "GPTBigCode": ({}, LEARNED),
    "OPT": ({}, r"learned and absolute \(max_position_embeddings is 2,048\)"),
    "GPTNeo": ({}, LEARNED),
    "XGLM": ({}, "are absolute"),
    "CTRL": ({}, "are absolute"),
}

# With max_position_embeddings 64.
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
THETA = 10_000.0


def config_of(name, **fields):
    return getattr(transformers, f"{name}Config")(**fields)


def tiny_config(rope=None, **fields):
    """A Llama of tiny sizes, trained for 64 tokens."""
    fields = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": THETA, **(rope or {"rope_type": "default"})},
        **fields,
    }
    return config_of("Llama", **fields)


# Refused and accepted


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_streamed_is_refused_with_family_and_reason(name):
    """From the configuration alone, in one sentence that names the family and a true reason."""
    fields, reason = REFUSED[name]
    config = config_of(name, **fields)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_config(config)
    assert f"'{config.model_type}'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_rope_scaling_that_nobody_knows_is_refused():
    """By name, with what is supported instead."""
    config = tiny_config()
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModelError, match=r"'spiral' is not supported \(supported: def"):
        check_config(config)


def test_preparing_a_refused_model_is_refused_too():
    """`prepare` asks the same question, for those who load their own models."""
    config = config_of("GPT2", n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(UnsupportedModelError, match=LEARNED):
        prepare(transformers.GPT2LMHeadModel(config))


ACCEPTED = {
    "llama": config_of("Llama"),
    "qwen2": config_of("Qwen2"),
    "qwen3": config_of("Qwen3"),
    "mistral without window": config_of("Mistral", sliding_window=None),
    "qwen2 whose window is never used": config_of("Qwen2", sliding_window=8),
    "qwen2 with a window above its last layer": config_of(
        "Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=99
    ),
    "llama that turns a part of each head": tiny_config(
        {"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "dynamic": tiny_config(DYNAMIC),
    "longrope": tiny_config(LONGROPE),
    "linear": tiny_config(LINEAR),
    "llama3": tiny_config(LLAMA3),
    "yarn": tiny_config(YARN),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_models_of_the_llama_layout_are_accepted(name):
    """Llama, Qwen 2 and 3, Mistral without a window, and the known RoPE scalings."""
    check_config(ACCEPTED[name])
    assert native_window(ACCEPTED[name]) is None


# Sizes


def test_a_cache_above_the_trained_length_is_refused_with_the_largest_window():
    """S + W may be the trained length; one more is refused, and the message names the limit."""
    config = tiny_config()
    check_fits(config, CacheConfig(sink_size=4, window_size=60))
    with pytest.raises(UnsupportedModelError, match=r"largest --window is 60$") as caught:
        check_fits(config, CacheConfig(sink_size=4, window_size=61))
    assert "65" in str(caught.value)
    with pytest.raises(UnsupportedModelError, match=r"lower --sinks$"):
        check_fits(config, CacheConfig(sink_size=64, window_size=1))


def test_a_config_that_names_no_trained_length_bounds_nothing():
    """Without max_position_embeddings any window is taken."""
    check_fits(SimpleNamespace(model_type="llama"), CacheConfig(window_size=10**9))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sizes_from_the_configuration_are_those_of_the_loaded_model(family):
    """What `info` computes without weights is what a loaded model's cache takes."""
    model = tiny_model(family, num_layers=3, head_dim=16)
    planned = geometry_from_config(model.config, torch.float32)
    loaded = geometry_of(model)
    assert planned.bytes_per_token() == loaded.bytes_per_token() == 2 * 3 * 2 * 16 * 4
    cache = SinkCache.for_model(model, CacheConfig(sink_size=0, window_size=10))
    assert cache.num_bytes == 10 * planned.bytes_per_token()


def test_a_table_that_does_not_fit_the_head_is_an_error():
    """A RoPE table longer than half a head is named with both shapes."""
    model = tiny_model()
    model.base_model.rotary_emb.inv_freq = torch.ones(5)
    with pytest.raises(ConfigError, match=r"\(1 to 4,\).*\(5,\)"):
        geometry_of(model)


def test_a_native_window_in_all_layers_bounds_the_cache():
    """Mistral's kind: no token was ever seen further away, so S + W may reach it and no more."""
    config = config_of("Mistral", sliding_window=8)
    check_config(config)
    assert native_window(config) == 8
    check_fits(config, CacheConfig(sink_size=4, window_size=4))
    with pytest.raises(UnsupportedModelError, match=r"above the 8 tokens.*--window is 4$"):
        check_fits(config, CacheConfig(sink_size=4, window_size=5))


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
def test_the_description_names_theta_and_scaling(rope):
    """`info` says which base and which scaling a model has."""
    words = describe_positions(tiny_config(rope))
    assert "theta 10,000" in words
    assert f"scaling {rope['rope_type']}" in words
    assert "scaling" not in describe_positions(tiny_config())


# Scaled RoPE


def scaled_model(rope):
    """A one-layer model whose table differs from the unscaled one."""
    model = tiny_model(rope_parameters={"rope_theta": THETA, **rope}, max_position_embeddings=64)
    plain = tiny_model(max_position_embeddings=64)
    rotary, plain_rotary = model.base_model.rotary_emb, plain.base_model.rotary_emb
    assert not torch.allclose(rotary.inv_freq, plain_rotary.inv_freq)
    assert (rotary.attention_scaling > 1.01) == (rope["rope_type"] == "yarn")
    return model


SCALED = pytest.mark.parametrize("rope", [LINEAR, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])


@SCALED
@pytest.mark.parametrize("chunk_size", [1, 7, 200])
def test_scaled_rope_streams_as_the_stock_model_sees_what_is_kept(rope, chunk_size):
    """Far past the window, cut in any way, the logits are oracle A's.

    A table without the scaling, or YaRN's factor lost or applied twice, is off by far more.
    """
    model, (sinks, window) = scaled_model(rope), (4, 12)
    ids = random_ids(200)[0].tolist()
    cache = SinkCache.for_model(model, CacheConfig(sink_size=sinks, window_size=window))
    for start in range(0, len(ids), chunk_size):
        chunk = torch.tensor([ids[start : start + chunk_size]])
        logits = forward(model, chunk, cache)[0, -1]
        seen = ids[: start + chunk_size]
        if len(seen) in range(14, 30) or len(seen) >= 196:
            assert_logits_equal(logits, one_layer_oracle(model, seen, sinks, window))


@pytest.mark.parametrize("window", [12, 13, 40])
@pytest.mark.parametrize("chunk_size", [1, 7, 200])
def test_longrope_has_one_table_for_the_life_of_a_cache(window, chunk_size):
    """Up to the first trained length (16) the short one, above it the long one.

    Oracle A sees as many tokens as the cache holds, and so chooses the same table.
    """
    model = tiny_model(
        rope_parameters={"rope_theta": THETA, **LONGROPE}, max_position_embeddings=64
    )
    ids = random_ids(150)[0].tolist()
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=window))
    for start in range(0, len(ids), chunk_size):
        logits = forward(model, torch.tensor([ids[start : start + chunk_size]]), cache)[0, -1]
        seen = ids[: start + chunk_size]
        if len(seen) >= 4 + window:
            assert_logits_equal(logits, one_layer_oracle(model, seen, 4, window))


def test_dynamic_scaling_scales_nothing_within_the_trained_length():
    """The table is the plain one, also after the model has run a longer prompt of its own."""
    rope = {"rope_theta": THETA, **DYNAMIC}
    model = tiny_model(rope_parameters=rope, max_position_embeddings=64)
    ids = random_ids(150)[0].tolist()
    expected = one_layer_oracle(model, ids, 4, 40)
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=40))
    logits = forward(model, torch.tensor([ids]), cache)[0, -1]
    assert_logits_equal(logits, expected)


@SCALED
def test_oracle_a_would_see_a_wrong_table(rope):
    """The check above has teeth: the unscaled table is off by a hundred times the tolerance."""
    model, plain = scaled_model(rope), tiny_model(max_position_embeddings=64)
    plain.load_state_dict(model.state_dict())
    ids = random_ids(60)[0].tolist()
    right = one_layer_oracle(model, ids, 4, 12)
    wrong = one_layer_oracle(plain, ids, 4, 12)
    assert len(retained_ids(ids, 4, 12)) == 16
    assert float((right - wrong).abs().max()) > 1e-3 * float(right.abs().max())


@SCALED
def test_key_norms_stay_what_they_were(rope):
    """The same token's key is as long at step 2,000 as at step 20; sink keys are the same bits.

    Turning keys again with a table that holds YaRN's factor would inflate them step by step.
    """
    model = scaled_model(rope)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=12))
    forward(model, random_ids(20), cache)
    norms, sinks = [], []
    for upto in (20, 2000):
        while cache.num_seen < upto:
            forward(model, random_ids(min(99, upto - cache.num_seen)), cache)
        forward(model, torch.tensor([[50]]), cache)
        assert cache.num_seen == upto + 1
        norms.append(cache.window_key(0, upto).norm(dim=-1))
        sinks.append(cache.snapshot().tensors["keys"][:, :, :, :4])
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=0)
    assert torch.equal(sinks[1], sinks[0])
