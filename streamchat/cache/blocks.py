"""Which keys the queries of a chunk may see, in blocks that bound the score matrix."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamchat.cache.alibi import PlaceBiases
from streamchat.cache.layout import Layout
from streamchat.ops.attention import Bias

QUERY_BLOCK = 128
"""Queries of a chunk that are scored at once. Bounds the score matrix, however long the chunk, and
the share of it that is hidden; larger and smaller blocks were slower on a CPU (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """A run of a chunk's queries and the keys it can see; masks as `plan_blocks` was told.

    The biases are those of models with ALiBi.
    """

    queries: slice
    columns: slice
    hidden_window: Tensor
    hidden_sinks: Tensor | None
    window_bias: Bias | None = None
    sink_bias: Bias | None = None


def plan_blocks(
    layout: Layout,
    positions: range,
    device: torch.device,
    mask: Callable[[Tensor], Tensor] = lambda hidden: hidden,
    biases: PlaceBiases | None = None,
) -> list[QueryBlock]:
    """Cut a chunk's queries into blocks, and say which columns each of them sees.

    The columns are the window tokens held before and then the chunk's own tokens without the
    sinks, in the order of the stream. `mask` makes of a bool mask, shape (num_queries, num_keys),
    what the attention takes.
    """
    num_sinks = layout.num_sinks(positions.stop)
    first_column = layout.held_window(positions.start).start
    blocks = []
    for first in range(0, len(positions), QUERY_BLOCK):
        block = positions[first : first + QUERY_BLOCK]
        oldest_seen = max(first_column, block.start - layout.window_size + 1)
        seen = range(oldest_seen, max(oldest_seen, block.stop))
        queries, keys = _arange(block, device)[:, None], _arange(seen, device)
        hidden = (keys > queries) | (keys <= queries - layout.window_size)
        hidden_sinks = None
        if block.start < num_sinks:
            hidden_sinks = mask(_arange(range(num_sinks), device) > queries)
        rows = slice(first, first + len(block))
        columns = slice(seen.start - first_column, seen.stop - first_column)
        window_bias = sink_bias = None
        if biases is not None:
            window_bias = biases.of_block(block, seen.start)
            sink_bias = biases.of_sinks(len(block))
        blocks.append(QueryBlock(rows, columns, mask(hidden), hidden_sinks, window_bias, sink_bias))
    return blocks


def _arange(positions: range, device: torch.device) -> Tensor:
    return torch.arange(positions.start, positions.stop, device=device)
