"""The cache by itself, on bare tensors: steps, undo, snapshots, and what it refuses.

Most oracles here are a second cache that was never disturbed, fed by the same cut: results must be
the same bits. That it gives the right numbers is `test_exactness`'s business, and of the first test
here.
"""

import pytest
import torch
from conftest import random_ids, tiny_model
from oracles import assert_logits_equal, attention_oracle

from streamchat import CacheConfig, CacheGeometry, ConfigError, SinkCache, StateError
from streamchat.model.compat import cache_argument
from streamchat.model.prepare import forward
from streamchat.ops.rotary import default_inv_freq

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 3, 4, 2, 8
SINK_SIZE, WINDOW_SIZE = 4, 12
CACHE_SIZE = SINK_SIZE + WINDOW_SIZE

# Lengths at which the cache is empty, has some sinks, all sinks, is one short, full, has wrapped.
STATES = pytest.mark.parametrize("length", [0, 2, 4, 15, 16, 17, 41])
CONFIG = CacheConfig(sink_size=SINK_SIZE, window_size=WINDOW_SIZE)
GEOMETRY = CacheGeometry(
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    inv_freq=default_inv_freq(HEAD_DIM),
)


def random_stream(length, *, seed=0, batch_size=1):
    """Queries, keys and values of all layers, shape (layers, batch, heads, length, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(NUM_LAYERS, batch_size, heads, length, HEAD_DIM, generator=generator)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )


STREAM = random_stream(120)
OTHER_STREAM = random_stream(120, seed=1)


def new_cache(**options):
    return SinkCache(CONFIG, GEOMETRY, **options)


def feed(cache, num_tokens, stream=STREAM, *, fail_at_layer=None):
    """One step with the stream's next tokens; outputs, shape (layers, batch, heads, n, head_dim).

    The stream's tensors are indexed by the cache's own position.
    """
    new = slice(cache.num_seen, cache.num_seen + num_tokens)
    out = []
    with cache.step(num_tokens):
        for layer_idx, (query, key, value) in enumerate(zip(*stream, strict=True)):
            if layer_idx == fail_at_layer:
                raise KeyboardInterrupt
            out.append(cache.attend(layer_idx, query[:, :, new], key[:, :, new], value[:, :, new]))
    return torch.stack(out)


def feed_all(cache, cut, stream=STREAM):
    out = [feed(cache, num_tokens, stream) for num_tokens in cut]
    return torch.cat(out, dim=-2) if out else None


# A single token and a chunk come to the sinks by different code: either may come first.
NEXT_CUTS = pytest.mark.parametrize("cut", [(1, 1, 3, 1, 20, 1, 1), (5, 1, 20, 1, 1)], ids=str)


def assert_same_from_here(cache, undisturbed, stream=STREAM, cut=(1, 1, 3, 1, 20, 1, 1)):
    """Two caches stand at the same token and give the same bits, by token and by chunk."""
    assert cache.num_seen == undisturbed.num_seen
    assert torch.equal(feed_all(cache, cut, stream), feed_all(undisturbed, cut, stream))


def assert_same_snapshot(got, expected):
    """Sinks' slots aside: those of the key buffer hold whatever the last step put there."""
    assert got.num_seen == expected.num_seen
    keys, expected_keys = (s.tensors["keys"][:, :, :, SINK_SIZE:] for s in (got, expected))
    assert torch.equal(keys, expected_keys)
    assert torch.equal(got.tensors["values"], expected.tensors["values"])


# Bare tensors


@pytest.mark.parametrize(
    "cut",
    [[1] * 50, [50], [7] * 7, [3, 1, 13, 1, 1, 16, 1, 14]],
    ids=["by_token", "at_once", "by_sevens", "mixed"],
)
def test_bare_tensors_stream_as_oracle_b_does(cut):
    """Two rows and three layers, without any model, give oracle B's attention.

    What is fed does not depend on what came out, so it would miss a layer that reads another's.
    """
    stream = random_stream(50, seed=2, batch_size=2)
    out = feed_all(new_cache(batch_size=2), cut, stream)
    for layer_idx in range(NUM_LAYERS):
        for row in range(2):
            queries, keys, values = (tensor[layer_idx, row, :, : sum(cut)] for tensor in stream)
            expected = attention_oracle(
                queries, keys, values, SINK_SIZE, WINDOW_SIZE, GEOMETRY.inv_freq
            )
            assert_logits_equal(out[layer_idx, row], expected)


def test_a_given_scaling_is_used():
    """`scaling` replaces head_dim ** -0.5, by token and by chunk.

    The oracle is the default scaling with queries scaled beforehand.
    """
    query, key, value = STREAM
    outs = []
    for cache, scaling, factor in ((new_cache(), 0.5, 1.0), (new_cache(), None, 0.5 * 8**0.5)):
        for new in (slice(0, 20), slice(20, 21)):
            with cache.step(new.stop - new.start):
                outs += [
                    cache.attend(
                        layer_idx,
                        query[layer_idx, :, :, new] * factor,
                        key[layer_idx, :, :, new],
                        value[layer_idx, :, :, new],
                        scaling,
                    )
                    for layer_idx in range(NUM_LAYERS)
                ]
    half = len(outs) // 2
    torch.testing.assert_close(outs[:half], outs[half:])


def test_the_counters_count():
    """Tokens seen, held and evicted are those of the contract at every length.

    The oracle is arithmetic. transformers' question for the length gets the tokens seen.
    """
    cache = new_cache()
    for length in range(1, 40):
        feed(cache, 1)
        assert cache.num_seen == cache.get_seq_length() == length
        assert cache.num_held == min(length, CACHE_SIZE)
        assert cache.num_evicted == max(0, length - CACHE_SIZE)


def test_the_memory_is_constant():
    """The cache takes 2 (S + W) rows of each layer from the first token to the last.

    What a step allocates on top and frees again is not counted.
    """
    cache = new_cache()
    rows = NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4
    expected = rows * 2 * CACHE_SIZE
    assert GEOMETRY.bytes_per_token() == 2 * rows
    pointers = {layer.keys.data_ptr() for layer in cache.layers}
    for num_tokens in (1, 2, 50, 1, 1):
        assert cache.num_bytes == expected
        feed(cache, num_tokens)
    assert cache.num_bytes == expected
    assert pointers == {layer.keys.data_ptr() for layer in cache.layers}


# Steps are transactions


@NEXT_CUTS
@STATES
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 13, 30])
@pytest.mark.parametrize("fail_at_layer", range(NUM_LAYERS))
def test_an_interrupted_step_leaves_no_trace(length, num_tokens, fail_at_layer, cut):
    """After an exception in any layer, of a token or a chunk, the cache is as before the step.

    The interrupted tokens are others than those fed next, so that what they wrote would show.
    """
    cache, undisturbed = new_cache(), new_cache()
    for either in (cache, undisturbed):
        feed_all(either, [length] * (length > 0))
    before = cache.snapshot()
    with pytest.raises(KeyboardInterrupt):
        feed(cache, num_tokens, OTHER_STREAM, fail_at_layer=fail_at_layer)
    assert_same_snapshot(cache.snapshot(), before)
    assert_same_from_here(cache, undisturbed, cut=cut)


@NEXT_CUTS
@STATES
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_a_step_left_open_is_taken_back_by_the_next(length, num_tokens, cut):
    """`begin` without `commit`, as a forward pass that raised leaves it, is undone by the next.

    No snapshot in between: that alone would undo it.
    """
    cache, undisturbed = new_cache(), new_cache()
    for either in (cache, undisturbed):
        feed_all(either, [1] * length)
    cache.begin(num_tokens)
    query, key, value = (tensor[0, :, :, :num_tokens] for tensor in OTHER_STREAM)
    cache.attend(0, query, key, value)
    assert_same_from_here(cache, undisturbed, cut=cut)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_an_interrupted_forward_pass_leaves_no_trace(num_tokens):
    """A model that is interrupted between its layers goes on as though it had not been.

    The oracle is a cache of the same model that was never disturbed.
    """
    model = tiny_model(num_layers=2)
    cache, undisturbed = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(60)
    for either in (cache, undisturbed):
        forward(model, ids[:, :30], either)

    def interrupt(*_args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, random_ids(num_tokens, seed=9), cache)
    hook.remove()
    assert cache.num_seen == 30
    with torch.no_grad():
        # Without a sink cache in between: the interrupted one must not cling to the model.
        model(ids, use_cache=False)
    for piece in ids[:, 30:].split([1, 1, 7, 1, 20], dim=1):
        assert torch.equal(forward(model, piece, cache), forward(model, piece, undisturbed))


# Undo


@NEXT_CUTS
@pytest.mark.parametrize("window_size", [1, 3, 12])
@pytest.mark.parametrize("length", [0, 2, 3, 10, 14, 15, 30])
@pytest.mark.parametrize("num_taken_back", [1, 2, 8])
def test_rewind_takes_back_single_tokens(window_size, length, num_taken_back, cut):
    """Up to 8 tokens are taken back, while sinks fill, across the first eviction, round the ring.

    With W = 3 eight tokens overwrite each slot of the ring more than twice.
    """
    config = CacheConfig(sink_size=SINK_SIZE, window_size=window_size)
    cache, undisturbed = (SinkCache(config, GEOMETRY, undo_depth=8) for _ in range(2))
    for either in (cache, undisturbed):
        feed_all(either, [length] * (length > 0))
    kept = 8 - num_taken_back
    feed_all(undisturbed, [1] * kept)
    feed_all(cache, [1] * kept)
    before = cache.snapshot()
    feed_all(cache, [1] * num_taken_back, OTHER_STREAM)
    cache.rewind(num_taken_back)
    assert_same_snapshot(cache.snapshot(), before)
    assert_same_from_here(cache, undisturbed, cut=cut)


def test_rewind_twice_is_rewind_once():
    """Taking back 2 and then 3 tokens leaves what taking back 5 leaves.

    The oracle is a cache that was fed the rest alone.
    """
    cache, undisturbed = new_cache(undo_depth=8), new_cache(undo_depth=8)
    feed_all(undisturbed, [20])
    feed_all(cache, [20, 1, 1, 1, 1, 1])
    cache.rewind(2)
    cache.rewind(3)
    assert_same_from_here(cache, undisturbed)


@pytest.mark.parametrize("depth", [1, 3])
def test_rewind_is_limited_by_the_undo_depth(depth):
    """One token more than the depth is refused, and the refusal changes nothing.

    The oracle is a cache that was never asked.
    """
    cache, undisturbed = new_cache(undo_depth=depth), new_cache()
    for either in (cache, undisturbed):
        feed_all(either, [20, 1, 1, 1, 1, 1])
    with pytest.raises(StateError, match=f"can take back {depth} tokens, asked for {depth + 1}"):
        cache.rewind(depth + 1)
    assert_same_from_here(cache, undisturbed)


def test_a_chunk_cannot_be_taken_back():
    """A chunk ends what can be undone, and single tokens after it begin anew.

    It would miss a chunk that could be taken back in part.
    """
    cache = new_cache(undo_depth=8)
    feed_all(cache, [1, 1, 2])
    with pytest.raises(StateError, match="can take back 0 tokens"):
        cache.rewind(1)
    feed(cache, 1)
    with pytest.raises(StateError, match="can take back 1 tokens"):
        cache.rewind(2)
    cache.rewind(1)
    assert cache.num_seen == 4


def test_the_undo_depth_can_be_changed_on_the_way():
    """A larger depth holds from the next token on; a smaller one keeps the newest.

    The oracle for what comes back is a cache that was fed less.
    """
    cache, undisturbed = new_cache(undo_depth=1), new_cache()
    feed_all(undisturbed, [20, 1, 1])
    feed_all(cache, [20, 1])
    cache.set_undo_depth(4)
    feed_all(cache, [1, 1, 1, 1, 1])
    cache.set_undo_depth(3)
    with pytest.raises(StateError, match="can take back 3 tokens"):
        cache.rewind(4)
    cache.rewind(3)
    feed(undisturbed, 1)
    assert_same_from_here(cache, undisturbed)


# Snapshots and copies


@NEXT_CUTS
@STATES
def test_restore_brings_back_the_moment_of_the_snapshot(length, cut):
    """Whatever was fed since, a restored cache goes on as from the snapshot, again and again.

    A snapshot that shared memory with the cache would fail the second time.
    """
    cache, undisturbed = new_cache(), new_cache()
    for either in (cache, undisturbed):
        feed_all(either, [length] * (length > 0))
    snapshot = cache.snapshot()
    for _ in range(2):
        feed_all(cache, (1, 30, 1, 1), OTHER_STREAM)
        cache.restore(snapshot)
        assert_same_snapshot(cache.snapshot(), snapshot)
    assert_same_from_here(cache, undisturbed, cut=cut)


@NEXT_CUTS
@STATES
def test_a_snapshot_fits_another_cache_of_the_same_sizes(length, cut):
    """Restored into a cache that has seen other tokens, a snapshot is all there is.

    Left-over rows of the other stream would show.
    """
    cache, other = new_cache(), new_cache()
    feed_all(cache, [length] * (length > 0))
    feed_all(other, [length, 1] if length else [1], OTHER_STREAM)
    other.restore(cache.snapshot())
    assert_same_from_here(other, cache, cut=cut)


@pytest.mark.parametrize("sizes", [(4, 11), (3, 13), (0, 16), (5, 11)], ids=str)
def test_a_snapshot_of_other_sizes_is_refused(sizes):
    """Tokens would lie in the wrong slots: the cache refuses and stays as it is.

    (3, 13), (0, 16) and (5, 11) have as many slots as the snapshot has.
    """
    snapshot_of = new_cache()
    feed(snapshot_of, 30)
    config = CacheConfig(sink_size=sizes[0], window_size=sizes[1])
    cache, undisturbed = (SinkCache(config, GEOMETRY) for _ in range(2))
    for either in (cache, undisturbed):
        feed(either, 20)
    with pytest.raises(StateError, match="other sizes"):
        cache.restore(snapshot_of.snapshot())
    assert_same_from_here(cache, undisturbed)


@STATES
def test_a_fork_and_its_origin_do_not_see_each_other(length):
    """After a fork both go their own way, whichever is fed first.

    The oracles are two caches that were never one.
    """
    cache, undisturbed, fork_undisturbed = (new_cache(start_position=5) for _ in range(3))
    for each in (cache, undisturbed, fork_undisturbed):
        feed_all(each, [length] * (length > 0))
    fork = cache.fork()
    assert fork.start_position == 5
    assert_same_from_here(fork, fork_undisturbed, OTHER_STREAM)
    assert_same_from_here(cache, undisturbed)
    assert_same_from_here(fork, fork_undisturbed, OTHER_STREAM)


@NEXT_CUTS
def test_reset_makes_the_cache_new(cut):
    """A cache that was fed other tokens gives what a new one gives.

    Left-over sinks and rows would show.
    """
    cache = new_cache()
    feed_all(cache, (4, 1, 1), OTHER_STREAM)
    cache.reset()
    assert cache.num_held == cache.num_evicted == 0
    assert_same_from_here(cache, new_cache(), cut=cut)


@STATES
def test_reorder_chooses_rows(length):
    """After `reorder_cache` the rows are those named, also in their sinks.

    The oracle was fed the rows in that order from the start.
    """
    stream = random_stream(100, seed=3, batch_size=3)
    order = torch.tensor([2, 0, 0])
    chosen = tuple(tensor[:, order] for tensor in stream)
    cache, undisturbed = new_cache(batch_size=3), new_cache(batch_size=3)
    cut = [length - 2, 1, 1] if length > 2 else [1] * length
    feed_all(cache, cut, stream)
    feed_all(undisturbed, cut, chosen)
    cache.reorder_cache(order)
    assert_same_from_here(cache, undisturbed, chosen)


# Skipping


@pytest.mark.parametrize("num_skipped", [1, 2**25])
def test_skip_stands_where_feeding_would(num_skipped):
    """With W = 1 the next token sees the sinks as though the skipped ones had been fed.

    The oracle is a stock pass over sinks and token: at W = 1 their distances are the dense ones.
    """
    model = tiny_model(num_layers=2)
    ids = random_ids(9)
    cache = SinkCache.for_model(model, CacheConfig(sink_size=8, window_size=1))
    forward(model, ids[:, :8], cache)
    cache.skip(num_skipped)
    assert cache.num_seen == 8 + num_skipped
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0, -1]
    assert_logits_equal(forward(model, ids[:, 8:], cache)[0, -1], expected)


def test_skip_is_refused_where_it_would_not_be_exact():
    """A window above 1, or sinks that are still missing, raise and nothing moves."""
    with pytest.raises(StateError, match="window_size 1"):
        new_cache().skip(5)
    cache = SinkCache(CacheConfig(sink_size=4, window_size=1), GEOMETRY)
    feed(cache, 3)
    with pytest.raises(StateError, match="all sinks"):
        cache.skip(5)
    assert cache.num_seen == 3


# Refusals


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 4, 8), (2, 2, 3, 8), (1, 4, 3, 8), (1, 2, 3, 6)],
    ids=["length", "batch", "heads", "head_dim"],
)
@pytest.mark.parametrize("which", ["key", "value"])
def test_other_shapes_are_refused(shape, which):
    """A key or value of another shape than the step's raises, both shapes named."""
    right, wrong = torch.zeros(1, NUM_KV_HEADS, 3, HEAD_DIM), torch.zeros(shape)
    key, value = (wrong, right) if which == "key" else (right, wrong)
    cache = new_cache()
    cache.begin(3)
    with pytest.raises(StateError, match=r"\(1, 2, 3, 8\).*got"):
        cache.attend(0, torch.zeros(1, NUM_HEADS, 3, HEAD_DIM), key, value)


def test_calls_outside_a_step_are_refused():
    """`attend`, `commit` and transformers' `update` need an open step."""
    cache = new_cache()
    query, key, value = (tensor[0, :, :, :1] for tensor in STREAM)
    with pytest.raises(StateError, match="outside a step"):
        cache.attend(0, query, key, value)
    with pytest.raises(StateError, match="outside a step"):
        cache.commit()
    with pytest.raises(StateError, match="not prepared"):
        cache.update(key, value, 0)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_step_of_no_tokens_is_refused(num_tokens):
    """A step feeds one token at least, and a refused one is not open."""
    cache = new_cache()
    with pytest.raises(StateError, match="at least 1 token"):
        cache.begin(num_tokens)
    with pytest.raises(StateError, match="outside a step"):
        cache.commit()


def test_frequencies_must_fit_the_head():
    """A RoPE table of another size than half a head is refused when the geometry is built."""
    with pytest.raises(ConfigError, match=r"4,\) for head_dim 8, got \(8,\)"):
        CacheGeometry(num_layers=1, num_kv_heads=1, head_dim=8, inv_freq=torch.ones(8))


@pytest.mark.parametrize("position", [3, 17, 30])
def test_only_window_keys_can_be_looked_at(position):
    """Sinks, evicted tokens and tokens to come have no window key."""
    cache = new_cache()
    feed(cache, 30)
    with pytest.raises(StateError, match=f"position {position} is not in the window"):
        cache.window_key(0, position)


def test_for_model_takes_its_sizes_from_the_model():
    """A cache for a prepared model has its layers, heads, dtype and the sizes asked for.

    The oracle is the configuration.
    """
    model = tiny_model(num_layers=2)
    cache = SinkCache.for_model(model, CONFIG, batch_size=3, start_position=7)
    assert (cache.batch_size, cache.start_position) == (3, 7)
    shape = (2, 3, 2, 0, 8)
    assert cache.snapshot().tensors["keys"].shape == shape
    assert cache.geometry.dtype == torch.float32
    assert SinkCache.for_model(model).config == CacheConfig()


def test_a_batch_of_another_size_is_refused():
    """Two rows do not go into a cache of one, which stays usable."""
    model = tiny_model(num_layers=2)
    cache, undisturbed = (SinkCache.for_model(model, CONFIG) for _ in range(2))
    ids = random_ids(20, batch_size=2)
    argument = cache_argument(type(model).forward)
    with pytest.raises(StateError, match="must have shape"), torch.no_grad():
        model(ids, **{argument: cache})
    row = ids[:1]
    assert torch.equal(forward(model, row, cache), forward(model, row, undisturbed))
