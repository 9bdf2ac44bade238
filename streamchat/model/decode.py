"""Which code computes a decode step: chosen once for each model, here and nowhere else."""

from typing import Any, Protocol

from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.sink import SinkCache
from streamchat.model.captured import CapturedStep
from streamchat.model.compiled import CompiledStep, why_not_compiled
from streamchat.model.dispatch import is_dispatched
from streamchat.model.sharded import num_shares


class DecodeStep(Protocol):
    """Feeds a token, or a few, in place of the model's forward pass.

    Attributes:
        failure: Why it takes no new caches, in a line, or None.
    """

    failure: str | None

    def takes(self, cache: SinkCache, ids: Tensor) -> bool:
        """Whether it will feed these ids, shape (batch, num_tokens), to this cache."""
        ...

    def __call__(self, ids: Tensor, cache: SinkCache) -> Tensor:
        """Feed them; logits, shape (batch, num_tokens, vocab_size)."""
        ...


def choose_decode_step(model: Any, geometry: CacheGeometry) -> DecodeStep | None:
    """The fastest decode step that this model can have; None for its own forward pass."""
    if why_not_captured(model, geometry) is None:
        return CapturedStep(model, geometry)
    if why_not_compiled(model, geometry) is None:
        return CompiledStep(model, geometry)
    return None


def why_slow(model: Any) -> str | None:
    """Why a prepared model's decode steps go through its own forward pass; None if they do not."""
    binding = model.streamchat_binding
    if binding.decode_step is not None and binding.decode_step.failure is None:
        return None
    if is_dispatched(model):
        return "its layers lie on several devices or on disk (--device-map)"
    if num_shares(model) > 1:
        return f"it is shared by {num_shares(model)} processes"
    if binding.geometry.device.type == "cuda":
        return why_not_captured(model, binding.geometry)
    return why_not_compiled(model, binding.geometry)


def why_not_captured(model: Any, geometry: CacheGeometry) -> str | None:
    """Why a model's decode steps are not replayed as a CUDA graph, in a line; None if they are."""
    if geometry.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, the model is on {geometry.device.type}"
    if geometry.alibi is not None:
        return "ALiBi's biases move with the window, which is not captured in a CUDA graph"
    if not (geometry.is_uniform and geometry.is_plain):
        return "layers of several kinds, or an attention of its own kind, are not captured yet"
    if num_shares(model) > 1:
        return "the exchange between processes is not captured in a CUDA graph"
    if is_dispatched(model):
        return "accelerate's hooks (device_map) cannot be captured in a CUDA graph"
    binding = getattr(model, "streamchat_binding", None)
    step = None if binding is None else binding.decode_step
    return None if step is None else step.failure
