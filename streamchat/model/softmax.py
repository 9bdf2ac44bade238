"""Models that were trained with another softmax run their own path as they were trained.

transformers knows the standard softmax only. With the cache the term in the denominator goes
through `ops.attention`; here it is a key of its own, so that any attention function will do.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""A function of transformers' attention interface."""


def off_by_one(attention: Attention) -> Attention:
    """The attention function with a softmax that has 1 more in its denominator.

    As one more key that all queries see, of zeros, whose score is 0 and whose value is nothing:
    the zero sink of StreamingLLM (arXiv:2309.17453, section 3.3).

    Args:
        attention: Of the standard softmax. If it gives weights, the last column is the zero key's.
    """

    def with_zero_key(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        return attention(module, query, key, value, F.pad(attention_mask, (0, 1)), **kwargs)

    return with_zero_key
