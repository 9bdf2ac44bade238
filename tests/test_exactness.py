"""Any way of cutting the stream gives the same numbers, and they are the right ones.

Oracles A, B and C stand in `oracles.py`, with the tolerance. A fits one layer only; B is the one
that would see a cache which recomputes keys, or forgets that upper layers remember evicted text; C
is the only one that runs transformers' own code in every part.
"""

from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch
from conftest import FAMILIES, random_ids, tiny_model
from oracles import (
    SlowStream,
    assert_logits_equal,
    attend_afresh,
    greedy_oracle,
    one_layer_oracle,
    retained_ids,
    rotated,
)
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from streamchat import CacheConfig, CacheGeometry, SinkCache, StateError
from streamchat.cache.blocks import QUERY_BLOCK
from streamchat.model.compat import cache_argument
from streamchat.model.prepare import forward
from streamchat.ops.rotary import default_inv_freq

SIZES = [(s, w) for s in (0, 1, 4) for w in (1, 12, 60)]


def chunk_sizes(sink_size, window_size):
    w = window_size
    return sorted({n for n in (1, 2, 7, w - 1, w, w + 1, sink_size + w, 4 * w) if n >= 1})


CUTS = [(s, w, chunk) for s, w in SIZES for chunk in chunk_sizes(s, w)]


def prefix_lengths(sink_size, window_size):
    """None, one before the capacity, at it, one after, far after."""
    full = sink_size + window_size
    return sorted({0, full - 1, full, full + 1, 3 * full + 5})


def new_cache(model, sink_size, window_size, **options):
    return SinkCache.for_model(
        model, CacheConfig(sink_size=sink_size, window_size=window_size), **options
    )


def feed_cut(model, cache, ids, cut):
    """Logits after each id, shape (batch, length, vocab_size), fed in pieces of the sizes `cut`."""
    pieces = ids.split(cut, dim=1)
    return torch.cat([forward(model, piece, cache, piece.shape[1]) for piece in pieces], dim=1)


def cut_after_prefix(prefix_length, chunk_size, length):
    """Piece sizes: the prefix at once, then chunks."""
    pieces = [prefix_length] if prefix_length else []
    rest = length - prefix_length
    pieces += [chunk_size] * (rest // chunk_size)
    return pieces + ([rest % chunk_size] if rest % chunk_size else [])


def tail_length(sink_size, window_size, chunk_size):
    """Tokens after the prefix: a chunk, or a turn of the ring, and a few more."""
    return max(sink_size + window_size, chunk_size) + 7


@lru_cache
def expected_logits(family, sink_size, window_size):
    """A two-layer model, its ids, and oracle B's logits for each, once for all cuts."""
    model = with_random_vectors(tiny_model(family, num_layers=2))
    longest = max(
        tail_length(sink_size, window_size, n) for n in chunk_sizes(sink_size, window_size)
    )
    ids = random_ids(max(prefix_lengths(sink_size, window_size)) + longest)
    oracle = SlowStream(model, sink_size, window_size)
    return model, ids, oracle.feed_all(ids[0].tolist())


def with_random_vectors(model):
    """Norms start as ones and biases as zeros, where leaving them out would not show."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# The oracles themselves


@pytest.mark.parametrize("family", FAMILIES)
def test_oracle_b_is_the_stock_forward_while_nothing_is_evicted(family):
    """Oracle B gives the stock logits of every family while everything fits.

    With random norms and biases. It says nothing of eviction.
    """
    model = with_random_vectors(tiny_model(family, num_layers=2))
    ids = random_ids(40)
    with torch.no_grad():
        stock = model(ids, use_cache=False).logits[0]
    assert_logits_equal(stock, SlowStream(model, 4, 36).feed_all(ids[0].tolist()))


def test_oracles_a_and_b_agree_past_the_window(one_layer):
    """Two oracles that share no code agree after each token, before and after eviction.

    Both could share a misreading of the contract; neither shares one with the cache.
    """
    ids = random_ids(50)[0].tolist()
    logits = SlowStream(one_layer, 4, 12).feed_all(ids)
    for length in range(1, len(ids) + 1):
        assert_logits_equal(one_layer_oracle(one_layer, ids[:length], 4, 12), logits[length - 1])


# Cuts


@pytest.mark.parametrize(("sink_size", "window_size", "chunk_size"), CUTS)
def test_every_cut_gives_the_logits_of_oracle_b(sink_size, window_size, chunk_size):
    """Every logit is oracle B's, whatever prefix came at once and whatever chunks follow.

    Two layers: it would miss a fault that needs a third.
    """
    model, ids, expected = expected_logits("llama", sink_size, window_size)
    for prefix_length in prefix_lengths(sink_size, window_size):
        length = prefix_length + tail_length(sink_size, window_size, chunk_size)
        cut = cut_after_prefix(prefix_length, chunk_size, length)
        logits = feed_cut(model, new_cache(model, sink_size, window_size), ids[:, :length], cut)
        assert_logits_equal(logits[0], expected[:length])


@pytest.mark.parametrize(("sink_size", "window_size", "chunk_size"), CUTS)
def test_every_cut_gives_the_last_logits_of_oracle_a(one_layer, sink_size, window_size, chunk_size):
    """The logits after each piece are those of a stock pass over the retained ids alone.

    Oracle A, one layer: it would miss anything that a second layer adds.
    """
    prefix_length = sink_size + window_size + 1
    length = prefix_length + tail_length(sink_size, window_size, chunk_size)
    ids = random_ids(length, seed=5)
    cache = new_cache(one_layer, sink_size, window_size)
    end = 0
    for piece in ids.split(cut_after_prefix(prefix_length, chunk_size, length), dim=1):
        logits = forward(one_layer, piece, cache)[0, -1]
        end += piece.shape[1]
        expected = one_layer_oracle(one_layer, ids[0, :end].tolist(), sink_size, window_size)
        assert_logits_equal(logits, expected)


@pytest.mark.parametrize("chunk_size", [1, 7, 13, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_oracle_b(family, chunk_size):
    """Every family streams as oracle B does, with random norms and biases.

    Two layers. Chunk 1 is the decode path, 13 is W + 1, 48 is 4 W.
    """
    model, ids, expected = expected_logits(family, 4, 12)
    logits = feed_cut(model, new_cache(model, 4, 12), ids, chunk_size)
    assert_logits_equal(logits[0], expected)


@pytest.mark.parametrize("query_block", [1, 2, 5, 13])
@pytest.mark.parametrize(("sink_size", "window_size"), [(0, 12), (4, 1), (4, 12)])
def test_the_query_blocks_of_a_chunk_do_not_show(monkeypatch, sink_size, window_size, query_block):
    """A chunk scored in blocks smaller than sinks, window and chunk gives oracle B's logits.

    Two layers. It would miss a fault that shows only at the real block size.
    """
    monkeypatch.setattr("streamchat.cache.blocks.QUERY_BLOCK", query_block)
    model, ids, expected = expected_logits("llama", sink_size, window_size)
    for prefix_length in prefix_lengths(sink_size, window_size):
        cut = [prefix_length] * (prefix_length > 0) + [ids.shape[1] - prefix_length]
        logits = feed_cut(model, new_cache(model, sink_size, window_size), ids, cut)
        assert_logits_equal(logits[0], expected)


def test_a_chunk_of_more_than_two_real_query_blocks(one_layer):
    """1,100 tokens at once give oracle A's logits on both sides of each block's edge.

    One layer, and only the positions looked at.
    """
    ids = random_ids(1100)
    logits = feed_cut(one_layer, new_cache(one_layer, 4, 60), ids, 1100)[0]
    for length in (QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK, 2 * QUERY_BLOCK + 1, 1100):
        expected = one_layer_oracle(one_layer, ids[0, :length].tolist(), 4, 60)
        assert_logits_equal(logits[length - 1], expected)


SCALED_ROPE = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("chunk_size", [1, 7, 50])
@pytest.mark.parametrize("rope_type", SCALED_ROPE)
def test_scaled_rope_gives_the_logits_of_oracle_a(rope_type, chunk_size):
    """The model's own frequencies are used, and YaRN's factor once, after 200 evictions too.

    Oracle A runs transformers' own scaling; one layer.
    """
    rope = SCALED_ROPE[rope_type]
    model = tiny_model(
        rope_parameters={"rope_type": rope_type, "rope_theta": 10_000.0, **rope},
        max_position_embeddings=int(16 * rope["factor"]),
    )
    ids = random_ids(216)
    logits = feed_cut(model, new_cache(model, 4, 12), ids, chunk_size)[0, -1]
    assert_logits_equal(logits, one_layer_oracle(model, ids[0].tolist(), 4, 12))


def test_a_batch_gives_what_its_rows_give_alone(two_layers):
    """Three rows fed at once, by chunks and by token, are each as when fed alone.

    The oracle is the cache with one row: a fault of every row alike would not show.
    """
    ids = random_ids(60, batch_size=3)
    cut = [20, 1, 1, 7, 30, 1]
    together = feed_cut(two_layers, new_cache(two_layers, 4, 12, batch_size=3), ids, cut)
    for row in range(3):
        alone = feed_cut(two_layers, new_cache(two_layers, 4, 12), ids[row : row + 1], cut)
        assert_logits_equal(together[row], alone[0])


# Cases from the field


@pytest.mark.parametrize("length", [50, 16, 17, 15])
def test_a_prompt_longer_than_the_cache(one_layer, length):
    """A prompt fed at once leaves min(length, 16) tokens, and 30 steps later 16, never 17.

    The logits are oracle A's after the prompt and after each step.
    """
    ids = random_ids(length + 30)
    cache = new_cache(one_layer, 4, 12)
    logits = forward(one_layer, ids[:, :length], cache)[0, -1]
    assert_logits_equal(logits, one_layer_oracle(one_layer, ids[0, :length].tolist(), 4, 12))
    assert cache.num_held == cache.snapshot().tensors["keys"].shape[-2] == min(length, 16)
    for end in range(length + 1, length + 31):
        logits = forward(one_layer, ids[:, end - 1 : end], cache)[0, -1]
        assert_logits_equal(logits, one_layer_oracle(one_layer, ids[0, :end].tolist(), 4, 12))
        assert cache.num_held == cache.snapshot().tensors["keys"].shape[-2] == 16
    assert cache.num_evicted == length + 30 - 16


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_positions_stay_consecutive_for_ten_capacities(one_layer, chunk_size):
    """Every distance stays below S + W, just past the capacity and at ten times it.

    Oracle A holds, whose positions are consecutive by construction; one layer.
    """
    ids = random_ids(160)
    cache = new_cache(one_layer, 4, 12)
    logits = feed_cut(one_layer, cache, ids, chunk_size)[0]
    for length in (16, 17, 18, 31, 159, 160):
        expected = one_layer_oracle(one_layer, ids[0, :length].tolist(), 4, 12)
        assert_logits_equal(logits[length - 1], expected)


@pytest.mark.parametrize("chunk_size", [1, 37])
def test_a_stream_that_starts_at_2_to_the_25_is_one_that_starts_at_0(two_layers, chunk_size):
    """Each token's loss is the same within 1e-4 wherever the stream starts.

    The oracle is the stream from 0. Float32 angles are off by more than a radian at 2**25.
    """
    ids = random_ids(300)
    losses = []
    for start_position in (0, 2**25):
        cache = new_cache(two_layers, 4, 60, start_position=start_position)
        logits = feed_cut(two_layers, cache, ids, chunk_size)[0]
        losses.append(F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none"))
    assert float((losses[0] - losses[1]).abs().max()) < 1e-4


# 16 bits


def test_a_stored_key_never_changes():
    """A bf16 window key stays bit for bit the same from its writing to its eviction.

    Decode and chunks mixed. The oracle is the key first seen: one written wrong would pass.
    """
    with default_dtype(torch.bfloat16):
        model = tiny_model(num_layers=2)
    cache = new_cache(model, 4, 12)
    first_seen, num_compared = {}, 0
    ids = random_ids(120)
    for piece in ids.split([1, 3, 1, 1, 7, 1, 1, 1, 5, 1, 12, 1, 1, 13, 2, 1, 1, 50, 1, 1, 15], 1):
        forward(model, piece, cache)
        for position in range(max(4, cache.num_seen - 12), cache.num_seen):
            for layer_idx in range(2):
                key = cache.window_key(layer_idx, position).clone()
                assert key.dtype == torch.bfloat16
                before = first_seen.setdefault((layer_idx, position), key)
                assert torch.equal(key, before)
                num_compared += before is not key
    assert num_compared > 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_keys_do_not_drift(dtype):
    """Neither keys nor attention are further off after 20,000 tokens than after 100.

    The oracles are un-rotated copies turned afresh in float64, and B's attention. Bare tensors of
    one layer: what a deep model makes of the error is not looked at.
    """
    sink_size, window_size, head_dim, length = 4, 64, 32, 20_000
    inv_freq = default_inv_freq(head_dim, theta=1e6)
    geometry = CacheGeometry(
        num_layers=1, num_kv_heads=1, head_dim=head_dim, inv_freq=inv_freq, dtype=dtype
    )
    cache = SinkCache(CacheConfig(sink_size=sink_size, window_size=window_size), geometry)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, length, head_dim, generator=generator).to(dtype)

    def feed(num_tokens):
        new = slice(cache.num_seen, cache.num_seen + num_tokens)
        with cache.step(num_tokens):
            return cache.attend(0, query[None, :, new], key[None, :, new], value[None, :, new])[0]

    def errors():
        window = range(cache.num_seen - window_size, cache.num_seen)
        stored = torch.stack([cache.window_key(0, p)[0, 0] for p in window]).double()
        fresh = torch.stack([rotated(key[0, p], p, inv_freq) for p in window])
        held = [(key[:, p], value[:, p]) for p in (*range(sink_size), *window)]
        expected = attend_afresh(query[:, cache.num_seen - 1], held, inv_freq)
        key_error = float((stored - fresh).abs().max() / fresh.abs().max())
        return key_error, float((out[:, -1] - expected).abs().max())

    for num_tokens in (50, 40, 4, 1, 1, 1, 1, 1, 1):
        out = feed(num_tokens)
    assert cache.num_seen == 100
    early_key, early_out = errors()
    while cache.num_seen < length - 100:
        out = feed(min(500, length - 100 - cache.num_seen))
        out = feed(1)
    while cache.num_seen < length:
        out = feed(1)
    late_key, late_out = errors()
    assert late_key <= 2 * early_key
    assert late_out <= 2 * early_out + torch.finfo(dtype).eps
    if dtype == torch.float32:
        assert max(late_key, late_out) < 1e-4


@lru_cache
def errors_in_16_bits(dtype):
    """What four models in `dtype` make of two cuts, by the sink cache and by the stock cache.

    Returns:
        For "ours" and "stock" the logits' errors against oracle B, by token and by chunks of 7,
        shape (2, models, length, vocab_size). The stock cache keeps everything, so its oracle does.
    """
    ids, num_models = random_ids(96), 4
    errors = {"ours": [], "stock": []}
    for seed in range(num_models):
        with default_dtype(dtype):
            model = tiny_model(num_layers=2, seed=seed)
        bounded, dense = (
            SlowStream(model, 4, window_size).feed_all(ids[0].tolist()) for window_size in (28, 96)
        )
        for chunk_size in (1, 7):
            logits = feed_cut(model, new_cache(model, 4, 28), ids, chunk_size)[0]
            errors["ours"].append(logits - bounded)
            errors["stock"].append(feed_stock(model, ids, chunk_size)[0] - dense)
    return {
        who: torch.stack(found).unflatten(0, (num_models, 2)).transpose(0, 1)
        for who, found in errors.items()
    }


def rms(x):
    return float(x.square().mean().sqrt())


BEFORE_AND_AFTER = pytest.mark.parametrize(
    "positions",
    [slice(0, 32), slice(32, 96)],
    ids=["before_the_first_eviction", "after_the_first_eviction"],
)

MOST_DIFFERENCE = 1.0
"""How far two cuts may differ, in terms of how far the stock cache lets the same two cuts differ.

Both ways through our attention compute in float32, so that only the model's own layers round.
"""


@BEFORE_AND_AFTER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_logits_are_no_further_from_the_truth_than_the_stock_cache(dtype, positions):
    """By token and by chunks of 7, 16-bit errors are at most those of the stock cache.

    Root mean square error against oracle B. It would miss a fault below 16-bit rounding, which
    the float32 tests are for.
    """
    errors = errors_in_16_bits(dtype)
    for ours, stock in zip(errors["ours"], errors["stock"], strict=True):
        assert rms(ours[:, positions]) <= rms(stock[:, positions])


@BEFORE_AND_AFTER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_cuts_differ_by_a_known_factor_of_what_the_stock_cache_does(dtype, positions):
    """Two cuts differ by at most MOST_DIFFERENCE times what they do with the stock cache.

    By token and by chunks of 7. It would miss an error that both cuts share.
    """
    errors = errors_in_16_bits(dtype)
    ours, stock = (rms((e[0] - e[1])[:, positions]) for e in (errors["ours"], errors["stock"]))
    assert ours <= MOST_DIFFERENCE * stock


def feed_stock(model, ids, chunk_size):
    cache = DynamicCache(config=model.config)
    argument = cache_argument(type(model).forward)
    with torch.no_grad():
        pieces = [model(piece, **{argument: cache}).logits for piece in ids.split(chunk_size, 1)]
    return torch.cat(pieces, dim=1)


# Through transformers' generate


def generate(model, ids, cache, num_new, **options):
    argument = cache_argument(type(model).forward)
    out = model.generate(
        ids,
        **{argument: cache},
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        **options,
    )
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_before_the_first_eviction_is_stock_generate(family):
    """Oracle C: the same greedy ids, two rows at once, while everything fits.

    It would miss an error too small to change an id.
    """
    model = tiny_model(family, num_layers=2)
    ids = random_ids(20, batch_size=2)
    cache = new_cache(model, 4, 60, batch_size=2)
    assert torch.equal(generate(model, ids, cache, 40), greedy_oracle(model, ids, 40))
    assert cache.num_evicted == 0


def test_generate_far_past_the_window_is_a_greedy_loop_over_oracle_b(two_layers):
    """160 ids after a prompt longer than the cache are those of a greedy loop over oracle B.

    It would miss an error too small to change an id.
    """
    ids = random_ids(30)
    cache = new_cache(two_layers, 4, 12)
    generated = generate(two_layers, ids, cache, 160)[0].tolist()
    oracle = SlowStream(two_layers, 4, 12)
    logits = oracle.feed_all(ids[0].tolist())[-1]
    expected = []
    for _ in range(160):
        expected.append(int(logits.argmax()))
        logits = oracle.feed(expected[-1])
    assert generated == expected
    # The last id was chosen, not fed.
    assert cache.num_seen == 30 + 160 - 1


def test_generate_goes_on_with_the_cache_it_filled(two_layers):
    """Generating 20 ids and, with the same cache, 20 more gives the 40 of one call."""
    ids = random_ids(30)
    at_once = generate(two_layers, ids, new_cache(two_layers, 4, 12), 40)
    cache = new_cache(two_layers, 4, 12)
    first = generate(two_layers, ids, cache, 20)
    second = generate(two_layers, torch.cat((ids, first), dim=1), cache, 20)
    assert torch.equal(torch.cat((first, second), dim=1), at_once)


def test_a_prepared_model_runs_its_own_path_without_a_sink_cache():
    """Before and after `prepare` a model gives the same bits with no cache and with its own."""
    torch.manual_seed(0)
    config = tiny_model(num_layers=2).config
    plain = LlamaForCausalLM(config).eval()
    prepared = tiny_model(num_layers=2)
    prepared.load_state_dict(plain.state_dict())
    plain.set_attn_implementation("sdpa")
    ids = random_ids(30)
    with torch.no_grad():
        assert torch.equal(prepared(ids).logits, plain(ids).logits)
    assert torch.equal(feed_stock(prepared, ids, 7), feed_stock(plain, ids, 7))


def test_a_padded_batch_is_refused(two_layers):
    """Padding, which would move a row against its neighbours, is refused before anything is fed.

    What the cache generates afterwards is what a new one does.
    """
    ids = random_ids(12, batch_size=2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = new_cache(two_layers, 4, 12, batch_size=2)
    with pytest.raises(StateError, match="padded"):
        generate(two_layers, ids, cache, 5, attention_mask=mask)
    assert cache.num_seen == 0
    expected = generate(two_layers, ids, new_cache(two_layers, 4, 12, batch_size=2), 20)
    assert torch.equal(generate(two_layers, ids, cache, 20), expected)


def test_a_model_that_was_not_prepared_is_refused():
    """Without `prepare` the model would rotate keys itself, and again: both ways in raise."""
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    with pytest.raises(StateError, match="not prepared"):
        SinkCache.for_model(model)
    geometry = CacheGeometry(num_layers=2, num_kv_heads=2, head_dim=8, inv_freq=default_inv_freq(8))
    cache = SinkCache(CacheConfig(sink_size=4, window_size=12), geometry)
    with pytest.raises(StateError, match="not prepared"):
        generate(model, random_ids(5), cache, 3)


def test_retained_ids_by_hand():
    """Oracle A's own list: S = 2, W = 3."""
    assert retained_ids([0, 1, 2, 3, 4], 2, 3) == [0, 1, 2, 3, 4]
    assert retained_ids([0, 1, 2, 3, 4, 5, 6], 2, 3) == [0, 1, 4, 5, 6]
    assert retained_ids([0], 2, 3) == [0]
