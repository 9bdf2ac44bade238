"""What differs between the supported versions of transformers. Only this file and `load` know.

Supported: transformers >= 5.17, < 6. The forward pass takes its cache as `past_key_values` in 5.17
and as `cache` in 5.24, where the old name warns.
"""

import inspect
import logging
import os
from functools import lru_cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from streamchat.errors import ModelError

OLDEST, FIRST_UNSUPPORTED = Version("5.17"), Version("6.0.dev0")


def check_version() -> None:
    """Refuse a transformers outside the supported range.

    Raises:
        ModelError: With both versions.
    """
    found = Version(transformers.__version__)
    if not OLDEST <= found < FIRST_UNSUPPORTED:
        raise ModelError(
            f"transformers {found} is installed, streamchat needs >= {OLDEST}, < 6: "
            f"pip install 'transformers>={OLDEST},<6'"
        )


def quiet(*, show_downloads: bool) -> None:
    """Keep transformers, its hub client and accelerate from writing to the terminal.

    Args:
        show_downloads: Leave the hub's download bars on (they go to stderr).
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("huggingface_hub", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not show_downloads:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


@lru_cache(maxsize=8)
def cache_argument(forward: Any) -> str:
    """The name under which this forward function takes its cache."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache among a forward call's keyword arguments, under either name, or None."""
    found = kwargs.get("cache")
    return kwargs.get("past_key_values") if found is None else found


def logits_of(model: Any, ids: Tensor, cache: Any, num_logits: int = 1) -> Tensor:
    """Run a causal LM's own forward pass over a cache.

    Args:
        model: The model.
        ids: Shape (batch, num_tokens), int64, on the model's device.
        cache: Gets the tokens appended.
        num_logits: For how many of the last tokens logits are computed.

    Returns:
        Logits, shape (batch, num_logits, vocab_size).
    """
    argument = cache_argument(type(model).forward)
    # no_grad, not inference_mode: the cache's buffers must stay usable outside.
    with torch.no_grad():
        out = model(ids, **{argument: cache}, use_cache=True, logits_to_keep=num_logits)
    logits: Tensor = out.logits
    return logits
