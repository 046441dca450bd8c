"""Experts on the CPU: both kernels against a dense reference, and what they refuse."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from llvmlite import binding
from numba import carray, njit, types
from numba.extending import intrinsic
from replayed import swiglu

from policies import jit
from policies.profile import ProfileError
from replay import cpu_amx, cpu_experts
from replay.cpu_amx import tile_configurations
from replay.cpu_experts import KERNELS, Batch, CpuExperts, default_workers, instructions

HIDDEN, INTERMEDIATE = 96, 64


def make_batch(loads, *, seed=0, num_tokens=9, hidden=HIDDEN, intermediate=INTERMEDIATE):
    rng = np.random.default_rng(seed)
    draw = lambda *size: torch.from_numpy(rng.standard_normal(size)).to(torch.bfloat16)  # noqa: E731
    experts = [draw(3 * hidden * intermediate) * 0.1 for _ in loads]
    ends = np.cumsum(np.array(loads, np.int64), dtype=np.int64)
    num_rows = int(sum(loads))
    rows = rng.integers(0, num_tokens, num_rows)
    out = torch.full((num_rows, hidden), float("nan"), dtype=torch.bfloat16)
    return Batch(experts, ends, rows, draw(num_tokens, hidden), out)


def reference(batch):
    rows = np.split(batch.rows, batch.ends[:-1])
    return torch.cat([swiglu(expert, batch.hidden[each]) for expert, each in zip(batch.experts, rows, strict=True)])


def relative_error(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_equal_the_dense_reference(kernel, num_workers):
    rng = np.random.default_rng(1)
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=num_workers, kernel=kernel) as cpu:
        for seed in range(5):
            loads = rng.integers(0, 12, rng.integers(1, 9)).tolist()
            loads[0] += 1
            batch = make_batch(loads, seed=seed)
            cpu.start(batch)
            cpu.wait()
            assert relative_error(batch.out, reference(batch)) < 0.01  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_number_of_rows_of_one_expert(kernel):
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=2, kernel=kernel) as cpu:
        for load in range(1, 10):
            batch = make_batch([load], seed=load)
            cpu.start(batch)
            cpu.wait()
            assert relative_error(batch.out, reference(batch)) < 0.01


def test_a_row_does_not_depend_on_the_rest_of_its_batch():
    whole = make_batch([5, 3], seed=3)
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=2) as cpu:
        cpu.start(whole)
        cpu.wait()
        for place in range(5):
            alone = whole._replace(
                experts=whole.experts[:1],
                ends=np.array([1]),
                rows=whole.rows[place : place + 1],
                out=torch.empty(1, HIDDEN, dtype=torch.bfloat16),
            )
            cpu.start(alone)
            cpu.wait()
            assert torch.equal(alone.out[0], whole.out[place])


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_rows_than_any_batch_before(kernel):
    with CpuExperts(32, 32, num_workers=2, kernel=kernel) as cpu:
        batch = make_batch([300, 0, 301], hidden=32, intermediate=32)
        cpu.start(batch)
        cpu.wait()
        assert relative_error(batch.out, reference(batch)) < 0.01


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_empty_batch_is_no_work(kernel):
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=1, kernel=kernel) as cpu:
        cpu.start(make_batch([]))
        cpu.wait()
        cpu.start(make_batch([0, 0]))
        cpu.wait()


@intrinsic
def numbers_at(typing_context, address):
    """Pointer to what lies at an address, as uint16."""
    signature = types.CPointer(types.uint16)(types.int64)
    return signature, lambda context, builder, made, arguments: builder.inttoptr(
        arguments[0], context.get_value_type(made.return_type)
    )


@njit
def product_in_numbers(configuration, weights, weight_stride, x, out, num_words):
    """What `tile_product` is to do, without AMX."""
    num_tokens = carray(numbers_at(configuration), 32)[8] // 4
    of_x = carray(numbers_at(x), (num_words, 16, 2))
    found = carray(numbers_at(out), (16, 32)).view(np.float32)
    for row in range(16):
        of_row = carray(numbers_at(weights + row * weight_stride), (num_words, 2))
        for token in range(num_tokens):
            total = np.float32(0)
            for k in range(num_words):
                for half in range(2):
                    weight, number = np.uint32(of_row[k, half]) << 16, np.uint32(of_x[k, token, half]) << 16
                    total += np.uint32(weight).view(np.float32) * np.uint32(number).view(np.float32)
            found[row, token] = total


@pytest.fixture(scope="module")
def another_cpu():
    """The kernel made anew, without its cache, as on a CPU without AVX-512; tiles are multiplied in numbers."""
    features = {**binding.get_host_cpu_features(), "avx512bf16": False, "avx512f": False}
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr(jit, "cache_dir", lambda: None)  # also for what is compiled later, when it is called
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(binding, "get_host_cpu_features", lambda: features)
            for name in ("replay.cpu_amx", "replay.cpu_kernel"):
                spec = importlib.util.find_spec(name)
                made = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(made)
                patch.setitem(sys.modules, name, made)
                made.tile_product = product_in_numbers
        yield made


def test_without_bfloat16_instructions_the_results_are_right(another_cpu, monkeypatch):
    assert not another_cpu.HAS_BFLOAT16
    monkeypatch.setattr(cpu_experts, "run_batch", another_cpu.run_batch)
    monkeypatch.setattr(cpu_experts, "_TILES", tile_configurations()[:0])
    batch = make_batch([3, 6])
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=2) as cpu:
        cpu.start(batch)
        cpu.wait()
    assert relative_error(batch.out, reference(batch)) < 0.01


def test_tiles_of_many_rows_equal_the_dense_reference(another_cpu, monkeypatch):
    monkeypatch.setattr(cpu_experts, "run_batch", another_cpu.run_batch)
    monkeypatch.setattr(cpu_amx, "HAS_AMX", True)
    monkeypatch.setattr(cpu_experts, "HAS_AMX", True)
    monkeypatch.setattr(cpu_experts, "_TILES", tile_configurations())
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=2) as cpu:
        for seed, loads in enumerate([[5], [16], [17], [3, 40, 1, 0, 7], [33] * 8, [5] * 51]):
            batch = make_batch(loads, seed=seed)
            cpu.start(batch)
            cpu.wait()
            assert relative_error(batch.out, reference(batch)) < 0.01


def test_tiles_are_as_large_as_their_tokens(monkeypatch):
    monkeypatch.setattr(cpu_amx, "HAS_AMX", True)
    made = tile_configurations()
    assert made.shape == (17, 64)
    assert made[5, 0] == 1
    assert made[5, 16:22].tolist() == [20, 0, 64, 0, 20, 0]
    assert made[5, 48:51].tolist() == [16, 16, 16]
    assert made[5, 51:].sum() == 0


def test_a_batch_at_a_time():
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=1) as cpu:
        with pytest.raises(ProfileError, match="no batch of CPU experts was started"):
            cpu.wait()
        cpu.start(make_batch([1]))
        with pytest.raises(ProfileError, match="is running: wait for it first"):
            cpu.start(make_batch([1]))
        cpu.wait()


def test_an_error_of_a_worker_is_raised_where_it_is_waited_for(monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(cpu_experts, "run_batch", fail)
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=1) as cpu:
        cpu.start(make_batch([1]))
        with pytest.raises(MemoryError, match="no room"):
            cpu.wait()
        cpu.start(make_batch([]))  # and it goes on
        cpu.wait()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ends": np.array([1, 4])}, "2 experts and 3 rows has ends"),
        ({"ends": np.array([3])}, "2 experts and 3 rows has ends"),
        ({"ends": np.array([4, 3])}, "2 experts and 3 rows has ends"),
        ({"rows": np.array([0, 9, 1])}, "rows of a batch must be from 0 to 8"),
        ({"rows": np.array([0, -1, 1])}, "rows of a batch must be from 0 to 8"),
        ({"hidden": torch.zeros(9, HIDDEN)}, r"hidden of a batch is \[9, 96\] of torch.float32"),
        ({"out": torch.zeros(2, HIDDEN, dtype=torch.bfloat16)}, r"out of a batch is .*must be \[3, 96\]"),
        ({"experts": [torch.zeros(5, dtype=torch.bfloat16)] * 2}, "expert 0 of the batch: 5 numbers .* must be 18432"),
    ],
)
def test_what_is_not_a_batch_is_refused(changes, message):
    with CpuExperts(HIDDEN, INTERMEDIATE, num_workers=1) as cpu, pytest.raises(ProfileError, match=message):
        cpu.start(make_batch([1, 2])._replace(**changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "0 CPU workers: must be from 1 to"),
        ({"num_workers": 10**6}, "1000000 CPU workers: must be from 1 to"),
        ({"kernel": "fast"}, "CPU kernel 'fast': allowed are rows, onednn"),
        ({"hidden": 100}, "CPU kernel rows: sizes 100 and 64 must be multiples of 32"),
    ],
)
def test_what_cannot_run_is_refused(arguments, message):
    with pytest.raises(ProfileError, match=message):
        CpuExperts(**{"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_workers": 1, **arguments})


def test_sizes_beyond_registers_run_through_onednn():
    with CpuExperts(20, 12, num_workers=1, kernel="onednn") as cpu:
        batch = make_batch([2, 3], hidden=20, intermediate=12)
        cpu.start(batch)
        cpu.wait()
        assert relative_error(batch.out, reference(batch)) < 0.01


def test_what_the_machine_has_is_said_and_a_core_is_left():
    assert "AMX" in instructions()
    assert default_workers() >= 1
