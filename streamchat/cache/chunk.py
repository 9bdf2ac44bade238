"""Several tokens at once: what their attention reads, and what is written when all layers have run.

The ring is full of tokens that the chunk's first queries still see, so its own come beside them and
take their slots at the commit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streamchat.cache.blocks import QueryBlock
from streamchat.cache.layout import Layout
from streamchat.ops.attention import Part

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def attend_chunk(
    layout: Layout,
    num_seen: int,
    blocks: Sequence[QueryBlock],
    held: Pair,
    new: Pair,
    queries: tuple[Tensor, Tensor],
    merged: Callable[[list[Part]], Tensor],
) -> tuple[Tensor, Pair]:
    """Attention of a chunk's tokens in one layer. Its sinks are written, the others are not.

    Args:
        layout: What the layer holds, and where.
        num_seen: Tokens fed before.
        blocks: The chunk's queries, see `plan_blocks`.
        held: The layer's buffers, shape (batch, num_kv_heads, num_slots, head_dim).
        new: The chunk's, rotated and of the buffers' dtype, shape (batch, num_kv_heads,
            num_tokens, head_dim).
        queries: Rotated to score the window, and to score the sinks; shape (batch, num_heads,
            num_tokens, head_dim).
        merged: Attention over several parts.

    Returns:
        Shape of the queries; and what `write_chunk` is to write.
    """
    (keys, values), (key, value), (for_window, for_sinks) = held, new, queries
    num_before, num_sinks = layout.num_sinks(num_seen), layout.num_sinks(num_seen + key.shape[-2])
    new_sinks = num_sinks - num_before
    # Slots of sinks not seen so far: writing them before the commit disturbs nothing.
    keys[:, :, num_before:num_sinks] = key[:, :, :new_sinks]
    values[:, :, num_before:num_sinks] = value[:, :, :new_sinks]
    key, value = key[:, :, new_sinks:], value[:, :, new_sinks:]

    newer, older = layout.ring_order(num_seen)
    newer_slots = slice(layout.sink_size, layout.sink_size + len(newer))
    older_slots = slice(newer_slots.stop, newer_slots.stop + len(older))
    window_keys = torch.cat((keys[:, :, older_slots], keys[:, :, newer_slots], key), dim=-2)
    window_values = torch.cat((values[:, :, older_slots], values[:, :, newer_slots], value), dim=-2)
    sink_keys, sink_values = keys[:, :, :num_sinks], values[:, :, :num_sinks]
    outputs = []
    for block in blocks:
        window = Part(
            for_window[:, :, block.queries],
            window_keys[:, :, block.columns],
            window_values[:, :, block.columns],
            block.hidden_window,
            block.window_bias,
        )
        sinks = Part(
            for_sinks[:, :, block.queries],
            sink_keys,
            sink_values,
            block.hidden_sinks,
            block.sink_bias,
        )
        outputs.append(merged([part for part in (window, sinks) if part.keys.shape[-2]]))
    newest = slice(max(0, key.shape[-2] - layout.window_size), None)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)
    return out, (key[:, :, newest], value[:, :, newest])


def write_chunk(layout: Layout, num_seen: int, num_tokens: int, held: Pair, newest: Pair) -> None:
    """Write the newest of a chunk's tokens to the ring; arguments as for `attend_chunk`."""
    for buffer, rows in zip(held, newest, strict=True):
        start = num_seen + num_tokens - rows.shape[-2]
        for write in layout.ring_writes(num_seen, num_tokens):
            source = slice(write.positions.start - start, write.positions.stop - start)
            buffer[:, :, write.slot : write.slot + len(write.positions)] = rows[:, :, source]
