"""Attention against a float64 softmax in NumPy, head by head."""

import numpy as np
import pytest
import torch

from streamchat.ops.attention import Part, decode_attention, merged_attention, score_mask

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
SCALING = HEAD_DIM**-0.5

TOLERANCE = 2e-6
"""Outputs are means of values of size 1 to 3, computed in float32 whatever the keys are."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def random_tensor(num_heads, length, *, seed, dtype=torch.float32, batch_size=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, num_heads, length, HEAD_DIM, generator=generator).to(dtype)


def make_part(num_queries, num_keys, *, seed, dtype=torch.float32, hidden=None):
    return Part(
        random_tensor(NUM_HEADS, num_queries, seed=seed),
        random_tensor(NUM_KV_HEADS, num_keys, seed=seed + 1, dtype=dtype),
        random_tensor(NUM_KV_HEADS, num_keys, seed=seed + 2, dtype=dtype),
        hidden,
    )


def softmax_oracle(parts, scaling):
    """One softmax over all parts' scores laid side by side, in float64, one query at a time."""
    arrays = [tuple(t.double().numpy() for t in (p.query, p.keys, p.values)) for p in parts]
    out = np.zeros(arrays[0][0].shape)
    batch_size, num_heads, num_queries, _ = out.shape
    for row, head, query in np.ndindex(batch_size, num_heads, num_queries):
        kv_head = head // (num_heads // arrays[0][1].shape[1])
        scores, values = [], []
        for part, (queries, keys, part_values) in zip(parts, arrays, strict=True):
            seen = np.ones(keys.shape[2], dtype=bool)
            if part.hidden is not None:
                seen = part.hidden[query].numpy() == 0
            scores.append(keys[row, kv_head, seen] @ queries[row, head, query] * scaling)
            values.append(part_values[row, kv_head, seen])
        joined = np.concatenate(scores)
        weights = np.exp(joined - joined.max())
        out[row, head, query] = weights @ np.concatenate(values) / weights.sum()
    return torch.from_numpy(out)


def assert_attends(got, parts, scaling=SCALING):
    expected = softmax_oracle(parts, scaling)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE)


@DTYPES
def test_two_parts_are_one_softmax_over_both(dtype):
    """Parts with queries of their own give the softmax over their scores laid side by side.

    The oracle concatenates. It takes the rotations of the queries as given.
    """
    parts = [make_part(5, 9, seed=0, dtype=dtype), make_part(5, 4, seed=10, dtype=dtype)]
    assert_attends(merged_attention(parts, SCALING), parts)


def test_one_part_is_plain_attention():
    """Without a second part nothing is added to the softmax.

    The oracle is the float64 softmax.
    """
    parts = [make_part(5, 9, seed=0)]
    assert_attends(merged_attention(parts, SCALING), parts)


def test_hidden_keys_have_no_weight():
    """A hidden key does not count, where one part hides all it has from a query too.

    The oracle drops the hidden keys before the softmax. Huge hidden values would show.
    """
    hidden = torch.arange(9)[None, :] > torch.arange(5)[:, None]
    all_hidden_from_two = torch.zeros(5, 4, dtype=torch.bool)
    all_hidden_from_two[1:3] = True
    parts = [
        make_part(5, 9, seed=0, hidden=score_mask(hidden)),
        make_part(5, 4, seed=10, hidden=score_mask(all_hidden_from_two)),
    ]
    parts[0].values[:, :, -1] = 1e30
    assert bool(hidden[:, -1].all())
    assert_attends(merged_attention(parts, SCALING), parts)


def test_large_scores_do_not_overflow():
    """Scores of some thousands, further apart in one part than in the other, stay finite.

    The oracle subtracts the largest first, in float64.
    """
    parts = [make_part(5, 9, seed=0), make_part(5, 4, seed=10)]
    parts[1].keys.mul_(3000)
    # Scores of 1e4 are known to 1e-3 in float32, and so are the weights: only here that coarse.
    expected = softmax_oracle(parts, SCALING)
    got = merged_attention(parts, SCALING)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-2)


def test_a_slice_of_a_longer_chunk_is_its_own_queries():
    """Queries that are a view of a longer chunk are read in the right order.

    The oracle is the same slice copied to a tensor of its own.
    """
    whole = make_part(12, 9, seed=0)
    part = Part(whole.query[:, :, 3:8], whole.keys[:, :, 2:], whole.values[:, :, 2:], None)
    copied = Part(part.query.clone(), part.keys.clone(), part.values.clone(), None)
    assert torch.equal(merged_attention([part], SCALING), merged_attention([copied], SCALING))


@DTYPES
def test_decode_is_one_softmax_in_any_order(dtype):
    """One query over all keys gives the softmax, in whatever slots they lie.

    The oracle sees the keys in another order.
    """
    part = make_part(1, 30, seed=0, dtype=dtype)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(4))
    keys, values = part.keys[:, :, order], part.values[:, :, order]
    assert_attends(decode_attention(part.query, part.query, keys, values, 0, SCALING), [part])


@DTYPES
def test_decode_scores_the_sinks_with_a_query_of_their_own(dtype):
    """The first keys are scored with one rotation of the query, the others with the other.

    The oracle lays the scores of two parts side by side.
    """
    sinks, window = make_part(1, 4, seed=0, dtype=dtype), make_part(1, 9, seed=10, dtype=dtype)
    keys = torch.cat((sinks.keys, window.keys), dim=2)
    values = torch.cat((sinks.values, window.values), dim=2)
    got = decode_attention(sinks.query, window.query, keys, values, 4, SCALING)
    assert_attends(got, [sinks, window])


def test_the_scaling_is_the_callers():
    """Both functions use the factor that they are given.

    The oracle is given the same.
    """
    part = make_part(1, 30, seed=0)
    query, keys, values = part.query, part.keys, part.values
    assert_attends(decode_attention(query, query, keys, values, 0, 0.7), [part], 0.7)
    assert_attends(merged_attention([part], 0.7), [part], 0.7)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_groups_are_keys_repeated_for_their_query_heads(num_kv_heads):
    """Grouped heads give what `repeat_interleave` over the query heads gives.

    The oracle is torch's own attention over the repeated keys.
    """
    query = random_tensor(NUM_HEADS, 1, seed=0)
    keys, values = (random_tensor(num_kv_heads, 20, seed=seed) for seed in (1, 2))
    repeated = (t.repeat_interleave(NUM_HEADS // num_kv_heads, dim=1) for t in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated)
    decoded = decode_attention(query, query, keys, values, 5, SCALING)
    merged = merged_attention([Part(query, keys, values, None)], SCALING)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(merged, expected, rtol=0, atol=2e-6)
