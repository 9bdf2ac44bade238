"""A cache for a model, by the name of its policy, and what feeds it."""

from typing import Any

from torch import Tensor

from streamchat.cache.dense import DenseCache
from streamchat.cache.h2o import H2OCache
from streamchat.cache.scored import ScoredCache
from streamchat.cache.sink import SinkCache
from streamchat.cache.snapkv import SnapKVCache
from streamchat.config import CacheConfig
from streamchat.errors import StateError
from streamchat.model import prepare
from streamchat.model.recompute import RecomputeCache

StreamCache = SinkCache | ScoredCache | RecomputeCache
"""What is held of a stream."""

CLASSES: dict[str, type[SinkCache] | type[ScoredCache]] = {
    "sink": SinkCache,
    "window": SinkCache,
    "dense": DenseCache,
    "h2o": H2OCache,
    "snapkv": SnapKVCache,
}
"""Those whose tokens go through a prepared model; `window` is `sink` without sinks."""


def make_cache(
    model: Any, config: CacheConfig | None = None, *, batch_size: int = 1
) -> StreamCache:
    """A cache for a model that went through `streamchat.prepare`.

    Args:
        model: With the policy `recompute`, any causal LM.
        config: Policy and sizes.
        batch_size: Rows.

    Raises:
        StateError: If the model is not prepared.
        UnsupportedModelError: If the policy does not fit the model.
    """
    config = config or CacheConfig()
    if config.policy == "recompute":
        return RecomputeCache(model, config, batch_size=batch_size)
    binding = getattr(model, "streamchat_binding", None)
    if binding is None:
        raise StateError("the model is not prepared: call streamchat.prepare(model) first")
    cache: SinkCache | ScoredCache = binding.new_cache(
        CLASSES[config.policy], config, binding.geometry, batch_size=batch_size
    )
    return cache


def forward(model: Any, ids: Tensor, cache: StreamCache, num_logits: int = 1) -> Tensor:
    """Feed tokens; see `prepare.forward` and `RecomputeCache.forward`."""
    if isinstance(cache, RecomputeCache):
        return cache.forward(ids, num_logits)
    return prepare.forward(model, ids, cache, num_logits)
