"""Processes that torchrun has started to be one model, and how the first speaks to the others.

Rank 0 is the program: it owns the terminal, reads, samples and writes. The others obey: an order
is a small object that rank 0 broadcasts over a group of its own (gloo, on the CPU), so that they
wait for it however long the input takes. What all of them compute at once, they compute `together`;
a process that is interrupted in there leaves the others in the middle of it, and can then only end.
"""

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streamchat.errors import ConfigError, ModelError, StreamchatError
from streamchat.model.launch import is_one_of_several

Result = TypeVar("Result")

COMPUTE_TIMEOUT = timedelta(hours=2)
"""For one collective operation. Reading weights counts: some processes finish it before others."""

ORDER_TIMEOUT = timedelta(days=3650)
"""For the next order: a stream may be silent for as long as it likes."""

MEETING_TIMEOUT = timedelta(seconds=20)
"""For the others to come upon the same error."""

END = None
"""The last order."""


class Ranks:
    """The processes of a run, as one of them sees them; see `join`.

    Attributes:
        rank: Which of them this one is.
        size: How many there are.
        is_apart: Whether it has left the others in the middle of what all of them compute.
    """

    def __init__(self, orders: "dist.ProcessGroup") -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._orders = orders
        self._numbers = itertools.count()
        # Filled by finalizers, which may run at any time: only the next order reads it.
        self._dropped: deque[int] = deque()
        self.is_apart = False
        self._has_ended = False

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that gives orders."""
        return self.rank == 0

    def part_of(self, free: int, device: torch.device) -> int:
        """This process's part of a device's free bytes: those of a node share its main memory."""
        if device.type == "cuda":
            return free
        return free // int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def number(self) -> int:
        """A new number, for something that the others are to hold."""
        return next(self._numbers)

    def drop_with(self, owner: object, number: int) -> None:
        """Let the others drop what has this number, once `owner` is gone."""
        weakref.finalize(owner, self._dropped.append, number).atexit = False

    def tell(self, order: Any) -> None:
        """Give an order to the others.

        Raises:
            StreamchatError: If one of them has ended, or this process has left them.
        """
        if self.is_apart or self._has_ended:
            raise StreamchatError("the processes of this run have parted: start it again")
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.is_apart = True  # until all have heard it
        try:
            dist.broadcast_object_list([order, dropped], src=0, group=self._orders)
        except RuntimeError as error:
            raise StreamchatError("another process of this run has ended") from error
        self.is_apart = False

    def hear(self) -> tuple[Any, list[int]]:
        """Wait for the next order.

        Returns:
            The order, and the numbers of what can be dropped before it.

        Raises:
            RuntimeError: If the first process has ended without a word.
        """
        heard: list[Any] = [None, None]
        dist.broadcast_object_list(heard, src=0, group=self._orders)
        return heard[0], heard[1]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all processes do at once, up to an error that all of them meet.

        Raises:
            StreamchatError: In place of what torch raises when another process is gone.
        """
        self.is_apart = True
        try:
            yield
        except StreamchatError:
            self.is_apart = not self._all_are_here()
            raise
        except RuntimeError as error:
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise StreamchatError(
                f"{self.size} processes could not compute together: {text}"
            ) from error
        self.is_apart = False

    def _all_are_here(self) -> bool:
        """Whether all processes call this: whatever stopped this one has stopped the others."""
        try:
            dist.monitored_barrier(self._orders, timeout=MEETING_TIMEOUT)
        except RuntimeError:
            return False
        return True

    def agree(self, work: Callable[[], Result]) -> Result:
        """Do what each process does for itself; go on if all of them could.

        Raises:
            StreamchatError: This process's own, or that of the first one that failed.
        """
        result: list[Result] = []
        failure: StreamchatError | None = None
        try:
            result.append(work())
        except StreamchatError as error:
            failure = error
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, failure and str(failure), group=self._orders)
        if failure is not None:
            raise failure if self.is_first else ModelError(str(failure))
        for rank, text in enumerate(found):
            if text is not None:
                raise ModelError(f"process {rank} of this run: {text}")
        return result[0]

    def end(self) -> None:
        """Send the others home, unless this process has left them; they then find out."""
        if self._has_ended:
            return
        try:
            if self.is_first:
                self.tell(END)
            dist.destroy_process_group()
        except (RuntimeError, StreamchatError):
            pass  # one of them has ended before, which is what was wanted
        self._has_ended = True


_joined: list[Ranks] = []


def join() -> Ranks:
    """Meet the other processes that torchrun has started; once in the life of a process.

    Raises:
        ConfigError: If there are none, or more of them than GPUs.
        StreamchatError: If they cannot be met.
    """
    if not _joined:
        _joined.append(_meet())
    return _joined[0]


def _meet() -> Ranks:
    if not is_one_of_several():
        raise ConfigError(
            "tensor parallelism needs several processes: torchrun --nproc-per-node 2 …"
        )
    backend = "gloo"
    if torch.cuda.is_available():
        local, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= num_gpus:
            raise ConfigError(f"process {local} has no GPU: --nproc-per-node is {num_gpus} at most")
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=COMPUTE_TIMEOUT)
        orders = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StreamchatError(f"cannot meet the other processes of this run: {text}") from error
    return Ranks(orders)
