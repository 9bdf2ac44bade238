"""What a cache must know of the model's attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamchat.errors import ConfigError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """What a cache must know of the model's attention.

    Attributes:
        num_layers: Attention layers.
        num_kv_heads: Key/value heads of a layer.
        head_dim: Size of one head.
        inv_freq: RoPE frequencies, shape (head_dim // 2,), any float dtype.
        dtype: Of the stored keys and values.
        device: Where they are stored.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    inv_freq: Tensor
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def __post_init__(self) -> None:
        if self.inv_freq.shape != (self.head_dim // 2,):
            raise ConfigError(
                f"inv_freq must have shape ({self.head_dim // 2},) for head_dim {self.head_dim}, "
                f"got {tuple(self.inv_freq.shape)}"
            )

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
