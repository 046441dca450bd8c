"""Experts of a batch on the CPU, in bfloat16: every thread computes its share of the rows of all their matrices."""

# pyright: reportCallIssue=false
# (an intrinsic is called without its first argument)

from __future__ import annotations

from functools import partial

import numba
import numpy as np
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from policies.jit import jit
from replay.cpu_amx import hidden_tile, out_tile, pack
from replay.cpu_numbers import rounded, silu

_FEATURES = binding.get_host_cpu_features()
_LANES = 16 if _FEATURES.get("avx512f") else 8  # of 32 bits, in one register
HAS_BFLOAT16 = bool(_FEATURES.get("avx512bf16"))  # products of bfloat16 pairs in one instruction
LEAST_PACKED = 5  # rows of an expert from which on packing them for tiles is worth it
MULTIPLE = 32  # of which hidden and intermediate sizes must be: whole registers of bfloat16

_I64, _F32 = ir.IntType(64), ir.FloatType()
_WORDS = ir.VectorType(ir.IntType(32), _LANES)  # two bfloat16 each
_FLOATS = ir.VectorType(_F32, _LANES)


@intrinsic(prefer_literal=True)
def _dot_tile(typing_context, weights, weight_stride, x, x_stride, x_rows, out, out_stride, num_words, rows, tokens):
    """Dot products of some weight rows with some rows of x, all given by address; strides in bytes.

    The accumulators of rows x tokens stay in registers, so a weight is read from memory once for all tokens of the
    tile. `x_rows` is the address of the tile's row numbers in x; out[token, row] is float32. A word is two numbers.
    """
    num_rows, num_tokens = rows.literal_value, tokens.literal_value
    signature = types.void(*[types.int64] * 8, rows, tokens)

    def codegen(context, builder, _, arguments):
        weights, weight_stride, x, x_stride, x_rows, out, out_stride, num_words = arguments[:8]

        def load(address, kind, alignment):
            value = builder.load(builder.inttoptr(address, kind.as_pointer()))
            value.align = alignment
            return value

        def at(base, stride, index):
            return builder.add(base, builder.mul(stride, index))

        weight_of = [at(weights, weight_stride, _I64(row)) for row in range(num_rows)]
        x_of = [at(x, x_stride, load(at(x_rows, _I64(8), _I64(t)), _I64, 8)) for t in range(num_tokens)]
        sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(num_rows * num_tokens)]
        for total in sums:
            builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), total)
        with cgutils.for_range(builder, builder.udiv(num_words, _I64(_LANES)), intp=_I64) as loop:
            offset = builder.mul(loop.index, _I64(4 * _LANES))
            of_weights = [_operand(builder, load(builder.add(address, offset), _WORDS, 4)) for address in weight_of]
            for token, address in enumerate(x_of):
                of_x = _operand(builder, load(builder.add(address, offset), _WORDS, 4))
                for row, of_weight in enumerate(of_weights):
                    total = sums[row * num_tokens + token]
                    builder.store(_multiply_add(builder, builder.load(total), of_weight, of_x), total)
        kind = ir.FunctionType(_F32, [_F32, _FLOATS])
        add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{_LANES}f32")
        for row in range(num_rows):
            for token in range(num_tokens):
                lanes = builder.load(sums[row * num_tokens + token])
                address = builder.add(at(out, out_stride, _I64(token)), _I64(4 * row))
                builder.store(
                    builder.call(add, [_F32(0.0), lanes], fastmath=("reassoc",)),
                    builder.inttoptr(address, _F32.as_pointer()),
                )
        return context.get_dummy_value()

    return signature, codegen


def _operand(builder, words):
    """Words as `_multiply_add` takes them: themselves, or their low and high halves as float32."""
    if HAS_BFLOAT16:
        return words
    low = builder.shl(words, ir.Constant(_WORDS, [16] * _LANES))
    high = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * _LANES))
    return builder.bitcast(low, _FLOATS), builder.bitcast(high, _FLOATS)


def _multiply_add(builder, total, weight, x):
    if HAS_BFLOAT16:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _WORDS])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(dot, [total, weight, x])
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")
    for half in range(2):
        total = builder.call(fma, [weight[half], x[half], total])
    return total


@jit
def _four_rows(weights, weight_stride, x, x_stride, x_rows, out, out_stride, num_words, first, end):
    """Dot products of four weight rows with rows `first` to `end` of a batch."""
    i = first
    while i < end:
        rows, place = x_rows + 8 * i, out + out_stride * i
        if end - i >= 4:
            _dot_tile(weights, weight_stride, x, x_stride, rows, place, out_stride, num_words, 4, 4)
            i += 4
        elif end - i == 3:
            _dot_tile(weights, weight_stride, x, x_stride, rows, place, out_stride, num_words, 4, 3)
            i += 3
        elif end - i == 2:
            _dot_tile(weights, weight_stride, x, x_stride, rows, place, out_stride, num_words, 4, 2)
            i += 2
        else:
            _dot_tile(weights, weight_stride, x, x_stride, rows, place, out_stride, num_words, 4, 1)
            i += 1


@partial(jit, parallel=True, nogil=True)
def run_batch(experts, ends, x_rows, numbers, x, gate, up, middle, wide, packed_x, packed_middle, configurations, out):
    """SwiGLU of a batch of experts, each over its own rows of x.

    Threads share the rows of the matrices, not the experts: one expert alone is read by all of them, and none waits
    for another's longer expert. Experts of many rows go through AMX, where the CPU has it.

    Args:
        experts: address of each expert's weights, [J] int64: gate [M, H], up [M, H], down [H, M], bfloat16, in a row.
        ends: end of each expert's rows within the batch, [J] int64 ascending.
        x_rows: row of x of each row of the batch, [N] int64.
        numbers: 0, 1, 2 ..., [N] int64.
        x: [T, H] bfloat16 as uint16.
        gate: scratch, [N, M] float32.
        up: scratch, [N, M] float32.
        middle: scratch, [N, M] uint16.
        wide: scratch, [N, H] float32.
        packed_x: scratch, [N / LEAST_PACKED, H / 2, 16] uint32.
        packed_middle: scratch, [N / LEAST_PACKED, M / 2, 16] uint32.
        configurations: what tiles are for each number of tokens, [17, 64] uint8; none without AMX.
        out: [N, H] bfloat16 as uint16, in the order of the batch.
    """
    hidden, intermediate = x.shape[1], gate.shape[1]
    matrix = 2 * hidden * intermediate  # bytes
    least = LEAST_PACKED if len(configurations) else len(numbers) + 1
    first_tile = np.zeros(experts.size + 1, np.int64)  # of each expert's tokens
    for job in range(experts.size):
        load = ends[job] - (ends[job - 1] if job else 0)
        first_tile[job + 1] = first_tile[job] + ((load + 15) // 16 if load >= least else 0)
    if first_tile[-1]:
        blocks = (hidden // 2 + 63) // 64
        for item in prange(first_tile[-1] * blocks):
            tile, word = item // blocks, item % blocks * 64
            job = np.searchsorted(first_tile, tile, "right") - 1
            first = (ends[job - 1] if job else 0) + 16 * (tile - first_tile[job])
            pack(x, x_rows, first, min(first + 16, ends[job]), word, packed_x[tile])

    steps = intermediate // 4
    for item in prange(experts.size * steps):
        job, row = item // steps, item % steps * 4
        first, end = ends[job - 1] if job else 0, ends[job]
        if end - first >= least:
            if row % 16 == 0:
                for tile in range(first_tile[job], first_tile[job + 1]):
                    start = first + 16 * (tile - first_tile[job])
                    stop = min(start + 16, end)
                    hidden_tile(
                        experts[job], matrix, x, configurations, start, stop, row, packed_x[tile], packed_middle[tile]
                    )
            continue
        for into, start in ((gate, experts[job]), (up, experts[job] + matrix)):
            _four_rows(
                start + row * 2 * hidden,
                2 * hidden,
                x.ctypes.data,
                2 * hidden,
                x_rows.ctypes.data,
                into.ctypes.data + 4 * row,
                4 * intermediate,
                hidden // 2,
                first,
                end,
            )
        for i in range(first, end):
            for k in range(row, row + 4):
                middle[i, k] = rounded(silu(gate[i, k]) * up[i, k])

    steps_out = hidden // 4
    for item in prange(experts.size * steps_out):
        job, row = item // steps_out, item % steps_out * 4
        first, end = ends[job - 1] if job else 0, ends[job]
        if end - first >= least:
            if row % 16 == 0:
                for tile in range(first_tile[job], first_tile[job + 1]):
                    start = first + 16 * (tile - first_tile[job])
                    stop = min(start + 16, end)
                    out_tile(experts[job] + 2 * matrix, configurations, start, stop, row, packed_middle[tile], out)
            continue
        _four_rows(
            experts[job] + 2 * matrix + row * 2 * intermediate,
            2 * intermediate,
            middle.ctypes.data,
            2 * intermediate,
            numbers.ctypes.data,
            wide.ctypes.data + 4 * row,
            4 * hidden,
            intermediate // 2,
            first,
            end,
        )
        for i in range(first, end):
            for k in range(row, row + 4):
                out[i, k] = rounded(wide[i, k])


@partial(jit, parallel=True, nogil=True)
def sum_words(words, parts):
    """Sum of each of some equal parts of an array, read by all threads: how fast memory can be read at best."""
    sums = np.zeros(parts, np.int64)
    size = words.size // parts
    for part in prange(parts):
        total = np.int64(0)
        for i in range(part * size, (part + 1) * size):
            total += words[i]
        sums[part] = total
    return sums


def most_threads() -> int:
    """Threads that batches can be given."""
    return numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


def use_threads(count: int) -> None:
    """Have batches that this thread starts run on so many, itself among them."""
    numba.set_num_threads(count)
