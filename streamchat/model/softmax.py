"""Models that were trained with another softmax than their family's.

The configuration says so: `"streamchat_softmax": "off_by_one"`, or `"learned"`, with a parameter
`sinks` of shape (num_heads,) in each attention module, as GPT-OSS has. transformers knows neither,
so the model's own path gets its term here: as one more key, which any attention function will do.
With the cache, `ops.attention` has it in the softmax itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from streamchat.model.families import own_softmax, softmax_of

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""A function of transformers' attention interface."""


def with_extra_term(attention: Attention, *, is_learned: bool) -> Attention:
    """The attention function with one more term in the denominator of its softmax.

    A key of zeros scores 0 with every query, and its value adds nothing: the zero sink of
    StreamingLLM (arXiv:2309.17453, section 3.3). What is learned is added like a bias.

    Args:
        attention: Of the standard softmax. If it gives weights, the last column is the term's.
        is_learned: Whether the term is exp(module.sinks), by head, and not 1.
    """

    def extended(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        mask = F.pad(attention_mask, (0, 1))
        if is_learned:
            term = F.pad(module.sinks[:, None, None], (mask.shape[-1] - 1, 0))
            mask = mask + term.to(mask.dtype)
        return attention(module, query, key, value, mask, **kwargs)

    return extended


def model_class(config: Any) -> Any:
    """What makes and loads a model: transformers' class, with `sinks` where they are learned.

    Returns:
        A class with `from_pretrained` and `from_config`.
    """
    if softmax_of(config) != "learned" or own_softmax(config) == "learned":
        return AutoModelForCausalLM
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def init(self: Any, config: Any) -> None:
        base.__init__(self, config)
        for module in self.modules():
            if hasattr(module, "is_causal"):  # attention, in every family
                module.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def from_config(cls: Any, /, config: Any, **_kwargs: Any) -> Any:
        return cls._from_config(config)

    members = {"__init__": init, "from_config": classmethod(from_config)}
    return type(base.__name__, (base,), {**members, "__module__": base.__module__})
