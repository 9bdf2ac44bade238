"""What models with ALiBi add to their scores, by the functions of their own code.

Each reads the configuration and returns the biases of the scaled scores of keys 0 to n - 1, shape
(num_heads, n), in the rounding that the model's forward pass gives them.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from streamchat.cache.geometry import CPU


def _bloom(functions: Any, config: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    biases: Tensor = functions.build_alibi_tensor(mask, config.num_attention_heads, dtype)
    return biases[:, 0]


def _falcon(functions: Any, config: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    # Falcon scales its biases along with the scores.
    return _bloom(functions, config, mask, dtype) / math.sqrt(config.head_dim)


def _mpt(functions: Any, config: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    # Float32 in any model.
    biases: Tensor = functions.build_mpt_alibi_tensor(
        config.num_attention_heads, mask.shape[1], device=mask.device
    )
    return biases[:, 0]


BIASES = {"bloom": _bloom, "falcon": _falcon, "mpt": _mpt}
"""By `config.model_type`."""


def has_alibi(config: Any) -> bool:
    """Whether a model biases by distance; Falcon may, and says so in its configuration."""
    return config.model_type in BIASES and bool(getattr(config, "alibi", True))


def alibi_of(
    config: Any, dtype: torch.dtype, device: torch.device = CPU
) -> Callable[[int], Tensor] | None:
    """`CacheGeometry.alibi` of a model whose activations have this dtype; None if it has none."""
    if not has_alibi(config):
        return None
    return partial(_biases, config, dtype, device)


def _biases(config: Any, dtype: torch.dtype, device: torch.device, num_keys: int) -> Tensor:
    family = config.model_type
    functions = import_module(f"transformers.models.{family}.modeling_{family}")
    mask = torch.ones((1, num_keys), dtype=torch.int64, device=device)
    return BIASES[family](functions, config, mask, dtype)
