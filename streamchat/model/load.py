"""Load a model by name: the built-in one, a Hub id, a local folder, or a .gguf file.

The configuration is read and judged before any weights. Weights are read as safetensors only: no
file of a model is ever executed. Remote code runs only where the caller asks for it, and no loader
reads standard input.
"""

import atexit
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError

from streamchat.config import CacheConfig
from streamchat.errors import ConfigError, ModelError, StateError, UnsupportedModelError
from streamchat.model import dispatch, prequantized, sharded
from streamchat.model.compiled import CompiledStep
from streamchat.model.decode import why_slow
from streamchat.model.families import LEARNED_POSITIONS, check_fits
from streamchat.model.fit import cache_bytes, check_memory
from streamchat.model.mirrored import lead
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
from streamchat.model.ranks import Ranks, join
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

    @property
    def device(self) -> torch.device:
        """Where it takes ids and gives logits, and where its caches lie."""
        return dispatch.home_of(self.model)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same for a saved state to go on with the very same numbers.

        Weights are told apart by the first few of each tensor that is in memory, tokenizers by a
        sample. Found once: threads may ask again, but not for the first time while another one
        encodes a text.

        Raises:
            StateError: If several processes share the model: none of them has all of a state.
        """
        if sharded.num_shares(self.model) > 1:
            raise StateError("a state cannot be saved by one of several processes")
        if not self._fingerprint:
            self._fingerprint.update(self._find_fingerprint())
        return dict(self._fingerprint)

    def _find_fingerprint(self) -> dict[str, str]:
        weights = hashlib.blake2b(digest_size=16)
        for name, tensor in self.model.state_dict().items():
            weights.update(f"{name} {tuple(tensor.shape)}".encode())
            if tensor.device.type != "meta":
                some = tensor.flatten()[:FINGERPRINT_WEIGHTS].contiguous().cpu().view(torch.uint8)
                weights.update(some.numpy().tobytes())
        return {
            "model": self.source.name,
            "weights": weights.hexdigest(),
            "tokenizer": self.tokenizer.fingerprint(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.device.type,
        }


@dataclass(frozen=True, slots=True)
class ShareOrder:
    """To the other processes: load your share of this model, as `load` was told.

    Attributes:
        number: What the model will be known by.
    """

    number: int
    name: str | None
    dtype: str
    trust_remote_code: bool
    check: bool


def load(
    name: str | None = None,
    *,
    cache_config: CacheConfig | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    trust_remote_code: bool = False,
    device_map: dispatch.DeviceMap | None = None,
    tensor_parallel: bool = False,
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
        device_map: For a model larger than one device: `auto` (layers on all GPUs, then in main
            memory, then on disk), `sequential` (each GPU filled in turn), or the device of each
            module by name, `cpu` and `disk` among them.
        tensor_parallel: Share the model among the processes that torchrun has started. Returns in
            the first of them only; the others follow it and end with it.
        check: Run the self-check.
        progress: Called with a few words before each step that takes time.

    Raises:
        ModelError: If it cannot be found, loaded, or streamed exactly.
        ConfigError: If device or dtype cannot be had here.
    """
    if tensor_parallel:
        ranks = join()
        if not ranks.is_first:
            from streamchat.model.follow import follow  # which loads models, too

            raise SystemExit(follow(ranks))
        atexit.register(ranks.end)
    planned = plan(
        name,
        device=device,
        dtype=dtype,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        tensor_parallel=tensor_parallel,
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
    is_bare = plan.config.model_type in LEARNED_POSITIONS  # its own forward pass is all there is
    if plan.ranks is not None:
        number, dtype = plan.ranks.number(), str(plan.dtype).removeprefix("torch.")
        plan.ranks.tell(ShareOrder(number, plan.asked, dtype, plan.trust_remote_code, check))
        model = load_share(plan.ranks, lambda: plan, check=check, progress=progress)
        lead(model, number, plan.ranks)
    else:
        reserved = num_caches * cache_bytes(plan, cache_config.cache_size) if cache_config else 0
        model = _read(plan, reserved, progress)
        if not is_bare:
            _make_ready(plan, model, check=check, progress=progress)
    is_own_choice = plan.is_own_choice and not plan.is_spread
    return LoadedModel(
        source,
        model,
        tokenizer,
        end_ids(tokenizer.inner, model),
        None if is_own_choice or is_bare else why_slow(model),
        unnamed_ids(tokenizer, plan.config.vocab_size),
    )


def load_share(
    ranks: Ranks, find: Callable[[], Plan], *, check: bool, progress: Callable[[str], None]
) -> Any:
    """Load this process's share of a model; all processes do so at once.

    Args:
        ranks: The processes.
        find: Gives the plan.
        check: See `load`.
        progress: See `load`.

    Raises:
        ModelError: As for `load`; also if another process cannot load its share.
    """

    def read() -> tuple[Plan, Any]:
        plan = find()
        return plan, _read(plan, 0, progress)

    with ranks.together():
        plan, model = ranks.agree(read)
        _make_ready(plan, model, check=check, progress=progress)
    return model


def _read(plan: Plan, reserved: int, progress: Callable[[str], None]) -> Any:
    """A model with its weights, where they will stay."""
    if plan.scheme is not None:
        model = _load_quantized(plan, plan.scheme, progress)
    else:
        model = _load_full(plan, plan.dtype, reserved)
    if plan.device.type == "cpu":
        use_fast_linear(model)
    # Who moves a model that is spread, or comes quantized, breaks it.
    if not (plan.is_spread or prequantized.method_of(plan.config)):
        guarded(plan.source, model.to, plan.device)
    return model.eval()


def _make_ready(plan: Plan, model: Any, *, check: bool, progress: Callable[[str], None]) -> None:
    """Prepare a model, and check it."""
    _prepared(plan.source, model)
    step = model.streamchat_binding.decode_step
    if isinstance(step, CompiledStep):
        if not step.is_compiled:
            progress("compiling the decode step (once, some 15 seconds)")
        guarded(plan.source, step.compile)
    if check:
        progress("checking that it streams exactly")
        self_check(model)


def _prepared(source: Source, model: Any) -> Any:
    try:
        return guarded(source, prepare, model)
    except ConfigError as error:  # its modules are not what its configuration says
        raise UnsupportedModelError(f"model '{source.name}' is refused: {error}") from error


def _load_full(plan: Plan, dtype: torch.dtype, reserved: int = 0) -> Any:
    """A model with its weights as they are; `reserved` as in `dispatch.placement`."""
    placement = _placement(plan, reserved)
    model, report = guarded(
        plan.source,
        model_class(plan.config).from_pretrained,
        plan.source.path,
        config=plan.config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=plan.trust_remote_code,
        **placement,
    )
    if "offload_folder" in placement:
        dispatch.remove_with(model, placement["offload_folder"])
    # transformers makes up what a file does not hold.
    if missing := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise ModelError(
            f"model '{plan.source.name}' is incomplete: {len(missing)} weights are missing or of "
            f"another shape, {missing[0]} first"
        )
    return model


def _placement(plan: Plan, reserved: int) -> dict[str, Any]:
    """Where transformers is to put the weights; nothing for main memory."""
    if plan.ranks is not None:
        return sharded.sharing_options()
    if plan.device_map is not None:
        return dispatch.placement(plan.device_map, reserved)
    if prequantized.method_of(plan.config):
        # Weights that come quantized are bound to the device that they are read to.
        return {"device_map": {"": plan.device}}
    return {}


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
