"""Attention modules that do not ask transformers' attention interface, brought to the cache.

While a step of ours is open, such a module projects with its own layers, hands queries, keys and
values to the cache un-rotated, and projects what comes back. At any other time its own forward
runs. What differs between the families stands in `WRAPPED`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.model.dispatch import attend_at_home

Three = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, shape (batch, heads, num_tokens, head_dim)."""


def split_by_group(qkv: Tensor, geometry: CacheGeometry) -> Three:
    """By key head: the queries of its group, its key, its value.

    Args:
        qkv: Shape (batch, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).
        geometry: Sizes.
    """
    groups = qkv.view(*qkv.shape[:2], geometry.num_kv_heads, -1, geometry.head_dim)
    query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def split_by_kind(qkv: Tensor, geometry: CacheGeometry) -> Three:
    """All queries, all keys, all values; as many of each.

    Args:
        qkv: Shape (batch, num_tokens, 3 * num_heads * head_dim).
        geometry: Sizes.
    """
    kinds = qkv.view(*qkv.shape[:2], 3, geometry.num_kv_heads, geometry.head_dim)
    query, key, value = kinds.permute(2, 0, 3, 1, 4)
    return query, key, value


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The attention module of a family.

    Attributes:
        qkv: Name of the layer that makes queries, keys and values.
        out: Name of the output layer.
        scaling: Name of the factor on the scores.
        split: Takes apart what `qkv` returns.
        adds_residual: The module adds the residual stream, its second argument, to its output.
    """

    qkv: str
    out: str
    scaling: str
    split: Callable[[Tensor, CacheGeometry], Three] = split_by_group
    adds_residual: bool = False


WRAPPED = {
    "bloom": Wrapped("query_key_value", "dense", "inv_norm_factor", adds_residual=True),
    "falcon": Wrapped("query_key_value", "dense", "inv_norm_factor"),
    "mpt": Wrapped("Wqkv", "out_proj", "softmax_scale", split_by_kind),
}
"""By `config.model_type`."""


def wrap(module: Any, family: Wrapped, rope_factor: float) -> None:
    """Let an attention module of a prepared model attend through the cache of an open step.

    Args:
        module: The module; `streamchat_binding` is set on it.
        family: What to know of it.
        rope_factor: On queries and keys (YaRN), which the module's own forward applies as it
            rotates them.
    """
    own_forward = module.forward
    scaling = getattr(module, family.scaling) * rope_factor**2

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        binding = module.streamchat_binding
        if binding.cache is None:
            return own_forward(hidden_states, *args, **kwargs)
        qkv = getattr(module, family.qkv)(hidden_states)
        bound = getattr(module, "clip_qkv", None)
        if bound:
            qkv = qkv.clamp(min=-bound, max=bound)
        three = family.split(qkv, binding.geometry)
        attended = attend_at_home(module, *three, scaling)
        out = getattr(module, family.out)(attended.transpose(1, 2).flatten(2))
        return (args[0] + out if family.adds_residual else out), None

    module.forward = forward
