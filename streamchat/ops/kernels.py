"""Which attention a cache uses: chosen by device, here and nowhere else."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamchat.ops.attention import decode_attention, merged_attention, score_mask
from streamchat.ops.fused import (
    additive_mask,
    fused_decode_attention,
    fused_merged_attention,
)

BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability from which the fused kernel knows bfloat16."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The attention of one kind of device.

    Attributes:
        mask: From a bool mask and the keys' dtype to what `Part.hidden` is for `merged`.
        decode: As `attention.decode_attention`, the explicit one alone with a bias.
        merged: As `attention.merged_attention`.
    """

    mask: Callable[[Tensor, torch.dtype], Tensor]
    decode: Callable[..., Tensor]
    merged: Callable[..., Tensor]


EXPLICIT = Kernels(lambda hidden, _dtype: score_mask(hidden), decode_attention, merged_attention)
FUSED = Kernels(additive_mask, fused_decode_attention, fused_merged_attention)


def kernels_for(device: torch.device, dtype: torch.dtype, *, is_plain: bool = True) -> Kernels:
    """The attention for keys of this dtype on this device.

    Args:
        device: Where the keys are.
        dtype: Of the keys.
        is_plain: Nothing between scores and softmax, ALiBi's biases among it, which fused kernels
            do not know.
    """
    if not is_plain:
        return EXPLICIT
    # ROCm calls its devices "cuda" too; its kernels are others.
    if device.type != "cuda" or torch.version.hip is not None:
        return EXPLICIT
    if dtype == torch.bfloat16:
        capability = torch.cuda.get_device_capability(device)
        return FUSED if capability >= BFLOAT16_CAPABILITY else EXPLICIT
    return FUSED
