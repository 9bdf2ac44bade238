"""Does it fit into memory? Asked before any weights are read, and answered with the way out.

What is not known refuses nothing: the loader goes on.
"""

from dataclasses import replace

import torch

from streamchat.config import CacheConfig
from streamchat.errors import ModelError
from streamchat.model import prequantized
from streamchat.model.dispatch import free_everywhere
from streamchat.model.families import geometry_from_config, trained_length
from streamchat.model.memory import free_bytes, gigabytes, passing_bytes
from streamchat.model.plan import Plan
from streamchat.model.quantize import Scheme
from streamchat.model.sizes import Census, file_bytes, take_census

CACHES_WITH_A_FORK = 2
"""Held at once: the stream's own, and a fork or what /undo and /regen go back to."""

PEAK_WITH_A_FORK = 4
"""For a moment: all of these, where a chat thinks on a fork, and a snapshot on the way there."""

AUTO_SHARE = 0.75
"""How much of the free memory `--window auto` may take, the weights included. The rest is for
activations and for other programs."""

AUTO_STEP = 256
"""Where memory bounds it, the cache size is a multiple of this: the same on most starts."""


def check_memory(plan: Plan, cache: CacheConfig | None = None, num_caches: int = 1) -> None:
    """Refuse a model that will not fit.

    Args:
        plan: How it will be loaded.
        cache: Sizes of the cache, or None where they are not known.
        num_caches: How many of them there will be at once.

    Raises:
        ModelError: With the sizes, and with what would fit.
    """
    if plan.device_map is not None:  # what finds no room in memory stays on disk
        return
    census = _census(plan)
    weights = _weight_bytes(plan, census)
    if weights is None:
        return
    caches = num_caches * cache_bytes(plan, cache.cache_size) if cache else 0
    problem = _problem(plan, census, weights, caches)
    if problem is not None:
        ways = _other_weights(plan, census, caches)
        if cache is not None and _problem(plan, census, weights, 0) is None:
            room = (_free_bytes(plan) - weights) // (num_caches * cache_bytes(plan, 1))
            if room > cache.sink_size:
                ways.append(f"--window {room - cache.sink_size}")
        ways.append("a smaller model" if plan.ranks is None else "more processes")
        raise ModelError(f"{problem}; choose {' or '.join(ways)}")


def weight_bytes(plan: Plan) -> int | None:
    """Bytes of a model's weights as they will be stored; None if nothing tells."""
    return _weight_bytes(plan, _census(plan))


def choose_window(plan: Plan, cache: CacheConfig, num_caches: int = 1) -> CacheConfig:
    """The largest window that trained length and free memory allow, if it is `is_auto` or dense.

    Where the configuration names no trained length, or nothing tells how large the weights are, it
    stays as it is: a window above what a model has seen makes it worse, not better. It is not made
    smaller than it is for want of memory either; `check_memory` says what is wrong then.
    """
    length, weights = trained_length(plan.config), weight_bytes(plan)
    is_dense = cache.policy == "dense"
    if not (cache.is_auto or is_dense) or (length is None and not is_dense) or weights is None:
        return cache
    room = AUTO_SHARE * _free_bytes(plan) - weights
    if plan.device_map is not None:
        room = min(room, AUTO_SHARE * free_bytes(plan.device))  # where the caches lie
    in_memory = int(room / (num_caches * cache_bytes(plan, 1)))
    size = max(in_memory // AUTO_STEP * AUTO_STEP, cache.cache_size)
    return replace(cache, window_size=max(1, min(length or size, size) - cache.sink_size))


def cache_bytes(plan: Plan, num_tokens: int) -> int:
    """Bytes of a cache of so many tokens, or of one process's share of it."""
    per_token = geometry_from_config(plan.config, plan.dtype).bytes_per_token()
    return num_tokens * per_token // plan.num_shares


def _census(plan: Plan) -> Census | None:
    return take_census(plan.config, trust_remote_code=plan.trust_remote_code)


def _weight_bytes(plan: Plan, census: Census | None) -> int | None:
    if prequantized.stays_quantized(plan.config, plan.device):
        return file_bytes(plan.source.path, getattr(plan.config, "_commit_hash", None))
    if census is None:
        return None
    return census.num_bytes(*_stored(plan, census)) // plan.num_shares


def _free_bytes(plan: Plan) -> int:
    """Memory for a model: everywhere if it is spread, this process's part if it is shared."""
    if plan.device_map is not None:
        return free_everywhere(plan.device)
    free = free_bytes(plan.device)
    return free if plan.ranks is None else plan.ranks.part_of(free, plan.device)


def _stored(plan: Plan, census: Census) -> tuple[torch.dtype, Scheme | None]:
    """Dtype and scheme that the weights end in: what cannot be quantized stays float32."""
    if plan.scheme is not None and plan.scheme not in census.schemes:
        return torch.float32, None
    return plan.dtype, plan.scheme


def _problem(plan: Plan, census: Census | None, weights: int, caches: int) -> str | None:
    """Why it will not fit, in words; None if it will."""
    name, free = plan.source.name, _free_bytes(plan)
    if weights + caches > free:
        cache = f" and the cache {gigabytes(caches)}" if caches else ""
        return (
            f"model '{name}' does not fit into memory: its weights take {gigabytes(weights)} "
            f"({_kind(plan)}){cache}, and {gigabytes(free)} are free"
        )
    passing = _passing_bytes(plan, census)
    if passing > passing_bytes():
        return (
            f"model '{name}' cannot be quantized here: that takes {gigabytes(passing)} once, for "
            f"its weights in float32, and {gigabytes(passing_bytes())} are free"
        )
    return None


def _kind(plan: Plan) -> str:
    method = prequantized.method_of(plan.config)
    return method or plan.scheme or str(plan.dtype).removeprefix("torch.")


def _passing_bytes(plan: Plan, census: Census | None) -> int:
    """Memory that quantizing takes for a while: the weights in float32, unless they are on disk."""
    if plan.scheme is None or census is None:
        return 0
    file = plan.quantized_file(plan.scheme)
    is_kept = file is not None and file.is_file()
    # Files in float32 are mapped, not copied.
    is_copied = getattr(plan.config, "dtype", None) in (torch.float16, torch.bfloat16)
    return census.num_weights * 4 if is_copied and not is_kept else 0


def _other_weights(plan: Plan, census: Census | None, caches: int) -> list[str]:
    """Options under which the same model and cache would fit."""
    if census is None or prequantized.method_of(plan.config) or plan.ranks is not None:
        return []
    ways = []
    others: list[tuple[str, Plan]] = [
        ("--quantize int8", replace(plan, scheme="int8")),
        ("--quantize int4", replace(plan, scheme="int4")),
        ("--dtype bfloat16", replace(plan, scheme=None, dtype=torch.bfloat16)),
    ]
    for words, other in others:
        if other.scheme is None or other.scheme in census.schemes:
            weights = census.num_bytes(other.dtype, other.scheme)
            # Keys and values are stored in the dtype of the activations.
            own = caches * other.dtype.itemsize // plan.dtype.itemsize
            if _problem(other, census, weights, own) is None:
                ways.append(words)
    return ways
