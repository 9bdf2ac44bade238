"""Dot products of one weight row with one activation vector, for compiled decode steps.

Each is an LLVM loop over vectors of 16 lanes, which the compiler lowers to what the machine has
(AVX-512, AVX2, NEON). Written out because the plain loop is not vectorised well: of the memory
bandwidth that these reach, numba's own code for the same loop reached a third (docs/log.md).

Weights are stored in groups of 32 along the input, see `quantization.py`. Addresses are integers;
callers keep the arrays alive.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from streamchat.ops.quantization import GROUP

LANES = 16

CHAINS = 2
"""Sums under way at once."""

F16, F32 = ir.HalfType(), ir.FloatType()
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
VEC_F32, VEC_I8, VEC_I32 = (ir.VectorType(kind, LANES) for kind in (F32, I8, I32))
ZEROS = ir.Constant(VEC_F32, [0.0] * LANES)

# What a sum in another order and fused multiply-adds need. Not `nnan`: a NaN must stay one.
FAST = ("reassoc", "contract", "nsz")

Value = Any
"""An llvmlite value; the library has no types."""


@intrinsic
def dot_int8(
    _context: Any,
    codes: Any,
    scales: Any,
    x: Any,
    num_groups: Any,
) -> tuple[Any, Callable[..., Value]]:
    """Sum over groups of scale * (codes . x): int8 codes, float16 scales, float32 `x`."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Value:
        codes, scales, x, num_groups = args

        def body(group: Value, total: list[Value]) -> list[Value]:
            part = ZEROS
            for half in range(GROUP // LANES):
                code = _load(b, VEC_I8, codes, _at(b, group, GROUP, half * LANES))
                weight = b.sitofp(b.sext(code, VEC_I32), VEC_F32)
                value = _load(b, VEC_F32, x, _at(b, group, 4 * GROUP, 4 * half * LANES))
                part = _multiply_add(b, weight, value, part)
            scale = b.fpext(_load(b, F16, scales, _at(b, group, 2)), F32)
            return [_multiply_add(b, part, _splat(b, scale), total[0])]

        return _sum(b, _sum_over(b, num_groups, [ZEROS], body)[0])

    return types.float32(*[types.int64] * 4), generate


@intrinsic
def dot_int4(
    _context: Any,
    codes: Any,
    scales: Any,
    x: Any,
    sums: Any,
    num_groups: Any,
) -> tuple[Any, Callable[..., Value]]:
    """Sum over groups of scale * (codes . x) + minimum * sum(x), two groups to a byte.

    4-bit codes, float16 scales and then minima, float32 `x` and `sums` of its groups.
    """

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Value:
        codes, scales, x, sums, num_groups = args
        half_way = b.lshr(num_groups, ir.Constant(I64, 1))

        def body(pair: Value, totals: list[Value]) -> list[Value]:
            low_part, high_part = ZEROS, ZEROS
            low_group, high_group = pair, b.add(pair, half_way)
            for half in range(GROUP // LANES):
                packed = _load(b, VEC_I8, codes, _at(b, pair, GROUP, half * LANES))
                low = b.and_(packed, ir.Constant(VEC_I8, [15] * LANES))
                high = b.lshr(packed, ir.Constant(VEC_I8, [4] * LANES))
                offset = 4 * half * LANES
                value = _load(b, VEC_F32, x, _at(b, low_group, 4 * GROUP, offset))
                low_part = _multiply_add(b, _unsigned(b, low), value, low_part)
                value = _load(b, VEC_F32, x, _at(b, high_group, 4 * GROUP, offset))
                high_part = _multiply_add(b, _unsigned(b, high), value, high_part)
            vector, scalar = totals
            for group, part in ((low_group, low_part), (high_group, high_part)):
                scale = b.fpext(_load(b, F16, scales, _at(b, group, 2)), F32)
                minimum = b.fpext(_load(b, F16, scales, _at(b, b.add(group, num_groups), 2)), F32)
                vector = _multiply_add(b, part, _splat(b, scale), vector)
                scalar = _multiply_add(b, minimum, _load(b, F32, sums, _at(b, group, 4)), scalar)
            return [vector, scalar]

        vector, scalar = _sum_over(b, half_way, [ZEROS, ir.Constant(F32, 0.0)], body)
        return b.fadd(_sum(b, vector), scalar, flags=FAST)

    return types.float32(*[types.int64] * 5), generate


@intrinsic
def dot_float32(
    _context: Any,
    a: Any,
    x: Any,
    num_vectors: Any,
) -> tuple[Any, Callable[..., Value]]:
    """Dot product of two float32 vectors of `num_vectors` * 16 elements."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Value:
        a, x, num_vectors = args

        def body(vector: Value, total: list[Value]) -> list[Value]:
            offset = _at(b, vector, 4 * LANES)
            return [
                _multiply_add(
                    b, _load(b, VEC_F32, a, offset), _load(b, VEC_F32, x, offset), total[0]
                )
            ]

        return _sum(b, _sum_over(b, num_vectors, [ZEROS], body)[0])

    return types.float32(*[types.int64] * 3), generate


@intrinsic
def dot_16_rows(
    _context: Any,
    x: Any,
    rows: Any,
    row_bytes: Any,
    num_vectors: Any,
    out: Any,
) -> tuple[Any, Callable[..., Value]]:
    """Write to `out` the dot products of `x` with 16 consecutive rows, all float32.

    Adding up the lanes of a single sum costs more than the products of a short row. Of 16 sums it
    takes four rounds in which each vector adds the neighbours of two.
    """

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Value:
        x, rows, row_bytes, num_vectors, out = args
        starts = [b.add(rows, b.mul(row_bytes, ir.Constant(I64, row))) for row in range(LANES)]

        def body(vector: Value, totals: list[Value]) -> list[Value]:
            offset = _at(b, vector, 4 * LANES)
            value = _load(b, VEC_F32, x, offset)
            return [
                _multiply_add(b, _load(b, VEC_F32, start, offset), value, total)
                for start, total in zip(starts, totals, strict=True)
            ]

        sums = _loop(b, num_vectors, [ZEROS] * LANES, body)
        even, odd = (ir.Constant(VEC_I32, list(range(first, 2 * LANES, 2))) for first in (0, 1))
        while len(sums) > 1:
            sums = [
                b.fadd(
                    b.shuffle_vector(left, right, even),
                    b.shuffle_vector(left, right, odd),
                    flags=FAST,
                )
                for left, right in zip(sums[::2], sums[1::2], strict=True)
            ]
        b.store(sums[0], b.inttoptr(out, VEC_F32.as_pointer()), align=4)
        return ir.Constant(I32, 0)

    return types.int32(*[types.int64] * 5), generate


@intrinsic
def exponentials(
    _context: Any,
    x: Any,
    num_vectors: Any,
    peak: Any,
    scaling: Any,
) -> tuple[Any, Callable[..., Value]]:
    """Replace each x by exp((x - peak) * scaling), float32; their sum. `x` must not exceed `peak`.

    To 2 units in the last place: range reduction by ln 2 in two parts and a polynomial (Cody and
    Waite 1980, chapter 6). What is below exp(-87) becomes that.
    """

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Value:
        x, num_vectors, peak, scaling = args
        peaks, scalings = _splat(b, peak), _splat(b, scaling)

        def body(vector: Value, total: list[Value]) -> list[Value]:
            offset = _at(b, vector, 4 * LANES)
            value = b.fmul(b.fsub(_load(b, VEC_F32, x, offset), peaks), scalings)
            result = _exp(b, value)
            b.store(result, b.inttoptr(b.add(x, offset), VEC_F32.as_pointer()), align=4)
            return [b.fadd(total[0], result, flags=FAST)]

        return _sum(b, _loop(b, num_vectors, [ZEROS], body)[0])

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


@intrinsic
def largest(
    _context: Any,
    x: Any,
    num_vectors: Any,
) -> tuple[Any, Callable[..., Value]]:
    """The largest of `num_vectors` * 16 float32 values."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Value:
        x, num_vectors = args
        lowest = ir.Constant(VEC_F32, [float("-inf")] * LANES)

        def body(vector: Value, peak: list[Value]) -> list[Value]:
            value = _load(b, VEC_F32, x, _at(b, vector, 4 * LANES))
            return [b.select(b.fcmp_ordered(">", value, peak[0]), value, peak[0])]

        peak = _loop(b, num_vectors, [lowest], body)[0]
        return b.call(_function(b, "llvm.vector.reduce.fmax", F32, [VEC_F32]), [peak])

    return types.float32(*[types.int64] * 2), generate


@intrinsic
def weighted_sum(
    _context: Any,
    weights: Any,
    rows: Any,
    row_bytes: Any,
    num_rows: Any,
    out: Any,
) -> tuple[Any, Callable[..., Value]]:
    """Write 16 columns of `weights` @ `rows` to `out`, all float32; the sums stay in registers."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Value:
        weights, rows, row_bytes, num_rows, out = args

        def body(row: Value, total: list[Value]) -> list[Value]:
            weight = _splat(b, _load(b, F32, weights, _at(b, row, 4)))
            value = _load(b, VEC_F32, rows, b.mul(row, row_bytes))
            return [_multiply_add(b, weight, value, total[0])]

        (total,) = _sum_over(b, num_rows, [ZEROS], body)
        b.store(total, b.inttoptr(out, VEC_F32.as_pointer()), align=4)
        return ir.Constant(I32, 0)

    return types.int32(*[types.int64] * 5), generate


def _at(b: Any, index: Value, stride: int, offset: int = 0) -> Value:
    """Byte offset of element `index`."""
    return b.add(b.mul(index, ir.Constant(I64, stride)), ir.Constant(I64, offset))


def _load(b: Any, kind: Any, address: Value, offset: Value) -> Value:
    # Aligned to an element, not to a vector: rows start anywhere.
    size = {VEC_I8: 1, F16: 2}.get(kind, 4)
    return b.load(b.inttoptr(b.add(address, offset), kind.as_pointer()), align=size)


def _unsigned(b: Any, codes: Value) -> Value:
    return b.sitofp(b.zext(codes, VEC_I32), VEC_F32)


def _multiply_add(b: Any, x: Value, y: Value, z: Value) -> Value:
    return b.fadd(b.fmul(x, y, flags=FAST), z, flags=FAST)


def _splat(b: Any, scalar: Value) -> Value:
    empty = ir.Constant(VEC_F32, ir.Undefined)
    first = b.insert_element(empty, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, empty, ir.Constant(VEC_I32, [0] * LANES))


def _sum(b: Any, vector: Value) -> Value:
    reduce = _function(b, "llvm.vector.reduce.fadd", F32, [F32, VEC_F32])
    return b.call(reduce, [ir.Constant(F32, -0.0), vector], fastmath=FAST)


def _function(b: Any, name: str, result: Any, arguments: list[Any]) -> Value:
    """One of LLVM's own functions for our vectors."""
    name = f"{name}.v{LANES}f32"
    found = b.module.globals.get(name)
    return found or ir.Function(b.module, ir.FunctionType(result, arguments), name)


def _exp(b: Any, x: Value) -> Value:
    def constant(value: float) -> Value:
        return ir.Constant(VEC_F32, [value] * LANES)

    # Fused where the machine can, but never in another order: the parts of ln 2 must stay apart.
    fuse = ("contract",)
    x = b.select(b.fcmp_ordered("<", x, constant(-87.0)), constant(-87.0), x)
    scaled = b.fadd(b.fmul(x, constant(math.log2(math.e)), flags=fuse), constant(0.5), flags=fuse)
    power = b.call(_function(b, "llvm.floor", VEC_F32, [VEC_F32]), [scaled])
    rest = x
    for part in (-0.693359375, 2.12194440e-4):
        rest = b.fadd(b.fmul(power, constant(part), flags=fuse), rest, flags=fuse)
    series = constant(1 / math.factorial(7))
    for order in range(6, -1, -1):
        term = constant(1 / math.factorial(order))
        series = b.fadd(b.fmul(series, rest, flags=fuse), term, flags=fuse)
    exponent = b.add(b.fptosi(power, VEC_I32), ir.Constant(VEC_I32, [127] * LANES))
    return b.fmul(series, b.bitcast(b.shl(exponent, ir.Constant(VEC_I32, [23] * LANES)), VEC_F32))


def _sum_over(
    b: Any, count: Value, zeros: list[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """Sums that `body` adds to for each index below `count`.

    In `CHAINS` interleaved chains, since one alone waits for the latency of each addition.
    """
    chains = ir.Constant(I64, CHAINS)

    def several(index: Value, totals: list[Value]) -> list[Value]:
        first = b.mul(index, chains)
        results: list[Value] = []
        for chain in range(CHAINS):
            own = totals[chain * len(zeros) : (chain + 1) * len(zeros)]
            results += body(b.add(first, ir.Constant(I64, chain)), own)
        return results

    rounds = b.udiv(count, chains)
    totals = _loop(b, rounds, zeros * CHAINS, several)
    merged = totals[: len(zeros)]
    for chain in range(1, CHAINS):
        own = totals[chain * len(zeros) : (chain + 1) * len(zeros)]
        merged = [b.fadd(x, y, flags=FAST) for x, y in zip(merged, own, strict=True)]
    done = b.mul(rounds, chains)
    return _loop(b, b.sub(count, done), merged, lambda index, own: body(b.add(index, done), own))


def _loop(
    b: Any,
    count: Value,
    initial: list[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """`for index in range(count)`, carrying values from one round to the next; the last ones."""
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    carried = [b.phi(value.type) for value in initial]
    for phi, value in zip(carried, initial, strict=True):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", index, count), inside, after)
    b.position_at_end(inside)
    results = body(index, carried)
    index.add_incoming(b.add(index, ir.Constant(I64, 1)), b.block)
    for phi, value in zip(carried, results, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return carried
