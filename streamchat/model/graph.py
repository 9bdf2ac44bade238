"""Record a function's work on a CUDA device once, and launch it again as a whole."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 3
"""Runs before the recording: libraries set themselves up in the first ones."""


def record_cuda_graph(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Run a function a few times, record it, and return what replays it.

    Args:
        run: Reads and writes tensors that stay where they are, and never waits for the device.
        device: A CUDA device.

    Returns:
        Replays the work on the current stream. What it returns is always the same tensor, which
        each replay writes anew.

    Raises:
        RuntimeError: Whatever torch raises where the work cannot be recorded.
    """
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # an older graph must not be freed while this one is recorded
        try:
            with torch.cuda.graph(graph, stream=stream):
                out = run()
        finally:
            # A recording that fails leaves its own stream behind as the current one.
            torch.cuda.set_stream(before)

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
