"""Load a model by name: the built-in one, a Hub id, a local folder, or a .gguf file.

The configuration is read and judged before any weights. Weights are read as safetensors only: no
file of a model is ever executed. Remote code runs only where the caller asks for it, and no loader
reads standard input.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError

from streamchat.config import CacheConfig
from streamchat.errors import ConfigError, ModelError, UnsupportedModelError
from streamchat.model import prequantized
from streamchat.model.compiled import CompiledStep
from streamchat.model.decode import why_slow
from streamchat.model.families import LEARNED_POSITIONS, check_fits
from streamchat.model.fit import check_memory
from streamchat.model.plan import Plan, Source, guarded, plan
from streamchat.model.prepare import prepare
from streamchat.model.quantize import (
    Scheme,
    load_quantized,
    quantize_model,
    save,
    to_dtype,
    use_fast_linear,
    why_not_quantized,
)
from streamchat.model.selfcheck import self_check
from streamchat.model.softmax import model_class
from streamchat.model.tokenizer import Tokenizer
from streamchat.model.vocabulary import load_tokenizer, unnamed_ids

FINGERPRINT_WEIGHTS = 64
"""Of each tensor, in a fingerprint."""


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
        unnamed_ids: Ids that the embedding has a row for and the tokenizer no token: never said.
    """

    source: Source
    model: Any
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    slow_reason: str | None = None
    unnamed_ids: frozenset[int] = frozenset()
    _fingerprint: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same for a saved state to go on with the very same numbers.

        Weights are told apart by the first few of each tensor, tokenizers by a sample. Found once:
        threads may ask again, but not for the first time while another one encodes a text.
        """
        if not self._fingerprint:
            self._fingerprint.update(self._find_fingerprint())
        return dict(self._fingerprint)

    def _find_fingerprint(self) -> dict[str, str]:
        weights = hashlib.blake2b(digest_size=16)
        for name, tensor in self.model.state_dict().items():
            some = tensor.flatten()[:FINGERPRINT_WEIGHTS].contiguous().cpu().view(torch.uint8)
            weights.update(f"{name} {tuple(tensor.shape)}".encode() + some.numpy().tobytes())
        return {
            "model": self.source.name,
            "weights": weights.hexdigest(),
            "tokenizer": self.tokenizer.fingerprint(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
        }


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
    planned = plan(
        name,
        device=device,
        dtype=dtype,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        policy=(cache_config or CacheConfig()).policy,
        progress=progress,
    )
    return load_planned(planned, cache_config, check=check, progress=progress)


def load_planned(
    plan: Plan,
    cache_config: CacheConfig | None = None,
    *,
    num_caches: int = 1,
    check: bool = True,
    progress: Callable[[str], None] = lambda _message: None,
) -> LoadedModel:
    """Load a model that has been found.

    Args:
        plan: From `plan.plan`.
        cache_config: See `load`.
        num_caches: How many caches of this size there will be at once.
        check: See `load`.
        progress: See `load`.

    Raises:
        ModelError: As for `load`.
    """
    source = plan.source
    if cache_config is not None:
        check_fits(plan.config, cache_config)
    check_memory(plan, cache_config, num_caches)
    progress(f"loading {source.name}")
    tokenizer = load_tokenizer(plan)
    scheme = plan.scheme
    if scheme is None:
        model = _load_full(plan, plan.dtype)
    else:
        model = _load_quantized(plan, scheme, progress)
    if plan.device.type == "cpu":
        use_fast_linear(model)
    if not prequantized.method_of(plan.config):
        guarded(source, model.to, plan.device)
    model = model.eval()
    slow_reason = None
    if plan.config.model_type not in LEARNED_POSITIONS:  # these run their own forward pass alone
        model = _prepared(source, model)
        _make_ready(source, model, progress, check=check)
        slow_reason = None if plan.is_own_choice else why_slow(model)
    return LoadedModel(
        source,
        model,
        tokenizer,
        end_ids(tokenizer.inner, model),
        slow_reason,
        unnamed_ids(tokenizer, plan.config.vocab_size),
    )


def _make_ready(
    source: Source, model: Any, progress: Callable[[str], None], *, check: bool
) -> None:
    """Compile a prepared model's decode step, if it has one, and run the self-check."""
    step = model.streamchat_binding.decode_step
    if isinstance(step, CompiledStep):
        if not step.is_compiled:
            progress("compiling the decode step (once, some 15 seconds)")
        guarded(source, step.compile)
    if check:
        progress("checking that it streams exactly")
        self_check(model)


def _prepared(source: Source, model: Any) -> Any:
    try:
        return guarded(source, prepare, model)
    except ConfigError as error:  # its modules are not what its configuration says
        raise UnsupportedModelError(f"model '{source.name}' is refused: {error}") from error


def _load_full(plan: Plan, dtype: torch.dtype) -> Any:
    """A model with its weights as they are."""
    model, report = guarded(
        plan.source,
        model_class(plan.config).from_pretrained,
        plan.source.path,
        config=plan.config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=plan.trust_remote_code,
        # Weights that come quantized are bound to the device that they are read to.
        device_map={"": plan.device} if prequantized.method_of(plan.config) else None,
    )
    # transformers makes up what a file does not hold.
    if missing := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise ModelError(
            f"model '{plan.source.name}' is incomplete: {len(missing)} weights are missing or of "
            f"another shape, {missing[0]} first"
        )
    return model


def _load_quantized(plan: Plan, scheme: Scheme, progress: Callable[[str], None]) -> Any:
    """A model with quantized weights, which are made and kept on first use.

    If the model cannot be quantized and need not be, its weights are as they are.
    """
    source, file = plan.source, plan.quantized_file(scheme)
    if file is not None and file.is_file():
        model = guarded(
            source,
            load_quantized,
            source.path,
            plan.config,
            file,
            plan.dtype,
            plan.trust_remote_code,
        )
        if model is not None:
            return model
    model = _load_full(plan, torch.float32)
    reason = why_not_quantized(model, scheme)
    if reason is not None:
        if plan.scheme_is_optional:
            return model
        raise ModelError(f"model '{source.name}' cannot be quantized to {scheme}: {reason}")
    progress(f"quantizing {source.name} to {scheme} (once)")
    quantize_model(model, scheme)
    if file is not None:
        try:
            save(model, file, source.path)
        except (OSError, SafetensorError) as error:
            progress(f"cannot keep the quantized weights in {file.parent}: {error}")
    return to_dtype(model, plan.dtype)


def end_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """Every id that ends an answer. One source alone is often incomplete."""
    ids: set[int] = set()
    for owner in (tokenizer, model.config, getattr(model, "generation_config", None)):
        named = getattr(owner, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(ids)
