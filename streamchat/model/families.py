"""Which models can be streamed exactly, and what the cache must know of them.

Read from the configuration, before any weights: a model that would stream rubbish is refused with
the reason. Supported are RoPE models of the Llama layout: the whole head is rotated, in two halves,
by one table for all layers that does not depend on the length.
"""

from typing import Any

import torch

from streamchat.cache.geometry import CacheGeometry
from streamchat.config import CacheConfig
from streamchat.errors import ConfigError, UnsupportedModelError

LLAMA_LAYOUT = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `config.model_type` that have the Llama layout."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE scalings whose table is the same at every length."""


def check_config(config: Any) -> None:
    """Refuse a model that cannot be streamed exactly.

    Args:
        config: A transformers configuration.

    Raises:
        UnsupportedModelError: With the family and the reason.
    """
    reason = _reason_against(config)
    if reason:
        raise UnsupportedModelError(f"model family '{config.model_type}' is refused: {reason}")


def _reason_against(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and streamchat streams decoder-only models"
    if config.model_type not in LLAMA_LAYOUT:
        return _kind_of_foreign(config)
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        return (
            f"its RoPE scaling '{rope_type}' depends on the length, which is not supported yet "
            f"(supported: {', '.join(STATIC_ROPE_TYPES)})"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "it rotates only a part of each head, which is not supported yet"
    window = native_window(config)
    if window is not None:
        return f"it has layers with a native sliding window ({window}), not supported yet"
    return None


def _kind_of_foreign(config: Any) -> str:
    """Why a family without the Llama layout is not streamed."""
    fields = config.to_dict()
    layer_types = " ".join(fields.get("layer_types") or [])
    if fields.get("kv_lora_rank"):
        return "it has latent attention (MLA), whose cache holds no keys that could be re-placed"
    if any(key in fields for key in ("state_size", "mamba_d_state", "mamba_expand")) or (
        "linear" in layer_types or "mamba" in layer_types
    ):
        return "it has state-space or linear-attention layers, which keep no keys to evict"
    if "mrope_section" in str(fields):
        return "it has multimodal positions (M-RoPE), which are not one stream"
    rotates = any("rope" in key or "rotary" in key for key in fields)
    if not rotates and any(key in fields for key in ("n_positions", "n_ctx")):
        return "its positions are learned and absolute, so a kept token cannot be re-placed"
    return f"it is not supported yet (supported: {', '.join(LLAMA_LAYOUT)})"


def native_window(config: Any) -> int | None:
    """The sliding window that the model was trained with, or None."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def trained_length(config: Any) -> int | None:
    """Tokens that the model was trained to see at once, or None where the config does not say."""
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None else int(length)


def check_fits(config: Any, cache_config: CacheConfig) -> None:
    """Refuse a cache that would show the model distances it was not trained for.

    Raises:
        UnsupportedModelError: With the largest window allowed.
    """
    length = trained_length(config)
    if length is None or cache_config.cache_size <= length:
        return
    largest = length - cache_config.sink_size
    advice = f"the largest --window is {largest}" if largest > 0 else "lower --sinks"
    raise UnsupportedModelError(
        f"sinks {cache_config.sink_size} + window {cache_config.window_size} = "
        f"{cache_config.cache_size} is above the {length} tokens the model was trained for; "
        f"{advice}"
    )


def describe_positions(config: Any) -> str:
    """One line on how the model's positions are handled."""
    rope = config.rope_parameters
    scaling = rope.get("rope_type", "default")
    table = "" if scaling == "default" else f", scaling {scaling}"
    return (
        f"RoPE, theta {rope['rope_theta']:,.0f}{table}; keys rotated once at their stream "
        "position (float64 angles), the query turned to reach the sinks"
    )


def geometry_from_config(config: Any, dtype: torch.dtype) -> CacheGeometry:
    """Sizes only, for a model whose weights are not loaded (the frequencies are zeros)."""
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    return CacheGeometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        inv_freq=torch.zeros(head_dim // 2),
        dtype=dtype,
    )


def geometry_of(model: Any) -> CacheGeometry:
    """What the cache must know of a loaded model.

    The frequencies are the model's own table. A factor on cos and sin (YaRN) is not among them:
    the model applies it to queries and keys itself.

    Raises:
        ConfigError: If the frequencies do not fit the head size.
    """
    sizes = geometry_from_config(model.config, model.dtype)
    inv_freq = model.base_model.rotary_emb.inv_freq
    if inv_freq.shape != sizes.inv_freq.shape:
        raise ConfigError(
            f"the model's RoPE table has shape {tuple(inv_freq.shape)}, expected "
            f"{tuple(sizes.inv_freq.shape)}"
        )
    return CacheGeometry(
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        inv_freq=inv_freq,
        dtype=model.dtype,
        device=model.device,
    )
