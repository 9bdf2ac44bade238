"""A step is a transaction: what all caches share that hold a stream, whichever tokens they keep.

What a step overwrites before it is committed is kept. A step that an exception left open is rolled
back by the next call, so an interrupted forward pass never leaves some layers a token ahead of
others; single-token steps can be taken back afterwards, too.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from streamchat.cache.face import StepCache
from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout
from streamchat.cache.snapshot import CacheSnapshot
from streamchat.config import CacheConfig
from streamchat.errors import StateError

Undo = list[Callable[[], object]]
"""What puts back, last first, what a step has overwritten."""


@dataclass(slots=True)
class Step:
    """A step between `begin` and `commit`.

    Attributes:
        num_tokens: Tokens fed.
        num_attended: Layers that have called `attend`.
    """

    num_tokens: int
    num_attended: int = field(default=0, init=False)


StepT = TypeVar("StepT", bound=Step)
CacheT = TypeVar("CacheT", bound="TransactionalCache[Any]")


class TransactionalCache(StepCache, Generic[StepT]):
    """Keys and values of some tokens of a stream, fed in steps.

    On bare tensors, without any model::

        with cache.step(num_tokens):
            for layer_idx in range(num_layers):
                out = cache.attend(layer_idx, query, key, value)

    Args:
        config: Policy and sizes.
        geometry: Layers, heads, frequencies, dtype, device.
        batch_size: Rows. They move in step: padding is not supported.
        undo_depth: How many single-token steps `rewind` can take back.

    Attributes:
        start_position: Position that the first token's RoPE angle is made for.
        layout: Which positions are held.
        keys: Shape (num_layers, batch, num_kv_heads, num_slots, head_dim).
        values: Same shape.
    """

    layout: Layout
    start_position = 0

    def __init__(
        self,
        config: CacheConfig,
        geometry: CacheGeometry,
        *,
        batch_size: int = 1,
        undo_depth: int = 1,
    ) -> None:
        self.config, self.geometry, self._batch_size = config, geometry, batch_size
        self.num_seen = 0
        g = geometry
        shape = (g.num_layers, batch_size, g.num_kv_heads, self._first_slots(), g.head_dim)
        self.keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self.values = torch.zeros_like(self.keys)
        self._step: StepT | None = None
        # Of a step that is not committed.
        self._open_undo: Undo = []
        self._undo: deque[Undo] = deque(maxlen=max(1, undo_depth))
        super().__init__(self.keys, self.values)

    # What a policy decides

    @abstractmethod
    def _open(self, num_tokens: int) -> StepT:
        """What the layers of a step share."""

    @abstractmethod
    def _attend(
        self,
        layer_idx: int,
        step: StepT,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sink_logit: Tensor | None,
    ) -> Tensor:
        """What `attend` returns, in any dtype; keys and values have the cache's, and no graph."""

    def _write(self, step: StepT) -> None:
        """Write what waits for the commit."""

    def _state(self) -> dict[str, Tensor]:
        """All that changes, by name: layers, rows and heads, then the slots."""
        return {"keys": self.keys, "values": self.values}

    def _held_of(self, num_seen: int) -> int:
        """Tokens held after `num_seen` have been fed; they fill the first slots without a gap."""
        return min(num_seen, self.config.cache_size)

    def _first_slots(self) -> int:
        """Slots of the buffers when nothing is held yet."""
        return self.config.cache_size

    def _reserve(self, num_tokens: int) -> None:
        """See that so many more tokens can be written."""

    # What it holds

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._batch_size

    @property
    def num_held(self) -> int:
        """Tokens in the cache, of each head; `config.cache_size` at most."""
        return self._held_of(self.num_seen)

    @property
    def num_evicted(self) -> int:
        """Tokens that have left, of each head."""
        return self.num_seen - self.num_held

    @property
    def num_bytes(self) -> int:
        """Bytes allocated; constant for the life of the cache, unless it is a dense one."""
        return sum(tensor.nbytes for tensor in self._state().values())

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
        self._step = self._open(num_tokens)

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
        step, g = self._step, self.geometry
        if step is None:
            raise StateError("attend was called outside a step")
        expected = (self._batch_size, g.num_kv_heads, step.num_tokens, g.head_dim)
        if key.shape != expected or value.shape != expected:
            raise StateError(
                f"keys and values must have shape {expected} (batch, num_kv_heads, num_tokens, "
                f"head_dim), got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if scaling is None:
            scaling = float(g.head_dim**-0.5)
        # Detached: what is stored must not keep a graph that grows with the stream.
        key, value = key.detach().to(g.dtype), value.detach().to(g.dtype)
        sink_logit = g.extra_term(sink_logit, query)
        out = self._attend(layer_idx, step, query, key, value, scaling, sink_logit)
        step.num_attended += 1
        return out.to(query.dtype)

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
        self._write(step)
        self._close(step.num_tokens)

    def _close(self, num_tokens: int) -> None:
        """What the step wrote is now part of the stream."""
        if num_tokens == 1:
            self._undo.append(self._open_undo)
        else:
            self._undo.clear()
        self.num_seen += num_tokens
        self._step, self._open_undo = None, []

    # Taken back

    def _roll_back(self) -> None:
        """Take back a step that was not committed, if there is one."""
        self._step = None
        undo, self._open_undo = self._open_undo, []
        _put_back(undo)

    def rewind(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, which were fed one at a time.

        Raises:
            StateError: If they are more than the undo log holds.
        """
        self._roll_back()
        if not 0 <= num_tokens <= len(self._undo):
            raise StateError(f"can take back {len(self._undo)} tokens, asked for {num_tokens}")
        for _ in range(num_tokens):
            _put_back(self._undo.pop())
            self.num_seen -= 1

    def set_undo_depth(self, depth: int) -> None:
        """From now on keep what is needed to take back `depth` single-token steps (at least 1)."""
        self._undo = deque(self._undo, maxlen=max(1, depth))

    # Copied

    def snapshot(self) -> CacheSnapshot:
        """Copy the state, O(cache size)."""
        self._roll_back()
        held = slice(0, self.num_held)
        tensors = {name: tensor[:, :, :, held].clone() for name, tensor in self._state().items()}
        return CacheSnapshot(self.config, self.num_seen, self.start_position, tensors)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Bring back the state of a snapshot of a cache of the same policy and sizes.

        Raises:
            StateError: If the snapshot comes from another one.
        """
        num_held = self._held_of(snapshot.num_seen)
        if not self.config.holds_like(snapshot.config) or any(
            snapshot.tensors[name].shape != (*tensor.shape[:3], num_held, *tensor.shape[4:])
            for name, tensor in self._state().items()
        ):
            raise StateError("the snapshot comes from a cache of other sizes")
        self._forget()
        self._reserve(num_held)
        self.num_seen, self.start_position = snapshot.num_seen, snapshot.start_position
        for name, tensor in self._state().items():
            tensor[:, :, :, :num_held] = snapshot.tensors[name]

    def fork(self: CacheT) -> CacheT:
        """An independent copy, O(cache size)."""
        copy = type(self)(
            self.config,
            self.geometry,
            batch_size=self.batch_size,
            undo_depth=self._undo.maxlen or 1,
        )
        copy.restore(self.snapshot())
        return copy

    def _forget(self) -> None:
        self._step, self._open_undo = None, []
        self._undo.clear()
        self.num_seen = 0

    # What transformers asks of a cache

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values through to our attention, which calls `attend`.

        Raises:
            StateError: If the model is not prepared, so that nobody opened a step.
        """
        if self._step is None:
            raise StateError("the model is not prepared: call streamchat.prepare(model) first")
        return super().update(*args, **kwargs)

    def reset(self) -> None:
        """Forget everything."""
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, for beam search."""
        self._roll_back()
        self._undo.clear()
        for tensor in self._state().values():
            tensor.copy_(tensor.index_select(1, beam_idx.to(tensor.device)))


def _put_back(undo: Undo) -> None:
    for put_back in reversed(undo):
        put_back()
