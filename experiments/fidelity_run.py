"""The fidelity run on the machine with the accelerator: calibrates, then replays every cell again and again until time is up."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from experiments.calibration import context_of
from experiments.errors import ConfigError
from experiments.fidelity_grid import MANIFEST, PROFILE, Cell, FirstForwards, cells_of, shape_of, slowed
from experiments.fidelity_log import write_log
from experiments.identity import sources, versions
from experiments.policy import built
from experiments.profiles import load_profile, profile_hash
from experiments.replay_config import Conditions
from experiments.replay_machine import Workshop
from experiments.whole import whole_file
from policies.contract import Policy, PolicyError
from policies.log import LogChunk
from policies.profile import HardwareProfile, ProfileError, estimates_of
from replay.machine import Machine
from replay.run import replay
from tracer.files import metadata_hash
from tracer.schema import ModelShape, Pass
from tracer.shipped import find_trace

CELLS = "cells"
CALIBRATION_S = 240  # it is stopped then
_WARM_FORWARDS = 3  # of every policy before anything counts: what is compiled or read at first use is then
_CLOSING_S = 15
_LIBRARIES = ("oledsim", "numpy", "numba", "pyarrow", "torch", "triton")


class Session:
    """What a run has found so far, in a directory that is of use whenever the run ends.

    Args:
        directory: of the run, empty or absent.
        seconds: until the run must have ended.
        started: by `time.monotonic`.
    """

    def __init__(self, directory: Path, seconds: float, started: float) -> None:
        if directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"{directory}: is not empty; a run has a directory of its own")
        (directory / CELLS).mkdir(parents=True, exist_ok=True)
        self.directory, self.manifest = directory, dict[str, Any]()
        self._started, self._ends = started, started + seconds

    def say(self, line: str) -> None:
        """Print a line with the time that has passed."""
        print(f"[{monotonic() - self._started:6.1f} s] {line}", flush=True)

    @property
    def seconds_left(self) -> float:
        """Until the run must have ended."""
        return self._ends - monotonic() - _CLOSING_S

    def note(self, **values: Any) -> None:
        """Add to the manifest, and write it."""
        self.manifest |= values
        with whole_file(self.directory / MANIFEST) as partial:
            partial.write_text(json.dumps(self.manifest, indent=1) + "\n", encoding="utf-8")


def run(options: Namespace, started: float) -> str:
    """Make one run; returns what it did in a line.

    Raises:
        ConfigError, PolicyError, ProfileError, TraceError: an argument, or what was asked of the machine, is not possible.
    """
    reader = FirstForwards(find_trace(options.trace), options.per_request)
    traced = reader.metadata.shape
    passes = list(reader.passes(signals=reader.has_signals))
    context, calibration = context_of(reader, options.warmup_requests, "auto", 0)
    policies = {name: built(name, {}, context) for name in options.policies}
    cells = cells_of(policies, options.slots, options.factors)
    session = Session(options.directory, options.seconds, started)
    profile = _profile(session, options)
    trace = {"name": options.trace, "hash": metadata_hash(reader.metadata), "source": reader.metadata.source}
    session.note(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=sys.argv[1:],
        trace=trace,
        per_request=options.per_request,
        warmup_requests=options.warmup_requests,
        num_forwards=len(passes),
        calibration=calibration,
        shape=options.shape,
        policies=list(policies),
        slots=list(options.slots),
        factors=list(options.factors),
        profile_hash=profile_hash(profile),
        sources=sources(),
        versions=versions(_LIBRARIES),
        seconds_asked=options.seconds,
        runs=[],
        errors=[],
    )
    workshop, shape = Workshop(), shape_of(options.shape, traced)
    try:
        machine, facts = workshop.machine(
            *(passes, trace["hash"], traced, shape),
            *(max(options.slots) * traced.num_layers + 2 * profile.transfer_chunk, profile),
            Conditions(device=options.device, h2d_bytes_factor=max(options.factors), slow_link=True),
            has_bars=False,
        )
        session.say(f"a machine with {machine.layout.num_slots} slots; host memory: {machine.arena.budget}")
        session.note(**facts._asdict(), expert_bytes=shape.expert_bytes("bfloat16"), link_before=_link(machine))
        runner = Runner(session, machine, passes, policies, traced, shape, profile)
        runner.warm_up(cells)
        runner.repeat(cells, options.repeats)
        session.note(link_after=_link(machine))
    finally:
        workshop.close()
    runs = session.manifest["runs"]
    return f"{options.directory}: {len(runs)} runs of {len(cells)} cells over {len(passes)} forwards"


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs cells on one machine.

    Args:
        session: to which results go.
        machine: made for the passes.
        passes: of every cell.
        policies: by name.
        traced: shape of the traced model.
        shape: sizes that are run.
        profile: of the machine, which policies believe.
    """

    session: Session
    machine: Machine
    passes: Sequence[Pass]
    policies: Mapping[str, Policy]
    traced: ModelShape
    shape: ModelShape
    profile: HardwareProfile
    _seconds: dict[Cell, float] = field(default_factory=dict)  # that a cell took last

    def warm_up(self, cells: Sequence[Cell]) -> None:
        """Run the first forwards of every policy once, which nobody counts."""
        for policy in self.policies:
            self._replay(next(cell for cell in cells if cell.policy == policy), self.passes[:_WARM_FORWARDS])
        self.session.say("every policy has run its first forwards once")

    def repeat(self, cells: Sequence[Cell], repeats: int) -> None:
        """Run all cells in turn, so often or until the next one would not end in time."""
        say = self.session.say
        for repeat in range(repeats):
            began = monotonic()
            for cell in cells:
                if self.session.seconds_left < 1.1 * self._seconds.get(cell, 0.0):
                    say(f"time is up before {cell.name} of repeat {repeat}")
                    return
                self._run(cell, repeat)
            took, left = monotonic() - began, self.session.seconds_left
            say(
                f"repeat {repeat} of all {len(cells)} cells took {took:.0f} s, {left:.0f} s are left: {left / took:.1f} more"
            )

    def _run(self, cell: Cell, repeat: int) -> None:
        session, began = self.session, monotonic()
        try:
            chunks, notes = self._replay(cell, self.passes)
        except (PolicyError, ProfileError, RuntimeError) as error:  # RuntimeError: what CUDA reports
            session.say(f"{cell.name} repeat {repeat} failed: {error}")
            failed = {"cell": cell.name, "repeat": repeat, "error": str(error)}
            session.note(errors=[*session.manifest["errors"], failed])
            return
        seconds = self._seconds[cell] = monotonic() - began
        spans = [chunk.forwards.scalars for chunk in chunks]
        total_ns = int(spans[-1]["end_ns"][-1] - spans[0]["start_ns"][0])
        notes |= {"cell": asdict(cell), "repeat": repeat}
        file = f"{CELLS}/{cell.name}-r{repeat}.parquet"
        write_log(session.directory / file, chunks, notes)
        session.note(runs=[*session.manifest["runs"], {"file": file, "seconds": round(seconds, 2), **notes}])
        session.say(
            f"{cell.name} repeat {repeat}: {total_ns / 1e6 / len(self.passes):.2f} ms a forward, "
            f"host {notes['host_us']:.0f} us, decision {notes['decide_us']:.0f} us a layer; took {seconds:.1f} s"
        )

    def _replay(self, cell: Cell, passes: Sequence[Pass]) -> tuple[list[LogChunk], dict[str, Any]]:
        self.machine.set_factor(cell.factor)
        expert_bytes = self.shape.expert_bytes("bfloat16")
        costs = slowed(self.profile, cell.factor).costs(self.shape, expert_bytes, cell.policy)
        slots = cell.slots_per_layer * self.traced.num_layers
        found = replay(
            self.machine,
            passes,
            self.policies[cell.policy],
            self.traced,
            slots,
            estimates_of(costs),
            2 * costs.transfer_chunk,
        )
        return found.chunks, {name: getattr(found, name) for name in ("host_us", "lead_us", "decide_us")}


def _profile(session: Session, options: Namespace) -> HardwareProfile:
    """The profile that is given, else one that is measured now by `oled-calibrate`."""
    path = session.directory / PROFILE
    if options.profile is not None:
        path.write_text(Path(options.profile).read_text(encoding="utf-8"), encoding="utf-8")
        session.note(calibrated=False)
        return load_profile(path)
    device = ["--device", options.device] if options.device else []
    names = [part for name in options.policies for part in ("--policy", name)]
    command = ["experiments.calibrate", str(path), *device, "--shape", options.shape, *names]
    session.say(" ".join(command))
    seconds = min(CALIBRATION_S, session.seconds_left)
    try:
        done = subprocess.run([sys.executable, "-m", *command], timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ProfileError(f"oled-calibrate took more than {seconds:.0f} s") from None
    if done.returncode != 0:
        raise ProfileError(f"oled-calibrate ended with {done.returncode}")
    session.note(calibrated=True)
    return load_profile(path)


def _link(machine: Machine) -> str | None:
    """The state of the PCIe link while it is busy, in words; None without one."""
    state = machine.busy_link()
    return None if state is None else f"{state}, of {state.max_generation}.0 x{state.max_width} at most"
