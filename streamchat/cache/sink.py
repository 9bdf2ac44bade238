"""The sink cache itself: the only place that moves keys and values.

The position contract stands at the top of `layout.py`. How it is met here:

* Keys arrive un-rotated. A window key is rotated for its stream position and written to its ring
  slot once; it is not touched again until another token takes the slot. Turning stored keys step
  by step, as earlier implementations do, destroys them in 16-bit.
* Sinks are kept un-rotated in a store of their own. The first S slots of the key buffer are made
  anew from it for each decode step, O(S) work, so that one plain attention over the buffer does.
* A chunk of queries scores the sinks with a second rotation of the query instead, because each
  query has a distance of its own to them.
* A step is a transaction. A chunk is written when all layers have computed; a single token
  overwrites one slot, whose old row is kept. A step that an exception left open is rolled back by
  the next call, so an interrupted forward pass never leaves some layers a token ahead of others.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from streamchat.cache.layout import Layout
from streamchat.config import CacheConfig
from streamchat.errors import ConfigError, StateError
from streamchat.ops.attention import Part, decode_attention, merged_attention
from streamchat.ops.rotary import rope_tables, rotate

CPU = torch.device("cpu")

QUERY_BLOCK = 512
"""Queries of a chunk that are scored at once. Bounds the score matrix, however long the chunk."""


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


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A cache's state at one moment; `SinkCache.restore` brings it back.

    Attributes:
        num_seen: Tokens fed so far.
        keys: Held window keys, shape (num_layers, batch, num_kv_heads, num_held, head_dim). The
            sinks' slots hold whatever the last step put there and are made anew.
        values: Held values, same shape.
        sinks: Un-rotated sink keys, shape (num_layers, batch, num_kv_heads, num_sinks, head_dim).
    """

    num_seen: int
    keys: Tensor
    values: Tensor
    sinks: Tensor


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """A run of a chunk's queries and the keys it can see."""

    queries: slice
    columns: slice
    hidden_window: Tensor
    hidden_sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    """What all layers share while a chunk of several tokens is fed."""

    cos_sin: tuple[Tensor, Tensor]
    cos_sin_for_sinks: tuple[Tensor, Tensor]
    cos_sin_of_sinks: tuple[Tensor, Tensor]
    num_sinks: int
    num_sinks_before: int
    blocks: list[_QueryBlock]


@dataclass(frozen=True, slots=True)
class _UndoRecord:
    """One fed token: its slot, and the rows it overwrote (None where the slot was empty)."""

    slot: int
    rows: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class _Step:
    """A step between `begin` and `commit`."""

    num_tokens: int
    chunk: _ChunkPlan | None = None
    cos_sin: tuple[Tensor, Tensor] | None = None
    undo: _UndoRecord | None = None
    pending: dict[int, tuple[Tensor, Tensor]] | None = None


class _LayerFace(CacheLayerMixin):
    """What transformers wants to see of one layer. Holds no state of its own."""

    is_sliding = False

    def __init__(self, cache: "SinkCache", keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.cache = cache
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers are allocated with the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the new, un-rotated keys and values through to our attention."""
        return self.cache.update(key_states, value_states, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen: transformers counts positions with it."""
        return self.cache.num_seen

    def get_max_length(self) -> int:
        """No maximum: a stream has no end."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Handled for all layers at once by `SinkCache.reorder_cache`."""


class SinkCache(Cache):
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
        shape = (g.num_layers, batch_size, g.num_kv_heads, config.cache_size, g.head_dim)
        self._keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self._values = torch.zeros_like(self._keys)
        self._sinks = torch.zeros(
            (*shape[:3], config.sink_size, g.head_dim), dtype=g.dtype, device=g.device
        )
        # MPS has no float64: there the angles are made on the host.
        angle_device = "cpu" if g.device.type == "mps" else g.device
        self._inv_freq = g.inv_freq.to(device=angle_device, dtype=torch.float64)
        self._step: _Step | None = None
        self._undo: deque[_UndoRecord] = deque(maxlen=max(1, undo_depth))
        # (sinks, shift) that the first slots of the key buffer were last made for.
        self._placed: tuple[int, int] | None = None
        super().__init__(
            layers=[_LayerFace(self, k, v) for k, v in zip(self._keys, self._values, strict=True)]
        )

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

        Raises:
            StateError: If the model is not prepared.
        """
        binding = getattr(model, "streamchat_binding", None)
        if binding is None:
            raise StateError("the model is not prepared: call streamchat.prepare(model) first")
        return cls(
            config or CacheConfig(),
            binding.geometry,
            batch_size=batch_size,
            start_position=start_position,
        )

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
        """Bytes allocated; constant for the life of the cache."""
        return sum(t.numel() * t.element_size() for t in (self._keys, self._values, self._sinks))

    def window_key(self, layer_idx: int, position: int) -> Tensor:
        """The stored key of a held window token, shape (batch, num_kv_heads, head_dim)."""
        if position not in self.layout.held_window(self.num_seen):
            raise StateError(f"position {position} is not in the window")
        return self._keys[layer_idx, :, :, self.layout.slot(position)]

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
        if num_tokens == 1:
            self._step = self._begin_decode()
        else:
            self._step = _Step(num_tokens, chunk=self._plan_chunk(num_tokens), pending={})

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
    ) -> Tensor:
        """Attention of the step's tokens in one layer, over what each of them may see.

        Args:
            layer_idx: Which layer.
            query: Shape (batch, num_heads, num_tokens, head_dim), not rotated.
            key: Shape (batch, num_kv_heads, num_tokens, head_dim), not rotated.
            value: Shape (batch, num_kv_heads, num_tokens, head_dim).
            scaling: Factor on the scores; head_dim ** -0.5 by default.

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
        key, value = key.to(g.dtype), value.to(g.dtype)
        if step.chunk is None:
            return self._attend_decode(layer_idx, step, query, key, value, scaling)
        return self._attend_chunk(layer_idx, step, query, key, value, scaling)

    def commit(self) -> None:
        """Close the step: its tokens are now part of the stream.

        Raises:
            StateError: Outside a step.
        """
        step = self._step
        if step is None:
            raise StateError("commit was called outside a step")
        if step.undo is not None:
            self._undo.append(step.undo)
        else:
            self._undo.clear()
        for layer_idx, (keys, values) in (step.pending or {}).items():
            start = self.num_seen + step.num_tokens - keys.shape[-2]
            for write in self.layout.ring_writes(self.num_seen, step.num_tokens):
                source = slice(write.positions.start - start, write.positions.stop - start)
                target = slice(write.slot, write.slot + len(write.positions))
                self._keys[layer_idx, :, :, target] = keys[:, :, source]
                self._values[layer_idx, :, :, target] = values[:, :, source]
        self.num_seen += step.num_tokens
        self._step = None

    def _roll_back(self) -> None:
        """Take back a step that was not committed, if there is one."""
        step, self._step = self._step, None
        if step is not None:
            self._placed = None
            self._put_back(step.undo)

    def _put_back(self, record: _UndoRecord | None) -> None:
        if record is not None and record.rows is not None:
            self._keys[:, :, :, record.slot], self._values[:, :, :, record.slot] = record.rows

    def rewind(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, which were fed one at a time.

        Raises:
            StateError: If they are more than the undo log holds.
        """
        self._roll_back()
        if num_tokens > len(self._undo):
            raise StateError(f"can take back {len(self._undo)} tokens, asked for {num_tokens}")
        for _ in range(num_tokens):
            self._put_back(self._undo.pop())
            self.num_seen -= 1
        self._placed = None

    def set_undo_depth(self, depth: int) -> None:
        """From now on keep what is needed to take back `depth` single-token steps (at least 1)."""
        self._undo = deque(self._undo, maxlen=max(1, depth))

    # Decode: one token

    def _begin_decode(self) -> _Step:
        position = self.num_seen
        slot = self.layout.slot(position)
        rows = None
        if position >= self.layout.cache_size:
            rows = (self._keys[:, :, :, slot].clone(), self._values[:, :, :, slot].clone())
        self._place_sinks(self.layout.num_sinks(position), self.layout.sink_shift(position))
        return _Step(
            1, cos_sin=self._tables(range(position, position + 1)), undo=_UndoRecord(slot, rows)
        )

    def _place_sinks(self, num_sinks: int, shift: int) -> None:
        """Make the first slots of the key buffer anew, in all layers, turned forward by `shift`."""
        if self._placed == (num_sinks, shift):
            return
        if num_sinks:
            cos, sin = self._tables(range(shift, shift + num_sinks))
            placed = rotate(self._sinks[:, :, :, :num_sinks], cos, sin)
            self._keys[:, :, :, :num_sinks] = placed
        self._placed = (num_sinks, shift)

    def _attend_decode(
        self, layer_idx: int, step: _Step, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        position = self.num_seen
        slot = self.layout.slot(position)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        cos, sin = step.cos_sin or self._tables(range(position, position + 1))
        keys[:, :, slot] = rotate(key, cos, sin)[:, :, 0]
        values[:, :, slot] = value[:, :, 0]
        if position < self.layout.sink_size:
            self._sinks[layer_idx, :, :, position] = key[:, :, 0]
        num_held = self.layout.num_held(position + 1)
        query = rotate(query, cos, sin).to(keys.dtype)
        return decode_attention(query, keys[:, :, :num_held], values[:, :, :num_held], scaling)

    # Chunk: several tokens

    def _plan_chunk(self, num_tokens: int) -> _ChunkPlan:
        layout, start = self.layout, self.num_seen
        positions = range(start, start + num_tokens)
        seen_from_sinks = [layout.sink_query_position(p) for p in positions]
        num_sinks = layout.num_sinks(start + num_tokens)
        return _ChunkPlan(
            cos_sin=self._tables(positions),
            cos_sin_for_sinks=self._tables(seen_from_sinks),
            cos_sin_of_sinks=self._tables(range(num_sinks)),
            num_sinks=num_sinks,
            num_sinks_before=layout.num_sinks(start),
            blocks=self._plan_blocks(positions, num_sinks),
        )

    def _plan_blocks(self, positions: range, num_sinks: int) -> list[_QueryBlock]:
        """Cut a chunk's queries into blocks, and say which columns each of them sees.

        The columns are the window tokens held before, in the order of their slots, then the
        chunk's own tokens without the sinks.
        """
        layout, device = self.layout, self.geometry.device
        newer, older = layout.ring_order(positions.start)
        own = range(max(positions.start, layout.sink_size), positions.stop)
        column_positions = torch.cat([_arange(r, device) for r in (newer, older, own)])
        num_ring = len(newer) + len(older)
        blocks = []
        for first in range(0, len(positions), QUERY_BLOCK):
            block = positions[first : first + QUERY_BLOCK]
            oldest_seen = block.start - layout.window_size + 1
            begin = 0
            if oldest_seen >= positions.start:  # nothing that was held before is in sight
                begin = num_ring + max(0, oldest_seen - own.start)
            columns = slice(begin, num_ring + max(0, block.stop - own.start))
            queries = _arange(block, device)[:, None]
            keys = column_positions[columns]
            hidden = (keys > queries) | (keys <= queries - layout.window_size)
            hidden_sinks = None
            if block.start < num_sinks:
                hidden_sinks = _arange(range(num_sinks), device) > queries
            blocks.append(
                _QueryBlock(slice(first, first + len(block)), columns, hidden, hidden_sinks)
            )
        return blocks

    def _attend_chunk(
        self, layer_idx: int, step: _Step, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        plan, layout, start = step.chunk, self.layout, self.num_seen
        if plan is None or step.pending is None:
            raise StateError("the step is not a chunk")
        new_sinks = plan.num_sinks - plan.num_sinks_before
        if new_sinks:
            # Slots of sinks not seen so far: writing them before the commit disturbs nothing.
            target = slice(plan.num_sinks_before, plan.num_sinks)
            self._sinks[layer_idx, :, :, target] = key[:, :, :new_sinks]
            self._values[layer_idx, :, :, target] = value[:, :, :new_sinks]
        rotated = rotate(key, *plan.cos_sin)[:, :, new_sinks:]
        value = value[:, :, new_sinks:]

        ring = slice(layout.sink_size, layout.sink_size + len(layout.held_window(start)))
        window_keys = torch.cat((self._keys[layer_idx, :, :, ring], rotated), dim=-2)
        window_values = torch.cat((self._values[layer_idx, :, :, ring], value), dim=-2)
        sink_keys = rotate(self._sinks[layer_idx, :, :, : plan.num_sinks], *plan.cos_sin_of_sinks)
        sink_values = self._values[layer_idx, :, :, : plan.num_sinks]
        query_for_window = rotate(query, *plan.cos_sin)
        query_for_sinks = rotate(query, *plan.cos_sin_for_sinks)

        outputs = []
        for block in plan.blocks:
            parts = [
                Part(
                    query_for_window[:, :, block.queries],
                    window_keys[:, :, block.columns],
                    window_values[:, :, block.columns],
                    block.hidden_window,
                ),
                Part(
                    query_for_sinks[:, :, block.queries], sink_keys, sink_values, block.hidden_sinks
                ),
            ]
            outputs.append(
                merged_attention([p for p in parts if p.keys.shape[-2]], scaling).to(query.dtype)
            )
        kept = min(rotated.shape[-2], layout.window_size)
        tail = slice(rotated.shape[-2] - kept, None)
        step.pending[layer_idx] = (rotated[:, :, tail], value[:, :, tail])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)

    def _tables(self, positions: range | list[int]) -> tuple[Tensor, Tensor]:
        """RoPE tables for stream positions, on the cache's device."""
        index = torch.tensor(positions, dtype=torch.int64, device=self._inv_freq.device)
        cos, sin = rope_tables(index + self.start_position, self._inv_freq)
        return cos.to(self.geometry.device), sin.to(self.geometry.device)

    # Snapshots

    def snapshot(self) -> CacheSnapshot:
        """Copy the state, O(S + W)."""
        self._roll_back()
        held = slice(0, self.num_held)
        sinks = slice(0, self.layout.num_sinks(self.num_seen))
        return CacheSnapshot(
            self.num_seen,
            self._keys[:, :, :, held].clone(),
            self._values[:, :, :, held].clone(),
            self._sinks[:, :, :, sinks].clone(),
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Bring back the state of a snapshot of a cache of the same sizes.

        Raises:
            StateError: If the snapshot comes from a cache of other sizes.
        """
        num_held = self.layout.num_held(snapshot.num_seen)
        num_sinks = self.layout.num_sinks(snapshot.num_seen)
        if (
            snapshot.keys.shape != self._keys[:, :, :, :num_held].shape
            or snapshot.sinks.shape != self._sinks[:, :, :, :num_sinks].shape
        ):
            raise StateError("the snapshot comes from a cache of other sizes")
        self._step = None
        self._undo.clear()
        self._placed = None
        self.num_seen = snapshot.num_seen
        self._keys[:, :, :, :num_held] = snapshot.keys
        self._values[:, :, :, :num_held] = snapshot.values
        self._sinks[:, :, :, :num_sinks] = snapshot.sinks

    def fork(self) -> "SinkCache":
        """An independent copy, O(S + W)."""
        copy = SinkCache(
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
        if self.config.window_size > 1 or self.num_seen < self.config.sink_size:
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
        self._step = None
        self._undo.clear()
        self._placed = None
        self.num_seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, for beam search."""
        self._roll_back()
        self._undo.clear()
        for buffer in (self._keys, self._values, self._sinks):
            buffer.copy_(buffer.index_select(1, beam_idx.to(buffer.device)))


def _arange(positions: range, device: torch.device) -> Tensor:
    return torch.arange(positions.start, max(positions.start, positions.stop), device=device)
