"""Which model, and how it would be loaded: all that is known before any weights are read."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from streamchat.config import Policy
from streamchat.errors import ConfigError, ModelError, StreamchatError
from streamchat.model import builtin, compat, gguf, prequantized, sharded
from streamchat.model.dispatch import DeviceMap, parse_device_map
from streamchat.model.families import check_config
from streamchat.model.quantize import BITS, Scheme, quantized_file
from streamchat.model.ranks import Ranks, join

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from.

    Attributes:
        name: What to call it.
        path: Local folder, or Hub id.
    """

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that has been found and judged, and how it will be loaded.

    Attributes:
        source: Where it comes from.
        config: Its configuration.
        device: Where it will run.
        dtype: Of what is not quantized.
        scheme: How the weights will be stored; None for `dtype`.
        scheme_is_optional: Whether `scheme` is given up where the weights do not allow it.
        is_own_choice: Whether weights are stored as the user wants them: by option, or by the
            choice of a checkpoint that comes quantized.
        trust_remote_code: Allow code from the model's repository to run.
        device_map: Where its layers will lie, if not all on `device`.
        ranks: The processes that will share it, or None.
        asked: The name that it was found by.
    """

    source: Source
    config: Any
    device: torch.device
    dtype: torch.dtype
    scheme: Scheme | None
    scheme_is_optional: bool = False
    is_own_choice: bool = False
    trust_remote_code: bool = False
    device_map: DeviceMap | None = None
    ranks: Ranks | None = None
    asked: str | None = None

    @property
    def num_shares(self) -> int:
        """By how many processes it will be shared."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def is_spread(self) -> bool:
        """Whether it will be on several devices: its weights are then stored in `dtype`."""
        return self.device_map is not None or self.ranks is not None

    def quantized_file(self, scheme: Scheme) -> Path | None:
        """Where the quantized weights are kept, see `quantize.quantized_file`."""
        revision = getattr(self.config, "_commit_hash", None)
        return quantized_file(builtin.models_folder(), self.source.path, revision, scheme)


def plan(
    name: str | None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    trust_remote_code: bool = False,
    device_map: DeviceMap | None = None,
    tensor_parallel: bool = False,
    policy: Policy = "sink",
    progress: Callable[[str], None] = lambda _message: None,
) -> Plan:
    """Find a model, judge its configuration, and choose how it will be loaded.

    Args and errors are those of `load.load`; `policy` is that of its cache.
    """
    compat.check_version()
    device_map = parse_device_map(device_map, device, quantize)
    ranks = None
    if tensor_parallel:
        sharded.check_options(device, quantize, device_map, policy)
        ranks = join()
    target = choose_device(device)
    torch_dtype = choose_dtype(dtype, target)
    is_spread = device_map is not None or ranks is not None
    scheme = None if is_spread else choose_scheme(quantize, dtype, target)
    source = locate(name, progress)
    config = load_config(source, policy, trust_remote_code=trust_remote_code)
    prequantized.check(config, source.name, quantize, target)
    if ranks is not None:
        sharded.check_plan(config, source.name, ranks.size)
    comes_quantized = prequantized.method_of(config) is not None
    return Plan(
        source,
        config,
        target,
        torch_dtype,
        None if comes_quantized else scheme,
        scheme_is_optional=quantize == "auto",
        is_own_choice=quantize == "none" or dtype != "auto" or comes_quantized,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        ranks=ranks,
        asked=name,
    )


def locate(name: str | None, progress: Callable[[str], None]) -> Source:
    """Find a model by name; fetch or convert it where that is needed.

    Raises:
        ModelError: If there is no such file or folder.
    """
    if not name:
        return Source(builtin.NAME, str(builtin.builtin_model(progress)))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"no config.json in {path}; expected a model folder, a .gguf file or a Hub id"
            )
        return Source(path.resolve().name, str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; expected that, a folder or a Hub id")
        target = gguf.converted_folder(path, builtin.models_folder())
        return Source(path.stem, str(gguf.convert(path, target, progress)))
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(name) or name[0] in "./~":
        raise ModelError(f"no such model file or folder: {name}")
    return Source(name, name)


def load_config(source: Source, policy: Policy = "sink", *, trust_remote_code: bool = False) -> Any:
    """Read a model's configuration, and refuse a model that cannot be streamed exactly.

    Raises:
        ModelError: If there is none, or the model is refused.
    """
    config = guarded(
        source, AutoConfig.from_pretrained, source.path, trust_remote_code=trust_remote_code
    )
    check_config(config, policy)
    return config


def choose_device(name: str) -> torch.device:
    """The torch device for `auto` or a device's name.

    Raises:
        ConfigError: If this machine has no such device.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "mps" if has_mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or mps, got '{name}'") from error
    counts = {"cuda": torch.cuda.device_count() if has_cuda else 0, "mps": int(has_mps), "cpu": 1}
    if (device.index or 0) < counts.get(device.type, 0):
        return device
    raise ConfigError(f"device '{name}' is not there; on this machine use --device cpu or auto")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for `auto` or a dtype's name.

    Raises:
        ConfigError: If the name is unknown.
    """
    if name == "auto":
        if device.type == "cpu":  # 16-bit is emulated on most CPUs: a quarter of the speed
            return torch.float32
        has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if has_bfloat16 else torch.float16
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got '{name}'")
    return DTYPES[name]


def choose_scheme(name: str, dtype: str, device: torch.device) -> Scheme | None:
    """How weights are stored, for `auto` or a scheme's name: int8 on a CPU unless a dtype is asked.

    Raises:
        ConfigError: If the name is unknown.
    """
    if name == "auto":
        return "int8" if device.type == "cpu" and dtype == "auto" else None
    if name == "none":
        return None
    if name not in BITS:
        raise ConfigError(f"quantize must be auto, none, {', '.join(BITS)}, got '{name}'")
    return name


def guarded(source: Source, read: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call one of transformers' readers; whatever it raises becomes one line."""
    try:
        return read(*args, **options)
    except (StreamchatError, KeyboardInterrupt):
        raise
    except Exception as error:  # a broken or missing model makes them raise anything
        text = str(error).strip() or type(error).__name__
        if "trust_remote_code" in text:
            raise ModelError(
                f"model '{source.name}' brings code of its own; --trust-remote-code lets it run"
            ) from error
        raise ModelError(
            f"cannot load model '{source.name}': {' '.join(text.split())[:300]}"
        ) from error
