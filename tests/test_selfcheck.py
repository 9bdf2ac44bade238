"""The load-time self-check passes what streams exactly, and fails what was broken on purpose."""

import dataclasses

import pytest
import torch
from conftest import FAMILIES, tiny_model
from families import ROWS, family_config, family_model, skip_without_interface
from transformers import AutoModelForCausalLM

from streamchat import SelfCheckError, SinkCache, StateError, prepare
from streamchat.cache.layout import Layout
from streamchat.model.selfcheck import self_check
from streamchat.ops.attention import merged_attention
from streamchat.ops.kernels import EXPLICIT
from streamchat.ops.rotary import default_inv_freq, rope_tables

BEFORE, FAR, CUT = "before any eviction", "at stream position", "cut in another way"
PAST = "past the native window"


def broken_table(model, factor):
    binding = model.streamchat_binding
    binding.geometry = dataclasses.replace(
        binding.geometry, inv_freq=binding.geometry.inv_freq * factor
    )
    return model


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family, num_layers):
    """A model of each supported family passes, whatever its depth."""
    self_check(tiny_model(family, num_layers=num_layers))


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_scaled_rope_passes(rope_type):
    """A RoPE scaling with a fixed table passes, a factor on cos and sin included."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    self_check(tiny_model(rope_parameters=rope, max_position_embeddings=2048))


SIXTEEN_BIT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def sixteen_bit_model(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return tiny_model(num_layers=2)
    finally:
        torch.set_default_dtype(before)


@SIXTEEN_BIT
def test_sixteen_bit_passes(dtype):
    """Rounding of 16-bit weights and keys is not taken for a fault."""
    model = sixteen_bit_model(dtype)
    assert model.dtype == dtype
    self_check(model)


@SIXTEEN_BIT
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_wrong_table_fails_in_sixteen_bit_too(dtype, factor):
    """The wider tolerance of 16-bit still tells rounding from a wrong table."""
    with pytest.raises(SelfCheckError, match=BEFORE):
        self_check(broken_table(sixteen_bit_model(dtype), factor))


def test_it_leaves_no_trace():
    """The check disturbs neither the model's weights nor the random numbers of the program."""
    model = tiny_model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    self_check(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    assert model.streamchat_binding.cache is None


@pytest.mark.parametrize("factor", [1.01, 0.5, 0.0])
def test_a_wrong_table_fails(factor):
    """Frequencies that are off by a hundredth are found before anything is streamed."""
    with pytest.raises(SelfCheckError, match=BEFORE):
        self_check(broken_table(tiny_model(), factor))


def test_a_table_in_another_order_fails():
    """The right frequencies at the wrong dimensions are found."""
    model = tiny_model()
    binding = model.streamchat_binding
    binding.geometry = dataclasses.replace(
        binding.geometry, inv_freq=binding.geometry.inv_freq.flip(0)
    )
    with pytest.raises(SelfCheckError, match=BEFORE):
        self_check(model)


# What the table of families may say wrongly

ROTARY = [name for name in ROWS if name not in ("bloom", "mpt", "falcon (rw)")]


def taken_for(model, **fields):
    """The model, of which something untrue is believed."""
    binding = prepare(model).streamchat_binding
    assert any(getattr(binding.geometry, name) is not value for name, value in fields.items())
    binding.geometry = dataclasses.replace(binding.geometry, **fields)
    return model


@pytest.mark.parametrize("name", ROTARY)
def test_the_other_way_of_pairing_elements_fails(name):
    """Halves for pairs, or pairs for halves, in each family with rotary positions."""
    model = prepare(family_model(name))
    interleaved = model.streamchat_binding.geometry.interleaved
    with pytest.raises(SelfCheckError, match=BEFORE):
        self_check(taken_for(model, interleaved=not interleaved))


WRONG = {
    "a whole head is turned, not a quarter": ("gpt_neox", {"inv_freq": default_inv_freq(16)}),
    "a whole head is turned, not half": ("phi", {"inv_freq": default_inv_freq(8)}),
    "half of a head is turned, not a quarter": ("stablelm", {"inv_freq": default_inv_freq(8)}),
    "half of a head is turned, not all": ("llama", {"inv_freq": default_inv_freq(4)}),
    "a layer without positions is turned": ("smollm3", {"unrotated_layers": frozenset()}),
    "full layers without positions are turned": ("cohere2", {"unrotated_layers": frozenset()}),
    "the other layer is turned": ("exaone4", {"unrotated_layers": frozenset({0})}),
    "a layer is not turned": ("llama", {"unrotated_layers": frozenset({1})}),
    "one table for two kinds of layers": ("gemma3_text", {"local_inv_freq": None}),
    "queries are not scaled": ("ministral3", {"query_scale": None}),
    "scores are not squeezed": ("gemma2", {"softcap": None}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_entry_fails(fault):
    """Partial share, layers without positions, tables, query scale, squeezed scores."""
    name, fields = WRONG[fault]
    with pytest.raises(SelfCheckError, match=BEFORE):
        self_check(taken_for(family_model(name), **fields))


WRONG_WINDOWS = {
    "no layer has one": {"local_layers": frozenset()},
    "the other layer has it": {"local_layers": frozenset({1})},
    "both layers have it": {"local_layers": frozenset({0, 1})},
    "one token more": {"native_window": 101},
    "one token less": {"native_window": 99},
}


@pytest.mark.parametrize("fault", [None, *WRONG_WINDOWS])
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "ministral", "olmo3"]
)
def test_a_wrong_native_window_fails(name, fault):
    """Also where the window, of 100 tokens here, is longer than any prompt of the check.

    What the check changes for that, it puts back, whatever it finds.
    """
    skip_without_interface(name)
    config = family_config(name)
    config.sliding_window = 100
    torch.manual_seed(0)
    model = prepare(AutoModelForCausalLM.from_config(config).eval())
    if fault is None:
        self_check(model)
    else:
        taken_for(model, **WRONG_WINDOWS[fault])
        with pytest.raises(SelfCheckError, match=f"{PAST}|{BEFORE}"):
            self_check(model)
    expected = WRONG_WINDOWS.get(fault, {}).get("native_window", 100)
    assert model.streamchat_binding.geometry.native_window == expected
    assert model.config.sliding_window == 100


# Broken mechanism


def test_sinks_scored_from_where_the_query_really_stands_fail(monkeypatch):
    """Sinks at a distance that grows with the stream are found far along it."""
    monkeypatch.setattr(Layout, "sink_query_position", lambda self, position: position)
    with pytest.raises(SelfCheckError, match=FAR):
        self_check(tiny_model())


def test_sinks_that_are_one_too_far_fail(monkeypatch):
    """A distance of S + W, one more than the contract allows, is found."""
    monkeypatch.setattr(
        Layout, "sink_query_position", lambda self, position: min(position, self.cache_size)
    )
    with pytest.raises(SelfCheckError, match=FAR):
        self_check(tiny_model())


def test_a_chunk_without_the_sink_correction_fails(monkeypatch):
    """A chunk whose queries see the sinks at their raw distance is found by the other cut."""
    sight = SinkCache._sight

    def uncorrected(self, kind, positions):
        seen = sight(self, kind, positions)
        if len(positions) == 1:
            return seen
        return dataclasses.replace(seen, tables_for_sinks=seen.tables)

    monkeypatch.setattr(SinkCache, "_sight", uncorrected)
    with pytest.raises(SelfCheckError, match=CUT):
        self_check(tiny_model())


def test_a_chunk_without_a_mask_fails(monkeypatch):
    """Queries of a chunk that see the tokens after them are found."""

    def unmasked(parts, scaling):
        return merged_attention([dataclasses.replace(p, hidden=None) for p in parts], scaling)

    kernels = dataclasses.replace(EXPLICIT, merged=unmasked)
    monkeypatch.setattr("streamchat.ops.kernels.EXPLICIT", kernels)
    with pytest.raises(SelfCheckError, match=BEFORE):
        self_check(tiny_model())


def test_angles_in_single_precision_fail(monkeypatch):
    """Float32 angles are found: the first question is asked from position 2**25 on."""

    def single(positions, inv_freq, **_):
        angles = positions.float()[:, None] * inv_freq.float()
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    positions = torch.arange(16)
    inv_freq = tiny_model().streamchat_binding.geometry.inv_freq.double()
    for ours, theirs in zip(
        rope_tables(positions, inv_freq), single(positions, inv_freq), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    monkeypatch.setattr("streamchat.cache.geometry.rope_tables", single)
    with pytest.raises(SelfCheckError, match="before any eviction"):
        self_check(tiny_model())


def test_a_cache_that_forgets_the_sinks_fails(monkeypatch):
    """A cache that keeps no sinks whatever it is asked for is found."""
    build = SinkCache.for_model.__func__

    def without_sinks(cls, model, config=None, **options):
        window = dataclasses.replace(config, sink_size=0)
        return build(cls, model, window, **options)

    monkeypatch.setattr(SinkCache, "for_model", classmethod(without_sinks))
    monkeypatch.setattr(
        SinkCache, "skip", lambda self, count: setattr(self, "num_seen", self.num_seen + count)
    )
    with pytest.raises(SelfCheckError, match=FAR):
        self_check(tiny_model())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_fail(value):
    """A weight that is no number fails, although NaN compares with nothing."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[5, 5] = value
    with pytest.raises(SelfCheckError, match="nan"):
        self_check(model)


def test_the_message_says_what_by_how_much_and_the_way_round():
    """One line with the question, the error, the tolerance and --no-self-check; exit code 3."""
    with pytest.raises(SelfCheckError) as caught:
        self_check(broken_table(tiny_model(), 1.5))
    message = str(caught.value)
    assert "\n" not in message
    for words in (BEFORE, "logits differ by", "1e-04", "--no-self-check"):
        assert words in message
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("error", [ValueError("no\nsuch shape"), KeyError(3), StateError("odd")])
def test_a_model_that_stumbles_fails_in_one_line(monkeypatch, error):
    """Whatever its own forward pass raises is named, in one line, with exit code 3."""
    model = tiny_model()

    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", broken)
    with pytest.raises(SelfCheckError, match=type(error).__name__) as caught:
        self_check(model)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert caught.value.__cause__ is error


def test_ctrl_c_is_no_failure_of_the_model(monkeypatch):
    """An interrupt goes through as what it is."""
    model = tiny_model()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        self_check(model)
