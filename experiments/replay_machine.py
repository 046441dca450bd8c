"""The machine of replays: experts in host memory and kernels on the device, kept from one run to the next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from experiments.errors import ConfigError
from experiments.replay_config import GENERATED, Conditions
from policies.profile import HardwareProfile
from replay.arena import MIB, Arena, plan_arena
from replay.calibrate import machine_of
from replay.checkpoint_experts import find_experts, load_experts
from replay.cpu_kernel import MULTIPLE
from replay.layout import FACTORS, Layout
from replay.link_state import check_link
from replay.machine import Machine, num_steps
from tracer.schema import ModelShape, Pass


class Facts(NamedTuple):
    """What results say of the machine, beside the conditions that were asked for."""

    device: str
    machine: str
    is_pinned: bool
    cpu_kernel: str
    cpu_workers: int
    num_distinct_experts: int


class Workshop:
    """Makes machines, and keeps the last one as long as runs fit it; experts in host memory outlive machines."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._machine: Machine | None = None
        self._arena_is_for: object = None
        self._machine_is_for: object = None
        self._text = ""

    def machine(
        self,
        passes: Sequence[Pass],
        trace_hash: str,
        traced: ModelShape,
        shape: ModelShape,
        num_slots: int,
        profile: HardwareProfile,
        conditions: Conditions,
        has_bars: bool,
    ) -> tuple[Machine, Facts]:
        """A machine for these passes, set to the conditions.

        Args:
            passes: of the run, the first of the trace.
            trace_hash: of the trace.
            traced: shape of the traced model.
            shape: sizes that are run.
            num_slots: of all layers, staging included.
            profile: says how the CPU computes.
            conditions: of the run.
            has_bars: show on stderr how far it is.

        Raises:
            ConfigError: there is no such device.
            ProfileError: memory is short on host or device, or cannot be pinned, or the link has trained down.
            TraceError: the checkpoint cannot be read, or is of another shape.
        """
        device = _device(conditions.device)
        kernel, workers = _cpu(profile, shape)
        layout = Layout(
            *(shape, traced.num_layers, traced.num_experts, traced.top_k, num_slots, profile.transfer_chunk),
            most_h2d_bytes_factor=conditions.h2d_bytes_factor,
            cpu_workers=workers,
            cpu_kernel=kernel,
        )
        sizes = device, traced.num_layers, traced.num_experts, shape.hidden, shape.expert_intermediate
        of_arena = sizes, conditions.weights, conditions.distinct_experts, conditions.allow_pageable
        runs = of_arena, trace_hash, len(passes), replace(layout, num_slots=0, most_h2d_bytes_factor=1)
        machine = self._machine
        if machine is None or self._machine_is_for != runs or not _fits(layout, machine.layout):
            machine = self._make(layout, passes, conditions, device, of_arena, has_bars)
            self._machine_is_for = runs
        machine.set_factor(conditions.h2d_bytes_factor)
        arena = machine.arena
        return machine, Facts(device, self._text, arena.is_pinned, kernel, workers, arena.num_distinct)

    def close(self) -> None:
        """Let go of everything."""
        self._close_machine()
        self._arena = None

    def _close_machine(self) -> None:
        if self._machine is not None:
            machine, self._machine = self._machine, None
            self._machine_is_for = None
            machine.close()

    def _make(
        self,
        layout: Layout,
        passes: Sequence[Pass],
        conditions: Conditions,
        device: str,
        of_arena: object,
        has_bars: bool,
    ) -> Machine:
        self._close_machine()
        if self._arena is None or self._arena_is_for != of_arena:
            self._arena = None  # before there is another
            self._arena = _arena(layout, conditions, device, has_bars)
            self._arena_is_for = of_arena
        with progress_bar("getting ready", num_steps(passes, layout.num_layers), "layer", has_bars) as bar:
            self._machine = Machine(layout, device, self._arena, passes, bar.update)
        link = self._machine.busy_link()
        if not conditions.slow_link:
            check_link(link, "slow_link=true")
        self._text = machine_of(self._machine.device.torch_device, link)
        return self._machine


@cache
def of_this_process() -> Workshop:
    """The one that the cells of a multirun share."""
    return Workshop()


def _device(name: str | None) -> str:
    has_cuda = torch.cuda.is_available()
    if name is None:
        return "cuda" if has_cuda else "cpu"
    if name.startswith("cuda") and not has_cuda:
        raise ConfigError(f"device={name}: PyTorch finds no CUDA device; device=cpu runs on this machine without one")
    number, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if name.startswith("cuda") and number >= count:
        raise ConfigError(f"device={name}: there are {count}, the last is cuda:{count - 1}")
    return name


def _cpu(profile: HardwareProfile, shape: ModelShape) -> tuple[str, int]:
    """Kernel and workers of the CPU: those that the profile was measured with, where they go together with this run."""
    fits = shape.hidden % MULTIPLE == 0 and shape.expert_intermediate % MULTIPLE == 0
    cores = len(os.sched_getaffinity(0))
    return (profile.cpu_kernel or "rows") if fits else "onednn", min(profile.cpu_workers, max(1, cores - 1))


def _fits(wanted: Layout, made: Layout) -> bool:
    """Whether a machine has the slots, and the room in each."""
    return wanted.num_slots <= made.num_slots and wanted.most_h2d_bytes_factor <= made.most_h2d_bytes_factor


def _arena(layout: Layout, conditions: Conditions, device: str, has_bars: bool) -> Arena:
    of_model = conditions.weights != GENERATED
    if of_model:
        if conditions.distinct_experts is not None:
            raise ConfigError("distinct_experts: with the experts of a checkpoint all are distinct; must be null")
        find_experts(Path(conditions.weights), layout.shape)  # what is missing is said before minutes are spent
    total = layout.num_layers * layout.num_experts
    num_distinct, padding = conditions.distinct_experts, FACTORS[-1] - 1
    budget = plan_arena(num_distinct or total, 2 * layout.expert_numel, padding)
    with progress_bar("pinning", budget.num_bytes // MIB, "MiB", has_bars) as bar:
        arena = Arena(
            *(layout.num_layers, layout.num_experts, layout.expert_numel),
            num_distinct=num_distinct,
            padding=padding,
            pinned=device != "cpu",
            allow_pageable=conditions.allow_pageable,
            progress=lambda num_bytes: bar.update(num_bytes // MIB),
        )
    with progress_bar("filling", arena.num_distinct, "expert", has_bars) as bar:
        if of_model:
            load_experts(arena, Path(conditions.weights), layout.shape, bar.update)
        else:
            arena.fill(progress=bar.update)
    return arena


def progress_bar(what: str, total: int, unit: str, is_wanted: bool) -> Any:
    """A bar on stderr where that is a terminal; Any, as what its `update` returns does not matter."""
    return tqdm(total=total, desc=what, unit=unit, disable=None if is_wanted else True, leave=False)
