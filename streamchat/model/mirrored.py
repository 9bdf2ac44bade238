"""Caches in step on all processes of a tensor-parallel run.

Each process keeps the keys and values of its own heads. Whatever changes a cache of the first
process (tokens fed, a snapshot brought back, a step taken back) is an order to the others, which do
the same to their counterpart, known by its number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.sink import CacheSnapshot, SinkCache
from streamchat.config import CacheConfig
from streamchat.errors import StateError
from streamchat.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class CacheOrder:
    """What the other processes are to do.

    Attributes:
        action: `make` a cache, `feed` it, take a `snapshot`, `restore` one, or a method's name.
        model: Number of the model.
        cache: Number of the cache.
        args: For the action; snapshots are numbers.
    """

    action: str
    model: int
    cache: int
    args: tuple[Any, ...]


class Leader:
    """The first process's side of one model: gives the orders.

    Args:
        ranks: The processes.
        model: Number of the model.
    """

    def __init__(self, ranks: Ranks, model: int) -> None:
        self.ranks, self._model = ranks, model
        self._is_feeding = False

    def order(self, action: str, cache: int, *args: Any) -> None:
        """Give an order; see `CacheOrder`."""
        self.ranks.tell(CacheOrder(action, self._model, cache, args))

    @contextmanager
    def feeding(self, ids: Tensor, cache: SinkCache, num_logits: int) -> Iterator[None]:
        """Feed these tokens in here; the others do so at the same time.

        Raises:
            StateError: If the cache is not one that the others have.
        """
        if not isinstance(cache, MirroredCache):
            raise StateError("the other processes lack this cache: use SinkCache.for_model")
        self.order("feed", cache.number, ids.tolist(), num_logits)
        self._is_feeding = True
        try:
            with self.ranks.together():
                yield
        finally:
            self._is_feeding = False

    def check(self, *_: Any) -> None:
        """A forward pre-hook.

        Raises:
            StateError: If this process computes alone, which would wait for the others for ever.
        """
        if not self._is_feeding:
            raise StateError("the other processes would not follow: feed it through a Stream")


class _Mark:
    """Lives as long as a snapshot, which has no room for a finalizer of its own."""


@dataclass(frozen=True, slots=True)
class MirroredSnapshot(CacheSnapshot):
    """A snapshot on all processes; the tensors are those of the first.

    Attributes:
        number: Of the others' snapshots.
        mark: Keeps these.
    """

    number: int
    mark: _Mark


class MirroredCache(SinkCache):
    """The first process's share of a cache. Each method does what it does in `SinkCache`.

    Args:
        leader: Who tells the others.
        config: Sizes of sinks and window.
        geometry: Of this process's heads.
        options: The other arguments of `SinkCache`.
    """

    def __init__(
        self, leader: Leader, config: CacheConfig, geometry: CacheGeometry, **options: Any
    ) -> None:
        super().__init__(config, geometry, **options)
        self._leader, self._options = leader, options
        self.number = leader.ranks.number()
        leader.ranks.drop_with(self, self.number)
        leader.order("make", self.number, config, options)

    def snapshot(self) -> MirroredSnapshot:
        """Copy the state, O(S + W)."""
        own, mark = super().snapshot(), _Mark()
        number = self._leader.ranks.number()
        self._leader.ranks.drop_with(mark, number)
        self._leader.order("snapshot", self.number, number)
        state = {field.name: getattr(own, field.name) for field in fields(own)}
        return MirroredSnapshot(**state, number=number, mark=mark)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Bring back the state of a snapshot of a cache of the same sizes.

        Raises:
            StateError: Also if the other processes have no such snapshot.
        """
        if not isinstance(snapshot, MirroredSnapshot):
            raise StateError("a snapshot of another run lacks the heads of the other processes")
        super().restore(snapshot)
        self._leader.order("restore", self.number, snapshot.number)

    def fork(self) -> "MirroredCache":
        """An independent copy, O(S + W)."""
        options = {**self._options, "undo_depth": self._undo.maxlen or 1}
        copy = MirroredCache(self._leader, self.config, self.geometry, **options)
        copy.restore(self.snapshot())
        return copy

    def rewind(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, which were fed one at a time."""
        super().rewind(num_tokens)
        self._leader.order("rewind", self.number, num_tokens)

    def set_undo_depth(self, depth: int) -> None:
        """From now on keep what is needed to take back `depth` single-token steps."""
        super().set_undo_depth(depth)
        self._leader.order("set_undo_depth", self.number, depth)

    def skip(self, num_tokens: int) -> None:
        """Let the position run on as though `num_tokens` tokens had been fed and evicted."""
        super().skip(num_tokens)
        self._leader.order("skip", self.number, num_tokens)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._leader.order("reset", self.number)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, for beam search."""
        super().reorder_cache(beam_idx)
        self._leader.order("reorder_cache", self.number, beam_idx.cpu())


def lead(model: Any, number: int, ranks: Ranks) -> None:
    """From now on a prepared model's caches and forward passes are those of all processes."""
    ranks.drop_with(model, number)
    leader, binding = Leader(ranks, number), model.streamchat_binding
    binding.leader, binding.new_cache = leader, partial(MirroredCache, leader)
    model.register_forward_pre_hook(leader.check)
