"""A layer's experts, wherever they are computed, against a dense reference."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from replayed import dense_reference, small_machine, small_shape, swiglu
from scripted import ESTIMATES, Script, make_pass, scripted
from torch import Tensor

from policies.steps import Steps, step_at
from replay.arrange import Index, arrange
from replay.executor import Run
from replay.expert_kernel import expert_kernels, make_buffers
from tracer.schema import Pass

EXPERTS, TOP_K, TOKENS = 16, 4, 6


def a_pass(seed: int = 0) -> Pass:
    rng = np.random.default_rng(seed)
    ids = np.stack([np.sort(rng.permutation(EXPERTS)[:TOP_K]) for _ in range(TOKENS)])[None]
    gates = rng.random(ids.shape)
    made = make_pass(0, [{0: TOKENS}])
    return replace(made, expert_ids=ids, gates=gates / gates.sum(-1, keepdims=True))


def outputs(
    hits: list[int], on_cpu: list[int], retained: list[int], pass_: Pass, *, device: str = "cpu", hidden: int = 64
) -> tuple[Tensor, Tensor]:
    """What a layer gives on a machine, and what it must give."""
    shape = small_shape(1, EXPERTS, TOP_K, hidden)
    machine = small_machine([pass_], 1, EXPERTS, TOP_K, EXPERTS + 4, device=device, hidden=hidden)
    script = Script(on_cpu=on_cpu, retained=retained)
    policy = scripted(shape, {(0, 0): script}, capacity=EXPERTS, residents={0: hits})
    try:
        run = Run(machine, policy, shape, 0, ESTIMATES, 4)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(TOKENS, hidden, generator=generator).to(torch.bfloat16)
        ids = torch.from_numpy(pass_.expert_ids[0].astype(np.int32))
        gates = torch.from_numpy(pass_.gates[0].astype(np.float32)) * 2.5
        out = run.moe_layer(step_at(Steps(shape).read(pass_), 0), x.to(device), ids.to(device), gates.to(device))
        return out.float().cpu(), dense_reference(machine.arena, 0, x, ids, gates)
    finally:
        machine.close()


def split(pass_: Pass, hit_share: float, cpu_share: float) -> tuple[list[int], list[int]]:
    order = np.random.default_rng(1).permutation(np.unique(pass_.expert_ids))
    hits, missed = np.split(order, [round(hit_share * len(order))])
    return hits.tolist(), missed[: round(cpu_share * len(missed))].tolist()


SPLITS = list(product([0, 0.3, 1], [0, 0.4, 1]))


@pytest.mark.parametrize(("hit_share", "cpu_share"), SPLITS)
def test_every_split_gives_the_dense_result(hit_share: float, cpu_share: float) -> None:
    pass_ = a_pass()
    hits, on_cpu = split(pass_, hit_share, cpu_share)
    out, wanted = outputs(hits, on_cpu, hits[::2], pass_)
    assert (out - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("hit_share", "cpu_share"), SPLITS)
def test_every_split_gives_the_dense_result_on_a_gpu(hit_share: float, cpu_share: float) -> None:
    pass_ = a_pass(2)
    hits, on_cpu = split(pass_, hit_share, cpu_share)
    out, wanted = outputs(hits, on_cpu, hits[::2], pass_, device="cuda", hidden=256)
    assert (out - wanted).norm() / wanted.norm() < 0.01


def test_where_an_expert_runs_changes_roundings_at_most() -> None:
    pass_ = a_pass(5)
    activated = np.unique(pass_.expert_ids).tolist()
    on_gpu, _ = outputs(activated, [], activated, pass_)
    copied, _ = outputs([], [], [], pass_)
    assert torch.equal(on_gpu, copied)
    on_cpu, _ = outputs([], activated, [], pass_)
    assert (on_gpu - on_cpu).norm() / on_gpu.norm() < 0.01


def test_the_grouped_kernel_runs_each_row_by_the_expert_of_its_slot() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate = 64, 32
    slots = (torch.randn(5, 3 * hidden * intermediate, generator=generator) * 0.1).to(torch.bfloat16)
    buffers, index = make_buffers(slots, 4, 1, hidden), Index(2, 3, 4, torch.device("cpu"))
    buffers.x.copy_(torch.randn(4, hidden, generator=generator))
    buffers.rows.fill_(7)
    ids = np.array([[7], [9], [9], [2]], np.int32)
    experts, ends, in_slots = np.array([9, 2, 7]), np.array([2, 3]), np.array([3, 0, 4], np.int32)
    arranged = index.array, index.layout, index.cpu_tokens, index.cpu_ends
    arrange(ids, experts, ends, in_slots, np.empty(0, np.int64), *arranged)
    expert_kernels(buffers, index, hidden, intermediate).run(0, 2)
    for token, slot in ((1, 3), (2, 3), (3, 0)):
        expected = swiglu(slots[slot], buffers.x[token])
        assert (buffers.rows[token].float() - expected).norm() / expected.norm() < 0.01
    assert (buffers.rows[0] == 7).all()
