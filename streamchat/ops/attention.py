"""Attention over what a sink cache holds, with the group structure of GQA kept.

Neither function repeats keys for the query heads of a group: the heads of a group become extra
query rows of their key head. Both compute in float32 whatever the dtype of the keys, so that the
numbers do not depend on which of the two a token went through.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Keys that are scored with one rotation of the query.

    Attributes:
        query: Shape (batch, num_heads, num_queries, head_dim), rotated for these keys, float32.
        keys: Shape (batch, num_kv_heads, num_keys, head_dim), rotated.
        values: Shape (batch, num_kv_heads, num_keys, head_dim).
        hidden: Shape (num_queries, num_keys). For the functions of this file bool, true where a
            query must not look; `kernels.Kernels.mask` makes it for others. None hides nothing.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor | None


def decode_attention(
    query_for_sinks: Tensor,
    query_for_window: Tensor,
    keys: Tensor,
    values: Tensor,
    num_sinks: int,
    scaling: float,
) -> Tensor:
    """One softmax of one query over sinks and window: `merged_attention` with less to do.

    Args:
        query_for_sinks: Shape (batch, num_heads, 1, head_dim), rotated for the sinks, float32.
        query_for_window: Same shape, rotated for the window, float32.
        keys: Shape (batch, num_kv_heads, num_keys, head_dim), rotated; the sinks come first.
        values: Shape (batch, num_kv_heads, num_keys, head_dim).
        num_sinks: How many of the keys are sinks.
        scaling: Factor on the scores.

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
    weights = (scores * scaling).softmax(dim=-1)
    return (weights @ values.float()).view(batch_size, num_heads, 1, head_dim)


def merged_attention(parts: list[Part], scaling: float) -> Tensor:
    """One softmax over several parts, each scored with its own rotation of the query.

    Args:
        parts: At least one, with at least one key each. Every query sees at least one key.
        scaling: Factor on the scores.

    Returns:
        Shape (batch, num_heads, num_queries, head_dim), float32.
    """
    scores = [_scores(part, scaling) for part in parts]
    peak = torch.stack([s.amax(dim=-1, keepdim=True) for s in scores]).amax(dim=0)
    total = torch.zeros_like(peak)
    out: Tensor | float = 0.0
    for part, score in zip(parts, scores, strict=True):
        weights = score.sub_(peak).exp_()
        total += weights.sum(dim=-1, keepdim=True)
        out = out + weights @ part.values.float()
    query = parts[0].query
    return (out / total).view(query.shape)


def _scores(part: Part, scaling: float) -> Tensor:
    """Scores of a part, shape (batch, num_kv_heads, group * num_queries, num_keys), float32."""
    batch_size, _, num_queries, head_dim = part.query.shape
    num_kv_heads = part.keys.shape[1]
    # reshape, not view: the caller may pass a slice of a longer chunk's queries.
    grouped = part.query.reshape(batch_size, num_kv_heads, -1, head_dim) * scaling
    scores = grouped @ part.keys.float().transpose(-1, -2)
    if part.hidden is not None:
        by_head = scores.view(batch_size, num_kv_heads, -1, num_queries, scores.shape[-1])
        by_head.masked_fill_(part.hidden, float("-inf"))
    return scores
