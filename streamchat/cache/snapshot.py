"""A cache's state at one moment, whatever its policy."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from streamchat.config import CacheConfig


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A cache's state at one moment; its `restore` brings it back.

    Attributes:
        config: Policy and sizes.
        num_seen: Tokens fed so far.
        start_position: Position that the first token's angle was made for.
        tensors: What is held, by name, without the empty slots.
    """

    config: CacheConfig
    num_seen: int
    start_position: int
    tensors: Mapping[str, Tensor]
