"""Models that were trained with softmax-off-by-one, or with a learned term for each head.

The oracle for off-by-one adds a token of zeros to a plain softmax; the one for models is A of
`oracles.py`, whose stock pass has the term as one more key, where the cache has it in the softmax.
B divides by it. What a stock pass computes is held to the formula in float64.
"""

import json
from dataclasses import replace

import pytest
import torch
from conftest import (
    BYTE_VOCAB_SIZE,
    INITIALIZER_RANGE,
    byte_tokenizer,
    random_ids,
    tiny_model,
)
from families import ROWS, all_slowly, family_config, family_of, skip_without_interface
from oracles import (
    SlowCache,
    assert_logits_equal,
    attend_afresh,
    greedy_oracle,
    one_layer_oracle,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from streamchat import (
    CacheConfig,
    CacheGeometry,
    SelfCheckError,
    SinkCache,
    UnsupportedModelError,
    prepare,
)
from streamchat.model import builtin
from streamchat.model.compiled import why_not_compiled
from streamchat.model.decode import why_not_captured
from streamchat.model.families import check_config
from streamchat.model.prepare import forward
from streamchat.model.quantize import quantize_model
from streamchat.model.selfcheck import self_check
from streamchat.model.softmax import model_class, with_extra_term
from streamchat.model.wrapped import WRAPPED
from streamchat.ops.kernels import EXPLICIT, kernels_for
from streamchat.ops.rotary import default_inv_freq

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 8, 60

KINDS = ["off_by_one", "learned"]
FREE_ROWS = [name for name in ROWS if family_of(name) not in {*WRAPPED, "gpt_oss"}]
"""Families whose softmax a configuration may choose."""

every_kind = pytest.mark.parametrize("kind", KINDS)
every_family = pytest.mark.parametrize("name", all_slowly(FREE_ROWS))
any_sizes = pytest.mark.parametrize(("sink_size", "window_size"), [(4, 12), (0, 12), (1, 1)])


def with_softmax(kind, name="llama", num_layers=2):
    """A prepared tiny model of a family."""
    skip_without_interface(name)
    config = family_config(name, num_layers=num_layers)
    config.streamchat_softmax = kind
    torch.manual_seed(0)
    model = model_class(config).from_config(config).eval()
    return prepare(with_random_sinks(model))


def with_random_sinks(model):
    """Learned terms that are not all alike, where there are any."""
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.normal_(parameter)
    return model


def logits_of_cut(model, ids, sink_size, window_size, cut):
    """Logits after each id, shape (length, vocab_size)."""
    config = CacheConfig(sink_size=sink_size, window_size=window_size)
    cache = SinkCache.for_model(model, config)
    pieces = ids.split(cut, dim=1)
    return torch.cat([forward(model, piece, cache, piece.shape[1])[0] for piece in pieces])


# Off by one


@any_sizes
@pytest.mark.parametrize("cut", [1, 7, LENGTH])
def test_off_by_one_is_a_plain_softmax_with_a_token_of_zeros(sink_size, window_size, cut):
    """Past the window, cut in any way: a key and a value of zeros stand before those held."""
    inv_freq = default_inv_freq(HEAD_DIM)
    geometry = CacheGeometry(
        num_layers=1,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        inv_freq=inv_freq,
        softmax="off_by_one",
    )
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, LENGTH, HEAD_DIM, generator=generator)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    cache = SinkCache(CacheConfig(sink_size=sink_size, window_size=window_size), geometry)
    got = []
    for three in zip(*(tensor.split(cut, dim=2) for tensor in (query, key, value)), strict=True):
        with cache.step(three[0].shape[2]):
            got.append(cache.attend(0, *three))

    nothing = torch.zeros(NUM_KV_HEADS, HEAD_DIM)
    held, expected = [], []
    for index in range(LENGTH):
        held.append((key[0, :, index], value[0, :, index]))
        if len(held) > sink_size + window_size:
            del held[sink_size]
        zeros_first = [(nothing, nothing), *held]
        expected.append(attend_afresh(query[0, :, index], zeros_first, inv_freq.double()))
    expected = torch.stack(expected, dim=1)
    torch.testing.assert_close(torch.cat(got, dim=2)[0].double(), expected, rtol=0, atol=2e-6)


def test_a_stock_pass_of_the_same_weights_is_another_model():
    """The term matters: the comparisons below would see it missing."""
    ids = random_ids(20)
    with torch.no_grad():
        plain = with_softmax("standard")(ids).logits
        for kind in KINDS:
            other = with_softmax(kind)(ids).logits
            assert float((plain - other).abs().max()) > 0.1 * float(plain.abs().max())


# The model's own path


@every_kind
@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_the_extra_term_is_in_the_denominator(kind, name, num_queries):
    """Of any attention function: the formula in float64, with a mask and grouped heads."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, heads, length, HEAD_DIM, generator=generator)
        for heads, length in ((NUM_HEADS, num_queries), (NUM_KV_HEADS, 9), (NUM_KV_HEADS, 9))
    )
    sinks = torch.randn(NUM_HEADS, generator=generator)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = NUM_HEADS // NUM_KV_HEADS, sinks
    hidden = torch.arange(9) > torch.arange(9 - num_queries, 9)[:, None]
    mask = torch.zeros(2, 1, num_queries, 9).masked_fill_(hidden, torch.finfo(torch.float32).min)
    stock = {"sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"], "eager": eager_attention_forward}[name]
    attention = with_extra_term(stock, is_learned=kind == "learned")
    got, _ = attention(module, query, key, value, mask, scaling=0.3)

    wide_keys, wide_values = (
        x.double().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (key, value)
    )
    weights = (0.3 * query.double() @ wide_keys.transpose(-1, -2)).exp().masked_fill(hidden, 0)
    term = sinks.double().exp()[:, None, None] if kind == "learned" else 1.0
    expected = weights / (weights.sum(-1, keepdim=True) + term) @ wide_values
    torch.testing.assert_close(got.transpose(1, 2).double(), expected, rtol=0, atol=2e-6)


@every_kind
def test_stock_generate_runs_as_trained(kind):
    """With the stock cache, token by token: the ids are the stream's, and a full pass's."""
    model, ids = with_softmax(kind), random_ids(6)
    stock = greedy_oracle(model, ids, 8)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=2, window_size=14))
    token = forward(model, ids, cache)[:, -1:].argmax(-1)
    with torch.no_grad():
        full = model(torch.cat((ids, stock), dim=1), use_cache=False).logits
    for index in range(8):
        assert int(token) == int(stock[0, index]) == int(full[0, 5 + index].argmax())
        token = forward(model, token, cache)[:, -1:].argmax(-1)


def test_learned_terms_can_be_trained():
    """Through the model's own path: each head of each layer gets a gradient."""
    model, ids = with_softmax("learned").train(), random_ids(20)
    model(ids, labels=ids, use_cache=False).loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if name.endswith(".sinks")]
    assert len(grads) == 2
    assert all(bool((grad != 0).all()) for grad in grads)


# Every family


@every_family
@every_kind
@pytest.mark.parametrize("cut", [1, 25])
def test_one_layer_is_a_pass_over_what_is_held(name, kind, cut):
    """Oracle A, five windows into the stream."""
    model, ids = with_softmax(kind, name, num_layers=1), random_ids(LENGTH)
    expected = one_layer_oracle(model, ids[0].tolist(), 4, 11)
    assert_logits_equal(logits_of_cut(model, ids, 4, 11, cut)[-1], expected)


@every_kind
@any_sizes
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2"])
def test_two_layers_are_the_slow_stream(name, kind, sink_size, window_size):
    """Oracle B after each token, with softcaps and native windows too."""
    model, ids = with_softmax(kind, name), random_ids(LENGTH)
    slow = SlowCache(model, sink_size, window_size)
    expected = torch.cat([forward(model, token, slow)[0] for token in ids.split(1, dim=1)])
    for cut in (1, 7, LENGTH):
        got = logits_of_cut(model, ids, sink_size, window_size, cut)
        assert_logits_equal(got, expected, 3e-5)


@every_family
@every_kind
def test_the_self_check_accepts_it(name, kind):
    """What runs at each load."""
    self_check(with_softmax(kind, name))


@every_kind
def test_the_self_check_sees_a_stream_without_the_term(kind):
    """A model whose cache computes another softmax than its own path is refused."""
    model = with_softmax(kind)
    binding = model.streamchat_binding
    binding.geometry = replace(binding.geometry, softmax="standard")
    with pytest.raises(SelfCheckError, match="before any eviction"):
        self_check(model)


@every_kind
def test_no_faster_step_takes_it(kind):
    """Neither fused attention nor a compiled or captured step knows the term."""
    binding = with_softmax(kind).streamchat_binding
    geometry = binding.geometry
    assert binding.decode_step is None
    cuda = torch.device("cuda")
    assert kernels_for(cuda, torch.float16, is_plain=geometry.is_plain) is EXPLICIT
    model = tiny_model(hidden_size=64, intermediate_size=128)
    quantize_model(model, "int8")
    assert "of its own kind" in why_not_compiled(model, replace(geometry, head_dim=16))
    assert "of its own kind" in why_not_captured(model, replace(geometry, device=cuda))


# From a folder


@pytest.fixture(autouse=True)
def models_folder(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    monkeypatch.setattr(builtin, "models_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def folder_of(tmp_path):
    def save(kind):
        config = LlamaConfig(
            vocab_size=BYTE_VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=INITIALIZER_RANGE,
            streamchat_softmax=kind,
        )
        torch.manual_seed(0)
        model = with_random_sinks(model_class(config).from_config(config))
        model.save_pretrained(tmp_path / kind)
        byte_tokenizer().save_pretrained(tmp_path / kind)
        return tmp_path / kind, model.eval()

    return save


def score(command, folder, *options):
    common = ["-q", "-m", folder, "--device", "cpu", "--window", "20"]
    done = command("pipe", "--mode", "score", *common, *options, stdin=b"some text\n")
    assert done.code == 0, done.err
    return float(done.out.split("\t")[0])


@every_kind
def test_a_saved_model_runs_as_trained(command, folder_of, kind):
    """The command's score is that of the model's own path; the self-check is passed."""
    folder, model = folder_of(kind)
    ids = torch.tensor([byte_tokenizer().encode("some text\n", add_special_tokens=False)])
    with torch.no_grad():
        expected = float(prepare(model)(ids, labels=ids, use_cache=False).loss)
    assert score(command, folder, "--quantize", "none") == pytest.approx(expected, abs=2e-3)


@every_kind
def test_a_saved_model_is_quantized_and_kept(command, folder_of, models_folder, kind):
    """In int8, made and then read again: near to the full weights, the term as it was."""
    folder, _ = folder_of(kind)
    full = score(command, folder, "--quantize", "none")
    made, kept = (score(command, folder) for _ in range(2))
    assert made == kept == pytest.approx(full, abs=0.15)
    assert kept != full
    [file] = models_folder.glob("*.safetensors")
    sinks = [name for name in load_file(file) if name.endswith(".sinks")]
    assert len(sinks) == (2 if kind == "learned" else 0)


def test_learned_terms_that_are_not_in_the_file_are_missed(command, folder_of):
    """A model without them is incomplete, as without any weight."""
    folder, _ = folder_of("off_by_one")
    assert_refused(command, folder, "learned", "incomplete: 2 weights are missing")


def test_a_softmax_that_nobody_knows_is_refused(command, folder_of):
    """In one line, with those that are known."""
    folder, _ = folder_of("off_by_one")
    words = "its streamchat_softmax is 'off_by_two', and only standard, off_by_one, learned are"
    assert_refused(command, folder, "off_by_two", words)


def assert_refused(command, folder, kind, words):
    file = folder / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**fields, "streamchat_softmax": kind}), encoding="utf-8")
    options = ["-q", "-m", folder, "--device", "cpu", "--window", "20", "--quantize", "none"]
    done = command("pipe", "--mode", "score", *options, stdin=b"text\n")
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    assert words in done.err


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bloom", "off_by_one"), ("falcon (7b)", "learned"), ("gpt_oss", "off_by_one")],
)
def test_attention_that_knows_one_softmax_only_is_refused_another(name, kind):
    """Wrapped modules, and GPT-OSS, whose own term is learned; what they know may be named."""
    config = family_config(name)
    config.streamchat_softmax = kind
    own = "learned" if name == "gpt_oss" else "standard"
    with pytest.raises(UnsupportedModelError, match=f"'{kind}', and its attention knows .*'{own}'"):
        check_config(config)
    config.streamchat_softmax = own
    check_config(config)


def test_a_class_without_learned_terms_is_refused():
    """Where the caller made the model with transformers' own class."""
    config = family_config("llama")
    config.streamchat_softmax = "learned"
    model = LlamaForCausalLM(config)
    for _ in range(2):  # and is left as it was
        with pytest.raises(UnsupportedModelError, match=r"needs `sinks` .* of LlamaForCausalLM"):
            prepare(model)


def test_code_of_its_own_is_refused_a_learned_softmax():
    """Nobody knows where its terms would be."""

    class OwnConfig(LlamaConfig):
        pass

    with pytest.raises(UnsupportedModelError, match="code comes with the model"):
        check_config(OwnConfig(streamchat_softmax="learned"))
