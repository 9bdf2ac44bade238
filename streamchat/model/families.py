"""Which models can be streamed exactly, and what the cache must know of them.

Read from the configuration, before any weights: a model that would stream rubbish is refused with
the reason. Supported are models with rotary positions that reach their attention through
transformers' attention interface, and those of `wrapped.WRAPPED`, rotary or with ALiBi. What is
the same in all of them is found in the configuration and the modules (sizes, frequencies, how much
of a head is turned, scaling); what is not stands in `FAMILIES`. A new family is a line there and a
row in `tests/families.py`.
"""

import sys
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from streamchat.cache.geometry import CacheGeometry, QueryScale, Softmax
from streamchat.config import CacheConfig, Policy
from streamchat.errors import UnsupportedModelError
from streamchat.model.alibi import alibi_of, has_alibi
from streamchat.model.dispatch import home_of
from streamchat.model.wrapped import WRAPPED
from streamchat.ops.rotary import default_inv_freq


@dataclass(frozen=True, slots=True)
class Family:
    """What a family does in another way than Llama.

    Attributes:
        interleaved: Elements 2i and 2i + 1 of a head are turned together.
        rotates: Which layers have rotary positions: `all`, those that `config.no_rope_layers`
            names (`listed`), or those with a native window (`local`).
        softcaps: Scores are squeezed, as `config.attn_logit_softcapping` says.
        has_sink_logits: The softmax has a learned term for each head, a sink of the model's own:
            beyond a pinned prefix no tokens are kept as sinks, unless asked for.
        scales_queries: Queries grow with their position: in all layers, as `rope_parameters` says
            (`all`), or in those without rotary positions, as `attn_scale` and `floor_scale` say
            (`unrotated`).
        fixed: Fields of the configuration, and the one value with which transformers (or our own
            attention) computes what the model was trained for.
    """

    interleaved: bool = False
    rotates: Literal["all", "listed", "local"] = "all"
    softcaps: bool = False
    has_sink_logits: bool = False
    scales_queries: Literal["no", "all", "unrotated"] = "no"
    fixed: tuple[tuple[str, Any], ...] = ()


HALVES, PAIRS = Family(), Family(interleaved=True)

FAMILIES = {
    "arcee": HALVES,
    # Adds up slices of its output layer, and forgets the bias.
    "bloom": Family(fixed=(("slow_but_exact", False),)),
    "codegen": PAIRS,
    "cohere": PAIRS,
    "cohere2": Family(interleaved=True, rotates="local"),
    "ernie4_5": PAIRS,
    "exaone4": Family(rotates="local"),
    "falcon": HALVES,
    "gemma": HALVES,
    "gemma2": Family(softcaps=True),
    "gemma3_text": HALVES,
    "glm": PAIRS,
    "glm4": PAIRS,
    "glm4_moe": HALVES,
    "gpt_neox": HALVES,
    "gpt_oss": Family(has_sink_logits=True),
    "gptj": PAIRS,
    "granite": HALVES,
    "granitemoe": HALVES,
    "helium": PAIRS,
    "llama": HALVES,
    "llama4_text": Family(interleaved=True, rotates="listed", scales_queries="unrotated"),
    "ministral": HALVES,
    "ministral3": Family(scales_queries="all"),
    "mistral": HALVES,
    "mixtral": HALVES,
    # Fields that transformers reads and then ignores.
    "mpt": Family(
        fixed=(
            ("attn_config.alibi", True),
            ("attn_config.alibi_bias_max", 8),
            ("attn_config.prefix_lm", False),
            ("attn_config.qk_ln", False),
        )
    ),
    "nemotron": HALVES,
    "olmo": HALVES,
    "olmo2": HALVES,
    "olmo3": HALVES,
    "olmoe": HALVES,
    "persimmon": HALVES,
    "phi": HALVES,
    "phi3": HALVES,
    "phimoe": HALVES,
    "qwen2": HALVES,
    "qwen2_moe": HALVES,
    "qwen3": HALVES,
    "qwen3_moe": HALVES,
    "seed_oss": HALVES,
    "smollm3": Family(rotates="listed"),
    "stablelm": HALVES,
    "starcoder2": HALVES,
}
"""By `config.model_type`."""

LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt")
"""Families whose positions are learned and absolute: a kept token cannot be re-placed, but all of
the newest can be computed anew (`recompute`)."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""RoPE scalings with one table for the life of a cache: `dynamic` scales nothing within the trained
length, and `longrope` chooses one of two tables by the number of tokens in sight."""


def check_config(config: Any, policy: Policy = "sink") -> None:
    """Refuse a model that cannot be streamed exactly.

    Args:
        config: A transformers configuration.
        policy: How it is to be streamed.

    Raises:
        UnsupportedModelError: With the family and the reason.
    """
    if policy == "recompute" and config.model_type in LEARNED_POSITIONS:
        return
    reason = _reason_against(config)
    if reason:
        raise UnsupportedModelError(f"model family '{config.model_type}' is refused: {reason}")


def _reason_against(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and streamchat streams decoder-only models"
    if config.model_type not in FAMILIES:
        return _kind_of_foreign(config)
    for field, only in FAMILIES[config.model_type].fixed:
        value = attrgetter(field)(config)
        if value != only:
            return f"its {field} is {value}, and only {only} is supported"
    if reason := _reason_against_softmax(config):
        return reason
    for rope in _rope_parameters(config).values():
        rope_type = rope.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            return f"its RoPE scaling '{rope_type}' is not supported (supported: {known})"
    if set(getattr(config, "layer_types", None) or []) - {LOCAL, CHUNKED, "full_attention"}:
        return "it has layers that attend neither to all tokens nor to a native window or chunk"
    if config.model_type not in WRAPPED and not _has_attention_interface(config):
        return (
            f"transformers {transformers.__version__} has no interface for its attention; a newer "
            "release may have"
        )
    return None


SOFTMAX_FIELD = "streamchat_softmax"
"""Where a configuration says which `Softmax` its model was trained with, if not its family's."""


def softmax_of(config: Any) -> Softmax:
    """The softmax that a model was trained with."""
    chosen: Softmax | None = getattr(config, SOFTMAX_FIELD, None)
    return own_softmax(config) if chosen is None else chosen


def own_softmax(config: Any) -> Softmax:
    """The softmax that transformers computes for a model's family."""
    family = FAMILIES.get(config.model_type, HALVES)
    return "learned" if family.has_sink_logits else "standard"


def _reason_against_softmax(config: Any) -> str | None:
    softmax, own, known = softmax_of(config), own_softmax(config), get_args(Softmax)
    if softmax not in known:
        return f"its {SOFTMAX_FIELD} is '{softmax}', and only {', '.join(known)} are known"
    if softmax == own:
        return None
    if own != "standard" or config.model_type in WRAPPED:
        return f"its {SOFTMAX_FIELD} is '{softmax}', and its attention knows only '{own}'"
    if softmax == "learned" and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "its code comes with the model, which cannot be given a learned softmax"
    return None


def check_class(model: Any) -> None:
    """Refuse a model whose code is not what its family or its softmax needs.

    Raises:
        UnsupportedModelError: With the name of the class.
    """
    is_learned = softmax_of(model.config) == "learned"
    if is_learned and not any(hasattr(module, "sinks") for module in model.modules()):
        raise UnsupportedModelError(
            f"a learned softmax needs `sinks` in the attention modules of {type(model).__name__}: "
            "make it with streamchat.load or streamchat.model.softmax.model_class"
        )
    family = model.config.model_type
    if family in WRAPPED and not type(model).__module__.startswith("transformers."):
        raise UnsupportedModelError(
            f"model family '{family}' is refused: its code comes with the model "
            f"({type(model).__name__}), and only that of transformers is supported"
        )


def _has_attention_interface(config: Any) -> bool:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:  # code of its own; the self-check will tell
        return True
    return hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")


LOCAL = "sliding_attention"
"""What `config.layer_types` calls a layer with a native window."""

CHUNKED = "chunked_attention"
"""And one that was trained on chunks: it attends to the tokens of the query's own. Positions inside
a cache begin at 0, so all that a cache no larger than a chunk holds lies in one."""


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """RoPE parameters by type of layer; most models have one kind for all."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:
        return {kind: own for kind, own in rope.items() if own is not None}
    return {"full_attention": rope}


def _local_layers(config: Any) -> frozenset[int]:
    """Layers with a native window, in a model that has layers without one, too."""
    types = getattr(config, "layer_types", None) or []
    local = frozenset(layer for layer, kind in enumerate(types) if kind == LOCAL)
    return frozenset() if len(local) == len(types) else local


def _chunked_layers(config: Any) -> list[int]:
    types = getattr(config, "layer_types", None) or []
    return [layer for layer, kind in enumerate(types) if kind == CHUNKED]


STATEFUL = ("mamba", "state_size", "lru_width")
"""In names of fields that only families with recurrent layers have."""

SINUSOIDAL = ("ctrl", "xglm")
"""Families whose absolute positions are sines."""


def _kind_of_foreign(config: Any) -> str:
    """Why a family without the Llama layout is not streamed."""
    fields = config.to_dict()
    layer_types = " ".join(fields.get("layer_types") or [])
    if fields.get("kv_lora_rank"):
        return "it has latent attention (MLA), whose cache holds no keys that could be re-placed"
    is_stateful = any(word in key for key in fields for word in STATEFUL)
    if is_stateful or "linear" in layer_types or config.model_type in ("rwkv", "xlstm"):
        return "it has state-space or linear-attention layers, which keep no keys to evict"
    if "conv_L_cache" in fields:
        return "it has convolution layers, which keep no keys to evict"
    if "mrope_section" in str(fields):
        return "it has multimodal positions (M-RoPE), which are not one stream"
    if fields.get("text_config"):
        text = config.get_text_config().model_type
        alone = f"; its text model alone ('{text}') is" if text in FAMILIES else ""
        return f"it is multimodal, and not streamed as a whole{alone}"
    rotates = any("rope" in key or "rotary" in key for key in fields)
    for field in ("n_positions", "n_ctx", "max_position_embeddings"):
        if not rotates and fields.get(field):
            how = "absolute" if config.model_type in SINUSOIDAL else "learned and absolute"
            slower = "--policy recompute streams it exactly, slower"
            return (
                f"its positions are {how} ({field} is {fields[field]:,}), so a kept token cannot "
                f"be re-placed{f'; {slower}' if config.model_type in LEARNED_POSITIONS else ''}"
            )
    return f"it is not supported yet (supported: {', '.join(FAMILIES)})"


def native_window(config: Any) -> int | None:
    """The sliding window that some or all layers were trained with, or None."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and LOCAL not in layer_types:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def has_learned_sinks(config: Any) -> bool:
    """Whether the model has sinks of its own, and needs no tokens in their place."""
    return softmax_of(config) == "learned"


LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Where configurations say how long their model's texts were: most of them, MPT, BLOOM."""


def trained_length(config: Any) -> int | None:
    """Tokens that the model was trained to see at once, or None where the config does not say.

    A native window in all layers bounds it: no token further away was ever seen. So does a chunk in
    some layers.
    """
    lengths = [getattr(config, field, None) for field in LENGTH_FIELDS]
    if not _local_layers(config):
        lengths.append(native_window(config))
    if _chunked_layers(config):
        lengths.append(config.attention_chunk_size)
    return min((int(length) for length in lengths if length is not None), default=None)


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
    if config.model_type in LEARNED_POSITIONS:
        return f"{trained_length(config):,}, learned and absolute; computed anew at each step"
    if has_alibi(config):
        return (
            f"ALiBi, the model's own biases on {config.num_attention_heads} heads; keys kept as "
            "they are, scores biased by the distance within sinks and window"
        )
    rope, family = _rope_parameters(config)["full_attention"], FAMILIES[config.model_type]
    scaling = rope.get("rope_type", "default")
    facts = [f"RoPE, theta {rope.get('rope_theta', 10_000):,.0f}"]
    if scaling != "default":
        facts.append(f"scaling {scaling}")
    if family.interleaved:
        facts.append("in pairs")
    if skipped := _unrotated_layers(config):
        facts.append(f"none in {len(skipped)} of {config.num_hidden_layers} layers")
    if local := _local_layers(config):
        facts.append(
            f"a native window of {native_window(config):,} in {len(local)} of "
            f"{config.num_hidden_layers} layers"
        )
    if chunked := _chunked_layers(config):
        facts.append(
            f"chunks of {config.attention_chunk_size:,} in {len(chunked)} of "
            f"{config.num_hidden_layers} layers"
        )
    return (
        f"{', '.join(facts)}; keys rotated once at their stream position (float64 angles), the "
        "query turned to reach the sinks"
    )


def _unrotated_layers(config: Any) -> frozenset[int]:
    rotates = FAMILIES.get(config.model_type, HALVES).rotates
    layers = range(config.num_hidden_layers)
    if rotates == "listed":
        return frozenset(layer for layer in layers if not config.no_rope_layers[layer])
    if rotates == "local" and config.sliding_window is not None:
        return frozenset(layer for layer in layers if config.layer_types[layer] != LOCAL)
    return frozenset()


def geometry_from_config(config: Any, dtype: torch.dtype) -> CacheGeometry:
    """Sizes only, for a model whose weights are not loaded (the frequencies are zeros)."""
    family = FAMILIES.get(config.model_type, HALVES)  # of learned positions only sizes matter
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    alibi = alibi_of(config, dtype)
    return CacheGeometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=_num_kv_heads(config),
        head_dim=head_dim,
        inv_freq=torch.zeros(head_dim // 2 if alibi is None else 0),
        alibi=alibi,
        native_window=native_window(config),
        local_layers=_local_layers(config),
        query_scale=_query_scale(config),
        softcap=config.attn_logit_softcapping if family.softcaps else None,
        softmax=softmax_of(config),
        interleaved=family.interleaved,
        unrotated_layers=_unrotated_layers(config),
        dtype=dtype,
    )


def _num_kv_heads(config: Any) -> int:
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def geometry_of(model: Any) -> CacheGeometry:
    """What the cache must know of a loaded model.

    The frequencies are the model's own table. A factor on cos and sin (YaRN, longrope) is not among
    them: the model applies it to queries and keys itself.

    Raises:
        ConfigError: If the frequencies do not fit the head size.
    """
    geometry = geometry_from_config(model.config, model.dtype)
    if geometry.alibi is not None:
        alibi = alibi_of(model.config, model.dtype, home_of(model))
        return replace(geometry, alibi=alibi, device=home_of(model))
    return replace(geometry, device=home_of(model), **_frequencies(model))


def _query_scale(config: Any) -> QueryScale | None:
    which = FAMILIES.get(config.model_type, HALVES).scales_queries
    rope = _rope_parameters(config)
    if which == "unrotated" and config.attn_temperature_tuning:
        return QueryScale(
            beta=config.attn_scale,
            length=config.floor_scale,
            shift=1,
            layers=_unrotated_layers(config),
        )
    beta = rope["full_attention"].get("llama_4_scaling_beta")
    if which != "all" or beta is None:
        return None
    return QueryScale(
        beta=float(beta),
        length=int(rope["full_attention"]["original_max_position_embeddings"]),
        layers=frozenset(range(config.num_hidden_layers)),
    )


def body_of(model: Any) -> Any:
    """The layers of a causal LM, without its head.

    Llama 4's class names as its `base_model` a module that only its multimodal sister has.
    """
    base = model.base_model
    return getattr(base, "model", base) if base is model else base


def _frequencies(model: Any) -> dict[str, Any]:
    """The tables among a geometry's fields. Copied: dynamic scaling replaces the model's own."""
    config, rotary = model.config, getattr(body_of(model), "rotary_emb", None)
    full, local = (getattr(rotary, f"{kind}_inv_freq", None) for kind in ("full_attention", LOCAL))
    if full is not None or local is not None:
        local_inv_freq = None if local is None else local.clone()
        return {
            "inv_freq": local if full is None else full.clone(),
            "local_inv_freq": local_inv_freq,
        }
    if rotary is None or not hasattr(rotary, "inv_freq"):  # GPT-J and CodeGen keep a table of sines
        head_dim = config.hidden_size // config.num_attention_heads
        return {"inv_freq": default_inv_freq(config.rotary_dim or head_dim)}
    rope = _rope_parameters(config)["full_attention"]
    if rope.get("rope_type") != "longrope":
        return {"inv_freq": rotary.inv_freq.clone()}
    original_length = rope["original_max_position_embeddings"]
    compute = ROPE_INIT_FUNCTIONS["longrope"]
    return {
        "inv_freq": compute(config, home_of(model), seq_len=1)[0],
        "long_inv_freq": compute(config, home_of(model), seq_len=original_length + 1)[0],
        "original_length": original_length,
    }
