"""What transformers, and the hooks of `model.prepare`, want to see of a cache that takes steps."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from streamchat.errors import StateError


class StepCache(Cache, ABC):
    """A cache whose layers attend by themselves, between `begin` and `commit`.

    Args:
        keys: Buffer whose first dimension is the layers.
        values: Same shape.

    Attributes:
        num_seen: Tokens fed so far.
    """

    num_seen = 0

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(layers=[LayerFace(self, k, v) for k, v in zip(keys, values, strict=True)])

    @abstractmethod
    def begin(self, num_tokens: int) -> None:
        """Open a step."""

    @abstractmethod
    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
    ) -> Tensor:
        """Attention of the step's tokens in one layer."""

    @abstractmethod
    def commit(self) -> None:
        """Close the step."""

    def update(  # transformers' signature
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values through to our attention, which calls `attend`."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the same for all
        """Tokens seen."""
        return self.num_seen

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""


class LayerFace(CacheLayerMixin):
    """What transformers wants to see of one layer. Holds no state of its own."""

    is_sliding = False

    def __init__(self, cache: StepCache, keys: Tensor, values: Tensor) -> None:
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
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """No maximum: a stream has no end."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what a window has evicted cannot come back."""
        raise StateError(f"a sink cache cannot be cropped by {tokens_to_remove} tokens")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the rows are fixed when the cache is made."""
        raise StateError(f"make the cache with {repeats} times the rows instead: batch_size=…")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused: the rows are fixed when the cache is made."""
        raise StateError(f"rows {indices.tolist()} cannot be selected: all rows move in step")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Handled for all layers at once by `TransactionalCache.reorder_cache`."""
