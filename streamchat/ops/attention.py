"""Attention over what a sink cache holds, with the group structure of GQA kept.

Neither function repeats keys for the query heads of a group: the heads of a group become extra
query rows of their key head. Both compute in float32 whatever the dtype of the keys, so that the
numbers do not depend on which of the two a token went through.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from streamchat.ops.linear import linear


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to scaled scores: for each query, and by head, a run of a table.

    Kept so, a long chunk's biases take no memory until they are used.

    Attributes:
        table: Shape (num_heads, length), float32.
        starts: Where each query's run begins, shape (num_queries,), int64.
    """

    table: Tensor
    starts: Tensor

    def rows(self, heads: slice, num_keys: int) -> Tensor:
        """The runs of some heads, shape (heads, num_queries, num_keys)."""
        runs = self.table[heads].unfold(-1, num_keys, 1)
        return runs.index_select(1, self.starts)


@dataclass(frozen=True, slots=True)
class Part:
    """Keys that are scored with one rotation of the query.

    Attributes:
        query: Shape (batch, num_heads, num_queries, head_dim), rotated for these keys, float32.
        keys: Shape (batch, num_kv_heads, num_keys, head_dim), rotated.
        values: Shape (batch, num_kv_heads, num_keys, head_dim).
        hidden: Shape (num_queries, num_keys). For the functions of this file bool, true where a
            query must not look; `kernels.Kernels.mask` makes it for others. None hides nothing.
        bias: Added to the scaled scores, for models with ALiBi.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor | None
    bias: Bias | None = None


def score_mask(hidden: Tensor) -> Tensor:
    """What `Part.hidden` must be to hide keys, of a bool mask that is true for these."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def decode_attention(
    query_for_sinks: Tensor,
    query_for_window: Tensor,
    keys: Tensor,
    values: Tensor,
    num_sinks: int,
    scaling: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """One softmax of one query over sinks and window: `merged_attention` with less to do.

    Args:
        query_for_sinks: Shape (batch, num_heads, 1, head_dim), rotated for the sinks, float32.
        query_for_window: Same shape, rotated for the window, float32.
        keys: Shape (batch, num_kv_heads, num_keys, head_dim), rotated; the sinks come first.
        values: Shape (batch, num_kv_heads, num_keys, head_dim).
        num_sinks: How many of the keys are sinks.
        scaling: Factor on the scores.
        softcap: Scores are squeezed between this and its negative (Gemma 2, arXiv:2408.00118).
        sink_logit: Shape (num_heads,): a term of the softmax that no key has (learned in GPT-OSS,
            zeros for softmax-off-by-one).
        bias: Added to the scaled scores, for models with ALiBi; shape (num_heads, num_keys).

    Returns:
        Shape (batch, num_heads, 1, head_dim), float32.
    """
    batch_size, num_heads, _, head_dim = query_for_window.shape
    groups = (batch_size, keys.shape[1], -1, head_dim)
    wide = keys.float().transpose(-1, -2)
    scores = query_for_window.reshape(groups) @ wide[..., num_sinks:]
    if num_sinks:
        of_sinks = query_for_sinks.reshape(groups) @ wide[..., :num_sinks]
        scores = torch.cat((of_sinks, scores), dim=-1)
    scores = _capped(scores * scaling, softcap)
    if bias is not None:
        scores = scores + bias.reshape(scores.shape[1:])
    if sink_logit is not None:
        sink_logit = sink_logit.view(keys.shape[1], -1)
    return (_softmax(scores, sink_logit) @ values.float()).view(batch_size, num_heads, 1, head_dim)


def attention_weights(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    hidden: Tensor | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """What each query gives to each key: for policies that choose keys by it.

    Args:
        query: Shape (batch, num_kv_heads, group, num_queries, head_dim), rotated, float32.
        keys: Shape (batch, num_kv_heads, num_keys, head_dim), rotated.
        scaling: Factor on the scores.
        hidden: Shape (num_queries, num_keys), bool, true where a query must not look.
        softcap: See `decode_attention`.
        sink_logit: See `decode_attention`; shape (num_kv_heads, group).
        bias: See `decode_attention`; shape (num_kv_heads, group, 1, num_keys).

    Returns:
        Shape (batch, num_kv_heads, group, num_queries, num_keys), float32.
    """
    # The group's heads as rows of one product: broadcast, the keys would be copied for each.
    scores = query.flatten(2, 3) @ keys.float().transpose(-1, -2) * scaling
    scores = _capped(scores, softcap).view(*query.shape[:4], -1)
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sink_logit is not None:
        sink_logit = sink_logit[None, :, :, None].expand(scores.shape[:-1])
    return _softmax(scores, sink_logit)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """What `attention_weights` make of values.

    Args:
        weights: Shape (batch, num_kv_heads, group, num_queries, num_keys).
        values: Shape (batch, num_kv_heads, num_keys, head_dim).

    Returns:
        Shape (batch, num_kv_heads, group, num_queries, head_dim), float32.
    """
    summed = weights.flatten(2, 3) @ values.float()
    return summed.view(*weights.shape[:4], -1)


def merged_attention(
    parts: list[Part],
    scaling: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
) -> Tensor:
    """One softmax over several parts, each scored with its own rotation of the query.

    Args:
        parts: At least one, with at least one key each, the largest first. Every query sees at
            least one key.
        scaling: Factor on the scores.
        softcap: See `decode_attention`.
        sink_logit: See `decode_attention`.

    Returns:
        Shape (batch, num_heads, num_queries, head_dim), float32.
    """
    query = parts[0].query
    batch_size, num_kv_heads = parts[0].keys.shape[:2]
    # reshape, not view: the caller may pass a slice of a longer chunk's queries.
    grouped = (batch_size, num_kv_heads, -1, query.shape[-1])
    queries = [part.query.reshape(grouped) * scaling for part in parts]
    keys = torch.cat([part.keys.float() for part in parts], dim=-2)
    values = torch.cat([part.values.float() for part in parts], dim=-2).transpose(-1, -2)
    sizes = [part.keys.shape[-2] for part in parts]
    hidden = [part.hidden for part in parts]
    biases = [part.bias for part in parts]
    if sink_logit is not None:  # for each query of each head of a group
        sink_logit = sink_logit.view(num_kv_heads, -1).repeat_interleave(query.shape[2], dim=1)
    if query.device.type != "cpu":
        added = _rows(biases, slice(None), sizes)
        out = _attend(queries, keys, values, sizes, hidden, added, softcap, sink_logit)
        return out.view(query.shape)
    # By head: oneDNN's matrix products are twice as fast as a batch of MKL's (docs/log.md), and
    # the scores of one head stay in the cache.
    out = torch.empty_like(queries[0])
    values = values.contiguous()
    group_size = query.shape[1] // num_kv_heads
    for row in range(batch_size):
        for head in range(num_kv_heads):
            own = [query[row, head] for query in queries]
            added = _rows(biases, slice(head * group_size, (head + 1) * group_size), sizes)
            own_sink = None if sink_logit is None else sink_logit[head]
            out[row, head] = _attend(
                own, keys[row, head], values[row, head], sizes, hidden, added, softcap, own_sink
            )
    return out.view(query.shape)


def _rows(biases: list[Bias | None], heads: slice, sizes: list[int]) -> list[Tensor | None]:
    """What each part adds to the scores of some heads, see `Bias.rows`."""
    return [
        None if bias is None else bias.rows(heads, size)
        for bias, size in zip(biases, sizes, strict=True)
    ]


def _attend(
    queries: list[Tensor],
    keys: Tensor,
    values: Tensor,
    sizes: list[int],
    hidden: list[Tensor | None],
    added: list[Tensor | None],
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
) -> Tensor:
    """Attention of key heads' groups over all parts.

    Args:
        queries: For each part, shape (..., group * num_queries, head_dim), scaled.
        keys: Of all parts, shape (..., num_keys, head_dim).
        values: Shape (..., head_dim, num_keys).
        sizes: Keys of each part.
        hidden: For each part, see `Part`.
        added: For each part, shape (heads, num_queries, keys of the part), or None.
        softcap: See `decode_attention`.
        sink_logit: Shape (..., group * num_queries), or None.
    """
    scores = _product(queries[0], keys)
    bounds = list(accumulate(sizes, initial=0))
    for query, start, stop in zip(queries[1:], bounds[1:], bounds[2:], strict=False):
        scores[..., start:stop] = _product(query, keys[..., start:stop, :])
    scores = _capped(scores, softcap)
    for mask, bias, start, stop in zip(hidden, added, bounds, bounds[1:], strict=False):
        own = scores[..., start:stop]
        if mask is not None:
            own.view(*own.shape[:-2], -1, *mask.shape).add_(mask)
        if bias is not None:
            own.view(-1, *bias.shape).add_(bias)
    return _product(_softmax(scores, sink_logit), values)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else (scores / softcap).tanh_().mul_(softcap)


def _softmax(scores: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Weights of the keys; with a sink logit, shape (...), they do not add up to one."""
    if sink_logit is None:
        return scores.softmax(dim=-1)
    column = sink_logit.float()[..., None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1].contiguous()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`x` times the transpose of `weight`."""
    return linear(x, weight, None) if weight.ndim == 2 else x @ weight.transpose(-1, -2)
