"""The decode step that a CUDA graph replays, and who lives in its buffers; here without a graph.

What stands in for a graph here runs the recorded function anew at each replay. That a recording of
it would do the same is what the traces show: the same operators, shapes and arguments at every
step, and none that waits for the device. The oracle for the numbers is the model's own forward pass
over a cache that was never captured.
"""

import dataclasses
import gc

import pytest
import torch
from conftest import FAMILIES, random_ids, tiny_model
from oracles import assert_logits_equal
from test_fused import cpu_kernel
from traces import assert_replayable, assert_same_traces, trace

from streamchat import CacheConfig, SinkCache, StateError
from streamchat.cache.layout import Layout
from streamchat.cache.static import StaticStep
from streamchat.engine.stream import Stream
from streamchat.model.captured import CapturedStep
from streamchat.model.compat import logits_of
from streamchat.model.decode import choose_decode_step, why_not_captured
from streamchat.model.prepare import forward
from streamchat.ops import fused
from streamchat.ops.kernels import FUSED

SINK_SIZE, WINDOW_SIZE = 4, 12
CONFIG = CacheConfig(sink_size=SINK_SIZE, window_size=WINDOW_SIZE)

# Of the largest logit. The static step scales the query before its product with the keys, the eager
# one the scores after it; in bfloat16 a last bit of a layer's output is 0.4 percent.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def run_anew(run, _device):
    """In place of a recording."""
    return run


def captured(model, record=run_anew):
    """The model with a captured step that needs no CUDA."""
    binding = model.streamchat_binding
    binding.decode_step = CapturedStep(model, binding.geometry, record)
    return model


def eager_logits(model, ids, cache):
    """The oracle: the model's own forward pass."""
    return logits_of(model, ids, cache)


def close_to(got, expected):
    assert_logits_equal(got.float(), expected.float(), TOLERANCE[expected.dtype])


def assert_same_tokens(model, cache, other, ids):
    """Captured and eager, token by token, give the same logits."""
    assert cache.num_seen == other.num_seen
    for index in range(ids.shape[1]):
        token = ids[:, index : index + 1]
        close_to(forward(model, token, cache), eager_logits(model, token, other))


# The numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sink_size", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_eager_step(family, sink_size, batch_size, dtype):
    """From the first token to the third time round the ring, captured and eager logits agree.

    In every family, with and without sinks, for one row and three, far along a stream.
    """
    model = captured(tiny_model(family, num_layers=2, dtype=dtype))
    config = CacheConfig(sink_size=sink_size, window_size=WINDOW_SIZE)
    cache, eager = (
        SinkCache.for_model(model, config, batch_size=batch_size, start_position=2**25)
        for _ in range(2)
    )
    assert_same_tokens(model, cache, eager, random_ids(45, batch_size=batch_size))
    assert model.streamchat_binding.decode_step.failure is None


def test_a_window_that_fills_its_buffer():
    """A window of 256 is not padded: the first and the last slot are used like all others."""
    model = captured(tiny_model())
    config = CacheConfig(sink_size=1, window_size=256)
    cache, eager = (SinkCache.for_model(model, config) for _ in range(2))
    ids = random_ids(520)
    forward(model, ids[:, :250], cache)
    forward(model, ids[:, :250], eager)
    assert_same_tokens(model, cache, eager, ids[:, 250:])


@pytest.mark.parametrize("window_size", [1, 12])
def test_the_fused_attention_in_the_static_step(monkeypatch, window_size):
    """With the attention that CUDA gets, its kernel taken from the CPU, the logits are the same."""
    monkeypatch.setattr("streamchat.ops.kernels.EXPLICIT", fused_on_cpu(monkeypatch))
    model = captured(tiny_model(num_layers=2))
    config = CacheConfig(sink_size=SINK_SIZE, window_size=window_size)
    cache = SinkCache.for_model(model, config)
    monkeypatch.undo()
    eager = SinkCache.for_model(model, config)
    monkeypatch.setattr("streamchat.ops.kernels.EXPLICIT", fused_on_cpu(monkeypatch))
    ids = random_ids(60)
    assert_same_tokens(model, cache, eager, ids[:, :30])
    # A chunk, too, and tokens after it.
    close_to(forward(model, ids[:, 30:50], cache), forward(model, ids[:, 30:50], eager))
    assert_same_tokens(model, cache, eager, ids[:, 50:])


def fused_on_cpu(monkeypatch):
    """The attention for CUDA with a kernel that a CPU has."""
    monkeypatch.setattr(fused.fused_merged_attention, "__defaults__", (cpu_kernel,))
    return FUSED


# Mixes


@pytest.mark.parametrize(
    "cut", [(1, 7, 1, 1, 30, 1, 1, 1, 5, 1), (3, 1, 1, 13, 1), (20, 1, 1, 1, 20, 1)], ids=str
)
def test_chunks_in_between(cut):
    """Chunks go the eager way in the same buffers, and the device's position follows them.

    Each piece is compared, so that a token after a chunk that stood at the wrong place shows.
    """
    model = captured(tiny_model(num_layers=2))
    cache, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    for piece in random_ids(sum(cut)).split(cut, dim=1):
        close_to(forward(model, piece, cache), eager_logits(model, piece, eager))
    assert cache.num_seen == sum(cut)


@pytest.mark.parametrize("length", [0, 2, 15, 16, 40])
def test_forks_take_the_buffers_from_each_other(length):
    """A cache and its fork decode in turns, each its own stream, and both stay right."""
    model = captured(tiny_model(num_layers=2))
    cache, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids, others = random_ids(90), random_ids(90, seed=7)
    assert_same_tokens(model, cache, eager, ids[:, :length])
    fork, eager_fork = cache.fork(), eager.fork()
    for start in range(length, length + 40, 5):
        assert_same_tokens(model, fork, eager_fork, others[:, start : start + 3])
        assert_same_tokens(model, cache, eager, ids[:, start : start + 5])
    # The one that has no buffers just now is read, chunked and copied all the same.
    assert_same_snapshot(fork, eager_fork)
    close_to(forward(model, ids[:, :6], fork), eager_logits(model, ids[:, :6], eager_fork))
    assert_same_tokens(model, fork, eager_fork, ids[:, :3])
    assert_same_tokens(model, cache, eager, others[:, :3])


def assert_same_snapshot(got, expected):
    got, expected = got.snapshot(), expected.snapshot()
    assert got.num_seen == expected.num_seen
    torch.testing.assert_close(got.tensors["keys"], expected.tensors["keys"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        got.tensors["values"], expected.tensors["values"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("length", [1, 10, 16, 40])
def test_restore_and_reset(length):
    """After `restore` and `reset` the device stands where the cache does."""
    model = captured(tiny_model(num_layers=2))
    cache, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(90)
    assert_same_tokens(model, cache, eager, ids[:, :length])
    states = cache.snapshot(), eager.snapshot()
    assert_same_tokens(model, cache, eager, ids[:, length : length + 20])
    cache.restore(states[0])
    eager.restore(states[1])
    assert_same_tokens(model, cache, eager, random_ids(20, seed=5))
    cache.reset()
    eager.reset()
    assert_same_tokens(model, cache, eager, ids[:, :30])


def test_restore_to_the_same_length_elsewhere():
    """A snapshot whose stream began elsewhere moves the angles, though the length is the same."""
    model = captured(tiny_model(num_layers=2))
    far = SinkCache.for_model(model, CONFIG, start_position=1000)
    near, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(30)
    forward(model, ids[:, :20], far)
    forward(model, ids[:, :19], near)
    forward(model, ids[:, 19:20], near)
    near.restore(far.snapshot())
    eager.restore(far.snapshot())
    assert_same_tokens(model, near, eager, ids[:, 20:])


@pytest.mark.parametrize("length", [0, 3, 10, 15, 16, 40])
@pytest.mark.parametrize("num_taken_back", [1, 5])
def test_tokens_are_taken_back(length, num_taken_back):
    """Replayed steps can be rewound, as far as the undo depth goes; what follows is right."""
    model = captured(tiny_model(num_layers=2))
    cache, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    cache.set_undo_depth(5)
    ids = random_ids(80)
    assert_same_tokens(model, cache, eager, ids[:, :length])
    for token in random_ids(num_taken_back, seed=3).split(1, dim=1):
        forward(model, token, cache)
    cache.rewind(num_taken_back)
    assert_same_tokens(model, cache, eager, ids[:, length : length + 20])


def test_tokens_are_taken_back_after_moving_out():
    """The undo log outlives the loss of the buffers."""
    model = captured(tiny_model(num_layers=2))
    cache, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    cache.set_undo_depth(4)
    ids = random_ids(60)
    assert_same_tokens(model, cache, eager, ids[:, :30])
    for token in random_ids(4, seed=3).split(1, dim=1):
        forward(model, token, cache)
    forward(model, ids[:, :1], cache.fork())  # moves in
    cache.rewind(4)
    assert_same_tokens(model, cache, eager, ids[:, 30:])


@pytest.mark.parametrize("length", [0, 5, 16, 30])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_an_interrupted_replay_leaves_no_trace(length, is_before):
    """Ctrl-C just before or just after a replay: the token does not count, and the next is right.

    After it, the device's position has moved on, the slot is overwritten, and the host knows of
    neither.
    """
    is_armed = False

    def record(run, _device):
        def replay():
            if is_armed and is_before:
                raise KeyboardInterrupt
            logits = run()
            if is_armed:
                raise KeyboardInterrupt
            return logits

        return replay

    model = captured(tiny_model(num_layers=2), record)
    cache, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(60)
    assert_same_tokens(model, cache, eager, ids[:, :length])
    is_armed = True
    with pytest.raises(KeyboardInterrupt):
        forward(model, random_ids(1, seed=9), cache)
    is_armed = False
    assert_same_snapshot(cache, eager)
    assert_same_tokens(model, cache, eager, ids[:, length:])


def test_a_step_left_open_is_rolled_back_first():
    """An eager step that was never committed is taken back before a replay."""
    model = captured(tiny_model(num_layers=2))
    cache, eager = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(40)
    assert_same_tokens(model, cache, eager, ids[:, :30])
    cache.begin(1)
    shape = (1, 2, 1, 8)
    cache.attend(0, torch.ones(1, 4, 1, 8), torch.ones(shape), torch.ones(shape))
    assert_same_tokens(model, cache, eager, ids[:, 30:])


def test_logits_handed_out_do_not_change():
    """The logits of a step are its caller's own: the next replay writes elsewhere."""

    def record(run, _device):
        out = run().clone()

        def replay():
            return out.copy_(run())

        return replay

    model = captured(tiny_model(), record)
    cache = SinkCache.for_model(model, CONFIG)
    first = forward(model, random_ids(1), cache)
    kept = first.clone()
    forward(model, random_ids(1, seed=2), cache)
    assert torch.equal(first, kept)


def test_an_engine_stream_of_greedy_tokens(loaded):
    """`Stream.generate` gives the same text with a stop string, which rewinds, and without."""
    binding = loaded.model.streamchat_binding
    events = []
    for step in (None, CapturedStep(loaded.model, binding.geometry, run_anew)):
        binding.decode_step = step
        try:
            stream = Stream(loaded, CONFIG)
            stream.feed([5, 6, 7, 8])
            events.append([])
            for stop in ((), ("qx",), ("\n", "ab")):
                told = list(stream.generate(max_new_tokens=40, stop=stop))
                events[-1] += [getattr(event, "text", None) for event in told]
                events[-1].append(stream.position)
        finally:
            binding.decode_step = None
    assert events[0] == events[1]
    assert events[0]


# Whose buffers, and for how long


class Counting:
    """A recorder that counts what it recorded."""

    def __init__(self):
        self.num_recorded = 0

    def __call__(self, run, _device):
        self.num_recorded += 1
        return run


def test_one_recording_for_each_size():
    """Caches of the same sizes share a recording; other sizes get their own."""
    counting = Counting()
    model = captured(tiny_model(), counting)
    wide = CacheConfig(sink_size=SINK_SIZE, window_size=WINDOW_SIZE + 1)
    caches = [
        SinkCache.for_model(model, CONFIG),
        SinkCache.for_model(model, CONFIG),
        SinkCache.for_model(model, wide),
        SinkCache.for_model(model, CONFIG, batch_size=2),
    ]
    for _ in range(2):
        for cache in caches:
            forward(model, random_ids(1, batch_size=cache.batch_size), cache)
    assert counting.num_recorded == 3


def test_the_buffers_stay_where_they_are():
    """A recording holds addresses: a cache that decodes uses the same ones all its life."""
    model = captured(tiny_model())
    cache = SinkCache.for_model(model, CONFIG)
    own = cache.layers[0].keys.data_ptr()
    addresses, sizes = set(), {cache.num_bytes}
    for num_tokens in (1, 1, 30, 1, 1):
        forward(model, random_ids(num_tokens), cache)
        addresses.add(cache.layers[0].keys.data_ptr())
        sizes.add(cache.num_bytes)
    cache.restore(cache.snapshot())
    forward(model, random_ids(1), cache)
    addresses.add(cache.layers[0].keys.data_ptr())
    assert len(addresses) == 1
    assert own not in addresses
    assert len(sizes) == 1
    forward(model, random_ids(1), cache.fork())
    assert cache.layers[0].keys.data_ptr() not in addresses


def test_a_recording_goes_with_its_last_cache():
    """When no cache of its size is left, a recording is freed: its memory is a whole cache's."""
    counting = Counting()
    model = captured(tiny_model(), counting)
    for expected in (1, 2):
        cache = SinkCache.for_model(model, CONFIG)
        forward(model, random_ids(1), cache)
        assert counting.num_recorded == expected
        del cache
        gc.collect()


def test_what_is_not_taken():
    """Chunks, rows that are not the cache's, and caches of another geometry go the eager way."""
    model = tiny_model()
    step = captured(model).streamchat_binding.decode_step
    cache = SinkCache.for_model(model, CONFIG)
    assert step.takes(cache, random_ids(1))
    assert not step.takes(cache, random_ids(2))
    assert not step.takes(cache, random_ids(1, batch_size=2))
    assert not step.takes(SinkCache.for_model(tiny_model(), CONFIG), random_ids(1))


# Where it cannot be


def test_a_model_that_cannot_be_captured_streams_eagerly():
    """The reason is kept in a line, recording is tried once, and the logits are the eager ones.

    Caches that were captured before stay so.
    """
    is_broken, num_tried = False, 0

    def record(run, _device):
        nonlocal num_tried
        num_tried += 1
        if is_broken:
            raise RuntimeError("operation not permitted when stream is capturing\nlong story")
        return run

    model = captured(tiny_model(num_layers=2), record)
    before = SinkCache.for_model(model, CONFIG)
    ids = random_ids(20)
    forward(model, ids[:, :1], before)
    is_broken = True
    config = CacheConfig(sink_size=1, window_size=5)
    for _ in range(2):
        cache, eager = (SinkCache.for_model(model, config) for _ in range(2))
        for token in ids.split(1, dim=1):
            assert torch.equal(forward(model, token, cache), eager_logits(model, token, eager))
    step = model.streamchat_binding.decode_step
    assert num_tried == 2
    assert step.failure == (
        "the forward pass cannot be captured: operation not permitted when stream is capturing"
    )
    assert step.takes(before, ids[:, :1])


def test_a_cpu_has_no_captured_step():
    """On a CPU nothing is chosen, and the reason names the device."""
    model = tiny_model()
    geometry = model.streamchat_binding.geometry
    assert choose_decode_step(model, geometry) is None
    assert model.streamchat_binding.decode_step is None
    assert "on cpu" in why_not_captured(model, geometry)


def test_a_dispatched_model_has_no_captured_step():
    """On a CUDA device a step is chosen, unless accelerate's hooks are in the model.

    No CUDA is needed to ask.
    """
    model = tiny_model()
    geometry = dataclasses.replace(
        model.streamchat_binding.geometry, device=torch.device("cuda", 0)
    )
    assert isinstance(choose_decode_step(model, geometry), CapturedStep)
    model.model.layers[0]._hf_hook = object()
    assert choose_decode_step(model, geometry) is None
    assert "device_map" in why_not_captured(model, geometry)


def test_a_failure_is_told():
    """After a failed recording the reason is what `why_not_captured` says."""
    model = captured(tiny_model())
    geometry = dataclasses.replace(model.streamchat_binding.geometry, device=torch.device("cuda"))
    assert why_not_captured(model, geometry) is None
    model.streamchat_binding.decode_step.failure = "because"
    assert why_not_captured(model, geometry) == "because"


# The traces


def static_step(
    model, *, sink_size=SINK_SIZE, window_size=WINDOW_SIZE, batch_size=1, kind=StaticStep
):
    static = kind(Layout(sink_size, window_size), model.streamchat_binding.geometry, batch_size)
    ids = torch.zeros((batch_size, 1), dtype=torch.int64, device=model.device)
    return lambda: logits_of(model, ids, static)


@pytest.mark.parametrize("sink_size", [0, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_steps_are_one(family, sink_size, batch_size):
    """The first, the first past the sinks, the last before it is full, and those round the ring.

    They ask for the same operators with the same arguments, and none waits for the device.
    """
    run = static_step(tiny_model(family), sink_size=sink_size, batch_size=batch_size)
    first = trace(run)
    for _ in range(2 * WINDOW_SIZE + SINK_SIZE):
        assert_same_traces(first, trace(run))
    assert_replayable(run)


@pytest.mark.parametrize("kernels", ["EXPLICIT", "FUSED"])
def test_no_value_is_needed_on_the_host(monkeypatch, kernels):
    """On the meta device there are no values: whatever the host would look at raises.

    With the fused attention too, whose shapes torch's own shape functions judge.
    """
    model = tiny_model(num_layers=2, device="meta", dtype=torch.bfloat16)
    if kernels == "FUSED":
        monkeypatch.setattr("streamchat.ops.kernels.EXPLICIT", FUSED)
    run = static_step(model, window_size=1020)
    assert run().shape == (1, 1, model.config.vocab_size)
    assert_replayable(run)


class HostSlot(StaticStep):
    """Fault: the slot is a Python number."""

    num_seen = 0

    def attend(self, layer_idx, query, key, value, scaling=None):
        out = super().attend(layer_idx, query, key, value, scaling)
        self._keys[layer_idx, :, :, self.layout.slot(self.num_seen)] = key[:, :, 0]
        return out

    def commit(self):
        super().commit()
        self.num_seen += 1


class GrowingView(StaticStep):
    """Fault: attention runs over what is held, whose shape grows."""

    num_seen = 0

    def begin(self, num_tokens):
        super().begin(num_tokens)
        self.num_seen += 1
        self._keys[..., : self.num_seen, :].sum()


class HostRead(StaticStep):
    """Fault: the host looks at the position."""

    def begin(self, num_tokens):
        super().begin(num_tokens)
        self.position.item()


@pytest.mark.parametrize("kind", [HostSlot, GrowingView, HostRead])
def test_the_traces_can_differ(kind):
    """A Python slot, a growing shape and a look at the device are each found.

    Without this, the tests above might compare nothing.
    """
    with pytest.raises(AssertionError):
        assert_replayable(static_step(tiny_model(), kind=kind))


def test_a_static_step_feeds_one_token():
    """More tokens, or attention without a step, are refused."""
    model = tiny_model()
    static = StaticStep(Layout(4, 12), model.streamchat_binding.geometry, 1)
    with pytest.raises(StateError, match="feeds 1 token, got 2"):
        logits_of(model, random_ids(2), static)
    with pytest.raises(StateError, match="outside a step"):
        static.attend(0, *(torch.zeros(1, heads, 1, 8) for heads in (4, 2, 2)))


def test_a_static_step_can_start_over():
    """After `reset` it gives what it gave at first; transformers is always told the length 0."""
    model = tiny_model()
    static = StaticStep(Layout(4, 12), model.streamchat_binding.geometry, 1)
    ids = random_ids(1)
    first = logits_of(model, ids, static)
    for _ in range(20):
        logits_of(model, ids, static)
    assert static.get_seq_length() == 0
    static.reset()
    assert torch.equal(logits_of(model, ids, static), first)


# On CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sink_size", [0, 4])
def test_on_cuda(dtype, batch_size, sink_size):
    """Replayed steps give the eager logits, with chunks, a fork and a rewind in between.

    The eager cache is on the same device, so that both round alike.
    """
    model = tiny_model(num_layers=2, device="cuda", dtype=dtype)
    config = CacheConfig(sink_size=sink_size, window_size=60)
    cache, eager = (SinkCache.for_model(model, config, batch_size=batch_size) for _ in range(2))
    cache.set_undo_depth(4)
    ids = random_ids(300, batch_size=batch_size).cuda()
    assert_same_tokens(model, cache, eager, ids[:, :100])
    assert why_not_captured(model, model.streamchat_binding.geometry) is None
    for piece in ids[:, 100:150].split([20, 1, 20, 1, 8], dim=1):
        close_to(forward(model, piece, cache), eager_logits(model, piece, eager))
    fork, eager_fork = cache.fork(), eager.fork()
    assert_same_tokens(model, fork, eager_fork, ids[:, 150:160])
    for token in ids[:, 150:154].split(1, dim=1):
        forward(model, token, cache)
    cache.rewind(4)
    assert_same_tokens(model, cache, eager, ids[:, 160:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_memory_is_flat_on_cuda():
    """Many replayed steps, and forks that come and go, allocate nothing for good."""
    model = tiny_model(num_layers=2, device="cuda")
    cache = SinkCache.for_model(model, CONFIG)
    token = random_ids(1).cuda()

    def work():
        for _ in range(50):
            forward(model, token, cache)
        forward(model, token, cache.fork())
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    work()
    before = work()
    assert [work() for _ in range(4)] == [before] * 4
