"""What a cache must know of the model's attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from streamchat.errors import ConfigError
from streamchat.ops.rotary import rope_tables, rotate

CPU = torch.device("cpu")

Tables = tuple[Tensor, Tensor]
"""Cosine and signed sine, as `rope_tables` makes them."""

Softmax = Literal["standard", "off_by_one", "learned"]
"""What stands in the denominator beside the keys: nothing, 1 (Miller 2023, "Attention Is Off By
One"; the zero sink of StreamingLLM, section 3.3), or a learned term for each head (GPT-OSS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries grow with the position that they have as seen from the sinks, by Llama 4's rule.

    They are multiplied by 1 + beta * log(1 + (position + shift) // length); see Scalable-Softmax
    (Nakanishi 2025, arXiv:2501.19399).

    Attributes:
        beta: How much they grow.
        length: Tokens between two steps of the factor.
        shift: 1 where positions are counted from 1.
        layers: Layers whose queries grow.
    """

    beta: float
    length: int
    shift: int = 0
    layers: frozenset[int]

    def factors(self, positions: Sequence[int]) -> Tensor:
        """Shape (len(positions), 1), float32."""
        steps = [(position + self.shift) // self.length for position in positions]
        growth = torch.tensor(steps, dtype=torch.float64).log1p()
        return (1 + self.beta * growth)[:, None].float()


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
        native_window: Tokens that the layers in `local_layers` were trained to see: the newest, and
            no sinks.
        local_layers: Layers with a native window.
        local_inv_freq: RoPE frequencies of these layers, where they have their own.
        query_scale: How queries grow with their position, or None.
        softcap: See `ops.attention.decode_attention`.
        softmax: Which one; `attend` is given the terms of a learned one.
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
    native_window: int | None = None
    local_layers: frozenset[int] = frozenset()
    local_inv_freq: Tensor | None = None
    query_scale: QueryScale | None = None
    softcap: float | None = None
    softmax: Softmax = "standard"
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
        """The table for a cache of this many tokens: one for its life, whatever it holds.

        Returns:
            Shape (rotary_dim // 2,), float64, on the device that angles are made on.
        """
        if self.long_inv_freq is not None and cache_size > (self.original_length or 0):
            return self.precise(self.long_inv_freq)
        return self.precise(self.inv_freq)

    def local_frequencies(self, cache_size: int) -> Tensor:
        """The same for the layers in `local_layers`."""
        if self.local_inv_freq is None:
            return self.frequencies(cache_size)
        return self.precise(self.local_inv_freq)

    def precise(self, inv_freq: Tensor) -> Tensor:
        """Frequencies in float64."""
        # MPS has no float64: there the angles are made on the host.
        device = CPU if self.device.type == "mps" else self.device
        return inv_freq.to(device=device, dtype=torch.float64)

    def tables(self, positions: Sequence[int], inv_freq: Tensor, start: int = 0) -> Tables:
        """RoPE tables on the cache's device.

        Args:
            positions: Stream positions.
            inv_freq: From `frequencies` or `local_frequencies`.
            start: Position that the first token's angle is made for.
        """
        index = torch.tensor(positions, dtype=torch.int64, device=inv_freq.device)
        cos, sin = rope_tables(index + start, inv_freq, interleaved=self.interleaved)
        return cos.to(self.device), sin.to(self.device)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a standard softmax stands between scores and weights."""
        return self.softcap is None and self.softmax == "standard" and self.alibi is None

    def extra_term(self, learned: Tensor | None, query: Tensor) -> Tensor | None:
        """A term of the softmax that no key has, shape (num_heads,), or None.

        Args:
            learned: The model's own, where it has learned it.
            query: Shape (batch, num_heads, num_tokens, head_dim).
        """
        if self.softmax == "off_by_one":
            return torch.zeros(query.shape[1], device=query.device)
        return learned

    @property
    def is_uniform(self) -> bool:
        """Whether a cache is the same in all layers, and its queries are scaled alike."""
        return not self.local_layers and self.query_scale is None

    def scales_queries(self, layer_idx: int) -> bool:
        """Whether the queries of a layer grow with their position."""
        return self.query_scale is not None and layer_idx in self.query_scale.layers

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are turned."""
        return 2 * len(self.inv_freq)

    def scale(self, layer_idx: int, query: Tensor, positions: Sequence[int]) -> Tensor:
        """Queries, shape (..., len(positions), head_dim), grown as `query_scale` says."""
        if self.query_scale is None or not self.scales_queries(layer_idx):
            return query
        return query * self.query_scale.factors(positions).to(query.device)

    def rotate(self, layer_idx: int, x: Tensor, tables: Tables) -> Tensor:
        """Turn queries or keys of a layer by `tables`, in float32; see `ops.rotary.rotate`."""
        if self.rotary_dim == 0 or layer_idx in self.unrotated_layers:
            return x.float()
        return rotate(x, *tables, interleaved=self.interleaved)

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
