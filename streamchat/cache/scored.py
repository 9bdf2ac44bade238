"""What the scored policies share: each head of each layer keeps its own tokens.

Where the sink cache decides by position, H2O and SnapKV decide by attention, so heads hold
different tokens, but equally many. Keys are kept un-rotated; when they are read, those that a head
holds are numbered 0, 1, 2, … in the order of the stream, and rotated for these numbers. So no
distance reaches the size of the cache, and the stream has no end. That is more work a step than a
sink cache does: every held key is rotated anew.

A step is a transaction, as in the sink cache: what it overwrites is kept until the next one.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from streamchat.cache.face import StepCache
from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout
from streamchat.cache.snapshot import CacheSnapshot
from streamchat.config import CacheConfig
from streamchat.errors import StateError, UnsupportedModelError
from streamchat.ops.attention import attention_weights
from streamchat.ops.rotary import rope_tables

NO_POSITION_IS_SURE = Layout(0, 2**62)
"""Heads hold different tokens: of no position can it be said that it has left."""

Undo = list[Callable[[], object]]
"""What puts back, last first, what a step has overwritten."""


@dataclass(slots=True)
class _Step:
    """A step between `begin` and `commit`."""

    num_tokens: int
    num_attended: int = 0
    undo: Undo = field(default_factory=list)


class ScoredCache(StepCache):
    """Keys and values of the tokens that each head needs most, as many for each.

    Args:
        config: Its cache size is the number of tokens that a head holds at most.
        geometry: Layers, heads, frequencies, dtype, device.
        batch_size: Rows. They move in step: padding is not supported.
        undo_depth: How many single-token steps `rewind` can take back.

    Attributes:
        keys: Un-rotated, shape (num_layers, batch, num_kv_heads, cache_size, head_dim).
        values: Same shape.
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
        self.config, self.geometry, self._batch_size = config, geometry, batch_size
        self.num_seen = 0
        g, size = geometry, config.cache_size
        shape = (g.num_layers, batch_size, g.num_kv_heads, size)
        self.keys = torch.zeros((*shape, g.head_dim), dtype=g.dtype, device=g.device)
        self.values = torch.zeros_like(self.keys)
        self.scores = torch.zeros(shape, device=g.device)
        # MPS has no float64: there the angles are made on the host.
        angle_device = "cpu" if g.device.type == "mps" else g.device
        inv_freq = g.frequencies(size).to(device=angle_device, dtype=torch.float64)
        numbers = torch.arange(size, device=angle_device)
        cos, sin = rope_tables(numbers, inv_freq, interleaved=g.interleaved)
        self._cos, self._sin = cos.to(g.device), sin.to(g.device)
        self._step: _Step | None = None
        self._undo: deque[Undo] = deque(maxlen=max(1, undo_depth))
        super().__init__(self.keys, self.values)

    # What a policy decides

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Tokens that each head holds."""

    @abstractmethod
    def _attend(
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

    def begin(self, num_tokens: int) -> None:
        """Open a step.

        Raises:
            StateError: If `num_tokens` < 1.
        """
        self._roll_back()
        if num_tokens < 1:
            raise StateError(f"a step feeds at least 1 token, got {num_tokens}")
        self._step = _Step(num_tokens)

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        sink_logit: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's tokens in one layer; see `SinkCache.attend`."""
        step, g = self._step, self.geometry
        if step is None:
            raise StateError("attend was called outside a step")
        expected = (self.batch_size, g.num_kv_heads, step.num_tokens, g.head_dim)
        if key.shape != expected or value.shape != expected:
            raise StateError(
                f"keys and values must have shape {expected} (batch, num_kv_heads, num_tokens, "
                f"head_dim), got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if step.num_tokens > 1:
            self._keep(*(tensor[layer_idx] for tensor in self._state().values()))
        groups = (*expected[:2], -1, *expected[2:])
        sink_logit = g.extra_term(sink_logit, query)
        if sink_logit is not None:
            sink_logit = sink_logit.view(g.num_kv_heads, -1)
        ask = Ask(g.head_dim**-0.5 if scaling is None else scaling, g.softcap, sink_logit)
        out = self._attend(
            layer_idx,
            query.detach().float().reshape(groups),
            key.detach().to(g.dtype),
            value.detach().to(g.dtype),
            ask,
        )
        step.num_attended += 1
        return out.reshape(query.shape).to(query.dtype)

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
        if step.num_tokens == 1:
            self._undo.append(step.undo)
        else:
            self._undo.clear()
        self.num_seen += step.num_tokens
        self._step = None

    def _keep(self, *views: Tensor) -> None:
        """Have these parts of the state put back if the step is taken back."""
        for view in views:
            self._undo_by(partial(view.copy_, view.clone()))

    def _undo_by(self, put_back: Callable[[], object]) -> None:
        """Call this, before what was said earlier, if the step is taken back."""
        assert self._step is not None  # noqa: S101 - for mypy
        self._step.undo.append(put_back)

    def _roll_back(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            for put_back in reversed(step.undo):
                put_back()

    def rewind(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, which were fed one at a time.

        Raises:
            StateError: If they are more than the undo log holds.
        """
        self._roll_back()
        if not 0 <= num_tokens <= len(self._undo):
            raise StateError(f"can take back {len(self._undo)} tokens, asked for {num_tokens}")
        for _ in range(num_tokens):
            for put_back in reversed(self._undo.pop()):
                put_back()
            self.num_seen -= 1

    def set_undo_depth(self, depth: int) -> None:
        """From now on keep what is needed to take back `depth` single-token steps (at least 1)."""
        self._undo = deque(self._undo, maxlen=max(1, depth))

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

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._batch_size

    @property
    def num_evicted(self) -> int:
        """Tokens that each head has let go."""
        return self.num_seen - self.num_held

    @property
    def num_bytes(self) -> int:
        """Bytes allocated; constant for the life of the cache."""
        return sum(tensor.nbytes for tensor in self._state().values())

    def _state(self) -> dict[str, Tensor]:
        """All that changes, by name; the slots are the fourth dimension."""
        return {"keys": self.keys, "values": self.values, "scores": self.scores}

    def snapshot(self) -> CacheSnapshot:
        """Copy the state, O(cache size)."""
        self._roll_back()
        held = slice(0, self.num_held)
        tensors = {name: tensor[:, :, :, held].clone() for name, tensor in self._state().items()}
        return CacheSnapshot(self.config, self.num_seen, 0, tensors)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Bring back the state of a snapshot of a cache of the same policy and sizes.

        Raises:
            StateError: If the snapshot comes from another one.
        """
        held = snapshot.tensors["keys"].shape[3]
        if not self.config.holds_like(snapshot.config) or any(
            snapshot.tensors[name].shape != tensor[:, :, :, :held].shape
            for name, tensor in self._state().items()
        ):
            raise StateError("the snapshot comes from a cache of other sizes")
        self._step = None
        self._undo.clear()
        self.num_seen = snapshot.num_seen
        for name, tensor in self._state().items():
            tensor[:, :, :, :held] = snapshot.tensors[name]

    def fork(self) -> "ScoredCache":
        """An independent copy, O(cache size)."""
        copy = type(self)(
            self.config,
            self.geometry,
            batch_size=self.batch_size,
            undo_depth=self._undo.maxlen or 1,
        )
        copy.restore(self.snapshot())
        return copy

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the same for all
        """Tokens seen."""
        return self.num_seen

    def reset(self) -> None:
        """Forget everything."""
        self._step = None
        self._undo.clear()
        self.num_seen = 0


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
