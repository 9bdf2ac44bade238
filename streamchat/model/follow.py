"""The other processes of a tensor-parallel run: they load their share, and obey the first."""

import signal
import sys
from typing import Any

import torch

from streamchat.errors import StreamchatError
from streamchat.model import compat
from streamchat.model.load import ShareOrder, load_share
from streamchat.model.mirrored import CacheOrder
from streamchat.model.plan import Plan, plan
from streamchat.model.prepare import forward
from streamchat.model.ranks import END, Ranks


def follow(ranks: Ranks) -> int:
    """Obey until the first process ends.

    It decides when that is: signals, which a terminal sends to all processes, are not heeded.

    Returns:
        The exit code: 1 if the first process ended without a word, or this one could not go on.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    compat.quiet(show_downloads=False)
    counterparts = Counterparts()
    while True:
        try:
            order, dropped = ranks.hear()
        except RuntimeError:  # the first process is gone, and has said why
            return 1
        if order is END:
            ranks.end()
            return 0
        try:
            counterparts.drop(dropped)
            if isinstance(order, ShareOrder):
                counterparts.add(order.number, _load(order, ranks))
            else:
                counterparts.obey(order)
        except Exception as error:
            if isinstance(error, StreamchatError) and not ranks.is_apart:
                continue  # the first process has met the same, and says so
            text = " ".join(str(error).split())[:200]
            sys.stderr.write(f"process {ranks.rank}: {type(error).__name__}: {text}\n")
            return 1


def _load(order: ShareOrder, ranks: Ranks) -> Any:
    def find() -> Plan:
        return plan(
            order.name,
            dtype=order.dtype,
            trust_remote_code=order.trust_remote_code,
            tensor_parallel=True,
        )

    return load_share(ranks, find, check=order.check, progress=lambda _message: None)


class Counterparts:
    """What stands for the models, caches and snapshots of the first process, by number."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def add(self, number: int, model: Any) -> None:
        """Hold a model: this process's share of it, prepared."""
        self._held[number] = model

    def drop(self, numbers: list[int]) -> None:
        """Hold these no longer; those that could not be made are not there."""
        for number in numbers:
            self._held.pop(number, None)

    def obey(self, order: CacheOrder) -> None:
        """Do what the first process does."""
        held, args = self._held, order.args
        if order.action == "make":
            cache_class, config, options = args
            geometry = held[order.model].streamchat_binding.geometry
            held[order.cache] = cache_class(config, geometry, **options)
            return
        cache = held[order.cache]
        if order.action == "feed":
            ids, num_logits = args
            tokens = torch.tensor(ids, device=cache.geometry.device)
            forward(held[order.model], tokens, cache, num_logits)
        elif order.action == "snapshot":
            held[args[0]] = cache.snapshot()
        elif order.action == "restore":
            cache.restore(held[args[0]])
        else:
            getattr(cache, order.action)(*args)
