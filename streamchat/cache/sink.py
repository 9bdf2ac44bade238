"""The sink cache itself.

The position contract stands at the top of `layout.py`. How it is met here:

* Keys arrive un-rotated. A key is rotated for its stream position and written to its slot once; it
  is not touched again until another token takes the slot. Turning stored keys step by step, as
  earlier implementations do, destroys them in 16-bit.
* What moves with the stream is the query. It is rotated twice: for its stream position, to score
  the window, and for where it stands as seen from the sinks, to score these. No sink is re-placed.
* A chunk is written to the ring when all layers have computed; a single token overwrites one slot,
  whose old row is kept. So a step is a transaction, see `transaction.py`.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamchat.cache.alibi import PlaceBiases
from streamchat.cache.blocks import QUERY_BLOCK, QueryBlock, plan_blocks
from streamchat.cache.chunk import Pair, attend_chunk, write_chunk
from streamchat.cache.geometry import CacheGeometry, Tables
from streamchat.cache.kinds import Kind, kinds_of_layers
from streamchat.cache.layout import Layout
from streamchat.cache.transaction import Step, TransactionalCache
from streamchat.config import CacheConfig
from streamchat.errors import StateError
from streamchat.ops.kernels import kernels_for


@dataclass(frozen=True, slots=True)
class _Sight:
    """What the layers of one kind share in a step.

    Attributes:
        layout: What they hold, and where.
        tables: For the stream positions of the step's tokens.
        tables_for_sinks: For where their queries stand as seen from the sinks.
        slot: Where the step's first token goes.
        num_held: Tokens held after the step.
        num_sinks: Sinks among these.
        blocks: The queries of a chunk, in blocks; empty for a single token.
    """

    layout: Layout
    tables: Tables
    tables_for_sinks: Tables
    slot: int
    num_held: int
    num_sinks: int
    blocks: list[QueryBlock]


@dataclass(slots=True)
class _Step(Step):
    """What the layers of a step share, and what it will write.

    Attributes:
        sights: By kind of layer.
        query_scale: Factor on the queries, shape (num_tokens, 1), or None.
        bias: Of a single token's scores, see `PlaceBiases.of_token`; None without ALiBi.
        pending: By layer, the keys and values of a chunk that will be written to the ring.
    """

    sights: list[_Sight]
    query_scale: Tensor | None
    bias: Tensor | None
    pending: dict[int, Pair] = field(default_factory=dict)


class SinkCache(TransactionalCache[_Step]):
    """Keys and values of the first S and the newest W tokens of a stream without end.

    With transformers: `cache = SinkCache.for_model(streamchat.prepare(model), config)`, then
    `model.generate(..., past_key_values=cache)`. On bare tensors, without any model::

        with cache.step(num_tokens):
            for layer_idx in range(num_layers):
                out = cache.attend(layer_idx, query, key, value)

    Args:
        config: Sizes of sinks and window.
        geometry: Layers, heads, frequencies, dtype, device.
        batch_size: Rows. They move in step: padding is not supported.
        start_position: Position that the first token's RoPE angle is made for. The distances,
            and so the results, do not depend on it.
        undo_depth: How many single-token steps `rewind` can take back.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: CacheGeometry,
        *,
        batch_size: int = 1,
        start_position: int = 0,
        undo_depth: int = 1,
    ) -> None:
        super().__init__(config, geometry, batch_size=batch_size, undo_depth=undo_depth)
        self.start_position = start_position
        self.layout = Layout(config.sink_size, config.window_size)
        self._kinds, self._kind_of = kinds_of_layers(geometry, self.layout)
        self._biases = None
        if geometry.alibi is not None:
            table = geometry.alibi(config.cache_size).to(geometry.device)
            self._biases = PlaceBiases(self.layout, table, QUERY_BLOCK)
        self._kernels = kernels_for(geometry.device, geometry.dtype, is_plain=geometry.is_plain)

    @classmethod
    def for_model(
        cls,
        model: Any,
        config: CacheConfig | None = None,
        *,
        batch_size: int = 1,
        start_position: int = 0,
    ) -> "SinkCache":
        """A cache for a model that went through `streamchat.prepare`.

        By default with 4 sinks and the newest 1,020 tokens; with no sinks where the model has
        learned its own.

        Raises:
            StateError: If the model is not prepared.
        """
        binding = getattr(model, "streamchat_binding", None)
        if binding is None:
            raise StateError("the model is not prepared: call streamchat.prepare(model) first")
        if config is None:
            config = (
                CacheConfig(sink_size=0) if binding.geometry.softmax == "learned" else CacheConfig()
            )
        cache: SinkCache = binding.new_cache(
            cls,
            config,
            binding.geometry,
            batch_size=batch_size,
            start_position=start_position,
        )
        return cache

    # What it holds

    def window_key(self, layer_idx: int, position: int) -> Tensor:
        """The stored key of a held window token, shape (batch, num_kv_heads, head_dim)."""
        layout = self._kinds[self._kind_of[layer_idx]].layout
        if position not in layout.held_window(self.num_seen):
            raise StateError(f"position {position} is not in the window")
        self._roll_back()
        return self.keys[layer_idx, :, :, layout.slot(position)]

    # One step

    def _open(self, num_tokens: int) -> _Step:
        positions = range(self.num_seen, self.num_seen + num_tokens)
        g, scale, bias = self.geometry, None, None
        if g.query_scale is not None:
            scale = g.query_scale.factors(_from_sinks(self.layout, positions)).to(g.device)
        if num_tokens == 1:
            self._keep_overwritten()
            bias = None if self._biases is None else self._biases.of_token(self.num_seen)
        return _Step(
            num_tokens, [self._sight(kind, positions) for kind in self._kinds], scale, bias
        )

    def _sight(self, kind: Kind, positions: range) -> _Sight:
        layout, g = kind.layout, self.geometry
        blocks = []
        if len(positions) > 1:
            blocks = plan_blocks(
                layout,
                positions,
                g.device,
                lambda hidden: self._kernels.mask(hidden, g.dtype),
                self._biases,
            )
        return _Sight(
            layout,
            g.tables(positions, kind.inv_freq, self.start_position),
            g.tables(_from_sinks(layout, positions), kind.inv_freq, self.start_position),
            layout.slot(positions.start),
            layout.num_held(positions.stop),
            layout.num_sinks(positions.stop),
            blocks,
        )

    def _keep_overwritten(self) -> None:
        """Keep the rows whose slots the next token takes."""
        for kind in self._kinds:
            if self.num_seen >= kind.layout.cache_size:
                layers, slot = kind.layers, kind.layout.slot(self.num_seen)
                rows = [buffer[layers, :, :, slot].clone() for buffer in self.buffers]
                self._open_undo.append(partial(self._put_rows, layers, slot, *rows))

    def _put_rows(self, layers: Tensor | slice, slot: int, keys: Tensor, values: Tensor) -> None:
        self.keys[layers, :, :, slot] = keys
        self.values[layers, :, :, slot] = values

    def _attend(
        self,
        layer_idx: int,
        step: _Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sink_logit: Tensor | None,
    ) -> Tensor:
        g, sight = self.geometry, step.sights[self._kind_of[layer_idx]]
        if step.query_scale is not None and g.scales_queries(layer_idx):
            query = query * step.query_scale
        how: dict[str, Any] = {} if g.is_plain else {"softcap": g.softcap, "sink_logit": sink_logit}
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        key = g.rotate(layer_idx, key, sight.tables)
        for_window = g.rotate(layer_idx, query, sight.tables)
        for_sinks = g.rotate(layer_idx, query, sight.tables_for_sinks)
        if step.num_tokens > 1:
            out, step.pending[layer_idx] = attend_chunk(
                sight.layout,
                self.num_seen,
                sight.blocks,
                (keys, values),
                (key.to(keys.dtype), value),
                (for_window, for_sinks),
                lambda parts: self._kernels.merged(parts, scaling, **how),
            )
            return out
        if step.bias is not None:
            how["bias"] = step.bias
        keys[:, :, sight.slot], values[:, :, sight.slot] = key[:, :, 0], value[:, :, 0]
        return self._kernels.decode(
            for_sinks,
            for_window,
            keys[:, :, : sight.num_held],
            values[:, :, : sight.num_held],
            sight.num_sinks,
            scaling,
            **how,
        )

    def _write(self, step: _Step) -> None:
        for layer_idx, newest in step.pending.items():
            layout = self._kinds[self._kind_of[layer_idx]].layout
            held = self.keys[layer_idx], self.values[layer_idx]
            write_chunk(layout, self.num_seen, step.num_tokens, held, newest)

    def skip(self, num_tokens: int) -> None:
        """Let the position run on as though `num_tokens` tokens had been fed and evicted.

        Exact only where the window holds nothing that the next token would still see: with
        `window_size` 1. The self-check uses it to stand at position 2**25 at once.

        Raises:
            StateError: If `window_size` is above 1 or the sinks are not all there.
        """
        if any(kind.layout.window_size > 1 for kind in self._kinds) or (
            self.num_seen < self.config.sink_size
        ):
            raise StateError("skip needs window_size 1 and all sinks in the cache")
        self._roll_back()
        self._undo.clear()
        self.num_seen += num_tokens

    # Decode by others

    @contextmanager
    def step_outside(self) -> Iterator[None]:
        """Feed one token that is computed elsewhere, and written to the buffers in there."""
        self._roll_back()
        self._reserve(1)
        self._keep_overwritten()
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self._close(1)

    @contextmanager
    def all_or_nothing(self, num_tokens: int) -> Iterator[None]:
        """Feed tokens one by one as though they were one chunk: an exception takes back all."""
        before, self._undo = self._undo, deque(maxlen=num_tokens)
        try:
            yield
        except BaseException:
            self.rewind(len(self._undo))
            self._undo = before
            raise
        before.extend(self._undo)
        self._undo = before

    @property
    def buffers(self) -> Pair:
        """Keys and values as they lie, shape (num_layers, batch, num_kv_heads, S + W, head_dim)."""
        return self.keys, self.values

    def next_tables(self) -> Tensor:
        """RoPE tables of the next token, shape (4, head_dim).

        Cosine and signed sine for its stream position, then for where it stands as seen from the
        sinks.
        """
        positions = [self.num_seen, self.layout.sink_query_position(self.num_seen)]
        cos, sin = self.geometry.tables(positions, self._kinds[0].inv_freq, self.start_position)
        return torch.stack((cos, sin), dim=1).view(4, -1)

    def move_to(self, keys: Tensor, values: Tensor) -> None:
        """From now on use these buffers, which get what is held.

        Args:
            keys: Shape (num_layers, batch, num_kv_heads, S + W, head_dim), of the cache's dtype.
            values: Same shape.
        """
        self._roll_back()
        keys.copy_(self.keys)
        values.copy_(self.values)
        self._point_to(keys, values)

    def _point_to(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            layer.keys, layer.values = layer_keys, layer_values

    def move_out(self) -> None:
        """From now on use buffers of its own: somebody else needs those that it was moved to."""
        self.move_to(*(torch.empty_like(buffer) for buffer in self.buffers))


def _from_sinks(layout: Layout, positions: range) -> list[int]:
    """Where queries stand as seen from the sinks."""
    return [layout.sink_query_position(position) for position in positions]
