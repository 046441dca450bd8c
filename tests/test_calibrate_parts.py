"""What a calibration measures of a machine by itself, where costs are known: fits, copies, the link, GPU and CPU."""

import itertools
import subprocess

import numpy as np
import pytest
import torch
from faked import FakeDevice, at

from policies.profile import ProfileError
from replay import cpu_experts, link_state
from replay.arena import MIB
from replay.calibrate import machine_of
from replay.calibrate_cpu import CpuBatches, choose_kernel, read_bytes_per_s
from replay.calibrate_gpu import flops_per_s, measure_layer, row_ns
from replay.calibrate_link import CopyRate, HostPool, PlainCopies, demand_rate, measure_copies
from replay.devices import open_device
from replay.fits import fit, rate_of
from replay.link_state import LinkState, busy_link, check_link, check_unchanged
from replay.repeats import Repeated, repeated, repeated_by_size


def test_a_fit_finds_the_costs_it_was_made_from():
    experts, rows = (np.array(column) for column in zip(*itertools.product([1, 4, 16], [1, 2, 8]), strict=True))
    found = fit([1, experts, experts * rows], 50_000 + 150_000 * experts + 5_000 * experts * rows)
    assert found.coefficients == pytest.approx([50_000, 150_000, 5_000], rel=1e-9)
    assert found.max_error < 1e-12


def test_a_fit_of_copies_through_the_probes_of_an_h200():
    sizes = np.array([6, 24]) * MIB
    found = fit([1, sizes], [117_000, 458_000])
    assert found.coefficients[0] == pytest.approx(3_333, abs=1)
    assert 1e9 / found.coefficients[1] == pytest.approx(55.35e9, rel=1e-3)


def test_noise_moves_a_fit_little_and_is_told():
    rng = np.random.default_rng(0)
    sizes = np.linspace(1, 50, 40) * MIB
    times = (3_000 + sizes / 55.0) * rng.normal(1, 0.01, 40)
    found = fit([1, sizes], times)
    assert 1 / found.coefficients[1] == pytest.approx(55.0, rel=0.01)
    assert 0.002 < found.mean_error < 0.02
    assert found.max_error == np.abs(found.errors).max()


def test_a_rate_below_nothing_is_nothing_and_the_others_are_fitted_anew():
    found = fit([1, [1, 2, 3, 4], [4, 3, 2, 1]], [10, 20, 30, 40])
    assert found.coefficients == pytest.approx([0, 10, 0])
    falling = fit([1, [1, 2, 3]], [30, 30, 29])
    assert falling.coefficients[1] == 0
    assert falling.coefficients[0] == pytest.approx(29.66, abs=0.01)


@pytest.mark.parametrize(
    ("columns", "times", "message"),
    [([1, [1], [2]], [5], "1 measurements for 3 coefficients"), ([1], [5, 0], "times must be above 0 ns, found 0")],
)
def test_what_cannot_be_fitted_is_refused(columns, times, message):
    with pytest.raises(ProfileError, match=message):
        fit(columns, times)


def test_batches_of_the_worked_example():
    times = {(n, n * load): at(50_000 + n * (150_000 + 5_000 * load)) for n in (1, 3) for load in (1, 2)}
    found = rate_of(times)
    assert found.coefficients_ns == pytest.approx((50_000, 150_000, 5_000))
    assert found.ns(3, 6) == pytest.approx(50_000 + 3 * 150_000 + 6 * 5_000)


def test_median_spread_and_mean():
    assert Repeated.of([1, 2, 3, 4, 5]) == (3, 2 / 3, 3)
    assert Repeated.of([1, 1, 4]) == (1, 1.5, 2)


def test_a_mean_leaves_out_the_largest_and_the_smallest_sixteenth():
    times = [-1e6, *range(1, 31), 1e9]
    assert Repeated.of(times).mean_ns == np.mean([*range(1, 31)])
    assert Repeated.of(times[1:]).mean_ns == pytest.approx(np.mean([*range(2, 31)]))


def test_the_first_repeat_is_left_out_and_sizes_take_turns():
    times = iter([100, 1, 2, 3, 4, 5])
    assert repeated(lambda: next(times), 5) == (3, 2 / 3, 3)
    asked = []

    def time_ns(size):
        asked.append(size)
        return size * len(asked)

    found = repeated_by_size(time_ns, [1, 10], 2)
    assert asked == [10, 1, 1, 10, 10, 1]
    assert {size: time.median_ns for size, time in found.items()} == {1: (3 + 6) / 2, 10: (40 + 50) / 2}


def test_copies_of_a_known_link():
    device = FakeDevice(copy_latency_ns=3_300, copy_bytes_per_s=55e9)
    copies, pool = PlainCopies(device, 4 * MIB, 4), HostPool(16 * MIB, pinned=False)
    rate = measure_copies(copies, pool, [MIB // 4, MIB, 4 * MIB], repeats=2, num_copies=3)
    assert rate.latency_ns == pytest.approx(3_300, abs=2)
    assert rate.bytes_per_s == pytest.approx(55e9, rel=1e-4)
    assert rate.copy_ns(MIB) == pytest.approx(3_300 + MIB / 55, abs=2)
    assert rate.max_error < 1e-3
    assert {time.spread for time in rate.times.values()} == {0}


def test_larger_copies_that_take_no_longer_are_no_bandwidth():
    device = FakeDevice(copy_latency_ns=3_300, copy_bytes_per_s=1e30)
    copies, pool = PlainCopies(device, MIB, 4), HostPool(8 * MIB, pinned=False)
    with pytest.raises(ProfileError, match=r"larger copies take no longer, .*: 0.25 MiB in 3 us, 1 MiB in 3 us"):
        measure_copies(copies, pool, [MIB // 4, MIB], repeats=1, num_copies=3)


def test_copies_from_memory_to_memory():
    device = open_device("cpu")
    copies, pool = PlainCopies(device, MIB, 4), HostPool(8 * MIB, pinned=False)
    sources = [pool.take(MIB) for _ in range(4)]
    times = copies.times_ns(sources)
    device.close()
    assert len(times) == 3
    assert min(times) > 0
    assert all(torch.equal(copies.slots[i], source) for i, source in enumerate(sources))


PLAIN = CopyRate(3_000.0, 55e9, 0.0, 0.0, {})


def test_copies_of_plans_have_a_rate_of_their_own():
    found = demand_rate({6 * MIB: at(6_000 + 6 * MIB / 50), 12 * MIB: at(6_000 + 12 * MIB / 50)}, PLAIN)
    assert found.latency_ns == pytest.approx(6_000)
    assert found.bytes_per_s == pytest.approx(50e9)
    assert found.max_error < 1e-9


def test_noise_in_copies_of_plans_leaves_the_bandwidth_of_plain_ones():
    found = demand_rate({6 * MIB: at(130_000.0), 12 * MIB: at(120_000.0)}, PLAIN)
    assert found.bytes_per_s == 55e9
    assert found.latency_ns == max(0.0, 125_000 - 9 * MIB / 55)
    assert 0 < found.mean_error <= found.max_error


class OneLayer:
    """Of a machine what a layer's start needs, on a device that takes a known time for it."""

    class layout:  # noqa: N801
        num_layers = 3

    def __init__(self, device, time_of):
        self.device, self._time_of, self.started = device, time_of, []

    def start_layer(self, number, layer):
        self.started.append((number, layer))
        self.device.compute.busy(self._time_of(number))


def test_a_layers_start_of_known_cost():
    sizes = list(itertools.product([4, 16], [0, 512]))
    costs = [200_000 + 400 * tokens + 30 * kv_len for tokens, kv_len in sizes]
    machine = OneLayer(FakeDevice(), lambda number: costs[number - 7])
    found = measure_layer(machine, 7, sizes, repeats=2, count=5)
    assert {size: time.mean_ns for size, time in found.items()} == dict(zip(sizes, costs, strict=True))
    assert rate_of(found).coefficients_ns == pytest.approx((200_000, 400, 30))
    assert {layer for _, layer in machine.started} == {0, 1, 2}  # whose weights no cache holds


def test_a_row_of_launches_does_not_count_the_first():
    device = FakeDevice()
    times = iter([1_000_000, 10, 20, 30])
    assert row_ns(device, lambda _: device.compute.busy(next(times)), 3) == 20


def test_a_rate_of_arithmetic():
    device = open_device("cpu")
    assert flops_per_s(device, 1, 2) > 1e6
    device.close()


def test_the_faster_kernel_and_its_workers_are_chosen(monkeypatch):
    batches = CpuBatches(64, 32, HostPool(MIB, pinned=False))

    def grid(kernel, workers, sizes, repeats):
        ns = {"rows": 1000, "onednn": 4000}[kernel] / workers
        return {size: at(size[0] * ns) for size in sizes}

    monkeypatch.setattr(batches, "grid", grid)
    found = choose_kernel(batches, 8, (4, 8), (1, 2), 1)
    assert (found.kernel, found.num_workers) == ("rows", 8)
    assert found.by_kernel == pytest.approx({"rows": 8 * 6 * 64 * 32 * 1e6, "onednn": 2 * 6 * 64 * 32 * 1e6})
    assert found.by_workers == pytest.approx({n: n * 6 * 64 * 32 * 1e6 for n in (2, 4, 8)})
    assert found.bytes_per_s == found.by_kernel["rows"]


def test_a_shape_that_our_kernel_does_not_take_runs_on_the_other():
    batches = CpuBatches(48, 24, HostPool(MIB, pinned=False))  # no multiples of what our kernel needs
    found = choose_kernel(batches, 1, (1, 2), (1,), 1)
    assert set(found.by_kernel) == {"onednn"}


def test_memory_is_read_in_a_thread_of_its_own():
    before = torch.get_num_threads()
    assert read_bytes_per_s(HostPool(8 * MIB, pinned=False), 1) > 1e6
    assert torch.get_num_threads() == before


def test_a_pool_is_walked_through_from_end_to_end():
    pool = HostPool(8 * MIB, pinned=False)
    pieces = [pool.take(3 * MIB).data_ptr() - pool.memory.data_ptr() for _ in range(4)]
    assert pieces == [0, 3 * MIB, 0, 3 * MIB]
    assert pool.memory.float().std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, where so little can be pinned")
def test_memory_that_cannot_be_pinned_is_named():
    with pytest.raises(ProfileError, match=r"8 MiB of host memory could not be pinned: .*ulimit -l"):
        HostPool(8 * MIB, pinned=True)


def test_memory_that_is_not_there_is_named_with_what_was_needed():
    with pytest.raises(ProfileError, match=r"1099511627776 MiB of host memory could not be allocated: .*--pool-mib"):
        HostPool(2**60, pinned=False)


FAST = LinkState(5, 16, 5, 16)


SLOW = LinkState(1, 16, 5, 16)


def test_a_link_that_trained_down_is_refused():
    check_link(FAST, "--slow-link")
    check_link(None, "--slow-link")
    with pytest.raises(ProfileError, match=r"runs at PCIe 1.0 x16 while it is busy, .*at PCIe 5.0 x16.*--slow-link"):
        check_link(SLOW, "--slow-link")


def test_a_link_that_changed_is_refused():
    check_unchanged(SLOW, SLOW)
    check_unchanged(None, None)
    with pytest.raises(ProfileError, match=r"changed while it was measured, from PCIe 5.0 x16 to PCIe 1.0 x16"):
        check_unchanged(FAST, SLOW)


def test_a_link_that_nobody_can_tell_of(monkeypatch):
    def fail(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(link_state.subprocess, "run", fail)
    assert link_state._from_nvidia_smi("GPU-0") is None


@pytest.mark.parametrize(
    ("answer", "state"), [("5, 16, 5, 16\n", FAST), ("[N/A], 16, 5, 16\n", None), ("5, 16\n", None)]
)
def test_what_nvidia_smi_says(monkeypatch, answer, state):
    done = subprocess.CompletedProcess([], 0, stdout=answer)
    monkeypatch.setattr(link_state.subprocess, "run", lambda *_, **__: done)
    assert link_state._from_nvidia_smi("GPU-0") == state


def test_the_link_is_read_while_copies_run(monkeypatch):
    device, memory = FakeDevice(1000, where="cuda"), torch.zeros(2, 8)
    monkeypatch.setattr(link_state, "read_link", lambda where: FAST if device.copies.now_ns else None)
    assert busy_link(device, *memory) == FAST
    assert busy_link(FakeDevice(), *memory) is None


@pytest.mark.parametrize(
    ("has_amx", "has_bfloat16", "words"),
    [(True, True, "(AMX)"), (False, True, "(no AMX, AVX-512 BF16)"), (False, False, "(no AMX and no AVX-512 BF16,")],
)
def test_a_cpu_without_matrix_instructions_is_told(has_amx, has_bfloat16, words, monkeypatch):
    monkeypatch.setattr(cpu_experts, "HAS_AMX", has_amx)
    monkeypatch.setattr(cpu_experts, "HAS_BFLOAT16", has_bfloat16)
    assert words in machine_of(torch.device("cpu"), None)
