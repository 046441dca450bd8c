"""Experts of many rows by AMX, on CPUs that have it: sixteen weight rows and up to sixteen tokens at a time."""

# pyright: reportCallIssue=false
# (an intrinsic is called without its first argument)

from __future__ import annotations

import ctypes
import platform

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from policies.jit import jit
from replay.cpu_numbers import rounded, silu

TILE = 16  # rows of a tile, and its columns of 32 bits
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # of arch_prctl in Linux: the state that tiles are kept in
_ARCH_PRCTL = 158  # number of the system call


def _is_permitted() -> bool:
    """Ask the system for the use of tiles, which it grants to a process as a whole."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


CPU_HAS_AMX = bool(binding.get_host_cpu_features().get("amx-bf16"))  # to compile for, as the cache tells CPUs apart
HAS_AMX = CPU_HAS_AMX and _is_permitted()  # to run


def tile_configurations() -> np.ndarray:
    """What the tiles are to be for 0 to 16 tokens, [17, 64] uint8: sums in tile 0, weights in 1, x in 2; none without AMX."""
    if not HAS_AMX:
        return np.zeros((0, 64), np.uint8)
    made = np.zeros((TILE + 1, 64), np.uint8)
    made[:, 0] = 1  # the palette that there is
    tokens = np.arange(TILE + 1)
    for tile, num_bytes in enumerate((4 * tokens, 64, 4 * tokens)):
        made[:, 16 + 2 * tile] = num_bytes  # of a row
        made[:, 48 + tile] = TILE  # rows
    return made


@intrinsic
def tile_product(typing_context, configuration, weights, weight_stride, x, out, num_words):
    """Sums over k of weights[row, k] * x[token, k] for 16 rows, all given by address; strides in bytes.

    A word is two bfloat16. x is [num_words, 16] words: a column for each token. out is [16, 16] float32: a row for each
    weight row, a column for each token.
    """

    def codegen(context, builder, _, arguments):
        if not CPU_HAS_AMX:  # compiled, never called
            return context.get_dummy_value()
        configuration, weights, weight_stride, x, out, num_words = arguments
        byte, i64 = ir.IntType(8), ir.IntType(64)
        pointer = byte.as_pointer()

        def call(name, *values):
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)

        def at(address):
            return builder.inttoptr(address, pointer)

        call("ldtilecfg", at(configuration))
        call("tilezero", byte(0))
        with cgutils.for_range(builder, builder.udiv(num_words, i64(TILE)), intp=i64) as loop:
            call("tileloadd64", byte(1), at(builder.add(weights, builder.mul(loop.index, i64(64)))), weight_stride)
            call("tileloadd64", byte(2), at(builder.add(x, builder.mul(loop.index, i64(64 * TILE)))), i64(64))
            call("tdpbf16ps", byte(0), byte(1), byte(2))
        call("tilestored64", byte(0), at(out), i64(64))
        call("tilerelease")
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@jit
def pack(x, x_rows, first, end, word, packed):
    """Some words of up to 16 rows of x, a column for each row, into [.., 16] words."""
    for k in range(word, min(word + 64, x.shape[1] // 2)):
        for i in range(first, end):
            low, high = np.uint32(x[x_rows[i], 2 * k]), np.uint32(x[x_rows[i], 2 * k + 1])
            packed[k, i - first] = low | high << np.uint32(16)


@jit
def hidden_tile(weights, matrix, x, configurations, first, end, row, packed_x, packed_middle):
    """16 hidden activations of up to 16 tokens, from packed x to packed activations."""
    gate, up = np.empty((16, 16), np.float32), np.empty((16, 16), np.float32)
    stride = 2 * x.shape[1]
    for start, into in ((weights, gate), (weights + matrix, up)):
        tile_product(
            configurations.ctypes.data + 64 * (end - first),
            start + row * stride,
            stride,
            packed_x.ctypes.data,
            into.ctypes.data,
            x.shape[1] // 2,
        )
    for k in range(0, 16, 2):
        for i in range(end - first):
            low = np.uint32(rounded(silu(gate[k, i]) * up[k, i]))
            high = np.uint32(rounded(silu(gate[k + 1, i]) * up[k + 1, i]))
            packed_middle[(row + k) // 2, i] = low | high << np.uint32(16)


@jit
def out_tile(weights, configurations, first, end, row, packed_middle, out):
    """16 numbers of the output of up to 16 tokens, from packed activations."""
    sums = np.empty((16, 16), np.float32)
    stride = 4 * len(packed_middle)
    tile_product(
        configurations.ctypes.data + 64 * (end - first),
        weights + row * stride,
        stride,
        packed_middle.ctypes.data,
        sums.ctypes.data,
        len(packed_middle),
    )
    for i in range(first, end):
        for k in range(16):
            out[i, row + k] = rounded(sums[k, i - first])
