"""Conversations and streams that never end, on any suitable Hugging Face causal language model.

The public names load torch only when they are first used, so that `import streamchat` and
`streamchat --help` stay fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from streamchat.cache.geometry import CacheGeometry
    from streamchat.cache.sink import SinkCache
    from streamchat.config import CacheConfig, SamplingConfig
    from streamchat.engine.stream import Stream
    from streamchat.errors import (
        ConfigError,
        DamagedError,
        InputError,
        ModelError,
        OutputError,
        SelfCheckError,
        SessionError,
        SessionInUseError,
        StateError,
        StreamchatError,
        StreamFullError,
        UnsupportedModelError,
        UsageError,
    )
    from streamchat.model.load import LoadedModel, load
    from streamchat.model.prepare import prepare

_HOMES = {
    "CacheConfig": "streamchat.config",
    "CacheGeometry": "streamchat.cache.geometry",
    "ConfigError": "streamchat.errors",
    "DamagedError": "streamchat.errors",
    "InputError": "streamchat.errors",
    "LoadedModel": "streamchat.model.load",
    "ModelError": "streamchat.errors",
    "OutputError": "streamchat.errors",
    "SamplingConfig": "streamchat.config",
    "SelfCheckError": "streamchat.errors",
    "SessionError": "streamchat.errors",
    "SessionInUseError": "streamchat.errors",
    "SinkCache": "streamchat.cache.sink",
    "StateError": "streamchat.errors",
    "StreamFullError": "streamchat.errors",
    "Stream": "streamchat.engine.stream",
    "StreamchatError": "streamchat.errors",
    "UnsupportedModelError": "streamchat.errors",
    "UsageError": "streamchat.errors",
    "load": "streamchat.model.load",
    "prepare": "streamchat.model.prepare",
}

__all__ = [
    "CacheConfig",
    "CacheGeometry",
    "ConfigError",
    "DamagedError",
    "InputError",
    "LoadedModel",
    "ModelError",
    "OutputError",
    "SamplingConfig",
    "SelfCheckError",
    "SessionError",
    "SessionInUseError",
    "SinkCache",
    "StateError",
    "Stream",
    "StreamFullError",
    "StreamchatError",
    "UnsupportedModelError",
    "UsageError",
    "load",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'streamchat' has no attribute {name!r}")
