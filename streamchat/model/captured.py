"""Decode steps replayed as one CUDA graph, so that no time goes into launching kernels.

Every size (sinks, window, rows) has one set of buffers and one recording, kept as long as a cache
uses it. The buffers belong to one cache at a time: a cache that decodes moves in, and the one that
was there before moves out into buffers of its own. Forks, snapshots and chunks work on whatever
buffers their cache has, and know nothing of this.
"""

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from streamchat.cache.geometry import CacheGeometry
from streamchat.cache.layout import Layout
from streamchat.cache.sink import SinkCache
from streamchat.cache.static import StaticStep
from streamchat.model.compat import logits_of
from streamchat.model.graph import record_cuda_graph

Recorder = Callable[[Callable[[], Tensor], torch.device], Callable[[], Tensor]]
"""From a function and its device to what replays it; see `graph.record_cuda_graph`."""


class _Recording:
    """One static step, recorded, and the cache that lives in its buffers.

    Args:
        model: A prepared model.
        static: Buffers and step.
        batch_size: Rows.
        record: Makes the recording.
    """

    def __init__(self, model: Any, static: StaticStep, batch_size: int, record: Recorder) -> None:
        self._model, self._static = model, static
        self.sizes = (static.layout, batch_size)
        device = static.geometry.device
        self._ids = torch.zeros((batch_size, 1), dtype=torch.int64, device=device)
        self._owner: ReferenceType[SinkCache] | None = None
        # Where the device stands: stream position and start. None: not known.
        self._standing: tuple[int, int] | None = None
        self._replay = record(self._run, device)

    def step(self, ids: Tensor, cache: SinkCache) -> Tensor:
        """Feed one token a row; logits, shape (batch, 1, vocab_size)."""
        self._move_in(cache)
        if self._standing != (cache.num_seen, cache.start_position):
            self._static.position.fill_(cache.num_seen)
            self._static.start_position.fill_(cache.start_position)
        self._standing = None  # until the step is closed: an interrupted one may have moved it
        self._ids.copy_(ids)
        with cache.step_outside():
            logits = self._replay()
        self._standing = (cache.num_seen, cache.start_position)
        return logits.clone()  # the next replay writes to the same place

    def _run(self) -> Tensor:
        return logits_of(self._model, self._ids, self._static)

    def _move_in(self, cache: SinkCache) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is cache:
            return
        if owner is not None:
            owner.move_out()
        self._owner = ref(cache)
        cache.move_to(self._static.keys, self._static.values)


class CapturedStep:
    """The decode step of one prepared model on CUDA; see `decode.DecodeStep`.

    A cache is decoded the same way for life: by a recording, or, where none could be made, not.

    Args:
        model: The prepared model.
        geometry: Its geometry.
        record: Makes a recording; another one makes tests possible without CUDA.

    Attributes:
        failure: Why a recording could not be made, in a line; None as long as all could.
    """

    def __init__(
        self, model: Any, geometry: CacheGeometry, record: Recorder = record_cuda_graph
    ) -> None:
        self._model, self._geometry, self._record = model, geometry, record
        self._recordings: WeakKeyDictionary[SinkCache, _Recording] = WeakKeyDictionary()
        self._refused: WeakSet[SinkCache] = WeakSet()
        self.failure: str | None = None

    def takes(self, cache: SinkCache, ids: Tensor) -> bool:
        """Whether this step can be replayed. The first time, that means recording it."""
        if cache.geometry is not self._geometry or ids.shape != (cache.batch_size, 1):
            return False
        if cache.buffers[0].shape[-2] != cache.layout.cache_size:  # a dense cache that grows
            return False
        if cache not in self._recordings and cache not in self._refused:
            recording = self._recording_for(cache.layout, cache.batch_size)
            if recording is None:
                self._refused.add(cache)
            else:
                self._recordings[cache] = recording
        return cache in self._recordings

    def __call__(self, ids: Tensor, cache: SinkCache) -> Tensor:
        """Feed one token a row.

        Args:
            ids: Shape (batch, 1), int64, on any device.
            cache: Gets the tokens appended; one that `takes` has agreed to.

        Returns:
            Logits, shape (batch, 1, vocab_size).
        """
        return self._recordings[cache].step(ids, cache)

    def _recording_for(self, layout: Layout, batch_size: int) -> _Recording | None:
        for recording in self._recordings.values():
            if recording.sizes == (layout, batch_size):
                return recording
        if self.failure is not None:
            return None
        try:
            static = StaticStep(layout, self._geometry, batch_size)
            return _Recording(self._model, static, batch_size, self._record)
        except Exception as error:  # a model's code, and the driver, may raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.failure = f"the forward pass cannot be captured: {lines[0]}"
            return None
