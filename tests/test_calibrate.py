"""`oled-calibrate` on a machine without a GPU, as its users call it."""

import dataclasses
import json
import signal
import subprocess
import sys

import pytest
import torch
from commands import running

from experiments import calibrate as command
from experiments.calibrate_policies import read_routing
from experiments.profiles import load_profile, load_shape
from policies.profile import ProfileError
from replay import calibrate
from replay.calibrate_settings import QUICK
from replay.link_state import LinkState

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


@pytest.mark.parametrize("name", ["hidden", "vocab", "head_dim"])
def test_a_shape_that_is_not_known_in_full_is_refused(name, tiny):
    shape = dataclasses.replace(load_shape(str(tiny)), **{name: 0})
    with pytest.raises(ProfileError, match=f"the shape does not say {name}"):
        calibrate.calibrate([shape], "cpu", QUICK, print)


def test_a_link_that_trained_down_is_refused_before_anything_is_measured(tiny, monkeypatch):
    class ReachedError(Exception):
        pass

    def measure(*_):
        raise ReachedError

    monkeypatch.setattr(calibrate, "busy_link", lambda *_: LinkState(1, 16, 5, 16))
    monkeypatch.setattr(calibrate, "measure_copies", measure)
    shapes = [load_shape(str(tiny))]
    with pytest.raises(ProfileError, match="trained down"):
        calibrate.calibrate(shapes, "cpu", QUICK, print)
    with pytest.raises(ReachedError):
        calibrate.calibrate(shapes, "cpu", QUICK, print, allow_slow_link=True)


def run(*arguments):
    command.main([str(argument) for argument in arguments])


QUICKLY = ("--device", "cpu", "--quick", "--policy", "lru", "--forwards", "4")


def test_the_whole_command_without_a_gpu(tmp_path, tiny, capsys):
    path = tmp_path / "mine.yaml"
    run(path, "--shape", tiny, *QUICKLY)
    profile, shape = load_profile(path), load_shape(str(tiny))
    assert profile.provenance == "measured"
    text = path.read_text()
    assert f"oled-calibrate {path} --shape {tiny} {' '.join(QUICKLY)}" in text
    assert "no GPU, memory copied to memory" in profile.machine
    assert set(profile.policy_ns) == {"default", "lru"}
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
        (
            ["x.yaml", "--device", "cpu", "--quick", "--policy", "lru", "--workers", "9999"],
            "9999 CPU workers: must be from 1 to",
        ),
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
    arguments = [str(tmp_path / "x.yaml"), "--shape", str(tiny), *QUICKLY]
    with running([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE) as process:
        assert "host memory" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "oled-calibrate: interrupted" in process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == [tiny]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_whole_command_with_a_gpu(tmp_path):
    shape = tmp_path / "small.yaml"
    shape.write_text(json.dumps({**TINY, "hidden": 256, "expert_intermediate": 128}))  # multiples of what kernels take
    run(tmp_path / "mine.yaml", "--shape", shape, "--quick", "--policy", "lru", "--forwards", "4")
    assert "PCIe" in load_profile(tmp_path / "mine.yaml").machine
