"""Calibration: fits of known costs, profiles as YAML, and the whole command on a machine without a GPU."""

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from faked import FakeDevice

from experiments import calibrate as command
from experiments.calibrate import profile_as_yaml, write_profile
from experiments.calibrate_policies import read_routing
from experiments.profiles import load_profile, load_shape, names, profile_from_dict
from policies.profile import ProfileError
from replay import calibrate, cpu_experts, link_state
from replay.arena import MIB
from replay.calibrate import Measured, ShapeMeasured, machine_of
from replay.calibrate_costs import LayerCosts, Slowdowns
from replay.calibrate_cpu import CpuBatches, CpuChoice, choose_kernel, read_bytes_per_s
from replay.calibrate_gpu import flops_per_s, measure_layer, row_ns
from replay.calibrate_layers import Layers
from replay.calibrate_link import CopyRate, HostPool, PlainCopies, demand_rate, measure_copies
from replay.calibrate_plans import Design
from replay.calibrate_settings import QUICK
from replay.calibrated import notes_of, profile_of
from replay.devices import open_device
from replay.fits import Rate, fit, rate_of
from replay.link_state import LinkState, busy_link, check_link, check_unchanged
from replay.repeats import Repeated, repeated, repeated_by_size

TINY = {
    "layer_ids": [1, 2],
    "num_experts": 16,
    "top_k": 4,
    "hidden": 128,
    "expert_intermediate": 64,
    "weight_dtype": "bfloat16",
    "gate_scale": 2.5,
    "num_shared_experts": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab": 512,
    "dense_intermediate": 128,
    "num_dense_layers": 1,
}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(TINY))  # JSON is YAML
    return path


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


def at(time_ns, spread=0.0):
    return Repeated(time_ns, spread, time_ns)


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


@pytest.mark.parametrize("name", ["hidden", "vocab", "head_dim"])
def test_a_shape_that_is_not_known_in_full_is_refused(name, tiny):
    shape = dataclasses.replace(load_shape(str(tiny)), **{name: 0})
    with pytest.raises(ProfileError, match=f"the shape does not say {name}"):
        calibrate.calibrate([shape], "cpu", QUICK, print)


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


def test_a_link_that_trained_down_is_refused_before_anything_is_measured(tiny, monkeypatch):
    class ReachedError(Exception):
        pass

    def measure(*_):
        raise ReachedError

    monkeypatch.setattr(calibrate, "busy_link", lambda *_: SLOW)
    monkeypatch.setattr(calibrate, "measure_copies", measure)
    shapes = [load_shape(str(tiny))]
    with pytest.raises(ProfileError, match="trained down"):
        calibrate.calibrate(shapes, "cpu", QUICK, print)
    with pytest.raises(ReachedError):
        calibrate.calibrate(shapes, "cpu", QUICK, print, allow_slow_link=True)


@pytest.mark.parametrize(
    ("has_amx", "has_bfloat16", "words"),
    [(True, True, "(AMX)"), (False, True, "(no AMX, AVX-512 BF16)"), (False, False, "(no AMX and no AVX-512 BF16,")],
)
def test_a_cpu_without_matrix_instructions_is_told(has_amx, has_bfloat16, words, monkeypatch):
    monkeypatch.setattr(cpu_experts, "HAS_AMX", has_amx)
    monkeypatch.setattr(cpu_experts, "HAS_BFLOAT16", has_bfloat16)
    assert words in machine_of(torch.device("cpu"), None)


def measured(shapes=("llada2.0-mini", "llada2.0-flash")):
    """Measurements as they would be of a machine whose costs are known."""
    time = at(1000.0, 0.01)

    def rate(*coefficients):
        return Rate(coefficients, 0.01, 0.02, {(1, 1): time})

    found = []
    for name, size in zip(shapes, (6, 24), strict=False):
        costs = LayerCosts(
            layer_ns={},
            gate_sync_ns=12_000.0 + size,
            first_copy_ns=5_000.0,
            kernel=rate(20_000.0, 1.5 * size * MIB / 3000, 1.0),
            hits=rate(50_000.0, size * MIB / 3000, 1.0),
            copy=at(4_000.0 + size * MIB / 50, 0.01),
            cpu=rate(50e3, 1e5 * size, 2e3),
            roundtrip_ns=20_000.0,
            after_cpu_ns=8_000.0,
            slowdowns=Slowdowns(1.5, 0.98),
            tail=Repeated(390_000.0, 0.01, 400_000.0),
            decide_ns=4_000.0,
            errors={Design(16, 0, 8): 0.01, Design(16, 0, 16): -0.03},
        )
        cpu = CpuChoice("rows", 15, {"rows": 6e10}, {15: 6e10})
        layers = Layers(rate(100_000.0, 50.0, 2.0), costs, {size * MIB: costs.copy})
        found.append(ShapeMeasured(load_shape(name), cpu, layers))
    plain = CopyRate(3_333.4, 55.345678e9, 0.01, 0.03, {MIB: time})
    pageable = CopyRate(9_000.0, 8.5e9, 0.1, 0.2, {MIB: time})
    demand = CopyRate(4_000.4, 50.345678e9, 0.01, 0.03, {s * MIB: at(4_000.0 + s * MIB / 50) for s in (6, 12)})
    return Measured("a machine", FAST, 1e11, plain, pageable, demand, 7e14, tuple(found))


def test_a_profile_of_what_was_measured():
    profile = profile_of(measured(), "mine", "2026-01-02", {"default": 9_999.6, "lru": 5_000.0}, 0.05)
    assert profile.provenance == "measured"
    assert not profile.provisional
    assert (profile.h2d_latency_ns, profile.h2d_bytes_per_s) == (4000, 50.35e9)  # of plans, not of plain copies
    assert profile.h2d_pageable_bytes_per_s == 8.5e9
    assert (profile.h2d_slowdown, profile.cpu_slowdown) == (1.5, 1.0)  # 0.98 is noise
    assert profile.gate_sync_ns == 12_015  # mean of 12006 and 12024
    assert profile.cpu_roundtrip_ns == 20_000
    assert profile.transfer_chunk == 4
    assert profile.policy_ns == {"default": 10_000, "lru": 5_000}
    mini = load_shape("llada2.0-mini")
    costs = profile.costs(mini, mini.expert_bytes(), "oled")
    assert costs[:6] == (1e5, 50.0, 2.0, 2e4, 3145.73, 1.0)
    assert (costs.cpu_a_ns, costs.cpu_b0_ns, costs.cpu_b1_ns, costs.tail_ns) == (50e3, 6e5, 2e3, 400_000)
    assert profile.provenance_at(mini, mini.expert_bytes("fp8")) == "roofline"
    assert profile.costs(mini, mini.expert_bytes("fp8"), "oled").cpu_b0_ns == pytest.approx(2.4e6 / 8, rel=1e-3)
    assert profile.fit_errors["shapes[1].cpu_max"] == 0.02
    assert (profile.fit_errors["shapes[0].layer_mean"], profile.fit_errors["shapes[0].layer_max"]) == (0.02, 0.03)
    assert profile.fit_errors["policy_ns_spread"] == 0.05
    assert "policy_ns" in profile_of(measured(), "mine", "2026-01-02", {}).assumed


def with_costs(found, **changes):
    """The same measurements with other costs at all shapes."""
    return found._replace(
        shapes=tuple(
            each._replace(layers=each.layers._replace(costs=each.layers.costs._replace(**changes)))
            for each in found.shapes
        )
    )


def test_rates_for_other_shapes_are_of_the_kernel_alone():
    roofline = profile_of(measured(), "mine", "2026-01-02", {}).roofline
    assert roofline.gpu_bytes_per_s == 3e12
    assert roofline.cpu_bytes_per_s == pytest.approx(24 * MIB / 2.4e-3, rel=1e-3)
    assert roofline.cpu_start_ns == 50_000


def test_arithmetic_that_did_not_show_on_the_cpu_is_charged_next_to_nothing():
    found = measured()
    free = with_costs(found, cpu=Rate((50e3, 1e5, 0.0), 0.0, 0.0, {}))
    assert profile_of(free, "mine", "2026-01-02", {}).roofline.cpu_flops_per_s == 1e15
    assert profile_of(found, "mine", "2026-01-02", {}).roofline.cpu_flops_per_s == 3.146e12  # 6 MiB in 2 us


def test_the_roofline_follows_from_the_shapes_of_a_shipped_profile():
    profile = load_profile("h200")
    shown = max(s.cpu_b1_ns / s.expert_bytes for s in profile.shapes)  # ns a byte, or for each operation of two
    assert profile.roofline.cpu_flops_per_s == pytest.approx(1e9 / shown, rel=1e-3)
    largest = max(profile.shapes, key=lambda s: s.expert_bytes)
    assert profile.roofline.cpu_bytes_per_s == pytest.approx(largest.expert_bytes * 1e9 / largest.cpu_b0_ns, rel=1e-3)
    assert profile.roofline.cpu_start_ns == largest.cpu_a_ns


def test_without_a_rate_of_experts_there_is_no_roofline():
    flat = with_costs(measured(), hits=Rate((20_000.0, 0.0, 1.0), 0.0, 0.0, {}))
    assert profile_of(flat, "mine", "2026-01-02", {}).roofline is None


def test_notes_say_how_plans_copies_stand_to_plain_ones():
    notes = notes_of(measured())
    plain = 3_333.4 + 6 * MIB / 55.345678
    assert f"6 MiB: {plain / (4_000 + 6 * MIB / 50):.1%} of the rate of plain copies." in notes
    assert "2 designs of layers by these costs: off by 2.0% on average, 3.0% at most. Mean error:" in notes
    assert "  with hits alone -1.0%" in notes


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile = profile_of(measured(), "mine", "2026-01-02", {"default": 10_000})
    path = tmp_path / "mine.yaml"
    write_profile(path, profile, notes_of(measured()))
    assert load_profile(path) == profile
    text = path.read_text()
    assert "# Host memory is read at 100.0 GB/s by all cores. Link while busy: PCIe 5.0 x16." in text
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= 140
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", names("hardware"))
def test_shipped_profiles_survive_being_written(name):
    profile = load_profile(name)
    assert profile_from_dict(yaml.safe_load(profile_as_yaml(profile, ["a note"])), name) == profile


def test_what_would_be_read_otherwise_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "profile_as_yaml", lambda *_: profile_as_yaml(load_profile("rtx5090"), []))
    with pytest.raises(ProfileError, match="not written, the text would be read as another profile"):
        write_profile(tmp_path / "mine.yaml", load_profile("h200"), [])
    assert not list(tmp_path.iterdir())


def run(*arguments):
    command.main([str(argument) for argument in arguments])


QUICKLY = ("--device", "cpu", "--quick", "--policy", "moe_infinity", "--forwards", "4")


def test_the_whole_command_without_a_gpu(tmp_path, tiny, capsys):
    path = tmp_path / "mine.yaml"
    run(path, "--shape", tiny, *QUICKLY)
    profile, shape = load_profile(path), load_shape(str(tiny))
    assert profile.provenance == "measured"
    text = path.read_text()
    assert f"oled-calibrate {path} --shape {tiny} {' '.join(QUICKLY)}" in text
    assert "no GPU, memory copied to memory" in profile.machine
    assert set(profile.policy_ns) == {"default", "moe_infinity"}
    assert profile.cpu_kernel in ("rows", "onednn")
    assert profile.cpu_workers == QUICK.num_workers
    assert profile.provenance_at(shape, shape.expert_bytes()) == "measured"
    assert min(profile.costs(shape, shape.expert_bytes(), "oled")) >= 0
    shown = capsys.readouterr()
    assert f"use it with hardware.path={path}" in shown.out
    assert "CPU batch" in shown.err
    with pytest.raises(SystemExit):
        run(path, "--shape", tiny, *QUICKLY)
    assert "exists already; --overwrite replaces it" in capsys.readouterr().err


def test_policies_run_on_forwards_that_comparisons_do_not_reach():
    routing = read_routing(["lru"], 16)
    assert len(routing.passes) == 16
    assert {int(pass_.requests[0]) for pass_ in routing.passes} == {2}
    assert routing.passes[-1].pass_id == 204  # of 205, 103 of them of this request
    assert not any(pass_.is_prefill for pass_ in routing.passes)
    assert list(routing.policies) == ["lru"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.txt"], "x.txt: must end in .yaml"),
        (["no-such/x.yaml"], "no-such: no such directory"),
        (["x.yaml", "--shape", "llada3"], "'llada3': not known"),
        (["x.yaml", "--policy", "lruu"], "policy 'lruu': not known; did you mean lru?"),
        (["x.yaml", "--pool-mib", "0"], "--pool-mib 0: must be at least 1"),
        (["x.yaml", "--forwards", "3"], "--forwards 3: must be more than 3, which are not counted"),
        (["x.yaml", "--policy", "ideal_min"], "ideal_min is a bound, which no hardware runs"),
        (["x.yaml", "--device", "cpu", "--quick", "--workers", "9999"], "9999 CPU workers: must be from 1 to"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, message, tmp_path, monkeypatch, capsys, tiny):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    if "--shape" not in arguments:
        arguments = [*arguments, "--shape", tiny]
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path / "x.yaml", "--device", "cuda")
    assert "PyTorch finds no CUDA device" in capsys.readouterr().err


def test_an_interrupt_leaves_no_profile(tmp_path, tiny):
    code = "import sys; from experiments.calibrate import main; main(sys.argv[1:])"
    arguments = [str(tmp_path / "x.yaml"), "--shape", str(tiny), *QUICKLY, "--pool-mib", "512"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    assert "host memory" in process.stderr.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "oled-calibrate: interrupted" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == [tiny]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_whole_command_with_a_gpu(tmp_path):
    shape = tmp_path / "small.yaml"
    shape.write_text(json.dumps({**TINY, "hidden": 256, "expert_intermediate": 128}))  # multiples of what kernels take
    run(tmp_path / "mine.yaml", "--shape", shape, "--quick", "--policy", "lru", "--forwards", "4")
    assert "PCIe" in load_profile(tmp_path / "mine.yaml").machine
