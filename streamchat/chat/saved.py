"""A stream's state as something to save: what sessions, pipes and kept benchmarks share."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from streamchat.config import CacheConfig
from streamchat.engine.stream import StreamState
from streamchat.model.load import LoadedModel
from streamchat.store.state import SavedState, differences


def pack(
    loaded: LoadedModel,
    config: CacheConfig,
    state: StreamState,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> SavedState:
    """A stream's state, and what else belongs to that moment.

    Args:
        loaded: The stream's model.
        config: Policy and sizes of its cache.
        state: From `Stream.snapshot`; its tensors are not copied.
        meta: Whatever JSON can say.
        tensors: By name.
    """
    about, parts = state.pack()
    parts.update({f"own.{name}": tensor for name, tensor in (tensors or {}).items()})
    return SavedState(_fingerprint(loaded, config), {"stream": about, "own": dict(meta)}, parts)


def why_not(saved: SavedState, loaded: LoadedModel, config: CacheConfig) -> list[str]:
    """Why a stream cannot go on from there with the very same numbers; empty if it can."""
    return differences(saved.fingerprint, _fingerprint(loaded, config))


def unpack(
    saved: SavedState, config: CacheConfig
) -> tuple[StreamState, dict[str, Any], dict[str, Tensor]]:
    """What `pack` put together: the state, the meta and the tensors; ask `why_not` first."""
    own = {
        name.removeprefix("own."): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith("own.")
    }
    state = StreamState.unpack(config, saved.meta["stream"], saved.tensors)
    return state, dict(saved.meta["own"]), own


def _fingerprint(loaded: LoadedModel, config: CacheConfig) -> dict[str, str | int]:
    return {
        **loaded.fingerprint(),
        "policy": config.policy,
        "sink_size": config.sink_size,
        "window_size": config.window_size,
    }
