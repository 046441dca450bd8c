"""`oled-replay` without a GPU, as its users call it: results as the simulator's, and what happens where it cannot run."""

import json
import os
import re
import threading
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from commands import Finished, command
from llada2_models import TINY
from replayed import small_shape
from stacked_experts import stack
from strategies import metadata_for, random_passes

import replay.arena
import replay.machine
from experiments import replay_machine, replay_result, simulate_command
from experiments.errors import ConfigError
from experiments.profiles import load_profile
from experiments.replay_command import main
from experiments.replay_config import Conditions, conditions_of
from policies.profile import ProfileError
from replay.arena import Arena
from replay.asking import Asking
from replay.checkpoint_experts import load_experts
from replay.cpu_experts import instructions
from replay.layout import Layout
from replay.link_state import LinkState
from replay.machine import Machine
from tracer.checkpoint import save
from tracer.llada2 import LLaDA2
from tracer.llada2_config import LLaDA2Config
from tracer.schema import NO_GATES, TraceError
from tracer.store import TraceReader, TraceWriter

FILES = {"summary.json", "result.parquet", "decisions.parquet", "manifest.json"}
LAYERS, EXPERTS, TOP_K = 3, 16, 4


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.trace"
    rng = np.random.default_rng(3)
    _, passes = random_passes(rng, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, num_requests=4, batch=2)
    with TraceWriter(path, metadata_for(small_shape(LAYERS, EXPERTS, TOP_K))) as writer:
        for item in passes:
            writer.write(item)
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(trace: Path, *arguments: str) -> Finished:
    """Run the command into ./out on this machine without a GPU."""
    return command(main, f"trace={trace}", "device=cpu", "output.dir=out", "cache.slots_per_layer=6", *arguments)


def results(directory: str = "out") -> tuple[dict, dict]:
    summary, manifest = (json.loads((Path(directory) / name).read_text()) for name in ("summary.json", "manifest.json"))
    return summary, manifest


def test_a_replay_writes_what_a_simulation_writes_and_decides_the_same(trace: Path) -> None:
    done = run(trace, "policy=oled", "warmup_requests=2")
    assert (done.code, done.err) == (0, "")
    keys = f"trace={trace}", "policy=oled", "warmup_requests=2", "cache.slots_per_layer=6", "hardware=h200"
    assert command(simulate_command.main, *keys, "output.dir=simulated").code == 0
    assert {path.name for path in Path("out").iterdir()} == FILES
    replayed, manifest = results()
    simulated, _ = results("simulated")
    assert tuple(replayed)[: len(simulated)] == tuple(simulated)
    assert replayed["decision_hash"] == simulated["decision_hash"]
    assert replayed["tpot_ms"] > 0
    about = {key: replayed[key] for key in ("engine", "mode", "device", "h2d_bytes_factor", "is_pinned", "cpu_kernel")}
    assert about == {
        "engine": "replay",
        "mode": "closed",
        "device": "cpu",
        "h2d_bytes_factor": 1,
        "is_pinned": False,
        "cpu_kernel": "rows",
    }
    assert replayed["num_distinct_experts"] == LAYERS * EXPERTS
    assert replayed["host_us_per_layer"] > replayed["lead_us_per_layer"] > 0
    assert replayed["decide_us_per_layer"] > 0
    assert "no GPU, memory copied to memory" in replayed["machine"]
    assert instructions() in replayed["machine"]
    assert manifest["config"]["engine"] == "replay"
    tables = [pl.read_parquet(Path(name) / "result.parquet") for name in ("out", "simulated")]
    assert tables[0].schema == tables[1].schema
    for column in ("pass_id", "kind", "warmup", "requests", "num_hits", "num_transfers", "num_on_cpu"):
        assert tables[0][column].equals(tables[1][column])
    assert "replayed with real copies of 1 x the bytes, mode closed, device cpu" in " ".join(done.out.split())
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("policy", ["lru", "oled"])
def test_open_mode_executes_what_the_simulator_decides(trace: Path, policy: str) -> None:
    keys = f"policy={policy}", "warmup_requests=2", "h2d_bytes_factor=2"
    assert run(trace, *keys, "mode=open").code == 0
    opened, _ = results()
    assert (opened["mode"], opened["policy"], opened["h2d_bytes_factor"]) == ("open", policy, 2)
    assert run(trace, *keys, "output.overwrite=true").code == 0
    assert results()[0]["decision_hash"] == opened["decision_hash"]


def test_a_log_is_executed(trace: Path) -> None:
    assert run(trace, "policy=lru", "warmup_requests=2").code == 0
    decided = results()[0]["decision_hash"]
    log = Path("out/decisions.parquet").rename("mine.parquet")
    keys = "policy=log", f"policy.path={log}", "warmup_requests=2", "output.overwrite=true", "mode=open"
    assert run(trace, *keys).code == 0
    assert results()[0]["decision_hash"] == decided


def test_a_grid_runs_on_one_machine_and_goes_on_where_it_stopped(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(Arena):
        def __init__(self, *arguments, **options) -> None:
            made.append("arena")
            super().__init__(*arguments, **options)

    class CountedMachine(Machine):
        def __init__(self, *arguments, **options) -> None:
            made.append("machine")
            super().__init__(*arguments, **options)

    monkeypatch.setattr(replay_machine, "Arena", Counted)
    monkeypatch.setattr(replay_machine, "Machine", CountedMachine)
    keys = "-m", "policy=full,ideal_free,lru", "warmup_requests=2", "forwards=12"
    done = run(trace, *keys)
    assert done.code == 1
    assert "ideal_free places experts at no cost, which no hardware does; simulate it" in " ".join(done.err.split())
    table = pl.read_parquet("out/sweep.parquet")
    assert sorted(table["policy"]) == ["full", "lru"]
    assert table["engine"].unique().to_list() == ["replay"]
    assert table["num_forwards"].unique().to_list() == [12]
    assert made == ["arena", "machine"]
    assert run(trace, *keys).code == 1
    assert made == ["arena", "machine"]  # what was done is not done again


def test_a_machine_is_made_anew_for_what_does_not_fit_it(trace: Path) -> None:
    reader = TraceReader(trace)
    passes, shape = list(reader.passes())[:3], reader.metadata.shape
    workshop, profile = replay_machine.Workshop(), load_profile("h200")

    def machine(num_slots: int, **changes: object) -> Machine:
        conditions = Conditions(device="cpu", **changes)  # type: ignore[arg-type]
        return workshop.machine(passes, "a trace", shape, shape, num_slots, profile, conditions, False)[0]

    first = machine(20)
    assert machine(12) is first
    larger = machine(30)
    assert larger is not first
    assert larger.arena is first.arena
    wider = machine(30, h2d_bytes_factor=2)
    assert wider is not larger
    assert machine(30) is wider
    assert (wider.copy_bytes, wider.arena) == (2 * 3 * 64 * 32, first.arena)
    assert machine(30, distinct_experts=5).arena.num_distinct == 5
    workshop.close()


def test_a_machine_that_could_not_be_made_is_taken_for_no_other(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = TraceReader(trace)
    passes, shape = list(reader.passes())[:3], reader.metadata.shape
    workshop, profile = replay_machine.Workshop(), load_profile("h200")

    def machine(**changes: object) -> Machine:
        conditions = Conditions(device="cpu", **changes)  # type: ignore[arg-type]
        return workshop.machine(passes, "a trace", shape, shape, 20, profile, conditions, False)[0]

    def no_room(*_: object) -> Machine:
        raise ProfileError("too many slots")

    assert machine().arena.num_distinct == 48
    with monkeypatch.context() as patch:
        patch.setattr(replay_machine, "Machine", no_room)
        with pytest.raises(ProfileError, match="too many slots"):
            machine(distinct_experts=5)  # whose arena is there by then
    again = machine()
    assert again.arena.num_distinct == 48
    with monkeypatch.context() as patch:
        patch.setattr(Machine, "busy_link", lambda machine: LinkState(1, 16, 5, 16))
        with pytest.raises(ProfileError, match="trained down"):
            machine(distinct_experts=7)  # whose machine is there by then
    assert machine().arena.num_distinct == 48
    workshop.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "live"}, "mode is live, allowed are closed, open"),
        ({"h2d_bytes_factor": 3}, "h2d_bytes_factor is 3, allowed are 1, 2, 4"),
        ({"engine": "des"}, "engine is des, allowed are replay"),
        ({"forwards": 0}, "forwards is 0, must be 1 or more, or null for all"),
        ({"device": "tpu"}, "device is tpu, allowed are cuda, cuda:N and cpu"),
        ({"forwards": 10**20}, "forwards is 100000000000000000000, must be at most 9223372036854775807, or null"),
        ({"device": ""}, "device is '', allowed are cuda, cuda:N and cpu"),
        ({"mode": ""}, "mode is '', allowed are closed, open"),
        ({"mode": None}, "mode is null, allowed are closed, open"),
        ({"slow_link": None}, "slow_link is null, must be true or false"),
        ({"output": {"timeline": True}}, "oled-compare draws the timelines of replays"),
    ],
)
def test_what_conditions_are_not_is_said(changes: dict, message: str) -> None:
    record = asdict(Conditions()) | {"engine": "replay", "output": {"timeline": False}} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        conditions_of(record)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forwards=0"], "forwards is 0, must be 1 or more, or null for all"),
        (["allow_pageable=3"], "allow_pageable is 3, must be true or false"),
        (["distinct_experts=100"], "100 distinct experts: must be 1 to 48, those of all layers"),
        (["forwards=1", "warmup_requests=2"], "all of them warm-up (warmup_requests=2): must be more"),
        (["expert_dtype=fp8"], "expert_dtype is fp8: replays copy and compute bfloat16 alone"),
        (["staging_slots=2"], "staging_slots is 2, must be at least 4, one chunk of transfers"),
        (["weights=nowhere"], "nowhere: no config.json; a checkpoint directory holds"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(trace: Path, arguments: list[str], message: str) -> None:
    done = run(trace, "policy=lru", *arguments)
    assert done.code == 2
    assert done.err.startswith("oled-replay: error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not Path("out").exists()


def test_a_trace_without_gates_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    _, passes = random_passes(rng, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, num_requests=2, batch=1)
    path = tmp_path / "gateless.trace"
    with TraceWriter(path, metadata_for(small_shape(LAYERS, EXPERTS, TOP_K), NO_GATES)) as writer:
        for item in passes:
            writer.write(replace(item, gates=np.full_like(item.gates, np.nan)))
    done = run(path, "policy=lru", "policy.lru_order=hits_first")
    assert (done.code, Path("out").exists()) == (2, False)
    assert "gates are null in this trace, and a replay computes with them; it can be simulated" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_gpu_that_is_not_there_is_named(trace: Path) -> None:
    done = run(trace, "policy=lru", "warmup_requests=2", "device=cuda")
    assert (done.code, Path("out").exists()) == (2, False)
    assert "device=cuda: PyTorch finds no CUDA device; device=cpu runs on this machine without one" in done.err


# Faults


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*sizes: int, pin_memory: bool = False, **options) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return empty(*sizes, **options)

    monkeypatch.setattr(replay.arena.torch, "empty", refuse)
    with pytest.raises(
        ProfileError,
        match=r"16 experts of 1 MiB: 16 MiB in 1 chunks of host memory could not be pinned: CUDA error: out of memory; raise the limit .*allow_pageable",
    ):
        Arena(1, 16, 2**19, pinned=True)
    assert not Arena(1, 16, 2**19, pinned=True, allow_pageable=True).is_pinned


def test_a_run_in_pageable_memory_says_so() -> None:
    facts = replay_machine.Facts("cuda", "a box", False, "rows", 15, 48)
    policy = SimpleNamespace(misses="h2d")
    assert replay_result.fallbacks(facts, policy, load_profile("h200")) == [  # type: ignore[arg-type]
        "experts lie in memory that could not be pinned, from where copies are slower"
    ]


def test_too_little_host_memory(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.arena, "free_bytes", lambda device: 2**18)
    done = run(trace, "policy=lru", "warmup_requests=2")
    assert (done.code, Path("out").exists()) == (2, False)
    assert "48 experts of 0.01172 MiB: 1 MiB in 1 chunks of host memory are needed, 0 MiB are available" in done.err


def test_too_little_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (2**30, 2**37))
    layout = Layout(small_shape(3, 256, 8, hidden=1024), 3, 256, 8, 400, 4)
    message = (
        r"400 slots of 3 MiB need 1200 MiB of GPU memory, 1024 MiB are free: at most 341 slots fit, staging included"
    )
    with pytest.raises(ProfileError, match=message):
        layout.require_room(torch.device("cuda"))


def test_a_cpu_that_is_slower_than_it_should_be_is_noted(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "no AMX and no AVX-512 BF16, float32 arithmetic"
    monkeypatch.setattr(replay_result, "instructions", lambda: words)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert run(trace, "policy=ktransformers", "warmup_requests=2", "forwards=12").code == 0
    assert results()[0]["warnings"] == [
        f"experts on the CPU are computed with {words}",
        "experts on the CPU have 2 of the profile's 15 workers, all that this machine can spare",
    ]


def test_a_link_that_trained_down(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "busy_link", lambda machine: LinkState(1, 16, 5, 16))
    done = run(trace, "policy=lru", "warmup_requests=2", "forwards=12")
    assert (done.code, Path("out").exists()) == (2, False)
    assert "the link runs at PCIe 1.0 x16 while it is busy, and could at PCIe 5.0 x16" in done.err
    assert "or allow it with slow_link=true" in done.err
    assert run(trace, "policy=lru", "warmup_requests=2", "forwards=12", "slow_link=true").code == 0


def test_a_machine_that_cannot_be_made_leaves_no_thread(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ProfileError("no kernels")

    monkeypatch.setattr(replay.machine, "expert_kernels", fail)
    done = run(trace, "policy=lru", "warmup_requests=2")
    assert (done.code, done.err) == (2, "oled-replay: error: no kernels\n")
    assert "copies" not in {thread.name for thread in threading.enumerate()}


def test_an_interrupt_in_the_middle_leaves_nothing(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide, asked = Asking.decide, []

    def interrupted(self: Asking, *arguments) -> object:
        asked.append(arguments)
        if len(asked) == 40:
            raise KeyboardInterrupt
        return decide(self, *arguments)

    monkeypatch.setattr(Asking, "decide", interrupted)
    done = run(trace, "policy=oled", "warmup_requests=2")
    assert (done.code, done.err) == (130, "oled-replay: interrupted\n")
    assert list(Path().iterdir()) == []
    assert not {"copies", "cpu-experts"} & {thread.name for thread in threading.enumerate()}


# Weights


def test_a_checkpoints_own_experts(tmp_path: Path) -> None:
    config = LLaDA2Config(**(TINY | {"hidden_size": 64, "moe_intermediate_size": 32}))
    torch.manual_seed(0)
    model = LLaDA2(config).to(torch.bfloat16)
    save(model, tmp_path / "model", max_shard_bytes=100_000)
    arena = Arena(LAYERS, EXPERTS, 3 * 64 * 32)
    shape = small_shape(LAYERS, EXPERTS, TOP_K)
    seen = []
    load_experts(arena, tmp_path / "model", shape, seen.append)
    assert sum(seen) == LAYERS * EXPERTS
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    for layer, (_, mlp) in enumerate(model.moe_layers()):
        gate, up, down = arena.experts[layer][7].split(64 * 32)
        hidden = torch.nn.functional.silu(x @ gate.view(32, 64).T) * (x @ up.view(32, 64).T)
        ids, weights = torch.full((5, 1), 7), torch.ones(5, 1)
        assert torch.allclose(mlp.experts(x, ids, weights), hidden @ down.view(64, 32).T, atol=1e-3, rtol=0.05)
    stack(tmp_path / "model", {"experts.gate_up_proj": "gu", "experts.down_proj": "d"}, layers=(2,))
    stacked = Arena(LAYERS, EXPERTS, 3 * 64 * 32)
    load_experts(stacked, tmp_path / "model", shape, seen.append)
    assert all(map(torch.equal, chain(*stacked.experts), chain(*arena.experts)))
    with pytest.raises(TraceError, match="experts 16, the run needs 32, those of its trace and shape"):
        load_experts(arena, tmp_path / "model", small_shape(LAYERS, 32, TOP_K), seen.append)
