"""How much memory this machine has left."""

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Memory of a device that can be had without pushing anything out.

    On a CPU (and on MPS, which shares its memory) this counts files in the system's cache as free.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def passing_bytes() -> int:
    """Main memory for what is needed for a moment only: swap counts."""
    return int(psutil.virtual_memory().available + psutil.swap_memory().free)


def gigabytes(num_bytes: float) -> str:
    """In words; two digits below 10 GB."""
    size = num_bytes / 1e9
    return f"{size:,.2f} GB" if size < 10 else f"{size:,.0f} GB"
