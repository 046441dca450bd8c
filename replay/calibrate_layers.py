"""Runs designed layers through the executor, on a machine with a small arena, and reads from its log what they cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import product
from typing import NamedTuple

import numpy as np

from policies.contract import Estimates
from policies.log import LogChunk
from policies.profile import ProfileError
from replay.arena import Arena
from replay.calibrate_costs import LayerCosts, demand_copy, layer_costs
from replay.calibrate_cpu import CpuChoice
from replay.calibrate_gpu import measure_layer
from replay.calibrate_log import observe
from replay.calibrate_plans import Design, Designed, designed, grid_passes
from replay.calibrate_settings import Settings
from replay.fits import Rate, rate_of
from replay.layout import Layout
from replay.machine import Machine
from replay.repeats import Repeated
from replay.run import replay
from tracer.schema import ModelShape

TRANSFER_CHUNK = 4  # of the profiles that are written
STAGING = 2 * TRANSFER_CHUNK
_BELIEF = Estimates(1, 1, 1)  # which the designs' policy does not read
_FACTORS = (1, 2)  # of the bytes of copies
_HITS_BESIDE_CPU = 16


class Layers(NamedTuple):
    """What was measured of layers at one shape."""

    layer: Rate  # without routed experts, by tokens and committed positions
    costs: LayerCosts
    copies: dict[int, Repeated]  # demand copies in the executor's pipeline, by their bytes


def measure_layers(
    shape: ModelShape,
    device: str,
    arena: Arena,
    cpu: CpuChoice,
    copies_per_expert: float,
    settings: Settings,
    say: Callable[[str], None],
) -> Layers:
    """Measure layers of one shape.

    Args:
        shape: all sizes known.
        device: its name.
        arena: experts of this shape, with padding for the largest factor.
        cpu: kernel and workers.
        copies_per_expert: as many copies take as long as one expert of a batch on the CPU.
        settings: what is measured, and how often.
        say: told what comes next.

    Raises:
        ProfileError: memory is short on the device, or the shape is not known in full.
    """
    num_residents = residents_of(settings, shape)
    designs = choose_designs(settings, shape, num_residents, copies_per_expert)
    made = designed(shape, settings.num_layers, num_residents, designs)
    sizes = list(product(settings.tokens, settings.kv_lens))
    passes = [*made.passes, *grid_passes(shape, settings.num_layers, sizes)]
    layout = Layout(
        *(shape, settings.num_layers, shape.num_experts, shape.top_k, made.slots + STAGING, TRANSFER_CHUNK),
        *(max(_FACTORS), cpu.num_workers, cpu.kernel),
    )
    with closing(Machine(layout, device, arena, passes)) as machine:
        layer = measure_layer(machine, len(designs), sizes, settings.repeats, settings.count)
        say(f"{len(designs)} designs of layers in the executor")
        repeats = {1: settings.run_repeats, 2: max(1, settings.run_repeats // 4)}
        runs = {factor: _runs(machine, made, factor, repeats[factor]) for factor in _FACTORS}
    observed, tail = observe([chunks for chunks, _ in runs[1]], designs)
    decide_ns = float(np.median([decide_us for _, decide_us in runs[1]])) * 1e3
    layer_ns = {size: time.mean_ns for size, time in layer.items()}
    costs = layer_costs(observed, tail, layer_ns, decide_ns, shape.top_k, TRANSFER_CHUNK)
    padded, _ = observe([chunks for chunks, _ in runs[2]], designs)
    expert_bytes = shape.expert_bytes("bfloat16")
    return Layers(rate_of(layer), costs, {expert_bytes: costs.copy, 2 * expert_bytes: demand_copy(padded)})


def _runs(machine: Machine, made: Designed, factor: int, repeats: int) -> list[tuple[list[LogChunk], float]]:
    """Logs of some runs of all designs, with the time of a decision in us; a first run, which warms up, is left out."""
    machine.set_factor(factor)
    found = []
    for _ in range(repeats + 1):
        ran = replay(machine, made.passes, made.policy, made.shape, made.slots, _BELIEF, STAGING)
        found.append((ran.chunks, ran.decide_us))
    return found[1:]


def residents_of(settings: Settings, shape: ModelShape) -> int:
    """Experts of each layer that stay on the GPU for good."""
    return min(max(settings.kernel_experts), shape.num_experts // 2)


def choose_designs(settings: Settings, shape: ModelShape, num_residents: int, copies_per_expert: float) -> list[Design]:
    """Layers with hits alone, with copies, with CPU experts, and with both so that they take about as long.

    In an order that mixes them, so that a drift of the machine bends no curve.

    Raises:
        ProfileError: the shape has too few experts for one of the first three kinds.
    """
    block, kv_len = settings.block, settings.kv_lens[len(settings.kv_lens) // 2]
    numbers = [number for number in settings.kernel_experts if number <= num_residents]
    if not numbers:
        raise ProfileError(
            f"{shape.num_experts} experts of a layer: must be {2 * min(settings.kernel_experts)} or more to be calibrated"
        )
    few, beside = min(numbers), min(_HITS_BESIDE_CPU, num_residents)
    most = next(number for number in numbers if 2 * number > num_residents)
    tokens = [count for count in settings.tokens if block // 4 <= count <= 2 * block]
    found = [Design(count, kv_len, number) for count, number in product(tokens, numbers)]
    found += [Design(block, kv_len, hits, number) for hits, number in product((few, most), settings.transfers)]
    for number, load in product(settings.cpu_experts, settings.cpu_loads):
        found.append(Design(block, kv_len, beside, 0, number, load))
    large = max(settings.cpu_experts)  # as where a prompt is read
    found += [Design(max(settings.tokens), kv_len, beside, 0, n, settings.cpu_loads[-1]) for n in (large, 2 * large)]
    for number in settings.cpu_experts:
        num_transfers = max(1, round(number * copies_per_expert))
        found += [Design(block, kv_len, beside, num_transfers, number, load) for load in settings.cpu_loads[:2]]
    num_others = shape.num_experts - num_residents
    fits = [
        design
        for design in dict.fromkeys(found)
        if design.is_possible(shape.top_k) and design.num_transfers + design.num_on_cpu <= num_others
    ]
    kinds = {(design.num_transfers > 0, design.num_on_cpu > 0) for design in fits}
    if not kinds >= {(False, False), (True, False), (False, True)}:
        raise ProfileError(
            f"{shape.num_experts} experts of a layer, {shape.top_k} of each token: no layers with hits alone, with "
            "copies and with CPU experts can be made of these"
        )
    order = np.random.default_rng(0).permutation(len(fits))
    return [fits[i] for i in order]
