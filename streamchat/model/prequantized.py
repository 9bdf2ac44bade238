"""Checkpoints whose weights come quantized: they stay as they are, by the library they are for.

Their configuration says so in `quantization_config`.
"""

from importlib.util import find_spec
from typing import Any

import torch

from streamchat.errors import ModelError

LIBRARIES = {
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("kernels",),
    "gptq": ("optimum", "gptqmodel"),
    "mxfp4": ("kernels",),
}
"""Packages that transformers needs to read them, by `quant_method`. Of a method that is not listed,
transformers itself says what it lacks."""

CUDA_ONLY = ("fp8", "mxfp4")
"""Elsewhere transformers makes 16-bit weights of them, without any library."""


def method_of(config: Any) -> str | None:
    """How a checkpoint's weights were quantized; None if they were not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    fields = found if isinstance(found, dict) else found.to_dict()
    method = fields.get("quant_method", "bitsandbytes")  # which alone may leave it out
    return str(getattr(method, "value", method))


def stays_quantized(config: Any, device: torch.device) -> bool:
    """Whether the weights will be held as they come."""
    method = method_of(config)
    return method is not None and (device.type == "cuda" or method not in CUDA_ONLY)


def check(config: Any, name: str, quantize: str, device: torch.device) -> None:
    """Refuse what cannot be done with a checkpoint that comes quantized.

    Args:
        config: A transformers configuration.
        name: What to call the model.
        quantize: What the user asked for.
        device: Where it will run.

    Raises:
        ModelError: If it is to be quantized once more, or its library is not installed.
    """
    method = method_of(config)
    if method is None:
        return
    if quantize not in ("auto", "none"):
        raise ModelError(
            f"model '{name}' comes quantized ({method}) and cannot be quantized to {quantize}: "
            "leave --quantize out, or choose its unquantized version"
        )
    if not stays_quantized(config, device):
        return
    missing = [
        package
        for package in LIBRARIES.get(method, ())
        if find_spec(package.replace("-", "_")) is None
    ]
    if missing:
        raise ModelError(
            f"model '{name}' comes quantized ({method}), which needs {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )
