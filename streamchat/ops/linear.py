"""Matrix products of many tokens on a CPU."""

import os
import platform

import torch
from torch import Tensor
from torch.nn import functional

CAN_COMPILE = os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
"""Whether numba may compile: some environments forbid it."""

MIN_TOKENS = 8
"""Below, a product is bound by reading the weight, and reordering it does not pay."""

HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and platform.machine().lower() in ("x86_64", "amd64")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, by oneDNN where that is there.

    torch hands float32 products to MKL, which leaves out the wide vectors of CPUs that are not
    Intel's: less than half of oneDNN's speed on Zen 5 (docs/log.md).
    """
    if (
        HAS_ONEDNN
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= MIN_TOKENS * x.shape[-1]
    ):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return functional.linear(x, weight, bias)
