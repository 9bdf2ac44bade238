"""What the scored policies share: each head of each layer keeps its own tokens.

Where the sink cache decides by position, H2O and SnapKV decide by attention, so heads hold
different tokens, but equally many. Keys are kept un-rotated; when they are read, those that a head
holds are numbered 0, 1, 2, … in the order of the stream, and rotated for these numbers. So no
distance reaches the size of the cache, and the stream has no end. That is more work a step than a
sink cache does: every held key is rotated anew.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout
from streamchat.cache.transaction import Step, TransactionalCache
from streamchat.config import CacheConfig
from streamchat.errors import UnsupportedModelError
from streamchat.ops.attention import attention_weights

NO_POSITION_IS_SURE = Layout(0, 2**62)
"""Heads hold different tokens: of no position can it be said that it has left."""


class ScoredCache(TransactionalCache[Step]):
    """Keys and values of the tokens that each head needs most, as many for each.

    Args:
        config: Its cache size is the number of tokens that a head holds at most.
        geometry: Layers, heads, frequencies, dtype, device.
        batch_size: Rows. They move in step: padding is not supported.
        undo_depth: How many single-token steps `rewind` can take back.

    Attributes:
        keys: Un-rotated.
        scores: Attention that the keys have drawn, shape (num_layers, batch, num_kv_heads,
            cache_size), float32.

    Raises:
        UnsupportedModelError: If the model's layers do not all hold the same number of tokens.
    """

    layout = NO_POSITION_IS_SURE

    def __init__(
        self,
        config: CacheConfig,
        geometry: CacheGeometry,
        *,
        batch_size: int = 1,
        undo_depth: int = 1,
    ) -> None:
        check_geometry(config, geometry)
        super().__init__(config, geometry, batch_size=batch_size, undo_depth=undo_depth)
        g, size = geometry, config.cache_size
        self.scores = torch.zeros(self.keys.shape[:-1], device=g.device)
        self._cos, self._sin = g.tables(range(size), g.frequencies(size))

    # What a policy decides

    @abstractmethod
    def _attend_kept(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, ask: "Ask"
    ) -> Tensor:
        """Attention of the step's tokens, which are appended to what the layer holds.

        Args:
            layer_idx: Which layer.
            query: Shape (batch, num_kv_heads, group, num_tokens, head_dim), not rotated, float32.
            key: Shape (batch, num_kv_heads, num_tokens, head_dim), not rotated.
            value: Same shape.
            ask: How scores become weights.

        Returns:
            Shape of `query`.
        """

    # One step

    def _open(self, num_tokens: int) -> Step:
        return Step(num_tokens)

    def _attend(
        self,
        layer_idx: int,
        step: Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sink_logit: Tensor | None,
    ) -> Tensor:
        if step.num_tokens > 1:
            self._keep(*(tensor[layer_idx] for tensor in self._state().values()))
        if sink_logit is not None:
            sink_logit = sink_logit.view(self.geometry.num_kv_heads, -1)
        ask = Ask(scaling, self.geometry.softcap, sink_logit)
        grouped = query.detach().float().reshape(*key.shape[:2], -1, *key.shape[2:])
        return self._attend_kept(layer_idx, grouped, key, value, ask).flatten(1, 2)

    def _keep(self, *views: Tensor) -> None:
        """Have these parts of the state put back if the step is taken back."""
        self._open_undo += [partial(view.copy_, view.clone()) for view in views]

    # What the policies read

    def _rotated_keys(self, layer_idx: int, num_keys: int) -> Tensor:
        """The first keys of a layer, rotated for 0, 1, 2, …; float32."""
        keys, tables = self.keys[layer_idx, :, :, :num_keys], (self._cos, self._sin)
        cos, sin = (table[:num_keys] for table in tables)
        return self.geometry.rotate(layer_idx, keys, (cos, sin))

    def _rotated_query(self, layer_idx: int, query: Tensor, numbers: slice) -> Tensor:
        """Queries, shape (..., num_tokens, head_dim), rotated and scaled for their numbers."""
        query = self.geometry.scale(layer_idx, query, range(numbers.start, numbers.stop))
        tables = self._cos[numbers], self._sin[numbers]
        return self.geometry.rotate(layer_idx, query, tables)

    # State

    def _state(self) -> dict[str, Tensor]:
        return super()._state() | {"scores": self.scores}


@dataclass(frozen=True, slots=True)
class Ask:
    """How scores become weights, see `ops.attention.attention_weights`."""

    scaling: float
    softcap: float | None
    sink_logit: Tensor | None

    def weights(self, query: Tensor, keys: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Weights of the keys, shape (batch, num_kv_heads, group, num_queries, num_keys)."""
        return attention_weights(query, keys, self.scaling, hidden, self.softcap, self.sink_logit)


def check_geometry(config: CacheConfig, geometry: CacheGeometry) -> None:
    """Refuse a model that a scored policy does not fit.

    Raises:
        UnsupportedModelError: With the reason.
    """
    native = geometry.native_window
    if geometry.alibi is not None:
        reason = "its positions are biases (ALiBi), not angles"
    elif geometry.local_layers and native is not None and native < config.cache_size:
        reason = f"some of its layers have a native window of {native}"
    else:
        return
    raise UnsupportedModelError(
        f"--policy {config.policy} is not offered for this model: {reason}; use --policy sink"
    )
