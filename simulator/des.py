"""The reference engine: policy and clock together, event by event, for every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.check import check_ranked
from policies.contract import Estimates, Plan, Policy, Step
from policies.log import LogChunk, decided_columns, forward_builder, forward_row, layer_builder, pass_columns
from policies.profile import Costs, cpu_batch_ns, kernel_ns, layer_ns, staging_of
from policies.residents import Residents
from policies.steps import Forward, end_of, read_all, step_at
from simulator.clock import Clock, Moment, Stage
from simulator.counts import Counts
from simulator.link import Chunk, Copy, Link
from simulator.slots import Slots
from tracer.schema import ModelShape, Pass


def simulate(
    passes: Iterable[Pass],
    policy: Policy,
    shape: ModelShape,
    slots: int,
    costs: Costs,
    estimates: Estimates,
    *,
    staging_slots: int | None = None,
    chunk_forwards: int = 128,
    on_copy: Callable[[Copy], None] | None = None,
) -> Iterator[LogChunk]:
    """Run a policy over a trace in simulated time.

    The passes are read once, one at a time, and the log is handed on in stretches of whole forwards, so memory does
    not grow with the trace. `boundary` runs when a forward's tail has: its confidence does not exist before.

    Args:
        passes: of the run, in order.
        policy: built for this shape.
        shape: of the traced model.
        slots: expert slots of all layers together, without staging.
        costs: what everything takes.
        estimates: what the policy believes an expert costs.
        staging_slots: slots beyond the cache for transfers; None is twice the transfer chunk.
        chunk_forwards: forwards in one stretch of the log.
        on_copy: told of every copy to the GPU when it has landed, prefetches included, whose times the log lacks.

    Raises:
        ProfileError: fewer staging slots than a chunk of transfers has.
        PlanError: a plan breaks the contract; the message says where.
        PolicyError: the policy does not start with these slots, cannot decide on this trace, or prefetches without a
            score to rank residents by.
        TraceError: a pass is not of this shape.
    """
    staging = staging_of(costs.transfer_chunk, staging_slots)
    return _Run(policy, shape, slots, costs, estimates, staging, on_copy).log(passes, chunk_forwards)


@dataclass(slots=True)
class _Reading:
    """What was true at a gate, and the plan made of it."""

    step: Step
    plan: Plan
    at_gate: NDArray[np.bool_]  # [E] or [L * E] residents of the pool
    hits: NDArray[np.int64]
    hit_tokens: int  # sum of the loads of the hits
    demands: list[Copy]  # transfers, but for a promoted prefetch
    chunks: list[Chunk]  # all transfers; a promoted one heads the first chunk

    @property
    def transfers(self) -> list[Copy]:
        return [copy for chunk in self.chunks for copy in chunk.copies]


class _Run:
    """One run. Its own thread of control is the GPU stream; link and CPU pool go on beside it."""

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        slots: int,
        costs: Costs,
        estimates: Estimates,
        staging: int,
        on_copy: Callable[[Copy], None] | None,
    ) -> None:
        self._policy, self._shape, self._costs = policy, shape, costs
        self._residents = Residents(policy, shape, slots, estimates)
        self._score = getattr(self._residents.state, "score", None)
        self._clock, self._counts = Clock(), Counts()
        self._slots = Slots(self._residents, staging, self._counts)
        self._link = Link(self._clock, self._slots, costs, self._score, self._counts, on_copy)
        # a call from Python of compiled code takes about 2 us, most of it to read the many fields of Costs
        self._kernel_ns = cache(partial(kernel_ns, costs))
        self._cpu_batch_ns = cache(partial(cpu_batch_ns, costs))
        self._layers, self._forwards = layer_builder(), forward_builder()

    def log(self, passes: Iterable[Pass], chunk_forwards: int) -> Iterator[LogChunk]:
        for pass_, forward in read_all(passes, self._shape, self._policy.reads_signals):
            self._run_forward(pass_, forward)
            if len(self._forwards) == chunk_forwards:
                yield LogChunk(self._layers.build(), self._forwards.build())
        if len(self._forwards):
            yield LogChunk(self._layers.build(), self._forwards.build())

    def _run_forward(self, pass_: Pass, forward: Forward) -> None:
        start_ns = self._clock.now_ns
        shared = pass_columns(forward.number, pass_)
        gate_ns = layer_ns(self._costs, shared["num_tokens"], shared["kv_len"]) + self._costs.gate_sync_ns
        for layer in range(self._shape.num_layers):
            row: dict[str, Any] = shared | {"layer": layer}
            self._layers.append(row)
            self._run_layer(step_at(forward, layer), gate_ns, row)
        self._wait(Stage.LAYER, self._costs.tail_ns)
        self._slots.boundary(end_of(forward))
        self._forwards.append(forward_row(forward.number, pass_, start_ns, self._clock.now_ns))

    def _run_layer(self, step: Step, gate_ns: int, row: dict[str, Any]) -> None:
        row["start_ns"] = self._clock.now_ns
        self._counts.begin(row)
        self._slots.begin(step.layer)
        dropped = self._link.drop(step.layer)
        self._wait(Stage.LAYER, gate_ns)
        reading = self._read(step, dropped, row)
        self._wait(Stage.LAYER, self._costs.policy_ns)
        cpu_back = self._act(reading, row)
        self._run_groups(reading, row)
        self._clock.wait(cpu_back)
        self._wait(Stage.LAYER, 0)
        self._slots.enter()
        transfers = reading.transfers
        row["transfer_start_ns"] = [copy.start_ns for copy in transfers]
        row["transfer_end_ns"] = [copy.end_ns for copy in transfers]
        row["end_ns"] = self._clock.now_ns

    def _read(self, step: Step, dropped: set[int], row: dict[str, Any]) -> _Reading:
        """Read residents and the copy in flight at the gate, and let the policy plan; until it acts no copy starts."""
        layer, residents, slots = step.layer, self._residents, self._slots
        slots.place(step)
        self._link.is_held = True
        at_gate = residents.of_pool(layer, residents.resident).copy()
        num_resident = int(np.count_nonzero(residents.resident[layer]))
        plan = self._decide(step)
        activated = step.load > 0
        promoted = self._link.current
        if promoted is not None and not (promoted.layer == layer and activated[promoted.expert]):
            promoted = None
        late = {promoted.expert} if promoted else set()
        hits = np.flatnonzero(slots.activate(activated))
        missed = set(np.flatnonzero(activated & ~residents.resident[layer]).tolist())
        demands = [Copy(layer, expert, is_prefetch=False) for expert in plan.transfers.tolist() if expert not in late]
        transfers = [promoted, *demands] if promoted else demands
        size = self._costs.transfer_chunk
        chunks = [Chunk(transfers[first : first + size]) for first in range(0, len(transfers), size)]
        experts = np.array([copy.expert for copy in transfers], np.int64)
        retained = np.flatnonzero(plan.retained)
        row.update(
            decided_columns(step.load, hits, experts, np.sort(plan.on_cpu), retained, plan.prefetches),
            capacity=residents.capacity_of(layer),
            num_resident=num_resident,
            num_promoted=len(late),
            prefetch_late=len(late),
            prefetch_unserved=len(dropped & missed - late),
        )
        return _Reading(step, plan, at_gate, hits, row["hit_tokens"], demands, chunks)

    def _act(self, reading: _Reading, row: dict[str, Any]) -> Moment:
        """Put the plan into effect; returns when the CPU's results are back."""
        plan, slots, clock, link = reading.plan, self._slots, self._clock, self._link
        row["plan_ns"] = clock.now_ns
        if plan.clear_prefetches:
            link.clear()
        slots.retain(reading.at_gate, plan.retained, [copy.expert for copy in reading.demands])
        num_tokens = int(reading.step.load[plan.on_cpu].sum())
        batch_ns = self._cpu_batch_ns(len(plan.on_cpu), num_tokens, len(reading.chunks) > 0)
        cpu_ns = batch_ns + self._costs.cpu_roundtrip_ns if len(plan.on_cpu) else 0
        row["cpu_end_ns"] = clock.now_ns + cpu_ns
        link.is_held, link.slow_until_ns = False, clock.now_ns + batch_ns
        link.demand(reading.demands)
        if len(plan.prefetches):
            # a policy may reuse its arrays before they are issued
            prefetches, priority = plan.prefetches.copy(), plan.prefetch_priority.copy()
            clock.at(Stage.ISSUE, plan.prefetch_delay_ns, partial(link.issue, prefetches, priority))
        return clock.at(Stage.RAN, cpu_ns)

    def _run_groups(self, reading: _Reading, row: dict[str, Any]) -> None:
        """Run the kernel over the hits, then one over each chunk of transfers when it has landed."""
        self._wait(Stage.RAN, self._kernel_ns(len(reading.hits), reading.hit_tokens))
        row["hits_end_ns"] = self._clock.now_ns
        self._slots.used(reading.hits)
        self._link.wake()
        for chunk in reading.chunks:
            while chunk.num_waiting:
                self._clock.step()
            experts = [copy.expert for copy in chunk.copies]
            self._wait(Stage.RAN, self._kernel_ns(len(experts), int(reading.step.load[experts].sum())))
            if chunk.copies[0].is_prefetch:
                self._slots.used(experts[:1])
            self._slots.release([copy.expert for copy in chunk.copies if not copy.is_prefetch])
            self._link.wake()

    def _decide(self, step: Step) -> Plan:
        plan = self._residents.decide(step)
        check_ranked(self._policy, plan, self._score is not None)
        return plan

    def _wait(self, stage: Stage, delay_ns: int) -> None:
        self._clock.wait(self._clock.at(stage, delay_ns))
