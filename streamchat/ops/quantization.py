"""Weights of 8 and 4 bits: what is stored, and what it means.

A row of a weight is cut into groups of 32 along the input. With 8 bits a group has one scale, and a
weight is scale * code, code in [-127, 127]. With 4 bits it has a scale and a minimum, and a weight
is scale * code + minimum, code in [0, 15]. Scales and minima are float16. These are the values that
the Q8_0 and Q4_1 blocks of GGML can take, so that weights from such a file survive unchanged.

Only weights are quantized. Activations stay in the model's dtype: the sinks' are a thousand times
the others', and quantizing them breaks a stream (docs/log.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Weights that share a scale."""


class Quantized(NamedTuple):
    """A quantized matrix.

    Attributes:
        codes: int8 of shape (rows, columns), or uint8 of shape (rows, columns / 2): byte i of a
            row holds its codes i (low half) and i + columns / 2.
        scales: float16 of shape (rows, columns / 32), or (rows, columns / 16) for 4 bits, where
            the scales come first and the minima after them.
    """

    codes: Tensor
    scales: Tensor


def fits(columns: int, bits: int) -> bool:
    """Whether rows of this length can be cut into groups (pairs of groups for 4 bits)."""
    return columns % (GROUP if bits == 8 else 2 * GROUP) == 0


def bytes_per_weight(bits: int) -> float:
    """Bytes that a quantized weight takes, with its share of the scales."""
    return bits / 8 + (2 if bits == 8 else 4) / GROUP


def quantize(weight: Tensor, bits: int) -> Quantized:
    """Quantize a matrix, shape (rows, columns), to 8 or 4 bits (see `fits`)."""
    rows = weight.shape[0]
    groups = weight.float().reshape(rows, -1, GROUP)
    if bits == 8:
        scales = (groups.abs().amax(dim=-1, keepdim=True) / 127).half()
        codes = (groups / _divisor(scales)).round_().clamp_(-127, 127)
        return Quantized(codes.to(torch.int8).reshape(rows, -1), scales.reshape(rows, -1))
    minima = groups.amin(dim=-1, keepdim=True).half()
    scales = ((groups.amax(dim=-1, keepdim=True) - minima.float()) / 15).half()
    codes = ((groups - minima.float()) / _divisor(scales)).round_().clamp_(0, 15).to(torch.uint8)
    first, second = codes.view(rows, 2, -1).unbind(dim=1)
    return Quantized(first | (second << 4), torch.cat((scales, minima), dim=1).view(rows, -1))


def _divisor(scales: Tensor) -> Tensor:
    """A scale of 0 belongs to a group of equal weights, whose codes are then 0."""
    return scales.float().masked_fill(scales == 0, torch.inf)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights that a quantized matrix, or some of its rows, stands for.

    Args:
        codes: Shape (..., columns) or (..., columns / 2), see `Quantized`.
        scales: See `Quantized`.
        dtype: Of the result.

    Returns:
        Shape (..., columns).
    """
    lead = codes.shape[:-1]
    if codes.dtype == torch.int8:
        groups = codes.view(*lead, -1, GROUP)
        return (groups.float() * scales.float()[..., None]).view(*lead, -1).to(dtype)
    unpacked = torch.cat((codes & 15, codes >> 4), dim=-1).view(*lead, -1, GROUP)
    factors, minima = scales.float()[..., None].chunk(2, dim=-2)
    return torch.addcmul(minima, unpacked.float(), factors).view(*lead, -1).to(dtype)
