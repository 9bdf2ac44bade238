"""The sink cache itself: the only place that moves keys and values.

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
from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout
from streamchat.cache.transaction import Step, TransactionalCache
from streamchat.config import CacheConfig
from streamchat.errors import StateError
from streamchat.ops.attention import Part
from streamchat.ops.kernels import kernels_for
from streamchat.ops.rotary import rope_tables

Tables = tuple[Tensor, Tensor]
"""Cosine and signed sine, as `rope_tables` makes them."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that hold the same tokens and turn by the same angles.

    Attributes:
        layers: Index of these layers in the buffers.
        layout: What they hold, and where.
        inv_freq: RoPE frequencies, shape (rotary_dim // 2,), float64.
    """

    layers: Tensor | slice
    layout: Layout
    inv_freq: Tensor


@dataclass(frozen=True, slots=True)
class _Sight:
    """What the layers of one kind share in a step.

    Attributes:
        layout: What they hold, and where.
        tables: For the stream positions of the step's tokens.
        tables_for_sinks: For where their queries stand as seen from the sinks.
        num_sinks: Sinks among the tokens held after the step.
        blocks: The queries of a chunk, in blocks; empty for a single token.
    """

    layout: Layout
    tables: Tables
    tables_for_sinks: Tables
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
    pending: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


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
        g = geometry
        # MPS has no float64: there the angles are made on the host.
        angle_device = "cpu" if g.device.type == "mps" else g.device
        self._inv_freq = g.frequencies(config.cache_size).to(
            device=angle_device, dtype=torch.float64
        )
        self._kinds, self._kind_of = self._kinds_of_layers()
        self._biases = None
        if g.alibi is not None:
            table = g.alibi(config.cache_size).to(g.device)
            self._biases = PlaceBiases(self.layout, table, QUERY_BLOCK)
        self._kernels = kernels_for(g.device, g.dtype, is_plain=g.is_plain)

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

    def _kinds_of_layers(self) -> tuple[list[_Kind], list[int]]:
        """The kinds of layers, and of which kind each layer is.

        A layer with a native window holds what it was trained to see, and no sinks, if that is less
        than the cache holds; otherwise it is bounded like any other.
        """
        g, native = self.geometry, self.geometry.native_window
        if not g.local_layers:
            return [_Kind(slice(None), self.layout, self._inv_freq)], [0] * g.num_layers
        is_local = [layer in g.local_layers for layer in range(g.num_layers)]
        local_layout = self.layout
        if native is not None and native < self.layout.cache_size:
            local_layout = Layout(0, native)
        local_inv_freq = self._inv_freq
        if g.local_inv_freq is not None:
            local_inv_freq = g.local_inv_freq.to(self._inv_freq)
        index = torch.tensor(is_local, device=g.device)
        kinds = [
            _Kind((~index).nonzero()[:, 0], self.layout, self._inv_freq),
            _Kind(index.nonzero()[:, 0], local_layout, local_inv_freq),
        ]
        return kinds, [int(local) for local in is_local]

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
        step = _Step(
            num_tokens,
            [self._sight(kind, positions) for kind in self._kinds],
            self._query_scale(positions),
            self._bias() if num_tokens == 1 else None,
        )
        if num_tokens == 1:
            self._keep_overwritten()
        return step

    def _sight(self, kind: _Kind, positions: range) -> _Sight:
        layout, inv_freq = kind.layout, kind.inv_freq
        from_sinks = [layout.sink_query_position(position) for position in positions]
        return _Sight(
            layout,
            self._tables(positions, inv_freq),
            self._tables(from_sinks, inv_freq),
            layout.num_sinks(positions.stop),
            self._blocks(layout, positions) if len(positions) > 1 else [],
        )

    def _query_scale(self, positions: range) -> Tensor | None:
        scale = self.geometry.query_scale
        if scale is None:
            return None
        from_sinks = [self.layout.sink_query_position(position) for position in positions]
        return scale.factors(from_sinks).to(self.geometry.device)

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
        g = self.geometry
        if step.query_scale is not None and g.scales_queries(layer_idx):
            query = query * step.query_scale
        how: dict[str, Any] = {} if g.is_plain else {"softcap": g.softcap, "sink_logit": sink_logit}
        if step.bias is not None:
            how["bias"] = step.bias
        attend = self._attend_decode if step.num_tokens == 1 else self._attend_chunk
        return attend(layer_idx, step, query, key, value, scaling, how)

    def _write(self, step: _Step) -> None:
        for layer_idx, (keys, values) in step.pending.items():
            start = self.num_seen + step.num_tokens - keys.shape[-2]
            layout = self._kinds[self._kind_of[layer_idx]].layout
            for write in layout.ring_writes(self.num_seen, step.num_tokens):
                source = slice(write.positions.start - start, write.positions.stop - start)
                target = slice(write.slot, write.slot + len(write.positions))
                self.keys[layer_idx, :, :, target] = keys[:, :, source]
                self.values[layer_idx, :, :, target] = values[:, :, source]

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
    def buffers(self) -> Tables:
        """Keys and values as they lie, shape (num_layers, batch, num_kv_heads, S + W, head_dim)."""
        return self.keys, self.values

    def next_tables(self) -> Tensor:
        """RoPE tables of the next token, shape (4, head_dim).

        Cosine and signed sine for its stream position, then for where it stands as seen from the
        sinks.
        """
        position = self.num_seen
        cos, sin = self._tables(
            [position, self.layout.sink_query_position(position)], self._inv_freq
        )
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
        self.move_to(*(torch.empty_like(buffer) for buffer in (self.keys, self.values)))

    # Decode: one token

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

    def _attend_decode(
        self,
        layer_idx: int,
        step: _Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        how: dict[str, Any],
    ) -> Tensor:
        sight = step.sights[self._kind_of[layer_idx]]
        layout, rotate = sight.layout, self.geometry.rotate
        slot, num_held = layout.slot(self.num_seen), layout.num_held(self.num_seen + 1)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[:, :, slot] = rotate(layer_idx, key, sight.tables)[:, :, 0]
        values[:, :, slot] = value[:, :, 0]
        return self._kernels.decode(
            rotate(layer_idx, query, sight.tables_for_sinks),
            rotate(layer_idx, query, sight.tables),
            keys[:, :, :num_held],
            values[:, :, :num_held],
            sight.num_sinks,
            scaling,
            **how,
        )

    def _bias(self) -> Tensor | None:
        return None if self._biases is None else self._biases.of_token(self.num_seen)

    # Chunk: several tokens

    def _blocks(self, layout: Layout, positions: range) -> list[QueryBlock]:
        device, dtype = self.geometry.device, self.geometry.dtype
        return plan_blocks(
            layout,
            positions,
            device,
            lambda hidden: self._kernels.mask(hidden, dtype),
            self._biases,
        )

    def _attend_chunk(
        self,
        layer_idx: int,
        step: _Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        how: dict[str, Any],
    ) -> Tensor:
        sight, start = step.sights[self._kind_of[layer_idx]], self.num_seen
        layout = sight.layout
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        rotate = self.geometry.rotate
        key = rotate(layer_idx, key, sight.tables).to(keys.dtype)
        num_before = layout.num_sinks(start)
        new_sinks = sight.num_sinks - num_before
        # Slots of sinks not seen so far: writing them before the commit disturbs nothing.
        keys[:, :, num_before : sight.num_sinks] = key[:, :, :new_sinks]
        values[:, :, num_before : sight.num_sinks] = value[:, :, :new_sinks]
        key, value = key[:, :, new_sinks:], value[:, :, new_sinks:]

        newer, older = layout.ring_order(start)
        newer_slots = slice(layout.sink_size, layout.sink_size + len(newer))
        older_slots = slice(newer_slots.stop, newer_slots.stop + len(older))
        window_keys = torch.cat((keys[:, :, older_slots], keys[:, :, newer_slots], key), dim=-2)
        window_values = torch.cat(
            (values[:, :, older_slots], values[:, :, newer_slots], value), dim=-2
        )
        sink_keys, sink_values = keys[:, :, : sight.num_sinks], values[:, :, : sight.num_sinks]
        for_window = rotate(layer_idx, query, sight.tables)
        for_sinks = rotate(layer_idx, query, sight.tables_for_sinks)
        outputs = []
        for block in sight.blocks:
            window = Part(
                for_window[:, :, block.queries],
                window_keys[:, :, block.columns],
                window_values[:, :, block.columns],
                block.hidden_window,
                block.window_bias,
            )
            sinks = Part(
                for_sinks[:, :, block.queries],
                sink_keys,
                sink_values,
                block.hidden_sinks,
                block.sink_bias,
            )
            parts = [part for part in (window, sinks) if part.keys.shape[-2]]
            outputs.append(self._kernels.merged(parts, scaling, **how))
        newest = slice(max(0, key.shape[-2] - layout.window_size), None)
        step.pending[layer_idx] = (key[:, :, newest], value[:, :, newest])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)

    def _tables(self, positions: range | list[int], inv_freq: Tensor) -> Tables:
        """RoPE tables for stream positions, on the cache's device."""
        index = torch.tensor(positions, dtype=torch.int64, device=inv_freq.device)
        cos, sin = rope_tables(
            index + self.start_position, inv_freq, interleaved=self.geometry.interleaved
        )
        return cos.to(self.geometry.device), sin.to(self.geometry.device)

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
