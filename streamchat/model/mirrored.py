"""Caches in step on all processes of a tensor-parallel run.

Each process keeps the keys and values of its own heads. Whatever changes a cache of the first
process (tokens fed, a snapshot brought back, a step taken back) is an order to the others, which do
the same to their counterpart, known by its number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.snapshot import CacheSnapshot
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
    def feeding(self, ids: Tensor, cache: Any, num_logits: int) -> Iterator[None]:
        """Feed these tokens in here; the others do so at the same time.

        Raises:
            StateError: If the cache is not one that the others have.
        """
        if getattr(cache, "leader", None) is not self:
            raise StateError("the other processes lack this cache: make it for this model")
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


@cache
def mirrored(cache_class: Any) -> Any:
    """A cache's class for the first process: what changes one is an order to the others."""

    class Mirrored(cache_class):  # type: ignore[misc]
        """Each method does what it does in the class itself; of the arguments, `leader` is new."""

        def __init__(
            self, leader: Leader, config: CacheConfig, geometry: CacheGeometry, **options: Any
        ) -> None:
            super().__init__(config, geometry, **options)
            self.leader, self._options = leader, options
            self.number = leader.ranks.number()
            leader.ranks.drop_with(self, self.number)
            self._order("make", cache_class, config, options)

        def _order(self, action: str, *args: Any) -> None:
            self.leader.order(action, self.number, *args)

        def snapshot(self) -> MirroredSnapshot:
            """Copy the state."""
            own, mark, ranks = super().snapshot(), _Mark(), self.leader.ranks
            number = ranks.number()
            ranks.drop_with(mark, number)
            self._order("snapshot", number)
            state = {field.name: getattr(own, field.name) for field in fields(own)}
            return MirroredSnapshot(**state, number=number, mark=mark)

        def restore(self, snapshot: CacheSnapshot) -> None:
            """Bring back the state of a snapshot.

            Raises:
                StateError: Also if the other processes have no such snapshot.
            """
            if not isinstance(snapshot, MirroredSnapshot):
                raise StateError("a snapshot of another run lacks the heads of the other processes")
            super().restore(snapshot)
            self._order("restore", snapshot.number)

        def fork(self) -> "Mirrored":
            """An independent copy."""
            copy = Mirrored(self.leader, self.config, self.geometry, **self._options)
            copy.set_undo_depth(self._undo.maxlen)
            copy.restore(self.snapshot())
            return copy

        def rewind(self, num_tokens: int) -> None:
            """Take back the last tokens."""
            super().rewind(num_tokens)
            self._order("rewind", num_tokens)

        def set_undo_depth(self, depth: int) -> None:
            """From now on keep what is needed to take back so many tokens."""
            super().set_undo_depth(depth)
            self._order("set_undo_depth", depth)

        def skip(self, num_tokens: int) -> None:
            """Let the position run on."""
            super().skip(num_tokens)
            self._order("skip", num_tokens)

        def reset(self) -> None:
            """Forget everything."""
            super().reset()
            self._order("reset")

        def reorder_cache(self, beam_idx: Tensor) -> None:
            """Choose rows."""
            super().reorder_cache(beam_idx)
            self._order("reorder_cache", beam_idx.cpu())

    return Mirrored


def lead(model: Any, number: int, ranks: Ranks) -> None:
    """From now on a prepared model's caches and forward passes are those of all processes."""
    ranks.drop_with(model, number)
    leader, binding = Leader(ranks, number), model.streamchat_binding

    def new_cache(cache_class: Any, *args: Any, **options: Any) -> Any:
        return mirrored(cache_class)(leader, *args, **options)

    binding.leader, binding.new_cache = leader, new_cache
    model.register_forward_pre_hook(leader.check)
