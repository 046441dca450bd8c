"""Decide over a whole trace without a clock, which is enough where nothing is prefetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.contract import Estimates, Policy, PolicyError
from policies.jit import jit
from policies.log import Table
from policies.pool import number_in_pool, pool_of
from policies.residents import Residents, view_at
from policies.steps import Forward, end_of, read_all, step_at
from simulator.loop import PolicyLoop, functions_of, is_movable, is_placeable, is_sound, replace
from simulator.pointers import borrowed, function_at
from simulator.rows import (
    HITS,
    NUM_FREED,
    NUM_STAYING,
    RETAINED,
    TRANSFERS,
    Forwards,
    RowBuffer,
    Rows,
    Said,
    decided,
    write_decision,
)
from tracer.schema import ModelShape, Pass


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a policy decided in a stretch of whole forwards, and what their time depends on beside costs."""

    forwards: Forwards
    layers: Table  # of the log, without times and counts of prefetches
    num_free: NDArray[np.int32]  # [rows] slots of all pools that are free for demand copies when the plan acts
    num_freed: NDArray[np.int32]  # [rows] of all pools that become free when the kernel over the hits has run
    transfer_retained: NDArray[np.bool_]  # of each transfer of `layers`


def drive(
    passes: Iterable[Pass],
    policy: Policy,
    shape: ModelShape,
    slots: int,
    estimates: Estimates,
    *,
    chunk_forwards: int = 128,
) -> Iterator[Decisions]:
    """Decide every layer of every pass, in the order of the run.

    Nothing in it depends on what anything takes, but for what the policy believes: the same decisions can be timed on
    many machines.

    Args:
        passes: of the run, in order.
        policy: built for this shape; one that does not prefetch.
        shape: of the traced model.
        slots: expert slots of all layers together.
        estimates: what the policy believes an expert costs.
        chunk_forwards: forwards in one stretch.

    Raises:
        PlanError: a plan breaks the contract; the message says where.
        PolicyError: the policy does not start with these slots, cannot decide on this trace, or prefetches.
        TraceError: a pass is not of this shape.
    """
    return _Run(policy, shape, slots, estimates).stretches(passes, chunk_forwards)


@jit
def write_row(rows, step, view, plan, num_resident):
    """Write what was decided at a gate, and end the row.

    Args:
        rows: Rows with room for another.
        step: at the gate.
        view: at the gate.
        plan: that keeps to the contract, without prefetches.
        num_resident: residents of all pools at the gate.

    Returns:
        Residents of all pools when the layer has ended.
    """
    write_decision(rows, step, view, plan, plan.transfers)
    row = rows.size[0]
    num_freed = num_kept = 0
    for place in range(rows.offsets[HITS, row], rows.offsets[HITS, row + 1]):
        num_freed += not plan.retained[number_in_pool(view.capacity, step.load.size, step.layer, rows.hits[place])]
    for place in range(rows.offsets[TRANSFERS, row], rows.offsets[TRANSFERS, row + 1]):
        num_kept += rows.transfer_retained[place]
    num_retained = rows.offsets[RETAINED, row + 1] - rows.offsets[RETAINED, row]
    of_pool = view.capacity[pool_of(view.capacity, step.layer)] - view.free_slots
    num_staying = num_resident - of_pool + num_retained - num_kept
    rows.numbers[NUM_STAYING, row] = num_staying + num_freed
    rows.numbers[NUM_FREED, row] = num_freed
    rows.size[0] += 1
    return num_staying + num_kept


@jit
def _num_true(mask):
    total = 0
    for layer in range(mask.shape[0]):
        for expert in range(mask.shape[1]):
            total += mask[layer, expert]
    return total


@jit
def decide_forward(decide, boundary, place, addresses, at, forward, held, rows):
    """Decide the layers of a forward: a loop of PolicyLoop."""
    forward, held, rows = borrowed((forward, held, rows))
    num_layers, num_experts = held.resident.shape
    num_resident = _num_true(held.resident)
    for layer in range(num_layers):
        step = step_at(forward, layer)
        if addresses[2] != 0:
            held.asked_at[0] = -1
            placed = function_at(place, addresses[2])(None, None, at[2], step)
            held.asked_at[0] = layer
            if not is_placeable(placed, layer, view_at(held, layer)):
                return None, placed, None
            num_resident += replace(held.resident[layer], placed)
        held.asked_at[0] = layer
        view = view_at(held, layer)
        plan = function_at(decide, addresses[0])(None, None, at[0], step, view)
        if plan.prefetches.shape[0] > 0 or not is_sound(plan, step, view):
            return plan, None, None
        num_resident = write_row(rows, step, view, plan, num_resident)
        # without copies in flight, what is retained is what stays
        start = pool_of(held.capacity, layer) * num_experts
        replace(held.resident.ravel()[start : start + plan.retained.size], plan.retained)
    if addresses[1] != 0:
        held.asked_at[0] = num_layers
        view = view_at(held, 0)
        moves = function_at(boundary, addresses[1])(None, None, at[1], end_of(forward), view)
        capacity, evictions = moves
        if not is_movable(capacity, evictions, view):
            return None, None, moves
        for layer in range(num_layers):
            resident, evicted = held.resident[layer], evictions[layer]
            for expert in range(resident.size):
                resident[expert] &= not evicted[expert]
        for pool in range(capacity.size):
            held.capacity[pool] = capacity[pool]
    return None, None, None


class _Run:
    def __init__(self, policy: Policy, shape: ModelShape, slots: int, estimates: Estimates) -> None:
        self._policy, self._shape = policy, shape
        self._residents = Residents(policy, shape, slots, estimates)
        self._buffer = RowBuffer(shape, self._residents.of_pool(0, self._residents.resident).size, prefetches=False)
        self._num_slots = int(self._residents.capacity.sum())
        functions = functions_of(policy, self._residents, shape)
        self._loop = None
        if functions is not None:
            rows = self._buffer.reserve()
            self._loop = PolicyLoop(decide_forward, functions, policy, self._residents, shape, rows)

    def stretches(self, passes: Iterable[Pass], chunk_forwards: int) -> Iterator[Decisions]:
        read: list[Said] = []
        first = 0
        for pass_, forward in read_all(passes, self._shape, self._policy.reads_signals):
            rows = self._buffer.reserve()
            if self._loop is not None:
                self._loop.run(forward, rows)
            else:
                self._ask(forward, rows)
            read.append(Said.of(pass_))
            if len(read) == chunk_forwards:
                yield self._cut(Forwards.of(read, first))
                first, read = first + len(read), []
        if read:
            yield self._cut(Forwards.of(read, first))

    def _ask(self, forward: Forward, rows: Rows) -> None:
        """Decide the layers of a forward with a policy that is called from Python."""
        residents = self._residents
        for layer in range(self._shape.num_layers):
            step = step_at(forward, layer)
            residents.place(step)
            at_gate = residents.of_pool(layer, residents.resident).copy()
            num_resident = int(np.count_nonzero(residents.resident))
            plan = residents.decide(step)
            if len(plan.prefetches):
                raise PolicyError(f"{self._policy.name} prefetches, so its decisions need an engine with a clock")
            write_row(rows, step, residents.view(layer), plan, num_resident)
            residents.settle(layer, at_gate, plan)
        residents.boundary(end_of(forward))

    def _cut(self, forwards: Forwards) -> Decisions:
        rows = self._buffer.cut()
        num_free = self._num_slots - rows.numbers[NUM_STAYING]
        return Decisions(forwards, decided(forwards, rows), num_free, rows.numbers[NUM_FREED], rows.transfer_retained)
