"""Load a model by name: the built-in one, a Hub id, a local folder, or a .gguf file.

The configuration is read and judged before any weights. Weights are read as safetensors only: no
file of a model is ever executed. Remote code runs only where the caller asks for it, and no loader
reads standard input.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from streamchat.config import CacheConfig
from streamchat.errors import ConfigError, ModelError, StreamchatError
from streamchat.model import builtin, compat, gguf
from streamchat.model.compiled import CompiledStep
from streamchat.model.decode import why_slow
from streamchat.model.families import check_config, check_fits
from streamchat.model.prepare import prepare
from streamchat.model.quantize import (
    BITS,
    Scheme,
    load_quantized,
    quantize_model,
    quantized_file,
    save,
    to_dtype,
    use_fast_linear,
    why_not_quantized,
)
from streamchat.model.selfcheck import self_check
from streamchat.model.tokenizer import Tokenizer

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
class LoadedModel:
    """A model ready to stream.

    Attributes:
        source: Where it came from.
        model: The prepared transformers model.
        tokenizer: Its tokenizer.
        end_ids: Ids that end an answer: the union of what tokenizer, configuration and generation
            configuration name.
        slow_reason: Why decode steps are not as fast as they could be, in a line, or None.
    """

    source: Source
    model: Any
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    slow_reason: str | None = None


def load(
    name: str | None = None,
    *,
    cache_config: CacheConfig | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    trust_remote_code: bool = False,
    check: bool = True,
    progress: Callable[[str], None] = lambda _message: None,
) -> LoadedModel:
    """Load a model and prepare it for streaming.

    Args:
        name: Hub id, folder or .gguf file; None for the built-in model.
        cache_config: The cache it will be used with, checked against the trained length before
            the weights are read.
        device: `auto` (CUDA, else MPS, else CPU) or a torch device.
        dtype: `auto` (float32 on a CPU, else 16-bit), `float32`, `bfloat16` or `float16`.
        quantize: How weights are stored: `int8`, `int4` or `none` (as `dtype` says); `auto` is
            int8 on a CPU, where that is fastest, unless a dtype is asked for.
        trust_remote_code: Allow code from the model's repository to run.
        check: Run the self-check.
        progress: Called with a few words before each step that takes time.

    Raises:
        ModelError: If it cannot be found, loaded, or streamed exactly.
        ConfigError: If device or dtype cannot be had here.
    """
    compat.check_version()
    target = choose_device(device)
    torch_dtype = choose_dtype(dtype, target)
    source = locate(name, progress)
    config = load_config(source, trust_remote_code=trust_remote_code)
    if cache_config is not None:
        check_fits(config, cache_config)
    scheme = choose_scheme(quantize, dtype, target)
    progress(f"loading {source.name}")
    options = {"trust_remote_code": trust_remote_code}
    tokenizer = _guarded(source, AutoTokenizer.from_pretrained, source.path, **options)
    if scheme is None:
        model = _load_full(source, config, torch_dtype, trust_remote_code)
    else:
        model = _load_quantized(
            source, config, scheme, torch_dtype, quantize == "auto", trust_remote_code, progress
        )
    if target.type == "cpu":
        use_fast_linear(model)
    model = prepare(model.to(target).eval())
    step = model.streamchat_binding.decode_step
    if isinstance(step, CompiledStep):
        if not step.is_compiled:
            progress("compiling the decode step (once, some 15 seconds)")
        step.compile()
    if check:
        progress("checking that it streams exactly")
        self_check(model)
    is_own_choice = quantize == "none" or dtype != "auto"
    slow_reason = None if is_own_choice else why_slow(model)
    return LoadedModel(source, model, Tokenizer(tokenizer), end_ids(tokenizer, model), slow_reason)


def _load_full(source: Source, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """A model with its weights as they are."""
    model, report = _guarded(
        source,
        AutoModelForCausalLM.from_pretrained,
        source.path,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
    )
    # transformers makes up what a file does not hold.
    if missing := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise ModelError(
            f"model '{source.name}' is incomplete: {len(missing)} weights are missing or of "
            f"another shape, {missing[0]} first"
        )
    return model


def _load_quantized(
    source: Source,
    config: Any,
    scheme: Scheme,
    dtype: torch.dtype,
    is_optional: bool,
    trust_remote_code: bool,
    progress: Callable[[str], None],
) -> Any:
    """A model with quantized weights, which are made and kept on first use.

    If the model cannot be quantized and need not be, its weights are as they are.
    """
    revision = getattr(config, "_commit_hash", None)
    file = quantized_file(builtin.models_folder(), source.path, revision, scheme)
    if file is not None and file.is_file():
        model = _guarded(
            source, load_quantized, source.path, config, file, dtype, trust_remote_code
        )
        if model is not None:
            return model
    model = _load_full(source, config, torch.float32, trust_remote_code)
    reason = why_not_quantized(model, scheme)
    if reason is not None:
        if is_optional:
            return model
        raise ModelError(f"model '{source.name}' cannot be quantized to {scheme}: {reason}")
    progress(f"quantizing {source.name} to {scheme} (once)")
    quantize_model(model, scheme)
    if file is not None:
        try:
            save(model, file, source.path)
        except (OSError, SafetensorError) as error:
            progress(f"cannot keep the quantized weights in {file.parent}: {error}")
    return to_dtype(model, dtype)


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


def load_config(source: Source, *, trust_remote_code: bool = False) -> Any:
    """Read a model's configuration, and refuse a model that cannot be streamed exactly.

    Raises:
        ModelError: If there is none, or the model is refused.
    """
    config = _guarded(
        source, AutoConfig.from_pretrained, source.path, trust_remote_code=trust_remote_code
    )
    check_config(config)
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


def end_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """Every id that ends an answer. One source alone is often incomplete."""
    ids: set[int] = set()
    for owner in (tokenizer, model.config, getattr(model, "generation_config", None)):
        named = getattr(owner, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(ids)


def _guarded(source: Source, read: Callable[..., Any], *args: Any, **options: Any) -> Any:
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
