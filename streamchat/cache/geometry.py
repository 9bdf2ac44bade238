"""What a cache must know of the model's attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamchat.errors import ConfigError
from streamchat.ops.rotary import rotate

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """What a cache must know of the model's attention.

    Attributes:
        num_layers: Attention layers.
        num_kv_heads: Key/value heads of a layer.
        head_dim: Size of one head.
        inv_freq: RoPE frequencies, shape (rotary_dim // 2,), any float dtype. The first
            `rotary_dim` elements of a head are turned, all of them in most models.
        long_inv_freq: Same, for a cache of more than `original_length` tokens (longrope).
        original_length: See there.
        interleaved: Which elements are turned together, see `ops.rotary.rope_tables`.
        unrotated_layers: Layers without RoPE.
        alibi: For models with ALiBi, which have no RoPE and an `inv_freq` of length 0: what the
            model adds to the scaled scores of the first n keys, for any n; shape (num_heads, n).
        dtype: Of the stored keys and values.
        device: Where they are stored.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    inv_freq: Tensor
    long_inv_freq: Tensor | None = None
    original_length: int | None = None
    interleaved: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    alibi: Callable[[int], Tensor] | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def __post_init__(self) -> None:
        fewest, most = (1, self.head_dim // 2) if self.alibi is None else (0, 0)
        if self.inv_freq.ndim != 1 or not fewest <= len(self.inv_freq) <= most:
            raise ConfigError(
                f"inv_freq must have shape ({fewest} to {most},) for head_dim {self.head_dim}, "
                f"got {tuple(self.inv_freq.shape)}"
            )

    def frequencies(self, cache_size: int) -> Tensor:
        """The table for a cache of this many tokens: one for its life, whatever it holds."""
        if self.long_inv_freq is not None and cache_size > (self.original_length or 0):
            return self.long_inv_freq
        return self.inv_freq

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are turned."""
        return 2 * len(self.inv_freq)

    def rotate(self, layer_idx: int, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Turn queries or keys of a layer by `tables`, in float32; see `ops.rotary.rotate`."""
        if self.rotary_dim == 0 or layer_idx in self.unrotated_layers:
            return x.float()
        return rotate(x, *tables, interleaved=self.interleaved)

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
