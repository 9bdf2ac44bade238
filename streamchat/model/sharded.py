"""A model in shares, one for each process: transformers' own plan for tensor parallelism.

The plan cuts the projections of attention and MLP; each process then attends with its share of the
heads, or with all of them where the plan gathers queries and keys for a norm over all heads.
"""

from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig, DynamicCache

from streamchat.config import Policy
from streamchat.errors import ConfigError, UnsupportedModelError
from streamchat.model import prequantized
from streamchat.model.compat import cache_argument
from streamchat.model.families import geometry_from_config
from streamchat.model.wrapped import WRAPPED

KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
"""Layers whose output holds the keys, alone or with others. Cut `colwise`, they cut the heads."""


def check_options(device: str, quantize: str, device_map: Any, policy: Policy) -> None:
    """Refuse options that do not go together with tensor parallelism.

    Raises:
        ConfigError: With the option.
    """
    if policy == "recompute":
        raise ConfigError("--policy recompute needs one process: start it without torchrun")
    if device_map is not None:
        raise ConfigError("--device-map needs one process: start it without torchrun")
    if quantize not in ("auto", "none"):
        raise ConfigError(f"--quantize {quantize} needs one process: start it without torchrun")
    if device != "auto":
        raise ConfigError(f"torchrun gives each process its device: leave out --device {device}")


def check_plan(config: Any, name: str, size: int) -> None:
    """Refuse a model that cannot be shared out.

    Args:
        config: A transformers configuration.
        name: What to call the model.
        size: How many processes there are.

    Raises:
        UnsupportedModelError: With the reason.
    """
    reason = _reason_against(config, size)
    if reason:
        raise UnsupportedModelError(
            f"model '{name}' cannot be shared by {size} processes: {reason}"
        )


def _reason_against(config: Any, size: int) -> str | None:
    if method := prequantized.method_of(config):
        return f"it comes quantized ({method}), and only unquantized weights are shared out"
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or config.model_type in WRAPPED:
        return (
            f"transformers {transformers.__version__} has no tensor-parallel plan for the family "
            f"'{config.model_type}'"
        )
    cuts_heads = any(
        layer.rsplit(".", 1)[-1] in KEY_PROJECTIONS and style == "colwise"
        for layer, style in plan.items()
    )
    num_heads = config.num_attention_heads
    num_kv_heads = geometry_from_config(config, torch.float32).num_kv_heads
    if cuts_heads and (num_heads % size or num_kv_heads % size):
        return f"it has {num_heads} heads on {num_kv_heads} key/value heads"
    return None


def sharing_options() -> dict[str, Any]:
    """What transformers' loader must be told."""
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def num_shares(model: Any) -> int:
    """By how many processes a loaded model is shared; 1 for an ordinary one."""
    return int(getattr(model, "tp_size", None) or 1)


def kv_heads_here(model: Any) -> int:
    """Key/value heads that this process's share of a model attends with.

    Asked of the model's own forward pass, which all processes must run at once.

    Raises:
        UnsupportedModelError: If it fails, or its layers differ.
    """
    cache = DynamicCache()
    ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad():
            model(ids, **{cache_argument(type(model).forward): cache}, use_cache=True)
    except Exception as error:  # the model's own code runs here, cut by the plan
        text = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"model family '{model.config.model_type}' is refused: transformers' own plan for "
            f"{num_shares(model)} processes fails with it: {text}"
        ) from error
    counts = {layer.keys.shape[1] for layer in cache.layers}
    if len(counts) != 1:
        raise UnsupportedModelError(
            f"model family '{model.config.model_type}' is refused: shared by "
            f"{num_shares(model)} processes, its layers have {sorted(counts)} key/value heads"
        )
    return int(counts.pop())


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of a weight; the weight itself where it is not shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
