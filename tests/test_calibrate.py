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

from experiments import calibrate as command
from experiments.calibrate import profile_as_yaml, write_profile
from experiments.profiles import load_profile, load_shape, names, profile_from_dict
from policies.profile import ProfileError
from replay import link_state
from replay.arrange import Index
from replay.calibrate import QUICK, Measured, ShapeMeasured
from replay.calibrate_cpu import CpuRate, Slowdowns, fit_batches
from replay.calibrate_gpu import Clock, GpuRate
from replay.calibrate_link import MIB, CopyRate, HostPool, Link, measure_copies
from replay.calibrate_parts import LLaDA2Parts
from replay.calibrated import notes_of, profile_of
from replay.expert_kernel import expert_kernels, make_buffers
from replay.fits import fit
from replay.link_state import LinkState, check_link
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
    times = {(n, load): Repeated(50_000 + n * (150_000 + 5_000 * load), 0) for n in (1, 3) for load in (1, 2)}
    assert fit_batches(times).coefficients == pytest.approx([50_000, 150_000, 5_000])


def test_median_and_spread():
    assert Repeated.of([1, 2, 3, 4, 5]) == (3, 2 / 3)


def test_the_first_repeat_is_left_out_and_sizes_take_turns():
    times = iter([100, 1, 2, 3, 4, 5])
    assert repeated(lambda: next(times), 5) == (3, 2 / 3)
    asked = []

    def time_ns(size):
        asked.append(size)
        return size * len(asked)

    found = repeated_by_size(time_ns, [1, 10], 2)
    assert asked == [10, 1, 1, 10, 10, 1]
    assert {size: time.median_ns for size, time in found.items()} == {1: (3 + 6) / 2, 10: (40 + 50) / 2}


def test_copies_from_memory_to_memory():
    pool = HostPool(8 * MIB, pinned=False)
    link = Link(torch.device("cpu"), MIB, 4)
    rate = measure_copies(link, pool, [MIB // 4, MIB], repeats=2, num_copies=3)
    assert set(rate.times) == {MIB // 4, MIB}
    assert rate.bytes_per_s > 0
    assert rate.latency_ns >= 0


def test_a_pool_is_walked_through_from_end_to_end():
    pool = HostPool(8 * MIB, pinned=False)
    pieces = [pool.take(3 * MIB).data_ptr() - pool.memory.data_ptr() for _ in range(4)]
    assert pieces == [0, 3 * MIB, 0, 3 * MIB]
    assert pool.memory.float().std() == pytest.approx(0.02, rel=0.05)


def test_memory_that_is_not_there_is_named_with_what_was_needed():
    with pytest.raises(ProfileError, match=r"1099511627776 MiB of host memory could not be allocated: .*--pool-mib"):
        HostPool(2**60, pinned=False)


def test_the_grouped_kernel_runs_each_row_by_the_expert_of_its_slot():
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate = 64, 32
    slots = (torch.randn(5, 3 * hidden * intermediate, generator=generator) * 0.1).to(torch.bfloat16)
    buffers, index = make_buffers(slots, 4, 1, hidden), Index(2, 3, 4, torch.device("cpu"))
    buffers.x.copy_(torch.randn(4, hidden, generator=generator))
    buffers.rows.fill_(7)
    ids = np.array([[7], [9], [9], [2]], np.int32)
    index.write(ids, np.array([9, 2, 7]), np.array([2, 3]), np.array([3, 0, 4], np.int32), np.empty(0, np.int64))
    expert_kernels(buffers, index, hidden, intermediate).run(0, 2)
    for token, slot in ((1, 3), (2, 3), (3, 0)):
        gate, up, down = slots[slot].float().view(3, -1)
        x = buffers.x[token].float()
        middle = torch.nn.functional.silu(gate.view(intermediate, hidden) @ x) * (up.view(intermediate, hidden) @ x)
        expected = down.view(hidden, intermediate) @ middle
        assert (buffers.rows[token].float() - expected).norm() / expected.norm() < 0.01
    assert (buffers.rows[0] == 7).all()


def test_parts_of_a_forward_run(tiny):
    parts, clock = LLaDA2Parts(load_shape(str(tiny)), torch.device("cpu"), num_slots=8), Clock(torch.device("cpu"))
    with torch.inference_mode():
        for run in (parts.layer(3, 5), parts.kernel(2, 4), parts.tail(3), parts.read_gate(3), parts.return_rows(2)):
            assert clock.device_ns(run, 2) > 0


@pytest.mark.parametrize("name", ["hidden", "vocab", "head_dim"])
def test_a_shape_that_is_not_known_in_full_is_refused(name, tiny):
    shape = dataclasses.replace(load_shape(str(tiny)), **{name: 0})
    with pytest.raises(ProfileError, match=f"the shape does not say {name}"):
        LLaDA2Parts(shape, torch.device("cpu"))


FAST = LinkState(5, 16, 5, 16)


def test_a_link_that_changed_or_trained_down_is_refused():
    check_link(FAST, FAST)
    check_link(None, None)
    slow = LinkState(1, 16, 5, 16)
    with pytest.raises(ProfileError, match=r"changed while it was measured, from PCIe 5.0 x16 to PCIe 1.0 x16"):
        check_link(FAST, slow)
    with pytest.raises(ProfileError, match=r"runs at PCIe 1.0 x16 while it is busy, and could at PCIe 5.0 x16"):
        check_link(slow, slow)
    check_link(slow, slow, allow_slow=True)
    with pytest.raises(ProfileError, match="changed while it was measured"):
        check_link(FAST, slow, allow_slow=True)


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


def measured(shapes=("llada2.0-mini", "llada2.0-flash")):
    """Measurements as they would be of a machine whose costs are known."""
    time = Repeated(1000.0, 0.01)
    found = [
        ShapeMeasured(
            shape=load_shape(name),
            layer=GpuRate((100_000.0, 50.0, 2.0), 0.01, 0.02, {(16, 0): time}),
            kernel=GpuRate((20_000.0, size * MIB / 3000, 1.0), 0.01, 0.02, {(1, 1): time}),
            tail=Repeated(400_000.0, 0.01),
            gate_sync=Repeated(12_000.0 + size, 0.01),
            roundtrip=Repeated(20_000.0, 0.01),
            cpu=CpuRate("rows", 15, 50e3, 1e5 * size, 2e3, 0.01, 0.02, {(1, 1): time}, {"rows": 6e10}, {15: 6e10}),
            slowdowns=Slowdowns(1.5, 0.98),
        )
        for name, size in zip(shapes, (6, 24), strict=True)
    ]
    rate = CopyRate(3_333.4, 55.345678e9, 0.01, 0.03, {MIB: time})
    return Measured("a machine", FAST, 1e11, rate, rate, 7e14, tuple(found))


def test_a_profile_of_what_was_measured():
    profile = profile_of(measured(), "mine", "2026-01-02", {"default": 9_999.6, "lru": 5_000.0}, 0.05)
    assert profile.provenance == "measured"
    assert not profile.provisional
    assert (profile.h2d_latency_ns, profile.h2d_bytes_per_s) == (3333, 55.35e9)
    assert (profile.h2d_slowdown, profile.cpu_slowdown) == (1.5, 1.0)  # 0.98 is noise
    assert profile.gate_sync_ns == 12_015  # mean of 12006 and 12024
    assert profile.policy_ns == {"default": 10_000, "lru": 5_000}
    mini = load_shape("llada2.0-mini")
    assert profile.costs(mini, mini.expert_bytes(), "oled")[:6] == (1e5, 50.0, 2.0, 2e4, 2097.15, 1.0)
    assert profile.provenance_at(mini, mini.expert_bytes("fp8")) == "roofline"
    assert profile.costs(mini, mini.expert_bytes("fp8"), "oled").cpu_b0_ns == pytest.approx(2.4e6 / 8, rel=1e-3)
    assert profile.fit_errors["shapes[1].cpu_max"] == 0.02
    assert "policy_ns" in profile_of(measured(), "mine", "2026-01-02", {}).assumed


def test_arithmetic_that_did_not_show_on_the_cpu_is_charged_next_to_nothing():
    found = measured()
    free = found._replace(shapes=tuple(s._replace(cpu=s.cpu._replace(b1_ns=0.0)) for s in found.shapes))
    assert profile_of(free, "mine", "2026-01-02", {}).roofline.cpu_flops_per_s == 1e15
    assert profile_of(found, "mine", "2026-01-02", {}).roofline.cpu_flops_per_s == 3.146e12  # 6 MiB in 2 us


def test_without_a_rate_of_experts_there_is_no_roofline():
    found = measured()
    flat = found.shapes[1]._replace(kernel=GpuRate((20_000.0, 0.0, 1.0), 0.01, 0.02, {}))
    assert profile_of(found._replace(shapes=(flat,)), "mine", "2026-01-02", {}).roofline is None


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


QUICKLY = ("--device", "cpu", "--quick", "--policy", "lru", "--policy", "oled", "--forwards", "10")


def test_the_whole_command_without_a_gpu(tmp_path, tiny, capsys):
    path = tmp_path / "mine.yaml"
    run(path, "--shape", tiny, *QUICKLY)
    profile, shape = load_profile(path), load_shape(str(tiny))
    assert profile.provenance == "measured"
    assert "no GPU, memory copied to memory" in profile.machine
    assert set(profile.policy_ns) == {"default", "lru", "oled"}
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.txt"], "x.txt: must end in .yaml"),
        (["no-such/x.yaml"], "no-such: no such directory"),
        (["x.yaml", "--shape", "llada3"], "'llada3': not known"),
        (["x.yaml", "--policy", "lruu"], "policy 'lruu': not known; did you mean lru?"),
        (["x.yaml", "--pool-mib", "0"], "--pool-mib 0: must be at least 1"),
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
def test_the_whole_command_with_a_gpu(tmp_path, tiny):
    run(tmp_path / "mine.yaml", "--shape", tiny, "--quick", "--policy", "lru", "--forwards", "10")
    assert "PCIe" in load_profile(tmp_path / "mine.yaml").machine
