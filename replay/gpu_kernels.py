"""Kernels of routed experts on a GPU, which find their weights in any slots of one allocation."""

# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportMissingImports=false
# (within a kernel names stand for blocks of numbers on the GPU; Triton is where GPUs are)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move_kernel(source, target, size, block: tl.constexpr):
    """Copy int32 between host and GPU: the kernel itself uses the link, so that it waits for no copy in progress."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + at, tl.load(source + at, mask=at < size, volatile=True), mask=at < size)


@triton.jit(do_not_specialize=["group"])
def gate_up_kernel(
    x,
    slots,
    index,
    middle,
    group,
    stride,
    slots_at: tl.constexpr,
    rows_at: tl.constexpr,
    places_at: tl.constexpr,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    intermediate: tl.constexpr,
    block_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """silu(gate(x)) * up(x) of one expert of a group: program (job, block of columns)."""
    job = tl.load(index + group) + tl.program_id(0)
    if job < tl.load(index + group + 1):
        slot = tl.load(index + slots_at + job).to(tl.int64)
        first, end = tl.load(index + rows_at + job), tl.load(index + rows_at + job + 1)
        n = tl.program_id(1) * block_n + tl.arange(0, block_n)
        k = tl.arange(0, block_k)
        gate_at = slots + slot * stride + n[None, :] * hidden + k[:, None]
        up_at = gate_at + intermediate * hidden
        for start in range(first, end, block_rows):
            row = start + tl.arange(0, block_rows)
            token = tl.load(index + places_at + row, mask=row < end, other=0) // top_k
            x_at = x + token[:, None] * hidden + k[None, :]
            gate = tl.zeros((block_rows, block_n), tl.float32)
            up = tl.zeros((block_rows, block_n), tl.float32)
            for done in range(0, hidden, block_k):
                part = tl.load(x_at + done)
                gate += tl.dot(part, tl.load(gate_at + done))
                up += tl.dot(part, tl.load(up_at + done))
            gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
            gate = (gate / (1 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
            into = middle + row[:, None] * intermediate + n[None, :]
            tl.store(into, (gate * up).to(tl.bfloat16), mask=(row < end)[:, None])


@triton.jit(do_not_specialize=["group"])
def down_kernel(
    middle,
    slots,
    index,
    out,
    group,
    stride,
    slots_at: tl.constexpr,
    rows_at: tl.constexpr,
    places_at: tl.constexpr,
    hidden: tl.constexpr,
    intermediate: tl.constexpr,
    block_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Down projection of one expert of a group, its rows written to their places."""
    job = tl.load(index + group) + tl.program_id(0)
    if job < tl.load(index + group + 1):
        slot = tl.load(index + slots_at + job).to(tl.int64)
        first, end = tl.load(index + rows_at + job), tl.load(index + rows_at + job + 1)
        n = tl.program_id(1) * block_n + tl.arange(0, block_n)
        k = tl.arange(0, block_k)
        down_at = slots + slot * stride + 2 * intermediate * hidden + n[None, :] * intermediate + k[:, None]
        for start in range(first, end, block_rows):
            row = start + tl.arange(0, block_rows)
            place = tl.load(index + places_at + row, mask=row < end, other=0)
            at = middle + row[:, None] * intermediate + k[None, :]
            sums = tl.zeros((block_rows, block_n), tl.float32)
            for done in range(0, intermediate, block_k):
                part = tl.load(at + done, mask=(row < end)[:, None], other=0.0)
                sums += tl.dot(part, tl.load(down_at + done))
            into = out + place[:, None] * hidden + n[None, :]
            tl.store(into, sums.to(tl.bfloat16), mask=(row < end)[:, None])


@triton.jit
def combine_kernel(
    index,
    rows,
    host_rows,
    gates,
    shared,
    stream,
    out,
    sources_at: tl.constexpr,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
):
    """Add a token's experts in the order of k, wherever they were computed, then the shared expert and the stream."""
    token = tl.program_id(0)
    n = tl.program_id(1) * block + tl.arange(0, block)
    sums = tl.zeros((block,), tl.float32)
    for k in range(top_k):
        source = tl.load(index + sources_at + token * top_k + k)
        gate = tl.load(gates + token * top_k + k)
        on_gpu = source >= 0
        of_gpu = tl.load(rows + source * hidden + n, mask=on_gpu & (n < hidden), other=0.0)
        of_cpu = tl.load(host_rows + (-1 - source) * hidden + n, mask=(source < 0) & (n < hidden), other=0.0)
        sums += gate * (of_gpu.to(tl.float32) + of_cpu.to(tl.float32))
    at = token * hidden + n
    routed = sums.to(tl.bfloat16).to(tl.float32)
    moe = (routed + tl.load(shared + at).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    tl.store(out + at, (moe + tl.load(stream + at).to(tl.float32)).to(tl.bfloat16))
