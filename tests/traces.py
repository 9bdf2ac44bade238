"""What a function asks of a device, operator by operator: what a CUDA graph of it would hold.

Two runs of a static step must leave the same trace. It would miss a value that is computed on the
host from another host value and reaches no operator.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

SYNCHRONIZING = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.is_nonzero.default",
    "aten.equal.default",
    "aten.unique_dim.default",
    "aten._unique2.default",
}
"""Operators whose result the host has to wait for."""


class Tracer(TorchDispatchMode):
    """Notes each operator with the shapes of its tensors and all its other arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        described = tree_map(_described, (args, kwargs or {}))
        self.calls.append((str(func), repr(described)))
        return func(*args, **(kwargs or {}))


def _described(value):
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.stride(), str(value.device))
    return value


def trace(run):
    """The operators of one call of `run`."""
    with Tracer() as tracer:
        run()
    return tracer.calls


def assert_same_traces(first, second):
    """Two traces have the same calls in the same order."""
    assert [name for name, _ in first] == [name for name, _ in second]
    for one, other in zip(first, second, strict=True):
        assert one == other


def assert_replayable(run):
    """Two runs in a row ask for the same, and neither waits for the device."""
    first, second = trace(run), trace(run)
    assert first
    assert_same_traces(first, second)
    waiting = [name for name, _ in first if name in SYNCHRONIZING]
    assert not waiting, f"the host waits for the device in {waiting}"
