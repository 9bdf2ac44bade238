"""The sink cache itself: the only place that moves keys and values.

The position contract stands at the top of `layout.py`. How it is met here:

* Keys arrive un-rotated. A key is rotated for its stream position and written to its slot once; it
  is not touched again until another token takes the slot. Turning stored keys step by step, as
  earlier implementations do, destroys them in 16-bit.
* What moves with the stream is the query. It is rotated twice: for its stream position, to score
  the window, and for where it stands as seen from the sinks, to score these. No sink is re-placed.
* A step is a transaction. A chunk is written when all layers have computed; a single token
  overwrites one slot, whose old row is kept. A step that an exception left open is rolled back by
  the next call, so an interrupted forward pass never leaves some layers a token ahead of others.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamchat.cache.alibi import PlaceBiases
from streamchat.cache.blocks import QUERY_BLOCK, QueryBlock, plan_blocks
from streamchat.cache.face import StepCache
from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout
from streamchat.cache.snapshot import CacheSnapshot
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
class _Overwritten:
    """Rows of the buffers that a token took the place of."""

    layers: Tensor | slice
    slot: int
    keys: Tensor
    values: Tensor


UndoRecord = list[_Overwritten]
"""What one fed token overwrote; empty where its slots were."""


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
class _Step:
    """A step between `begin` and `commit`: what its layers share, and what it will write.

    Attributes:
        num_tokens: Tokens fed.
        sights: By kind of layer.
        query_scale: Factor on the queries, shape (num_tokens, 1), or None.
        bias: Of a single token's scores, see `PlaceBiases.of_token`; None without ALiBi.
        pending: By layer, the keys and values of a chunk that will be written to the ring.
        num_attended: Layers that have called `attend`.
    """

    num_tokens: int
    sights: list[_Sight]
    query_scale: Tensor | None
    bias: Tensor | None
    pending: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    num_attended: int = 0


class SinkCache(StepCache):
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
        self.config = config
        self.geometry = geometry
        self._batch_size = batch_size
        self.start_position = start_position
        self.layout = Layout(config.sink_size, config.window_size)
        self.num_seen = 0
        g = geometry
        shape = (g.num_layers, batch_size, g.num_kv_heads, self._first_slots(), g.head_dim)
        self._keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self._values = torch.zeros_like(self._keys)
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
        self._step: _Step | None = None
        # What the single token of an uncommitted step overwrites.
        self._open_undo: UndoRecord | None = None
        self._undo: deque[UndoRecord] = deque(maxlen=max(1, undo_depth))
        super().__init__(self._keys, self._values)

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

    def _first_slots(self) -> int:
        """Slots of the buffers when nothing is held yet."""
        return self.config.cache_size

    def _reserve(self, num_tokens: int) -> None:
        """See that so many more tokens can be written."""

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

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._batch_size

    @property
    def num_held(self) -> int:
        """Tokens in the cache, S + W at most."""
        return self.layout.num_held(self.num_seen)

    @property
    def num_evicted(self) -> int:
        """Tokens that have left."""
        return self.layout.num_evicted(self.num_seen)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated; constant for the life of the cache, unless it is a dense one."""
        return self._keys.nbytes + self._values.nbytes

    def window_key(self, layer_idx: int, position: int) -> Tensor:
        """The stored key of a held window token, shape (batch, num_kv_heads, head_dim)."""
        layout = self._kinds[self._kind_of[layer_idx]].layout
        if position not in layout.held_window(self.num_seen):
            raise StateError(f"position {position} is not in the window")
        self._roll_back()
        return self._keys[layer_idx, :, :, layout.slot(position)]

    # One step

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Feed `num_tokens` tokens: call `attend` once for each layer inside."""
        self.begin(num_tokens)
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self.commit()

    def begin(self, num_tokens: int) -> None:
        """Open a step.

        Raises:
            StateError: If `num_tokens` < 1.
        """
        self._roll_back()
        if num_tokens < 1:
            raise StateError(f"a step feeds at least 1 token, got {num_tokens}")
        self._reserve(num_tokens)
        positions = range(self.num_seen, self.num_seen + num_tokens)
        self._step = _Step(
            num_tokens,
            [self._sight(kind, positions) for kind in self._kinds],
            self._query_scale(positions),
            self._bias() if num_tokens == 1 else None,
        )
        if num_tokens == 1:
            self._open_undo = self._undo_record()

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

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        sink_logit: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's tokens in one layer, over what each of them may see.

        Args:
            layer_idx: Which layer.
            query: Shape (batch, num_heads, num_tokens, head_dim), not rotated.
            key: Shape (batch, num_kv_heads, num_tokens, head_dim), not rotated.
            value: Shape (batch, num_kv_heads, num_tokens, head_dim).
            scaling: Factor on the scores; head_dim ** -0.5 by default.
            sink_logit: For a learned softmax, see `ops.attention.decode_attention`.

        Returns:
            Shape (batch, num_heads, num_tokens, head_dim).

        Raises:
            StateError: Outside a step, or if the shapes are not the cache's.
        """
        step = self._step
        if step is None:
            raise StateError("attend was called outside a step")
        g = self.geometry
        expected = (self.batch_size, g.num_kv_heads, step.num_tokens, g.head_dim)
        if key.shape != expected or value.shape != expected:
            raise StateError(
                f"keys and values must have shape {expected} (batch, num_kv_heads, num_tokens, "
                f"head_dim), got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if scaling is None:
            scaling = float(g.head_dim**-0.5)
        # Detached: what is stored must not keep a graph that grows with the stream.
        key, value = key.detach().to(g.dtype), value.detach().to(g.dtype)
        dtype = query.dtype
        if step.query_scale is not None and g.scales_queries(layer_idx):
            query = query * step.query_scale
        sink_logit = g.extra_term(sink_logit, query)
        how: dict[str, Any] = {} if g.is_plain else {"softcap": g.softcap, "sink_logit": sink_logit}
        if step.bias is not None:
            how["bias"] = step.bias
        attend = self._attend_decode if step.num_tokens == 1 else self._attend_chunk
        out = attend(layer_idx, step, query, key, value, scaling, how).to(dtype)
        step.num_attended += 1
        return out

    def commit(self) -> None:
        """Close the step: its tokens are now part of the stream.

        Raises:
            StateError: Outside a step, or if not every layer has attended.
        """
        step = self._step
        if step is None:
            raise StateError("commit was called outside a step")
        if step.num_attended != self.geometry.num_layers:
            raise StateError(
                f"{step.num_attended} of {self.geometry.num_layers} layers called attend"
            )
        for layer_idx, (keys, values) in step.pending.items():
            start = self.num_seen + step.num_tokens - keys.shape[-2]
            layout = self._kinds[self._kind_of[layer_idx]].layout
            for write in layout.ring_writes(self.num_seen, step.num_tokens):
                source = slice(write.positions.start - start, write.positions.stop - start)
                target = slice(write.slot, write.slot + len(write.positions))
                self._keys[layer_idx, :, :, target] = keys[:, :, source]
                self._values[layer_idx, :, :, target] = values[:, :, source]
        self._close(step.num_tokens)

    def _close(self, num_tokens: int) -> None:
        """What the step wrote is now part of the stream."""
        if self._open_undo is not None:
            self._undo.append(self._open_undo)
        else:
            self._undo.clear()
        self.num_seen += num_tokens
        self._step = self._open_undo = None

    def _roll_back(self) -> None:
        """Take back a step that was not committed, if there is one."""
        self._step = None
        record, self._open_undo = self._open_undo, None
        self._put_back(record)

    def _put_back(self, record: UndoRecord | None) -> None:
        for rows in record or []:
            self._keys[rows.layers, :, :, rows.slot] = rows.keys
            self._values[rows.layers, :, :, rows.slot] = rows.values

    def rewind(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, which were fed one at a time.

        Raises:
            StateError: If they are more than the undo log holds.
        """
        self._roll_back()
        if not 0 <= num_tokens <= len(self._undo):
            raise StateError(f"can take back {len(self._undo)} tokens, asked for {num_tokens}")
        for _ in range(num_tokens):
            self._put_back(self._undo.pop())
            self.num_seen -= 1

    def set_undo_depth(self, depth: int) -> None:
        """From now on keep what is needed to take back `depth` single-token steps (at least 1)."""
        self._undo = deque(self._undo, maxlen=max(1, depth))

    # Decode by others

    @contextmanager
    def step_outside(self) -> Iterator[None]:
        """Feed one token that is computed elsewhere, and written to the buffers in there."""
        self._roll_back()
        self._reserve(1)
        self._open_undo = self._undo_record()
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
        return self._keys, self._values

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
        keys.copy_(self._keys)
        values.copy_(self._values)
        self._point_to(keys, values)

    def _point_to(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            layer.keys, layer.values = layer_keys, layer_values

    def move_out(self) -> None:
        """From now on use buffers of its own: somebody else needs those that it was moved to."""
        self.move_to(*(torch.empty_like(buffer) for buffer in (self._keys, self._values)))

    # Decode: one token

    def _undo_record(self) -> UndoRecord:
        record = []
        for kind in self._kinds:
            if self.num_seen >= kind.layout.cache_size:
                slot = kind.layout.slot(self.num_seen)
                keys, values = (b[kind.layers, :, :, slot] for b in (self._keys, self._values))
                record.append(_Overwritten(kind.layers, slot, keys.clone(), values.clone()))
        return record

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
        keys, values = self._keys[layer_idx], self._values[layer_idx]
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
        keys, values = self._keys[layer_idx], self._values[layer_idx]
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

    # Snapshots

    def snapshot(self) -> CacheSnapshot:
        """Copy the state, O(S + W)."""
        self._roll_back()
        held = slice(0, self.num_held)
        tensors = {
            "keys": self._keys[:, :, :, held].clone(),
            "values": self._values[:, :, :, held].clone(),
        }
        return CacheSnapshot(self.config, self.num_seen, self.start_position, tensors)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Bring back the state of a snapshot of a cache of the same sizes.

        Raises:
            StateError: If the snapshot comes from a cache of other sizes.
        """
        num_held, keys = self.layout.num_held(snapshot.num_seen), snapshot.tensors["keys"]
        if not self.config.holds_like(snapshot.config) or keys.shape != (
            *self._keys.shape[:3],
            num_held,
            self.geometry.head_dim,
        ):
            raise StateError("the snapshot comes from a cache of other sizes")
        self._step = self._open_undo = None
        self._undo.clear()
        self.num_seen = 0
        self._reserve(num_held)
        self.num_seen = snapshot.num_seen
        self.start_position = snapshot.start_position
        self._keys[:, :, :, :num_held] = keys
        self._values[:, :, :, :num_held] = snapshot.tensors["values"]

    def fork(self) -> "SinkCache":
        """An independent copy, O(S + W)."""
        copy = type(self)(
            self.config,
            self.geometry,
            batch_size=self.batch_size,
            start_position=self.start_position,
            undo_depth=self._undo.maxlen or 1,
        )
        copy.restore(self.snapshot())
        return copy

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

    # What transformers asks of a cache

    def update(  # transformers' signature
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values through to our attention, which calls `attend`.

        Raises:
            StateError: If the model is not prepared, so that nobody opened a step.
        """
        if self._step is None:
            raise StateError("the model is not prepared: call streamchat.prepare(model) first")
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the same for all
        """Tokens seen."""
        return self.num_seen

    def reset(self) -> None:
        """Forget everything."""
        self._step = self._open_undo = None
        self._undo.clear()
        self.num_seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, for beam search."""
        self._roll_back()
        self._undo.clear()
        for buffer in (self._keys, self._values):
            buffer.copy_(buffer.index_select(1, beam_idx.to(buffer.device)))
