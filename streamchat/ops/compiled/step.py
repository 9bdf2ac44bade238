"""One decode step of a quantized Llama-layout model as one compiled function.

It computes what the model's own layers compute with the same dequantized weights, in float32, and
reads and writes the same cache buffers; only the order of the sums differs. The model: RMSNorm,
fused q/k/v, RoPE by halves, grouped attention over sinks and window, gated MLP with SiLU (Touvron
et al. 2023, arXiv:2302.13971), and what Qwen adds to it: biases on q/k/v, norms on q and k.

A step reads each weight once and is bound by that. Threads share the work region by region
(`team.py`): every product is cut by rows, the attention by heads and blocks of keys.
"""

from typing import Any, NamedTuple

import numpy as np

from streamchat.ops.compiled.dot import (
    LANES,
    dot_16_rows,
    dot_float32,
    exponentials,
    largest,
    weighted_sum,
)
from streamchat.ops.compiled.entry import Entry
from streamchat.ops.compiled.matrix import (
    address,
    borrow,
    compiled,
    num_pieces,
    piece_rows,
    row_dot,
    sum_groups,
)
from streamchat.ops.compiled.team import claim, finish, new_progress, run, wait
from streamchat.ops.quantization import GROUP

KEY_BLOCK = 64
"""Keys that one task of the attention scores: its keys and values stay in the first-level cache."""

LAYER_REGIONS = 6
"""q/k/v, their place, attention, its output, gate and up, down."""

MINUS_INFINITY = np.float32("-inf")
ZERO, ONE = np.float32(0), np.float32(1)


class Matrix(NamedTuple):
    """A quantized matrix, or one for each layer in the first dimension.

    Attributes:
        codes: See `quantization.Quantized`.
        scales: Same, as int16: numba has no float16 on a CPU.
    """

    codes: Any
    scales: Any


class StepWeights(NamedTuple):
    """The weights of a model, stacked over the layers. An absent bias or norm has width 0.

    Attributes:
        attention_norm: (num_layers, hidden_size), float32 like all that is no `Matrix`.
        qkv: Rows of q, then k, then v.
        qkv_bias: (num_layers, rows) or (num_layers, 0).
        query_norm: (num_layers, head_dim) or (num_layers, 0).
        key_norm: Same.
        output: (num_layers, hidden_size, num_heads * head_dim).
        mlp_norm: (num_layers, hidden_size).
        gate_up: Rows of gate, then up.
        down: (num_layers, hidden_size, intermediate_size).
        final_norm: (hidden_size,).
        head: (vocab_size, hidden_size).
    """

    attention_norm: Any
    qkv: Matrix
    qkv_bias: Any
    query_norm: Any
    key_norm: Any
    output: Matrix
    mlp_norm: Any
    gate_up: Matrix
    down: Matrix
    final_norm: Any
    head: Matrix


class StepShape(NamedTuple):
    """Numbers of a model that no array's shape tells.

    Attributes:
        num_heads: Query heads.
        epsilon: Of the norms.
        scaling: Factor on the attention scores.
        rope_factor: Factor on rotated queries and keys (YaRN); 1 for others.
    """

    num_heads: int
    epsilon: float
    scaling: float
    rope_factor: float


class StepPlace(NamedTuple):
    """Where in the stream a step stands: `layout.py` decides it.

    Attributes:
        slot: Where the token's key and value go.
        num_held: Slots in use, that one included.
        num_sinks: How many of these are sinks.
    """

    slot: int
    num_held: int
    num_sinks: int


class _Work(NamedTuple):
    """What the threads of one step share. All but the counters float32."""

    progress: Any  # see `team.new_progress`
    hidden: Any  # (hidden_size,)
    qkv: Any  # (rows of q, k and v,)
    query: Any  # for the window and for the sinks, (2, num_heads, head_dim)
    peaks: Any  # by block of keys, (num_heads, num_blocks)
    totals: Any
    parts: Any  # (num_heads, num_blocks, head_dim)
    activation: Any  # (intermediate_size,)
    logits: Any  # (vocab_size,)


@compiled
def _normalize(x: Any, weight: Any, epsilon: float, out: Any) -> None:
    """RMSNorm; `out` may be `x`."""
    total = ZERO
    for value in x:
        total += value * value
    factor = ONE / np.sqrt(total / np.float32(x.size) + np.float32(epsilon))
    for index in range(x.size):
        out[index] = x[index] * factor * weight[index]


@compiled
def _rotate(x: Any, cos: Any, sin: Any, factor: float, out: Any) -> None:
    """`rotary.rotate` of one vector, times a factor."""
    half = x.size // 2
    for index in range(half):
        low, high = x[index] * np.float32(factor), x[index + half] * np.float32(factor)
        out[index] = low * cos[index] + high * sin[index]
        out[index + half] = high * cos[index + half] + low * sin[index + half]


@compiled
def _attend_block(
    query: Any,
    keys: Any,
    values: Any,
    kv_head: int,
    block: int,
    num_held: int,
    num_sinks: int,
    scaling: float,
    scores: Any,
    peaks: Any,
    totals: Any,
    parts: Any,
) -> None:
    """Attention of one group of query heads over one block of their keys, not yet divided.

    Args:
        query: For the window and for the sinks, shape (2, num_heads, head_dim).
        keys: Shape (num_kv_heads, cache_size, head_dim).
        values: Same.
        kv_head: Whose keys they are.
        block: Which keys.
        num_held: Slots in use.
        num_sinks: How many of these are sinks.
        scaling: Factor on the scores.
        scores: Scratch, shape (group_size, KEY_BLOCK).
        peaks: Written: largest score, shape (num_heads, num_blocks).
        totals: Written: sum of the weights, relative to the peak.
        parts: Written: sum of the weighted values, shape (num_heads, num_blocks, head_dim).
    """
    group_size, head_dim = scores.shape[0], keys.shape[2]
    row_bytes, num_vectors = head_dim * 4, head_dim // LANES
    start, stop = block * KEY_BLOCK, min(num_held, (block + 1) * KEY_BLOCK)
    at_keys, at_values = address(keys[kv_head]), address(values[kv_head]) + start * row_bytes
    for member in range(group_size):
        head = kv_head * group_size + member
        row = scores[member]
        at_row, at_part = address(row), address(parts[head, block])
        for_window, for_sinks = address(query[0, head]), address(query[1, head])
        for slot in range(start, stop, LANES):
            at_score, at_key = at_row + (slot - start) * 4, at_keys + slot * row_bytes
            if slot + LANES <= stop and slot >= num_sinks:
                dot_16_rows(for_window, at_key, row_bytes, num_vectors, at_score)
                continue
            for near in range(LANES):
                row[slot - start + near] = MINUS_INFINITY
                if slot + near < stop:
                    one = for_sinks if slot + near < num_sinks else for_window
                    row[slot - start + near] = dot_float32(
                        one, at_key + near * row_bytes, num_vectors
                    )
        padded = (stop - start + LANES - 1) // LANES
        peak = largest(at_row, padded)
        totals[head, block] = exponentials(at_row, padded, peak, np.float32(scaling))
        peaks[head, block] = peak * np.float32(scaling)
        for column in range(0, row_bytes, LANES * 4):
            weighted_sum(at_row, at_values + column, row_bytes, stop - start, at_part + column)


@compiled
def _merge_blocks(peaks: Any, totals: Any, parts: Any, context: Any) -> None:
    """One softmax out of those of the blocks; `context` has shape (num_heads * head_dim,)."""
    num_heads, num_blocks, head_dim = parts.shape
    for head in range(num_heads):
        out = context[head * head_dim : (head + 1) * head_dim]
        out[:] = ZERO
        peak, total = peaks[head].max(), ZERO
        for block in range(num_blocks):
            factor = np.exp(peaks[head, block] - peak)
            total += factor * totals[head, block]
            for column in range(head_dim):
                out[column] += factor * parts[head, block, column]
        out /= total


# What a product does with its rows.
SET, ADD, GATE = 0, 1, 2


@compiled
def _multiply(
    thread: int,
    progress: Any,
    region: int,
    codes: Any,
    scales: Any,
    x: Any,
    sums: Any,
    out: Any,
    what: int,
) -> None:
    """A region: `out` set to the product, or the product added to it.

    With `GATE`, the matrix has the rows of gate and then of up, and `out` is SiLU(gate) * up.
    """
    rows = piece_rows(codes)
    pieces = num_pieces(out.size, rows)
    groups = x.size // GROUP
    at_codes, at_scales, at_x, at_sums = address(codes), address(scales), address(x), address(sums)
    piece = claim(progress, region, thread, pieces)
    while piece >= 0:
        for row in range(piece * rows, min(out.size, (piece + 1) * rows)):
            value = row_dot(codes, at_codes, at_scales, row, at_x, at_sums, groups)
            if what == ADD:
                value += out[row]
            elif what == GATE:
                up = row_dot(codes, at_codes, at_scales, row + out.size, at_x, at_sums, groups)
                value *= up / (ONE + np.exp(-value))
            out[row] = value
        finish(progress, region)
        piece = claim(progress, region, thread, pieces)
    wait(progress, region, pieces)


@compiled
def _place(
    thread: int,
    progress: Any,
    region: int,
    qkv: Any,
    bias: Any,
    query_norm: Any,
    key_norm: Any,
    epsilon: float,
    tables: Any,
    factor: float,
    slot: int,
    query: Any,
    keys: Any,
    values: Any,
) -> None:
    """A region in one piece: norms and RoPE; the key and the value go to their slot.

    Args:
        thread: Which.
        progress: Counters.
        region: Which.
        qkv: Shape ((num_heads + 2 * num_kv_heads) * head_dim,); overwritten.
        bias: Same shape, or (0,).
        query_norm: Shape (head_dim,) or (0,).
        key_norm: Same.
        epsilon: Of the norms.
        tables: See `decode_step`.
        factor: On rotated vectors.
        slot: In the cache.
        query: Written, for the window and for the sinks, shape (2, num_heads, head_dim).
        keys: Shape (num_kv_heads, cache_size, head_dim).
        values: Same.
    """
    if claim(progress, region, thread, 1) == 0:
        _, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[0]
        if bias.size:
            qkv += bias
        vectors = qkv.reshape(-1, head_dim)
        for head in range(num_heads + num_kv_heads):
            vector = vectors[head]
            norm = query_norm if head < num_heads else key_norm
            if norm.size:
                _normalize(vector, norm, epsilon, vector)
            if head < num_heads:
                _rotate(vector, tables[0], tables[1], factor, query[0, head])
                _rotate(vector, tables[2], tables[3], factor, query[1, head])
            else:
                _rotate(vector, tables[0], tables[1], factor, keys[head - num_heads, slot])
        for head in range(num_kv_heads):
            values[head, slot] = vectors[num_heads + num_kv_heads + head]
        finish(progress, region)
    wait(progress, region, 1)


@compiled
def _attend(
    thread: int,
    progress: Any,
    region: int,
    query: Any,
    keys: Any,
    values: Any,
    num_held: int,
    num_sinks: int,
    scaling: float,
    scores: Any,
    peaks: Any,
    totals: Any,
    parts: Any,
) -> None:
    """A region: attention of each group of heads over each block of keys, see `_attend_block`."""
    num_blocks = peaks.shape[1]
    pieces = keys.shape[0] * num_blocks
    piece = claim(progress, region, thread, pieces)
    while piece >= 0:
        _attend_block(
            query,
            keys,
            values,
            piece // num_blocks,
            piece % num_blocks,
            num_held,
            num_sinks,
            scaling,
            scores,
            peaks,
            totals,
            parts,
        )
        finish(progress, region)
        piece = claim(progress, region, thread, pieces)
    wait(progress, region, pieces)


@Entry
def _decode_step(
    thread: int,
    weights: StepWeights,
    shape: StepShape,
    place: StepPlace,
    work: _Work,
    tables: Any,
    keys: Any,
    values: Any,
) -> None:
    keys, values, tables = borrow(keys), borrow(values), borrow(tables)
    progress, hidden, qkv, query = (
        borrow(work.progress),
        borrow(work.hidden),
        borrow(work.qkv),
        borrow(work.query),
    )
    peaks, totals, parts = borrow(work.peaks), borrow(work.totals), borrow(work.parts)
    activation, logits = borrow(work.activation), borrow(work.logits)
    qkv_codes, qkv_scales = borrow(weights.qkv.codes), borrow(weights.qkv.scales)
    output_codes, output_scales = borrow(weights.output.codes), borrow(weights.output.scales)
    gate_codes, gate_scales = borrow(weights.gate_up.codes), borrow(weights.gate_up.scales)
    down_codes, down_scales = borrow(weights.down.codes), borrow(weights.down.scales)
    head_codes, head_scales = borrow(weights.head.codes), borrow(weights.head.scales)
    attention_norm, mlp_norm = borrow(weights.attention_norm), borrow(weights.mlp_norm)
    final_norm, qkv_bias = borrow(weights.final_norm), borrow(weights.qkv_bias)
    query_norm, key_norm = borrow(weights.query_norm), borrow(weights.key_norm)

    _, num_heads, head_dim = query.shape
    # A thread's own.
    x = np.empty(hidden.size, np.float32)
    context = np.empty(num_heads * head_dim, np.float32)
    scores = np.empty((num_heads // keys.shape[1], KEY_BLOCK), np.float32)
    sums = np.empty(max(hidden.size, context.size, activation.size) // GROUP, np.float32)

    region = 0
    for layer in range(keys.shape[0]):
        _normalize(hidden, attention_norm[layer], shape.epsilon, x)
        sum_groups(x, sums)
        _multiply(thread, progress, region, qkv_codes[layer], qkv_scales[layer], x, sums, qkv, SET)
        _place(
            thread,
            progress,
            region + 1,
            qkv,
            qkv_bias[layer],
            query_norm[layer],
            key_norm[layer],
            shape.epsilon,
            tables,
            shape.rope_factor,
            place.slot,
            query,
            keys[layer],
            values[layer],
        )
        _attend(
            thread,
            progress,
            region + 2,
            query,
            keys[layer],
            values[layer],
            place.num_held,
            place.num_sinks,
            shape.scaling,
            scores,
            peaks,
            totals,
            parts,
        )
        _merge_blocks(peaks, totals, parts, context)
        sum_groups(context, sums)
        _multiply(
            thread,
            progress,
            region + 3,
            output_codes[layer],
            output_scales[layer],
            context,
            sums,
            hidden,
            ADD,
        )
        _normalize(hidden, mlp_norm[layer], shape.epsilon, x)
        sum_groups(x, sums)
        _multiply(
            thread,
            progress,
            region + 4,
            gate_codes[layer],
            gate_scales[layer],
            x,
            sums,
            activation,
            GATE,
        )
        sum_groups(activation, sums)
        _multiply(
            thread,
            progress,
            region + 5,
            down_codes[layer],
            down_scales[layer],
            activation,
            sums,
            hidden,
            ADD,
        )
        region += LAYER_REGIONS

    _normalize(hidden, final_norm, shape.epsilon, x)
    sum_groups(x, sums)
    _multiply(thread, progress, region, head_codes, head_scales, x, sums, logits, SET)


def decode_step(
    weights: StepWeights,
    shape: StepShape,
    place: StepPlace,
    tables: Any,
    hidden: Any,
    keys: Any,
    values: Any,
) -> Any:
    """Feed one token; its key and value are written to the cache.

    Args:
        weights: Of the model.
        shape: Of the model.
        place: In the stream.
        tables: Cosine and signed sine for the window, then for the sinks, shape (4, head_dim).
        hidden: The token's embedding, shape (hidden_size,); overwritten.
        keys: The cache's buffer, shape (num_layers, num_kv_heads, cache_size, head_dim).
        values: Same.

    Returns:
        Logits, shape (vocab_size,). All arrays are float32.
    """
    num_layers, _, _, head_dim = keys.shape
    num_blocks = -(-place.num_held // KEY_BLOCK)
    work = _Work(
        new_progress(LAYER_REGIONS * num_layers + 1),
        hidden,
        _empty(weights.qkv.codes.shape[1]),
        _empty(2, shape.num_heads, head_dim),
        _empty(shape.num_heads, num_blocks),
        _empty(shape.num_heads, num_blocks),
        _empty(shape.num_heads, num_blocks, head_dim),
        _empty(weights.gate_up.codes.shape[1] // 2),
        _empty(weights.head.codes.shape[0]),
    )
    run(_decode_step, weights, shape, place, work, tables, keys, values)
    return work.logits


def _empty(*shape: int) -> Any:
    return np.empty(shape, np.float32)


def is_kept() -> bool:
    """Whether the step has been compiled before on this machine."""
    return bool(_decode_step.is_kept)
