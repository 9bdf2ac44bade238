"""The other processes of a tensor-parallel run: they load their share, and obey the first."""

import signal
import sys
from typing import Any

import torch

from streamchat.cache.sink import SinkCache
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
    counterparts: Counterparts | None = None
    while True:
        try:
            order = ranks.hear()
        except RuntimeError:  # the first process is gone, and has said why
            return 1
        if order is END:
            ranks.end()
            return 0
        try:
            if isinstance(order, ShareOrder):
                counterparts = Counterparts(_load(order, ranks))
            elif counterparts is not None:
                counterparts.obey(order)
        except Exception as error:
            if isinstance(error, StreamchatError) and error.__cause__ is None:
                continue  # found by a rule, so the first process has found it, too, and says so
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
    """What stands for the caches and snapshots of the first process.

    Args:
        model: This process's share of the prepared model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._held: dict[int, Any] = {}

    def obey(self, order: CacheOrder) -> None:
        """Do what the first process does."""
        for number in order.dropped:
            del self._held[number]
        if order.action == "make":
            config, options = order.args
            geometry = self._model.streamchat_binding.geometry
            self._held[order.number] = SinkCache(config, geometry, **options)
            return
        cache, args = self._held[order.number], order.args
        if order.action == "feed":
            ids = torch.tensor(args[0], device=cache.geometry.device)
            forward(self._model, ids, cache, args[1])
        elif order.action == "snapshot":
            self._held[args[0]] = cache.snapshot()
        elif order.action == "restore":
            cache.restore(self._held[args[0]])
        else:
            getattr(cache, order.action)(*args)
