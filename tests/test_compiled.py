"""The decode step that is compiled for the CPU, held against torch.

The oracles: the same model with whole matrices in place of the quantized ones, each rounded alike,
which runs none of the compiled code (`twin`); and `SlowStream` in float64 over the twin's weights.
What quantizing itself does is tested in test_quantization.py.
"""

import functools
import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from conftest import random_ids
from oracles import SlowStream, assert_logits_equal
from test_quantization import SCHEMES, threads, whole_model
from torch.nn import functional as F

from streamchat import CacheConfig, SinkCache, Stream, load
from streamchat.cache.geometry import CacheGeometry
from streamchat.model.compat import logits_of
from streamchat.model.compiled import MAX_TOKENS, CompiledStep, why_not_compiled
from streamchat.model.decode import why_slow
from streamchat.model.prepare import forward, prepare
from streamchat.model.quantize import QuantizedEmbedding, QuantizedLinear, quantize_model, to_dtype
from streamchat.ops.compiled import step as step_module
from streamchat.ops.compiled.step import KEY_BLOCK
from streamchat.ops.quantization import dequantize

CONFIG = CacheConfig(sink_size=4, window_size=12)

YARN = {
    "rope_theta": 10_000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_theta": 10_000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TOLERANCE = 5e-5
"""Of the largest logit: what two orders of float32 sums may differ by. Mostly it is 5e-6; a query
that stands one off moves a logit by half a percent at least (oracles.py)."""

KINDS = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with wide heads": ("qwen3", {"head_dim": 32}),
    "heads of 48": ("llama", {"head_dim": 48}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "no groups": ("llama", {"num_key_value_heads": 4}),
    "yarn": ("llama", {"rope_parameters": YARN, "max_position_embeddings": 256}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    # More rows than one piece of work has.
    "wide": ("llama", {"vocab_size": 5001, "intermediate_size": 4160}),
}
SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


@functools.cache
def pair(kind="llama", scheme="int8"):
    """A model whose steps are compiled, and its twin of whole matrices, which runs torch only."""
    family, overrides = KINDS[kind]
    model, twin = (whole_model(family, **overrides) for _ in range(2))
    quantize_model(model, scheme)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            weight = twin.get_submodule(name).weight
            weight.data = dequantize(module.codes, module.scales)
    model, twin = prepare(model), prepare(twin)
    assert isinstance(model.streamchat_binding.decode_step, CompiledStep)
    assert twin.streamchat_binding.decode_step is None
    return model, twin


def caches(model, twin, config=CONFIG, **options):
    return [SinkCache.for_model(each, config, **options) for each in (model, twin)]


def assert_same(model, cache, twin, other, ids):
    """Both give the same logits after each piece of ids, a token or a chunk."""
    for piece in ids:
        assert_logits_equal(forward(model, piece, cache), forward(twin, piece, other), TOLERANCE)
    assert cache.num_seen == other.num_seen


def one_by_one(ids):
    return ids.split(1, dim=1)


def decoded(model, cache, ids):
    """Logits after each token, shape (length, vocab_size)."""
    return torch.cat([forward(model, token, cache)[0] for token in one_by_one(ids)])


def assert_same_content(cache, other, exactly=True):
    """What two caches hold, and how much they have seen."""
    assert cache.num_seen == other.num_seen
    for got, expected in zip(
        (cache.snapshot().tensors["keys"], cache.snapshot().tensors["values"]),
        (other.snapshot().tensors["keys"], other.snapshot().tensors["values"]),
        strict=True,
    ):
        if exactly:
            assert torch.equal(got, expected)
        else:
            assert_logits_equal(got, expected, TOLERANCE)


# The numbers


@SCHEME
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_models_own_step(kind, scheme):
    """From the first token to the third time round the ring, in every family and shape.

    The cache, too, holds what torch would have written.
    """
    model, twin = pair(kind, scheme)
    cache, other = caches(model, twin)
    assert_same(model, cache, twin, other, one_by_one(random_ids(45)))
    assert_same_content(cache, other, exactly=False)


@SCHEME
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_it_is_the_slow_stream(kind, scheme):
    """Oracle B, in float64, far past the window."""
    model, twin = pair(kind, scheme)
    ids = random_ids(50)
    got = decoded(model, SinkCache.for_model(model, CONFIG), ids)
    expected = SlowStream(twin, CONFIG.sink_size, CONFIG.window_size).feed_all(ids[0].tolist())
    assert_logits_equal(got, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("sink_size", "window_size"),
    [(s, w) for s in (0, 4, KEY_BLOCK, 70) for w in (1, 12, 200)],
)
def test_all_sizes(sink_size, window_size):
    """Sinks that end in the first block of keys, at its end and past it; windows of many blocks.

    Token by token, so that the number of held tokens passes every boundary of a block.
    """
    model, twin = pair()
    config = CacheConfig(sink_size=sink_size, window_size=window_size)
    length = sink_size + window_size + 40
    cache, other = caches(model, twin, config)
    assert_same(model, cache, twin, other, one_by_one(random_ids(length)))


def test_the_result_does_not_depend_on_where_the_stream_starts():
    """At position 2**25 float32 angles would be off by radians."""
    model, twin = pair()
    cache, other = caches(model, twin, start_position=2**25)
    ids = random_ids(45)
    assert_same(model, cache, twin, other, one_by_one(ids))
    far, near = (SinkCache.for_model(model, CONFIG, start_position=x) for x in (2**25, 0))
    assert_logits_equal(decoded(model, far, ids), decoded(model, near, ids), TOLERANCE)


# Mixes


@pytest.mark.parametrize(
    "cut", [(1, 7, 1, 1, 30, 1, 1, 1, 5, 1), (3, 1, 1, 13, 1), (20, 1, 1, 1, 20, 1)], ids=str
)
@SCHEME
def test_chunks_in_between(scheme, cut):
    """Chunks go through torch into the same buffers; tokens before and after are right."""
    model, twin = pair("qwen2", scheme)
    cache, other = caches(model, twin)
    assert_same(model, cache, twin, other, random_ids(sum(cut)).split(cut, dim=1))


@pytest.mark.parametrize("length", [2, 16, 40])
def test_a_fork_is_a_stream_of_its_own(length):
    """A cache and its fork decode in turns, and both stay right."""
    model, twin = pair()
    cache, other = caches(model, twin)
    assert_same(model, cache, twin, other, one_by_one(random_ids(length)))
    fork, other_fork = cache.fork(), other.fork()
    for seed in range(4):
        ids = one_by_one(random_ids(4, seed=seed))
        assert_same(model, fork, twin, other_fork, ids)
        assert_same(model, cache, twin, other, ids[::-1])


@pytest.mark.parametrize("length", [0, 2, 15, 16, 40])
def test_tokens_are_taken_back(length):
    """After `rewind` the cache holds what it held, bit for bit, and goes on."""
    model, twin = pair()
    cache, other = caches(model, twin)
    cache.set_undo_depth(5)
    ids = random_ids(length + 10)
    assert_same(model, cache, twin, other, one_by_one(ids[:, :length]) if length else [])
    before = cache.fork()
    decoded(model, cache, random_ids(5, seed=3))
    cache.rewind(5)
    assert_same_content(cache, before)
    assert_same(model, cache, twin, other, one_by_one(ids[:, length:]))


def test_a_snapshot_and_a_new_start():
    """`restore` goes back, `reset` to the beginning; the same tokens give the same bits."""
    model, _ = pair()
    cache = SinkCache.for_model(model, CONFIG)
    ids = random_ids(60)
    first = decoded(model, cache, ids[:, :30])
    snapshot = cache.snapshot()
    rest = decoded(model, cache, ids[:, 30:])
    cache.restore(snapshot)
    assert torch.equal(decoded(model, cache, ids[:, 30:]), rest)
    cache.reset()
    assert torch.equal(decoded(model, cache, ids[:, :30]), first)


def test_logits_handed_out_do_not_change():
    """Each step's logits are its caller's own."""
    model, _ = pair()
    cache = SinkCache.for_model(model, CONFIG)
    first = forward(model, random_ids(1), cache)
    kept = first.clone()
    forward(model, random_ids(1, seed=2), cache)
    assert torch.equal(first, kept)


# Interrupted


@pytest.mark.parametrize("length", [0, 5, 16, 30])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_an_interrupted_step_leaves_no_trace(monkeypatch, length, is_before):
    """Ctrl-C before or after the computation: the token does not count, and the next is right."""
    model, _ = pair()
    cache = SinkCache.for_model(model, CONFIG)
    ids = random_ids(length + 10)
    if length:
        decoded(model, cache, ids[:, :length])
    before, step = cache.fork(), model.streamchat_binding.decode_step
    compute = step._decode_step

    def interrupted(*args):
        if not is_before:
            compute(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "_decode_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(model, random_ids(1, seed=9), cache)
    monkeypatch.undo()
    assert_same_content(cache, before)
    rest = ids[:, length:]
    assert torch.equal(decoded(model, cache, rest), decoded(model, before, rest))


@pytest.mark.parametrize("length", [0, 14, 30])
def test_an_interrupted_short_chunk_leaves_no_trace(monkeypatch, length):
    """Ctrl-C after three of seven tokens: none of them counts, and older ones can be taken back."""
    model, _ = pair()
    cache = SinkCache.for_model(model, CONFIG)
    cache.set_undo_depth(5)
    ids = random_ids(length + 10)
    if length:
        decoded(model, cache, ids[:, :length])
    before, step = cache.fork(), model.streamchat_binding.decode_step
    compute, calls = step._decode_step, []

    def interrupted(*args):
        calls.append(compute(*args))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(step, "_decode_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(model, random_ids(7, seed=9), cache)
    monkeypatch.undo()
    assert_same_content(cache, before)
    rest = ids[:, length:]
    assert torch.equal(decoded(model, cache, rest), decoded(model, before, rest))
    cache.rewind(5)
    assert cache.num_seen == length + 5


def test_a_short_chunk_is_its_tokens():
    """Bit for bit, with logits for as many as are asked; a chunk that is longer goes by torch."""
    model, _ = pair()
    chunked, single = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(40)
    for piece in ids.split(MAX_TOKENS, dim=1):
        assert torch.equal(forward(model, piece, chunked, 3)[0], decoded(model, single, piece)[-3:])
    assert_same_content(chunked, single)
    step = model.streamchat_binding.decode_step
    assert step.takes(chunked, ids[:, :MAX_TOKENS])
    assert not step.takes(chunked, ids[:, : MAX_TOKENS + 1])


def test_an_interrupt_while_the_helpers_have_begun(monkeypatch):
    """Ctrl-C when helpers have their job and this thread has not begun: they must not write later.

    The helper is let go only when the step has been taken back.
    """
    model, _ = pair()
    cache = SinkCache.for_model(model, CONFIG)
    decoded(model, cache, random_ids(40))
    before, compute = cache.fork(), step_module._decode_step
    is_taken_back, has_ended = threading.Event(), threading.Event()
    interrupts = [KeyboardInterrupt()]

    def interrupted(thread, *args):
        if thread == 0 and interrupts:
            raise interrupts.pop()
        if thread:
            is_taken_back.wait(10)
        compute(thread, *args)
        if thread:
            has_ended.set()

    monkeypatch.setattr(step_module, "_decode_step", interrupted)
    with threads(2):
        with pytest.raises(KeyboardInterrupt):
            forward(model, random_ids(1, seed=9), cache)
        is_taken_back.set()
        assert has_ended.wait(10)
    assert_same_content(cache, before)


def test_a_step_left_open_is_rolled_back_first():
    """A step of torch's that was never committed is taken back before a compiled one."""
    model, _ = pair()
    cache = SinkCache.for_model(model, CONFIG)
    ids = random_ids(40)
    decoded(model, cache, ids[:, :30])
    before = cache.fork()
    cache.begin(1)
    cache.attend(0, torch.ones(1, 4, 1, 16), *(torch.ones(1, 2, 1, 16) for _ in range(2)))
    rest = ids[:, 30:]
    assert torch.equal(decoded(model, cache, rest), decoded(model, before, rest))


# Threads and processes


@SCHEME
def test_the_number_of_threads_changes_no_bit(scheme):
    """One, two and three threads, over several blocks of keys."""
    model, _ = pair("wide", scheme)
    ids, results = random_ids(80), []
    for number in (1, 2, 3):
        with threads(number):
            cache = SinkCache.for_model(model, CacheConfig(sink_size=4, window_size=66))
            results.append(decoded(model, cache, ids))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_two_streams_at_once():
    """Decoded from two threads at the same time, each gets what it gets alone."""
    model, _ = pair("wide")
    ids = [random_ids(60, seed=seed) for seed in (1, 2)]
    alone = [decoded(model, SinkCache.for_model(model, CONFIG), each) for each in ids]
    together = [None, None]
    start = threading.Barrier(2)

    def stream(index):
        cache = SinkCache.for_model(model, CONFIG)
        start.wait(10)
        together[index] = decoded(model, cache, ids[index])

    streams = [threading.Thread(target=stream, args=(index,)) for index in range(2)]
    for each in streams:
        each.start()
    for each in streams:
        each.join(60)
    assert all(torch.equal(*both) for both in zip(alone, together, strict=True))


FORK = """
import os, sys
import torch
from conftest import random_ids
from test_compiled import CONFIG, decoded, pair
from streamchat import SinkCache
torch.set_num_threads(2)
model, _ = pair()
cache = SinkCache.for_model(model, CONFIG)
decoded(model, cache, random_ids(20))
child = os.fork()
logits = decoded(model, cache, random_ids(20, seed=2))
name, answer = "child" if child == 0 else "parent", logits.double().sum().item().hex()
os.write(1, f"{name} {answer}\\n".encode())  # in one piece: both write to the same pipe
if child == 0:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_goes_on():
    """The threads do not survive a fork; the child's first answer is right all the same."""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    answers = dict(line.split() for line in out.stdout.splitlines())
    assert set(answers) == {"parent", "child"}
    assert answers["parent"] == answers["child"]


# What it does not take, and where it cannot be


def test_a_batch_goes_through_torch():
    """Two rows are not taken; each still gets its own logits."""
    model, twin = pair()
    cache, other = caches(model, twin, batch_size=2)
    ids = random_ids(20, batch_size=2)
    step = model.streamchat_binding.decode_step
    assert not step.takes(cache, ids[:, :1])
    assert step.takes(SinkCache.for_model(model, CONFIG), ids[:1, :1])
    assert_same(model, cache, twin, other, one_by_one(ids))


def test_a_cache_of_another_geometry_is_not_taken():
    """Fewer layers than the model has would be computed with as many as the cache has."""
    model, _ = pair()
    geometry = model.streamchat_binding.geometry
    fewer = CacheGeometry(
        num_layers=1,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        inv_freq=geometry.inv_freq,
    )
    step = model.streamchat_binding.decode_step
    assert not step.takes(SinkCache(CONFIG, fewer), random_ids(1))


def test_an_unknown_id_is_an_error():
    """An id past the vocabulary reads no memory that is not the table's, and does not count."""
    model, _ = pair()
    cache = SinkCache.for_model(model, CONFIG)
    decoded(model, cache, random_ids(3))
    with pytest.raises(IndexError):
        forward(model, torch.tensor([[101]]), cache)
    assert cache.num_seen == 3


def as_it_is(model):
    pass


def in_8_bits(model):
    quantize_model(model, "int8")


def in_16_bit(model):
    quantize_model(model, "int8")
    to_dtype(model, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "overrides", "expected"),
    [
        (in_8_bits, {"hidden_act": "gelu"}, "model family 'llama' has another layout"),
        (in_8_bits, {"attention_bias": True}, "biases"),
        (in_8_bits, {"mlp_bias": True}, "biases"),
        (in_8_bits, {"head_dim": 8}, "heads of 8 elements"),
        (in_16_bit, {}, "need a CPU and float32"),
        (as_it_is, {}, "its weights are not quantized"),
    ],
)
def test_why_a_step_is_not_compiled(change, overrides, expected):
    """The reason in a line; the model streams by its own forward pass."""
    model = whole_model(**overrides)
    change(model)
    model = prepare(model)
    reason = why_not_compiled(model, model.streamchat_binding.geometry)
    assert expected in reason
    assert "\n" not in reason
    assert why_slow(model) == reason
    assert model.streamchat_binding.decode_step is None
    one, many = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(12)
    got = decoded(model, one, ids)[-1].float()
    tolerance = TOLERANCE if model.dtype == torch.float32 else 0.1
    assert_logits_equal(got, forward(model, ids, many)[0, 0].float(), tolerance)


def test_a_compiled_model_is_not_slow():
    """There is nothing to tell."""
    model, twin = pair()
    assert why_slow(model) is None
    assert why_slow(twin) == "its weights are not quantized"


# The built-in model


@pytest.fixture(scope="module")
def builtin_int8():
    """The built-in model as a CPU gets it."""
    return load(device="cpu", check=False)


STORY = """\
The old ferryman had crossed the river every day for forty years, and he knew each stone in it.
When the bridge was built nobody came any more. He sat on the bank and watched the carts go by,
and in the evening he still rowed over once, so that the river would not forget him. One night a
girl stood on the far side and called. The bridge was gone: the water had risen, brown and fast,
and taken it. Her brother was ill, she said, and the doctor lived in the town. The ferryman looked
at the river for a long time. Then he untied the boat. He told her where to sit and what to hold,
and he did not speak again until they were across. "You were not afraid," said the girl. "I was,"
he said, "but I know where the stones are." The doctor went back with them before it was light.
"""


@torch.inference_mode()
def torch_logits(loaded, ids, config):
    """Oracle: all at once, through torch and dequantized matrices; shape (length, vocab_size)."""
    cache = SinkCache.for_model(loaded.model, config)
    return logits_of(loaded.model, torch.tensor([ids]), cache, len(ids))[0]


@pytest.mark.builtin
def test_the_losses_of_the_builtin_model(builtin_int8):
    """Token by token past a small window, each loss is torch's within 1e-4."""
    ids = builtin_int8.tokenizer.encode(STORY)
    assert len(ids) > 150
    config = CacheConfig(sink_size=4, window_size=60)
    expected = torch_logits(builtin_int8, ids, config)[:-1]
    got = decoded(
        builtin_int8.model, SinkCache.for_model(builtin_int8.model, config), torch.tensor([ids])
    )[:-1]
    targets = torch.tensor(ids[1:])
    losses, other = (F.cross_entropy(each, targets, reduction="none") for each in (got, expected))
    assert float((losses - other).abs().max()) < 1e-4


@pytest.mark.builtin
def test_the_greedy_tokens_of_the_builtin_model(builtin_int8):
    """200 tokens, each the one that torch finds best, but for two that are equally good."""
    ids = builtin_int8.tokenizer.encode("The old ferryman")
    config = CacheConfig(sink_size=4, window_size=60)
    cache = SinkCache.for_model(builtin_int8.model, config)
    logits = decoded(builtin_int8.model, cache, torch.tensor([ids]))[-1:]
    num_fed = len(ids)
    for _ in range(200):
        ids.append(int(logits.argmax()))
        logits = forward(builtin_int8.model, torch.tensor([ids[-1:]]), cache)[0]
    expected = torch_logits(builtin_int8, ids, config)[num_fed - 1 : -1]
    chosen = expected.gather(1, torch.tensor(ids[num_fed:])[:, None])[:, 0]
    assert float((expected.amax(dim=-1) - chosen).max()) < 1e-4


@pytest.mark.slow
@pytest.mark.builtin
def test_what_quantizing_costs(builtin_model, builtin_int8, union_text, capsys):
    """Perplexity over 2,048 tokens at 4 + 252: int8 within 1 % of float32, int4 within 15 %."""
    addresses = [address.strip() for address in union_text.strip().split("\n\n")[-40:]]
    ids = builtin_model.tokenizer.encode("\n".join(addresses))[:2048]
    config = CacheConfig(sink_size=4, window_size=252)
    models = {"float32": builtin_model, "int8": builtin_int8}
    models["int4"] = load(device="cpu", quantize="int4", check=False)
    found = {}
    for name, loaded in models.items():
        losses = [loss for loss in Stream(loaded, config).score(ids) if loss is not None]
        found[name] = math.exp(sum(losses) / len(losses))
    with capsys.disabled():
        print(f"\nperplexity {', '.join(f'{name} {x:.3f}' for name, x in found.items())}")
    assert found["int8"] == pytest.approx(found["float32"], rel=0.01)
    assert found["int4"] == pytest.approx(found["float32"], rel=0.15)


def test_where_compiling_is_forbidden_torch_computes(tiny_folder):
    """NUMBA_DISABLE_JIT: the same scores, and one line that says why it is slow."""
    command = [sys.executable, "-m", "streamchat", "pipe", "--mode", "score", "-m", tiny_folder]
    done = [
        subprocess.run(
            list(map(str, command)),
            input="a line\nanother, a little longer\n",
            env=os.environ | extra,
            capture_output=True,
            text=True,
            check=True,
        )
        for extra in ({}, {"NUMBA_DISABLE_JIT": "1"})
    ]
    compiled, torch_only = (
        [float(line.split("\t")[0]) for line in run.stdout.splitlines()] for run in done
    )
    assert torch_only == pytest.approx(compiled, abs=2e-3)
    assert "slower: NUMBA_DISABLE_JIT forbids compiling" in done[1].stderr
    assert "slower" not in done[0].stderr
