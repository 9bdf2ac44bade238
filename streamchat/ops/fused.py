"""Attention by a fused kernel, for CUDA: no score matrix, and no copy of the keys in float32.

A kernel scores one part of the keys and returns, beside the output, the log-sum-exp of its scores.
The softmax over all parts is then the mean of their outputs, weighted by the softmax of their
log-sum-exps. That serves twice: sinks and window are scored by queries of different rotation, and
a long window is cut into pieces, without which one query would keep a few multiprocessors busy.
As in `attention.py`, the heads of a group become extra query rows of their key head.

See FlashAttention (Dao et al. 2022, arXiv:2205.14135), section 3.1, and its "Flash-Decoding".
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from streamchat.ops.attention import Part

HIDDEN = -32768.0
"""Added to a score that must not count. Finite, so that a piece of which all is hidden gives
numbers, which then weigh nothing, and no NaN; exact in every dtype."""

ALIGNMENT = 16
"""The kernel wants the rows of a bias this many elements apart."""

ROWS_PER_BLOCK = 64
"""Query rows that the kernel gives to one thread block, at most."""

TARGET_BLOCKS = 256
"""Thread blocks that keep a large GPU busy: about two for each multiprocessor."""

SHORTEST_PIECE = 64
"""Keys that a piece has at least: what the kernel reads at once."""


class Piece(NamedTuple):
    """What a kernel is called with. Rows: the heads of a group, times the queries.

    Attributes:
        query: Shape (batch * num_kv_heads, num_pieces, rows, head_dim).
        keys: Shape (batch * num_kv_heads, num_pieces, num_keys, head_dim).
        values: Same shape.
        bias: Broadcast to (batch * num_kv_heads, num_pieces, rows, num_keys), or None.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None


Kernel = Callable[[Piece, float], tuple[Tensor, Tensor]]
"""From a piece and the factor on the scores to the output, shaped as the query, and the log-sum-exp
of the scores, shape (batch * num_kv_heads, num_pieces, rows), float32."""


def efficient_kernel(piece: Piece, scaling: float) -> tuple[Tensor, Tensor]:
    """Score by the memory-efficient attention of torch."""
    out, log_sum_exp, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *piece, compute_log_sumexp=True, scale=scaling
    )
    # The kernel pads its rows to a multiple of 32.
    return out, log_sum_exp[..., : piece.query.shape[-2]]


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias that hides what `hidden` says, its rows aligned as the kernel wants them.

    Args:
        hidden: Shape (num_queries, num_keys), bool.
        dtype: Of the keys.
    """
    num_queries, num_keys = hidden.shape
    padded = -(-num_keys // ALIGNMENT) * ALIGNMENT
    bias = torch.zeros((num_queries, padded), dtype=dtype, device=hidden.device)
    return bias[:, :num_keys].masked_fill_(hidden, HIDDEN)


def fused_decode_attention(
    query_for_sinks: Tensor,
    query_for_window: Tensor,
    keys: Tensor,
    values: Tensor,
    num_sinks: int,
    scaling: float,
) -> Tensor:
    """`attention.decode_attention` by a fused kernel."""
    sinks, window = slice(0, num_sinks), slice(num_sinks, None)
    parts = [
        Part(query_for_sinks, keys[:, :, sinks], values[:, :, sinks], None),
        Part(query_for_window, keys[:, :, window], values[:, :, window], None),
    ]
    return fused_merged_attention([part for part in parts if part.keys.shape[-2]], scaling)


def fused_merged_attention(
    parts: list[Part], scaling: float, kernel: Kernel = efficient_kernel
) -> Tensor:
    """`attention.merged_attention` by a fused kernel.

    Args:
        parts: At least one, with at least one key each. Every query sees at least one key. What
            they hide is said by `additive_mask`.
        scaling: Factor on the scores.
        kernel: Scores one piece.

    Returns:
        Shape (batch, num_heads, num_queries, head_dim), float32.
    """
    scored = [kernel(piece, scaling) for part in parts for piece in _pieces(part)]
    outs, log_sum_exps = zip(*scored, strict=True)
    weights = torch.cat(log_sum_exps, dim=1).softmax(dim=1).unsqueeze(-1)
    # float32: the log-sum-exps are, whatever the dtype of the keys.
    return (weights * torch.cat(outs, dim=1)).sum(dim=1).view(parts[0].query.shape)


def _pieces(part: Part) -> Iterator[Piece]:
    """Cut a part into pieces of equal length, and a shorter one where that does not come out."""
    head_dim = part.query.shape[-1]
    # The key heads of all rows are the kernel's batch: its heads are then free for the pieces.
    keys, values = part.keys.flatten(0, 1), part.values.flatten(0, 1)
    query = part.query.to(keys.dtype).reshape(len(keys), 1, -1, head_dim)
    num_keys, num_rows = keys.shape[1], query.shape[2]
    length = _piece_length(num_keys, len(keys) * -(-num_rows // ROWS_PER_BLOCK))
    num_whole = num_keys // length
    cuts = [(0, num_whole, length)]
    if rest := num_keys - num_whole * length:
        cuts.append((num_whole * length, 1, rest))
    for start, count, size in cuts:
        columns = slice(start, start + count * size)
        yield Piece(
            query.expand(-1, count, -1, -1),
            _cut(keys[:, columns], count),
            _cut(values[:, columns], count),
            _bias_of(part, columns, count, query.shape, len(keys)),
        )


def _cut(x: Tensor, count: int) -> Tensor:
    """View the second dimension as `count` equal runs."""
    return x.view(x.shape[0], count, x.shape[1] // count, *x.shape[2:])


def _piece_length(num_keys: int, num_blocks: int) -> int:
    """Keys of one piece, where uncut `num_blocks` thread blocks would have work.

    A power of two of pieces: windows are mostly a multiple of one.
    """
    wanted = min(TARGET_BLOCKS // num_blocks, num_keys // SHORTEST_PIECE)
    if wanted <= 1:
        return num_keys
    count = 1 << (wanted.bit_length() - 1)
    # Aligned, so that the bias of every piece is.
    return -(-num_keys // (count * ALIGNMENT)) * ALIGNMENT


def _bias_of(
    part: Part, columns: slice, count: int, query_shape: torch.Size, batch: int
) -> Tensor | None:
    """The bias of some columns, broadcast as a `Piece` has it, without a copy for one query."""
    if part.hidden is None:
        return None
    num_queries, num_rows = part.hidden.shape[0], query_shape[2]
    pieces = _cut(part.hidden[:, columns], count).transpose(0, 1)
    if num_queries > 1:
        # One copy of the mask for each head of a group, in rows that stay aligned.
        pieces = _repeated_rows(pieces, num_rows // num_queries)
    return pieces.expand(batch, count, num_rows, -1)


def _repeated_rows(bias: Tensor, times: int) -> Tensor:
    """All rows again and again, shape (count, times * rows, columns), aligned."""
    count, num_rows, num_columns = bias.shape
    padded = -(-num_columns // ALIGNMENT) * ALIGNMENT
    wide = bias.new_zeros((count, times, num_rows, padded))
    wide[..., :num_columns] = bias.unsqueeze(1)
    return wide.flatten(1, 2)[..., :num_columns]
