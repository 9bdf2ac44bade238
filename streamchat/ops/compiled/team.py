"""Threads that share the work of one compiled function, and do not wait for one that is late.

All threads run the same function. It is a sequence of regions, each cut into pieces; a thread
claims pieces until none is left, and goes on when all are done. A thread that the system has put
aside holds nobody up unless it holds a piece, and finds on its return that its work has been done.
OpenMP, which gives each thread a fixed share, takes ten times as long when one core is busy
(docs/log.md); the portable pool of numba takes 100 µs for each region.

A thread starts with its own share of the pieces, which lie side by side, and helps with the others'
after that: memory is read fastest in long runs.

What makes it correct: what a thread computes for itself before it claims a piece was read from
arrays that do not change until the region is done, so if the claim succeeds, it was right.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

STRIDE = 8
"""Counters lie a cache line apart, so that threads do not take it from each other."""

MAX_SHARES = 16
"""More threads than these share a share."""

I32, I64 = ir.IntType(32), ir.IntType(64)

MAX_SPINS = 50_000
"""Looks at a counter before a waiting thread naps: as long as many pieces of work take."""

NAP_MICROSECONDS = 10


def new_progress(num_regions: int) -> Any:
    """Counters of one run: for each region the pieces done, and those claimed of each share."""
    num_shares = min(torch.get_num_threads(), MAX_SHARES)
    return np.zeros((num_regions, 1 + num_shares, STRIDE), np.int64)


@njit(error_model="numpy")
def claim(progress: Any, region: int, thread: int, num_pieces: int) -> int:
    """The number of a piece that nobody else has; -1 if none is left."""
    num_shares = progress.shape[1] - 1
    for turn in range(num_shares):
        share = (thread + turn) % num_shares
        start = num_pieces * share // num_shares
        count = num_pieces * (share + 1) // num_shares - start
        address = _counter(progress, region, 1 + share)
        if _read(address) < count:
            piece = _add_one(address)
            if piece < count:
                return start + piece
    return -1


@njit(error_model="numpy")
def finish(progress: Any, region: int) -> None:
    """A claimed piece is done, and what it wrote can be read."""
    _add_one(_counter(progress, region, 0))


@njit(error_model="numpy")
def wait(progress: Any, region: int, num_pieces: int) -> None:
    """Until all pieces of a region are done."""
    address = _counter(progress, region, 0)
    spins = 0
    while _read(address) < num_pieces:
        spins += 1
        if spins > MAX_SPINS:
            _nap()


@njit(error_model="numpy")
def _counter(progress: Any, region: int, index: int) -> int:
    return progress.ctypes.data + 8 * STRIDE * (region * progress.shape[1] + index)


@intrinsic
def _add_one(_context: Any, address: Any) -> Any:
    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        pointer = b.inttoptr(args[0], I64.as_pointer())
        return b.atomic_rmw("add", pointer, ir.Constant(I64, 1), "acq_rel")

    return types.int64(address), generate


@intrinsic
def _nap(_context: Any) -> Any:
    """Sleep for an instant, so that the system can run a thread which it has put aside here."""

    def generate(_context: Any, b: Any, _signature: Any, _args: Any) -> Any:
        if sys.platform != "win32":
            sleep = b.module.globals.get("usleep") or ir.Function(
                b.module, ir.FunctionType(I32, [I32]), "usleep"
            )
            b.call(sleep, [ir.Constant(I32, NAP_MICROSECONDS)])
        return ir.Constant(I32, 0)

    return types.int32(), generate


@intrinsic
def _read(_context: Any, address: Any) -> Any:
    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(address), generate


Job = tuple[Callable[..., None], tuple[Any, ...]]


class _Team:
    """The helping threads of this process; they sleep between runs."""

    def __init__(self) -> None:
        self._jobs: list[SimpleQueue[Job]] = []
        self._lock = threading.Lock()

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Run a compiled function in as many threads as torch uses, this one among them.

        Its first argument is the number of the thread, which is 0 for this one.

        It returns when this thread has seen the last region done. Another may still be about to
        find that out: `args` must be fresh for each run, but for what is only read.
        """
        if not getattr(function, "is_ready", True):
            function(0, *args)  # alone: Ctrl-C must be able to end compiling it
            return
        num_helpers = torch.get_num_threads() - 1
        if num_helpers > len(self._jobs):
            self._hire(num_helpers)
        try:
            for thread, jobs in enumerate(self._jobs[:num_helpers], start=1):
                jobs.put((function, (thread, *args)))
            function(0, *args)
        except BaseException:
            # Ctrl-C, before the function began: helpers would go on to write what the caller is
            # about to take back. Once all pieces are done they find nothing left.
            function(0, *args)
            raise

    def _hire(self, num_helpers: int) -> None:
        with self._lock:
            while len(self._jobs) < num_helpers:
                jobs: SimpleQueue[Job] = SimpleQueue()
                self._jobs.append(jobs)
                threading.Thread(target=_help, args=(jobs,), daemon=True).start()


def _help(jobs: "SimpleQueue[Job]") -> None:
    while True:
        function, args = jobs.get()
        with contextlib.suppress(Exception):  # the caller runs the same, and raises the same
            function(*args)
        del args  # or the arrays of the last run would live until the next


_team = _Team()


def run(function: Callable[..., None], *args: Any) -> None:
    """Run a compiled function on the team; see `_Team.run`."""
    _team.run(function, *args)


def _after_fork() -> None:
    """Threads do not survive a fork: the child hires its own."""
    global _team
    _team = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
