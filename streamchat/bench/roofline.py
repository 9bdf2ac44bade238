"""The roofline of a decode step: the bytes that it must move, and how fast this device moves them.

A step of one token reads every weight once, and the keys and values that are held. Nothing can be
faster than reading these bytes; how near a step comes to that is its share of the roofline. What is
not counted: activations, logits, and what a step writes, which are thousands of times smaller.
"""

import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import psutil
import torch
from torch import Tensor

from streamchat.cache.scored import ScoredCache
from streamchat.cache.sink import SinkCache
from streamchat.model.sharded import stored

CPU_ARRAY_BYTES = 1 << 29
ACCELERATOR_ARRAY_BYTES = 1 << 32
"""Read in one go: far above the last-level cache, so that the bytes come from memory, and on an
accelerator long enough that starting the work does not count."""

CACHE_LINE_FLOATS = 16
"""One float of each 64-byte line: the whole line travels, and little arithmetic is in the way."""

REPEATS = 8


def read_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes per second that the device reads from its memory with all of torch's threads.

    Best of several sums over a large array; on a CPU also of sums over one float of each cache
    line, where adding up does not hold the reading back. Takes about half a second.

    Args:
        device: Where to measure.
    """
    device = torch.device(device)
    # Ones are written: pages that nothing has touched would all be read from one page of zeros.
    array = torch.ones(_array_bytes(device) // 4, device=device)
    kinds: list[Callable[[], Tensor]] = [array.sum]
    if device.type == "cpu":
        kinds.append(array.view(-1, CACHE_LINE_FLOATS)[:, 0].sum)
    best = min(_seconds(kind, device) for _ in range(REPEATS) for kind in kinds)
    num_bytes = array.nbytes
    del array, kinds
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return num_bytes / best


def bytes_per_step(model: Any, cache: SinkCache | ScoredCache) -> int:
    """Bytes that a decode step must read.

    Weights count once as they are stored, in parameters and buffers, however many modules share
    them and however many rows there are. Of an embedding table that nothing else reads, one entry
    a row. Keys and values count as held now, for each row.

    Args:
        model: A transformers causal LM.
        cache: Its cache.
    """
    table = model.get_input_embeddings()
    read: dict[int, int] = {}
    looked_up: dict[int, int] = {}
    for module in model.modules():
        for weight in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            tensor = stored(weight)
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            if module is table:
                looked_up[tensor.data_ptr()] = cache.batch_size * tensor[:1].nbytes
            else:
                read[tensor.data_ptr()] = tensor.nbytes
    weights = sum({**looked_up, **read}.values())
    return weights + cache.num_held * cache.batch_size * cache.geometry.bytes_per_token()


def _array_bytes(device: torch.device) -> int:
    """Size of the array: no more than a quarter of what is free, in whole cache lines."""
    if device.type == "cuda":
        wanted, free = ACCELERATOR_ARRAY_BYTES, torch.cuda.mem_get_info(device)[0]
    else:
        wanted = CPU_ARRAY_BYTES if device.type == "cpu" else ACCELERATOR_ARRAY_BYTES
        free = psutil.virtual_memory().available
    return max(1 << 20, min(wanted, free // 4)) // 64 * 64


def _seconds(read: Callable[[], Tensor], device: torch.device) -> float:
    _wait_for(device)
    started = time.perf_counter()
    read()
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
