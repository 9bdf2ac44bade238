"""Put the sink cache under a transformers model.

Every token is given position 0, where the model's own RoPE is the identity (but for YaRN's constant
factor). Queries and keys therefore reach our attention function un-rotated, and it rotates them for
their place in the stream. Models that do not ask for an attention function have their attention
modules wrapped. With any other cache, or none, a prepared model runs its own path.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamchat.cache.face import StepCache
from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.sink import SinkCache
from streamchat.errors import StateError
from streamchat.model.compat import cache_of, logits_of
from streamchat.model.decode import DecodeStep, choose_decode_step
from streamchat.model.dispatch import attend_at_home
from streamchat.model.families import (
    body_of,
    check_class,
    check_config,
    geometry_of,
    own_softmax,
)
from streamchat.model.mirrored import Leader
from streamchat.model.sharded import kv_heads_here, num_shares
from streamchat.model.softmax import with_extra_term
from streamchat.model.wrapped import WRAPPED, wrap

ATTENTION_NAME, EAGER_NAME = "streamchat", "streamchat_eager"
"""Our attention, for models whose own path may run torch's fused attention, and for those that it
lacks something for."""


def _new_cache(cache_class: Callable[..., StepCache], *args: Any, **options: Any) -> StepCache:
    return cache_class(*args, **options)


@dataclass(slots=True)
class Binding:
    """One for each prepared model; its attention modules point to it.

    Attributes:
        geometry: What a cache for this model must know.
        cache: The cache of the forward pass under way, or None.
        decode_step: What computes single tokens; None for the model's own forward pass.
        new_cache: Makes a cache, from its class and the arguments of that.
        leader: Tells other processes what they must feed, too; None if there are none.
        stock: What the model runs when its cache is not one of ours.
    """

    geometry: CacheGeometry
    cache: StepCache | None = None
    decode_step: DecodeStep | None = None
    new_cache: Callable[..., StepCache] = _new_cache
    leader: Leader | None = None
    stock: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]


def prepare(model: Any) -> Any:
    """Make a transformers causal LM ready for `SinkCache`. Doing it twice does no harm.

    Args:
        model: A loaded model of a supported family. It is changed in place.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: If the model cannot be streamed exactly.
    """
    if getattr(model, "streamchat_binding", None) is not None:
        return model
    check_config(model.config)
    check_class(model)
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    AttentionInterface.register(EAGER_NAME, _attention)
    AttentionMaskInterface.register(EAGER_NAME, eager_mask)
    geometry = geometry_of(model)
    if num_shares(model) > 1:
        geometry = replace(geometry, num_kv_heads=kv_heads_here(model))
    binding = Binding(geometry)
    model.streamchat_binding = binding
    base = body_of(model)
    family = WRAPPED.get(model.config.model_type)
    rope_factor = getattr(getattr(base, "rotary_emb", None), "attention_scaling", 1.0)
    for module in base.modules():
        if hasattr(module, "layer_idx"):
            module.streamchat_binding = binding
            if family is not None:
                wrap(module, family, rope_factor)

    # Llama 4 takes its queries' positions from the cache, not from us.
    self_scaling = [module for module in base.modules() if _scales_queries(module)]

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = cache_of(kwargs)
        binding.cache = cache if isinstance(cache, StepCache) else None
        for module in self_scaling:
            module.attn_temperature_tuning = binding.cache is None
        if binding.cache is None:
            return None
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = args[0] if args else kwargs["inputs_embeds"]
        if len(args) > 1:
            raise StateError("pass only input_ids by position, everything else by name")
        _refuse_padding(kwargs.pop("attention_mask", None))
        binding.cache.begin(tokens.shape[1])
        kwargs["position_ids"] = torch.zeros(
            (1, tokens.shape[1]), dtype=torch.long, device=tokens.device
        )
        if binding.geometry.alibi is not None:
            # Without a mask these models make biases for all tokens that the cache has ever seen.
            kwargs["attention_mask"] = torch.ones(
                tokens.shape[:2], dtype=torch.long, device=tokens.device
            )
        return args, kwargs

    def after(_module: Any, _args: Any, _output: Any) -> None:
        if binding.cache is not None:
            binding.cache.commit()
            binding.cache = None

    # MPT's default is False: `generate` would feed its cache all ids again at each step.
    model.generation_config.use_cache = True
    base.register_forward_pre_hook(before, with_kwargs=True)
    base.register_forward_hook(after)
    if family is None:
        _use_our_attention(model, binding)
    binding.decode_step = choose_decode_step(model, binding.geometry)
    return model


def forward(model: Any, ids: Tensor, cache: StepCache, num_logits: int = 1) -> Tensor:
    """Feed tokens through a prepared model.

    Args:
        model: A model that went through `prepare`.
        ids: Shape (batch, num_tokens), int64, on the model's device.
        cache: Gets the tokens appended.
        num_logits: For how many of the last tokens logits are computed.

    Returns:
        Logits, shape (batch, num_logits, vocab_size).
    """
    leader = model.streamchat_binding.leader
    if leader is not None:
        with leader.feeding(ids, cache, num_logits):
            return logits_of(model, ids, cache, num_logits)
    step = model.streamchat_binding.decode_step
    if isinstance(cache, SinkCache) and step is not None and step.takes(cache, ids):
        logits: Tensor = step(ids, cache)
        return logits[:, -num_logits:]
    return logits_of(model, ids, cache, num_logits)


def _use_our_attention(model: Any, binding: Binding) -> None:
    """Let the model call our attention function, and choose what runs without a cache of ours."""
    geometry, name = binding.geometry, ATTENTION_NAME
    is_fusible = geometry.softcap is None and geometry.softmax != "learned"
    # Not everywhere does transformers refuse what its fused attention leaves out.
    if not (is_fusible and getattr(type(model), "_supports_sdpa", True)):
        binding.stock = sys.modules[type(model).__module__].eager_attention_forward
        name = EAGER_NAME
    if geometry.softmax != own_softmax(model.config):
        is_learned = geometry.softmax == "learned"
        binding.stock = with_extra_term(binding.stock, is_learned=is_learned)
        name = EAGER_NAME  # whose mask is always there to be extended
    model.set_attn_implementation(name)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What the model calls in each layer (transformers' attention interface)."""
    cache = module.streamchat_binding.cache
    if cache is None:
        stock = module.streamchat_binding.stock
        out: tuple[Tensor, Tensor | None] = stock(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    is_learned = module.streamchat_binding.geometry.softmax == "learned"
    own = {"sink_logit": module.sinks} if is_learned else {}
    attended = attend_at_home(module, query, key, value, scaling, **own)
    return attended.transpose(1, 2).contiguous(), None


def _scales_queries(module: Any) -> bool:
    """Whether an attention module multiplies its queries by a factor of their positions itself."""
    return bool(getattr(module, "attn_temperature_tuning", False))


def _refuse_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and (
        attention_mask.ndim != 2 or not bool(attention_mask.to(torch.bool).all())
    ):
        raise StateError("a padded batch cannot be streamed: rows move in step, without padding")
