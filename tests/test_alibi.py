"""ALiBi, and the families whose attention modules are wrapped; the matrix has them too.

The oracle on bare tensors is the position contract's formula, distance by distance. For models it
is A of `oracles.py`, far enough out for biases that are rounded to bfloat16 to be crooked.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import BYTE_VOCAB_SIZE, byte_tokenizer, random_ids
from families import ROWS, family_model, family_of
from oracles import assert_logits_equal, greedy_oracle, one_layer_oracle
from torch import nn
from transformers import AutoModelForCausalLM

from streamchat import CacheConfig, ConfigError, SinkCache, UnsupportedModelError, prepare
from streamchat.cache.geometry import CacheGeometry
from streamchat.cli.app import run
from streamchat.model import builtin
from streamchat.model.compat import cache_argument
from streamchat.model.decode import why_not_captured
from streamchat.model.families import (
    check_config,
    describe_positions,
    geometry_from_config,
    geometry_of,
    trained_length,
)
from streamchat.model.prepare import forward
from streamchat.model.quantize import QuantizedLinear, quantize_model
from streamchat.model.selfcheck import self_check
from streamchat.model.wrapped import WRAPPED
from streamchat.ops import attention
from streamchat.ops.attention import Bias, Part
from streamchat.ops.kernels import EXPLICIT, kernels_for

WRAPPED_ROWS = [name for name in ROWS if family_of(name) in WRAPPED]
every_wrapped = pytest.mark.parametrize("name", WRAPPED_ROWS)

SLOPES = torch.tensor([0.5, 0.3, 0.11, 0.02])
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


def geometry(**fields):
    """Four heads in two groups, with straight biases."""
    sizes = {"num_layers": 1, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    biases = {"alibi": lambda n: SLOPES[:, None] * torch.arange(n), "inv_freq": torch.empty(0)}
    return CacheGeometry(**{**sizes, **biases, **fields})


def by_distance(query, keys, values, sink_size, window_size):
    """What the contract says, shape (num_heads, length, head_dim), float64.

    To a window key j the bias is -slope * (t - j), to a sink -slope * (min(t, S + W - 1) - j).
    """
    out = torch.empty_like(query, dtype=torch.float64)
    for t in range(query.shape[1]):
        sinks = range(min(sink_size, t + 1))
        window = range(max(sink_size, t - window_size + 1), t + 1)
        distances = [min(t, sink_size + window_size - 1) - j for j in sinks]
        distances = torch.tensor(distances + [t - j for j in window])
        held = [*sinks, *window]
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = keys[kv_head, held].double() @ query[head, t].double() * HEAD_DIM**-0.5
            weights = (scores - SLOPES[head].double() * distances).softmax(-1)
            out[head, t] = weights @ values[kv_head, held].double()
    return out


@pytest.mark.parametrize("sink_size", [0, 4])
@pytest.mark.parametrize("window_size", [1, 11, 150])
@pytest.mark.parametrize("size", [1, 7, 25, 300])
def test_scores_are_biased_by_the_distances_of_the_contract(sink_size, window_size, size):
    """While the cache fills and long after, token by token and in chunks of several blocks."""
    torch.manual_seed(0)
    query, keys, values = (torch.randn(n, 400, HEAD_DIM) for n in (NUM_HEADS, 2, 2))
    config = CacheConfig(sink_size=sink_size, window_size=window_size)
    cache, outputs = SinkCache(config, geometry()), []
    for three in zip(*(x[None].split(size, dim=2) for x in (query, keys, values)), strict=True):
        with cache.step(three[0].shape[2]):
            outputs.append(cache.attend(0, *three))
    expected = by_distance(query, keys, values, sink_size, window_size)
    error = (torch.cat(outputs, dim=2)[0].double() - expected).abs().max()
    assert float(error) < 1e-5


def test_all_heads_at_once_are_biased_as_one_by_one():
    """Devices other than a CPU score all heads in one product."""
    torch.manual_seed(0)
    parts = []
    for num_keys in (20, 3):
        sizes = [(2, NUM_HEADS, 5, HEAD_DIM)] + 2 * [(2, NUM_KV_HEADS, num_keys, HEAD_DIM)]
        bias = Bias(torch.randn(NUM_HEADS, 30), torch.tensor([3, 0, 1, 7, 2]))
        parts.append(Part(*(torch.randn(size) for size in sizes), None, bias))
    expected = attention.merged_attention(parts, 0.3)
    sizes = [part.keys.shape[2] for part in parts]
    together = attention._attend(
        [part.query.reshape(2, NUM_KV_HEADS, -1, HEAD_DIM) * 0.3 for part in parts],
        torch.cat([part.keys for part in parts], dim=2),
        torch.cat([part.values for part in parts], dim=2).transpose(-1, -2),
        sizes,
        [None, None],
        attention._rows([part.bias for part in parts], slice(None), sizes),
    )
    torch.testing.assert_close(together.view(expected.shape), expected)


def test_a_model_biases_or_rotates():
    """A geometry with ALiBi has no frequencies, and one without has some."""
    with pytest.raises(ConfigError, match=r"\(0 to 0,\).*\(4,\)"):
        geometry(inv_freq=torch.ones(4))
    with pytest.raises(ConfigError, match=r"\(1 to 4,\).*\(0,\)"):
        geometry(alibi=None)


def test_a_gpu_gets_the_explicit_attention_and_no_graph():
    """The fused kernel and the static step know no biases."""
    cuda = torch.device("cuda")
    assert kernels_for(cuda, torch.float16, is_plain=geometry().is_plain) is EXPLICIT
    assert "ALiBi" in why_not_captured(nn.Module(), geometry(device=cuda))
    assert why_not_captured(nn.Module(), geometry_from_config(config_of("falcon (7b)"), None)) == (
        "CUDA graphs need a CUDA device, the model is on cpu"
    )


# Models


def config_of(name, **fields):
    """A configuration of a row's layout, with other sizes."""
    prefix, extra = ROWS[name]
    return getattr(transformers, f"{prefix}Config")(**{**extra, **fields})


def wide_model(name, **fields):
    """Two layers, wide enough for weights of four bits; not prepared."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = config_of(name, **sizes, initializer_range=0.3, **fields)
    return AutoModelForCausalLM.from_config(config).eval()


SIX_HEADS = {
    "bloom": {"hidden_size": 48, "n_layer": 1, "n_head": 6},
    "falcon (rw)": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6},
    "mpt": {"d_model": 48, "n_layers": 1, "n_heads": 6, "max_seq_len": 1024},
}


@pytest.mark.parametrize("name", SIX_HEADS)
@pytest.mark.parametrize("size", [1, 97, 700])
def test_crooked_biases_are_the_models_own(name, size):
    """Oracle A at six heads and 604 places: slopes and products do not fit Falcon's bfloat16.

    Straight biases of the same slopes are off by more than the tolerance, for Falcon a thousand
    times.
    """
    torch.manual_seed(0)
    fields = {**SIX_HEADS[name], "vocab_size": 101, "initializer_range": 0.3}
    model = prepare(AutoModelForCausalLM.from_config(config_of(name, **fields)).eval())
    ids = random_ids(700)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=600))
    for chunk in (ids[:, :600], *ids[:, 600:].split(size, dim=1)):
        logits = forward(model, chunk, cache)[0, -1]
    assert_logits_equal(logits, one_layer_oracle(model, ids[0].tolist(), 4, 600))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("falcon (rw)", {"alibi": True, "multi_query": True}),
        ("falcon (40b)", {"num_ln_in_parallel_attn": 1}),
        (
            "falcon (7b)",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
        ),
        ("bloom", {"apply_residual_connection_post_layernorm": True, "pretraining_tp": 4}),
        ("mpt", {"attn_config": {"softmax_scale": 0.3}}),
    ],
    ids=str,
)
def test_other_layouts_of_these_families(name, fields):
    """Multi-query ALiBi, Falcon-11B, YaRN's factor, and fields that change the attention."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "vocab_size": 101}
    torch.manual_seed(0)
    config = config_of(name, **sizes, initializer_range=0.3, **fields)
    self_check(prepare(AutoModelForCausalLM.from_config(config).eval()))


@every_wrapped
def test_generate_takes_the_cache(name):
    """`model.generate` over our cache gives the ids that it gives over its own."""
    model = prepare(family_model(name))
    ids = random_ids(6)
    expected = greedy_oracle(model, ids, 8)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=2, window_size=14))
    options = {cache_argument(type(model).forward): cache}
    out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, **options)
    assert torch.equal(out[:, 6:], expected)
    assert cache.num_seen == 13


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@every_wrapped
def test_quantized_layers_are_wrapped_like_whole_ones(name, scheme):
    """No linear layer is left as it was, Falcon's own class among them, and it streams exactly."""
    model = wide_model(name, vocab_size=101)
    quantize_model(model, scheme)
    kinds = {type(module) for module in model.modules()}
    assert QuantizedLinear in kinds
    assert not any(issubclass(kind, nn.Linear) for kind in kinds)
    self_check(prepare(model))


# What the configuration says


def test_key_value_heads_of_each_layout():
    """Multi-query has one, whatever `num_kv_heads` says; the grouped layout says how many."""
    expected = {"bloom": 4, "mpt": 4, "falcon (rw)": 4, "falcon (7b)": 1, "falcon (40b)": 2}
    for name, num_kv_heads in expected.items():
        model = family_model(name)
        planned = geometry_from_config(model.config, torch.float32)
        assert planned.num_kv_heads == geometry_of(model).num_kv_heads == num_kv_heads
        assert planned.rotary_dim == geometry_of(model).rotary_dim


def test_the_trained_length_of_each_family():
    """Each has a field of its own; BLOOM's is missing in transformers' own configuration."""
    assert trained_length(transformers.BloomConfig()) is None
    assert trained_length(transformers.BloomConfig(seq_length=2048)) == 2048
    assert trained_length(transformers.MptConfig(max_seq_len=4096)) == 4096
    assert trained_length(transformers.FalconConfig()) == 2048


def test_the_description_names_alibi():
    """`info` says how positions are handled; a Falcon says which of the two it has."""
    assert describe_positions(config_of("bloom", n_head=8)).startswith("ALiBi")
    assert "8 heads" in describe_positions(config_of("bloom", n_head=8))
    assert describe_positions(config_of("falcon (rw)")).startswith("ALiBi")
    assert describe_positions(config_of("falcon (7b)")).startswith("RoPE, theta 10,000")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.BloomConfig(slow_but_exact=True), "slow_but_exact is True"),
        (transformers.MptConfig(attn_config={"alibi_bias_max": 16}), "alibi_bias_max is 16"),
        (transformers.MptConfig(attn_config={"alibi": False}), "attn_config.alibi is False"),
    ],
    ids=["slices", "storywriter", "no alibi"],
)
def test_what_transformers_would_compute_wrongly_is_refused(config, words):
    """Fields that its code ignores: the model would stream, and not be what was trained."""
    with pytest.raises(UnsupportedModelError, match=words):
        check_config(config)


def test_code_that_comes_with_a_model_is_refused():
    """Its modules have other names, so nothing of ours could be put under them."""

    class RemoteForCausalLM(SimpleNamespace):
        pass

    with pytest.raises(UnsupportedModelError, match=r"'mpt' is refused.*\(RemoteForCausalLM\)"):
        prepare(RemoteForCausalLM(config=transformers.MptConfig()))


# The command line


@every_wrapped
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_a_saved_model_scores(name, quantize, tmp_path, monkeypatch, capfd):
    """From a folder, whole and quantized; the second time from the file that was kept.

    All of the first line is still held, so its score is what the model's own path says.
    """
    monkeypatch.setattr(builtin, "models_folder", lambda: tmp_path / "cache")
    folder = tmp_path / "model"
    model, tokenizer = wide_model(name, vocab_size=BYTE_VOCAB_SIZE), byte_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source = tmp_path / "text"
    source.write_text("to be or not to be\nthat is the question\n" * 3)
    capfd.readouterr()
    outs = []
    for _ in range(2):
        sizes = ["--sinks", "4", "--window", "16", "--quantize", quantize, "--device", "cpu"]
        code = run(["pipe", "--mode", "score", "-q", "-m", str(folder), *sizes, str(source)])
        out, err = capfd.readouterr()
        assert (code, err) == (0, "")
        outs.append(out)
    assert outs[0] == outs[1]
    assert len(outs[0].splitlines()) == 6
    ids = torch.tensor([tokenizer.encode("to be or not to be\n")])
    if quantize != "none":
        quantize_model(model, quantize)
    with torch.no_grad():
        own = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert float(outs[0].partition("\t")[0]) == pytest.approx(float(own), abs=2e-3)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == (quantize != "none")


@every_wrapped
def test_info_describes_a_saved_model(name, tmp_path, capfd):
    """`info` needs the configuration alone."""
    family_model(name).config.save_pretrained(tmp_path)
    assert run(["info", str(tmp_path), "--window", "60"]) == 0
    out = capfd.readouterr().out
    assert f"family           {family_of(name)}" in out
    assert "key/value heads" in out
