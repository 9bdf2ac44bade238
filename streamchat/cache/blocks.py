"""Which keys the queries of a chunk may see, in blocks that bound the score matrix."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamchat.cache.layout import Layout

QUERY_BLOCK = 512
"""Queries of a chunk that are scored at once. Bounds the score matrix, however long the chunk."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """A run of a chunk's queries and the keys it can see; masks as `plan_blocks` was told."""

    queries: slice
    columns: slice
    hidden_window: Tensor
    hidden_sinks: Tensor | None


def plan_blocks(
    layout: Layout,
    positions: range,
    device: torch.device,
    mask: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> list[QueryBlock]:
    """Cut a chunk's queries into blocks, and say which columns each of them sees.

    The columns are the window tokens held before, in the order of their slots, then the
    chunk's own tokens without the sinks. `mask` makes of a bool mask, shape (num_queries,
    num_keys), what the attention takes.
    """
    num_sinks = layout.num_sinks(positions.stop)
    newer, older = layout.ring_order(positions.start)
    own = range(max(positions.start, layout.sink_size), positions.stop)
    column_positions = torch.cat([_arange(r, device) for r in (newer, older, own)])
    num_ring = len(newer) + len(older)
    blocks = []
    for first in range(0, len(positions), QUERY_BLOCK):
        block = positions[first : first + QUERY_BLOCK]
        oldest_seen = block.start - layout.window_size + 1
        begin = 0
        if oldest_seen >= positions.start:  # nothing that was held before is in sight
            begin = num_ring + max(0, oldest_seen - own.start)
        columns = slice(begin, num_ring + max(0, block.stop - own.start))
        queries = _arange(block, device)[:, None]
        keys = column_positions[columns]
        hidden = (keys > queries) | (keys <= queries - layout.window_size)
        hidden_sinks = None
        if block.start < num_sinks:
            hidden_sinks = mask(_arange(range(num_sinks), device) > queries)
        rows = slice(first, first + len(block))
        blocks.append(QueryBlock(rows, columns, mask(hidden), hidden_sinks))
    return blocks


def _arange(positions: range, device: torch.device) -> Tensor:
    return torch.arange(positions.start, max(positions.start, positions.stop), device=device)
