"""Rotary position embedding with angles that stay exact at any stream position.

Angles are made in float64. In float32, as transformers makes them, the angle of position 2**22 is
off by 0.12 rad and that of 2**24 by more than one: a stream of a few million tokens would decay.

See RoFormer (Su et al. 2021, arXiv:2104.09864), section 3.4.2.
"""

import torch
from torch import Tensor


def default_inv_freq(head_dim: int, theta: float = 10_000.0) -> Tensor:
    """Inverse frequencies of unscaled RoPE.

    Args:
        head_dim: Size of one head; even.
        theta: Base of the geometric series.

    Returns:
        Shape (head_dim // 2,), float64, in radians per position.
    """
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def rope_tables(
    positions: Tensor, inv_freq: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for each position.

    Args:
        positions: Shape (length,), int64.
        inv_freq: Shape (rotary_dim // 2,), float64.
        interleaved: Whether elements 2i and 2i + 1 are turned together, as in GPT-J; otherwise
            elements i and i + rotary_dim // 2, as in Llama.

    Returns:
        `cos` and `sin`, shape (length, rotary_dim), float32, for `rotate`. Of each pair the first
        element of `sin` is negated, so that rotating takes one multiplication and one fused
        multiply-add.
    """
    angles = positions.to(torch.float64)[:, None] * inv_freq
    cos, sin = angles.cos().float(), angles.sin().float()
    if interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first `rotary_dim` elements of vectors by the angles of `rope_tables`.

    Args:
        x: Shape (..., length, head_dim), not rotated, any float dtype.
        cos: Shape (length, rotary_dim).
        sin: Shape (length, rotary_dim).
        interleaved: As for `rope_tables`.

    Returns:
        Shape of `x`, float32.
    """
    wide = x.float()
    rotary_dim = cos.shape[-1]
    if rotary_dim < wide.shape[-1]:
        turned = rotate(wide[..., :rotary_dim], cos, sin, interleaved=interleaved)
        return torch.cat((turned, wide[..., rotary_dim:]), dim=-1)
    if interleaved:
        partners = wide.view(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partners = wide.roll(rotary_dim // 2, dims=-1)
    return torch.addcmul(wide * cos, partners, sin)
