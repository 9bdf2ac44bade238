"""Quantized matrices times float32 vectors, compiled, for a CPU.

Each row of weights is read once and dequantized in registers (`dot.py`). A product is cut by rows
among the threads.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

from streamchat.ops.compiled.dot import dot_int4, dot_int8
from streamchat.ops.compiled.entry import FAST, Entry
from streamchat.ops.compiled.team import claim, finish, new_progress, run, wait
from streamchat.ops.quantization import GROUP

PIECE_BYTES = 1 << 16
"""Bytes of weights that a thread takes at a time."""

ZERO = np.float32(0)

compiled = njit(fastmath=FAST, error_model="numpy")


def matrix_times_rows(codes: Tensor, scales: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer for few tokens.

    Args:
        codes: See `quantization.Quantized`.
        scales: Same.
        x: Shape (..., in_features), float32.
        bias: Shape (out_features,), or None.

    Returns:
        Shape (..., out_features), float32.
    """
    out = torch.empty(*x.shape[:-1], codes.shape[0], dtype=torch.float32, device="cpu")
    run(
        _multiply_rows,
        codes.numpy(),
        scales.view(torch.int16).numpy(),
        x.detach().contiguous().view(-1, x.shape[-1]).numpy(),
        out.view(-1, codes.shape[0]).numpy(),
        new_progress(1),
    )
    return out if bias is None else out.add_(bias)


def row_dot(kind: Any, codes: int, scales: int, row: int, x: int, sums: int, groups: int) -> Any:
    """One row of a matrix times a vector; compiled code only.

    Args:
        kind: The matrix's codes, for their dtype.
        codes: Address of its codes.
        scales: Address of its scales.
        row: Which row.
        x: Address of the vector.
        sums: Address of the sums of its groups.
        groups: Groups of a row.
    """
    raise NotImplementedError


@overload(row_dot, inline="always")
def _row_dot(
    kind: Any, codes: Any, scales: Any, row: Any, x: Any, sums: Any, groups: Any
) -> Callable[..., Any]:
    def int8(kind: Any, codes: Any, scales: Any, row: Any, x: Any, sums: Any, groups: Any) -> Any:
        return dot_int8(codes + row * groups * GROUP, scales + row * groups * 2, x, groups)

    def int4(kind: Any, codes: Any, scales: Any, row: Any, x: Any, sums: Any, groups: Any) -> Any:
        row_codes, row_scales = codes + row * groups * (GROUP // 2), scales + row * groups * 4
        return dot_int4(row_codes, row_scales, x, sums, groups)

    return int8 if kind.dtype.signed else int4


@intrinsic
def address(_context: Any, array: Any) -> Any:
    """Where an array lies."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.int64))

    return types.int64(array), generate


@intrinsic
def _pointer(_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@compiled
def borrow(array: Any) -> Any:
    """The same array, without a count of its references.

    numba counts them atomically at every slice, and threads that slice the same array wait for
    each other: a third of a step (docs/log.md).
    """
    return numba.carray(_pointer(array), array.shape)


@compiled
def piece_rows(matrix: Any) -> int:
    """Rows of a piece of work: enough to outweigh the claim, few enough to share evenly."""
    return max(1, PIECE_BYTES // matrix.shape[1])


@compiled
def num_pieces(num_rows: int, rows: int) -> int:
    """Pieces of `rows` rows each, the last one shorter."""
    return (num_rows + rows - 1) // rows


@compiled
def sum_groups(x: Any, sums: Any) -> None:
    """Write the sum of each group of `x`, which minima of 4-bit codes are multiplied by."""
    for group in range(x.size // GROUP):
        total = ZERO
        for index in range(group * GROUP, (group + 1) * GROUP):
            total += x[index]
        sums[group] = total


@Entry
def _multiply_rows(thread: int, codes: Any, scales: Any, x: Any, out: Any, progress: Any) -> None:
    codes, scales, x, out = borrow(codes), borrow(scales), borrow(x), borrow(out)
    progress = borrow(progress)
    sums = np.empty((x.shape[0], x.shape[1] // GROUP), np.float32)
    for index in range(x.shape[0]):
        sum_groups(x[index], sums[index])
    rows = piece_rows(codes)
    pieces = num_pieces(codes.shape[0], rows)
    groups = x.shape[1] // GROUP
    at_codes, at_scales, at_x, at_sums = address(codes), address(scales), address(x), address(sums)
    piece = claim(progress, 0, thread, pieces)
    while piece >= 0:
        for row in range(piece * rows, min(codes.shape[0], (piece + 1) * rows)):
            for index in range(x.shape[0]):
                out[index, row] = row_dot(
                    codes,
                    at_codes,
                    at_scales,
                    row,
                    at_x + 4 * index * x.shape[1],
                    at_sums + 4 * index * groups,
                    groups,
                )
        finish(progress, 0)
        piece = claim(progress, 0, thread, pieces)
    wait(progress, 0, pieces)
