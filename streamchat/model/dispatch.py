"""Models larger than one device: layers on several GPUs, in main memory and on disk.

accelerate decides which layer goes where and moves weights and activations as a forward pass comes
to them. A cache stays on one device, `home_of`: queries, keys and values of a layer elsewhere are
moved there, and the result back. That is right, but slower than a cache in as many parts. What does
not fit into memory is read from the model's own files each time it is needed; only weights that
those files hold in another form are written anew, to a folder that goes with the model.
"""

import os
import platform
import shutil
import uuid
import weakref
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import get_max_memory
from platformdirs import user_cache_path
from torch import Tensor

from streamchat.errors import ConfigError
from streamchat.model.memory import free_bytes

NAMES = ("auto", "balanced", "sequential")
"""How layers may be placed, in accelerate's words; `auto` is `balanced`."""

DeviceMap = str | dict[str, Any]
"""One of `NAMES`, or the device of each module by its name."""

SHARE = 0.9
"""How much of what is free may be given to weights: activations need some, too."""


def parse_device_map(device_map: DeviceMap | None, device: str, quantize: str) -> DeviceMap | None:
    """A device map that can be had together with the other options; None for one device.

    Args:
        device_map: What the user asked for; `none` is None.
        device: Name of the device that the user asked for.
        quantize: How the user wants the weights stored.

    Raises:
        ConfigError: If it is unknown, or excludes another option.
    """
    if device_map is None or device_map == "none":
        return None
    if isinstance(device_map, str) and device_map not in NAMES:
        raise ConfigError(f"device-map must be none, {', '.join(NAMES)}, got '{device_map}'")
    if device != "auto":
        raise ConfigError(f"--device-map chooses the devices: leave out --device {device}")
    if quantize not in ("auto", "none"):
        raise ConfigError(f"--quantize {quantize} needs one device: leave out --device-map")
    return device_map


def home_of(model: Any) -> torch.device:
    """Where a model takes ids and gives logits, and where its caches lie.

    Of a dispatched model that is the first GPU in its map, whatever its first weights lie on.
    """
    placed = getattr(model, "hf_device_map", None)
    if not placed:
        device: torch.device = model.device
        return device
    devices = [device for device in placed.values() if str(device) not in ("cpu", "disk")]
    return _torch_device(devices[0]) if devices else torch.device("cpu")


def attend_at_home(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **more: Tensor
) -> Tensor:
    """Attention of a layer by the cache of the open step, wherever the layer lies.

    Args:
        module: The attention module of a prepared model.
        query: Shape (batch, num_heads, num_tokens, head_dim), not rotated.
        key: Shape (batch, num_kv_heads, num_tokens, head_dim), not rotated.
        value: Same shape.
        scaling: Factor on the scores.
        more: What else the cache's `attend` takes.

    Returns:
        Shape of `query`, on its device.
    """
    binding = module.streamchat_binding
    home, here = binding.geometry.device, query.device
    moved = {name: tensor.to(home) for name, tensor in more.items()}
    three = (tensor.to(home) for tensor in (query, key, value))
    attended: Tensor = binding.cache.attend(module.layer_idx, *three, scaling, **moved)
    return attended.to(here)


def is_dispatched(model: Any) -> bool:
    """Whether accelerate moves tensors between devices in a model's forward pass."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def devices_here(home: torch.device) -> list[torch.device]:
    """All memories that layers may be placed in, the home of the caches first."""
    if home.type != "cuda":  # MPS shares main memory
        return [home]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [*gpus, torch.device("cpu")]


def free_everywhere(home: torch.device) -> int:
    """Bytes that are free on all devices and in main memory."""
    return sum(free_bytes(device) for device in devices_here(home))


def placement(device_map: DeviceMap, reserved: int) -> dict[str, Any]:
    """What transformers' loader must be told.

    Args:
        device_map: See there.
        reserved: Bytes that caches will need on the first device.
    """
    options: dict[str, Any] = {"device_map": device_map, "offload_folder": str(new_folder())}
    if isinstance(device_map, str):
        free = {device: int(SHARE * size) for device, size in get_max_memory().items()}
        first = next(iter(free))
        free[first] = max(0, free[first] - reserved)
        options["max_memory"] = free
    return options


def offload_root() -> Path:
    """Where the folders for weights lie that must be written anew."""
    return user_cache_path("streamchat", appauthor=False) / "offload"


def new_folder() -> Path:
    """A folder for the weights of one model; made when it is needed.

    What processes of this machine have left that did not end by themselves is removed.
    """
    root, own = offload_root(), f"{platform.node()}-"
    for left in root.glob(f"{own}*"):
        pid = left.name.removeprefix(own).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return root / f"{own}{os.getpid()}-{uuid.uuid4().hex}"


def remove_with(model: Any, folder: str) -> None:
    """Remove a model's folder when the model goes, or the process ends."""
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)


def _torch_device(name: Any) -> torch.device:
    return torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
