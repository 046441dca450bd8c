"""Runs a policy over recorded routing with real copies, kernels and CPU experts, by the timing rules of the simulator."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.contract import Estimates, Plan, Policy, PolicyError, Step
from policies.log import PREFETCH_COUNTS, LogChunk
from policies.profile import ProfileError
from policies.residents import Residents
from policies.steps import Forward, end_of, step_at
from replay.device import Event, without_collection
from replay.link import Copy, Link
from replay.machine import Machine
from replay.records import ForwardRecord, LayerRecord, log_of
from replay.slots import Freed, Slots
from tracer.schema import ModelShape, Pass

Action = Callable[[], None]
_EVENTS_PER_LAYER = 64  # that are made before a run; what it needs beyond is made when it is needed


class Run:
    """One run of a policy on a machine.

    The calling thread issues everything and runs ahead of the device; it waits for the ids of each gate, for the CPU,
    and for the tokens at the end of a forward. What the rules let happen when a kernel has run is kept with that
    kernel's event. Where prefetches need it, the thread looks at these events while it waits; else nobody could tell
    the difference, and it happens at once.

    Args:
        machine: made for the passes of the run.
        policy: built for the traced shape.
        shape: of the traced model.
        slots: of all layers together, without staging.
        estimates: what the policy believes an expert costs.
        staging: slots beyond the cache.

    Raises:
        ProfileError: fewer staging slots than a chunk, or more slots than the machine has.
        PolicyError: the policy does not start with these slots, or places experts at no cost, which takes no hardware.
    """

    def __init__(
        self, machine: Machine, policy: Policy, shape: ModelShape, slots: int, estimates: Estimates, staging: int
    ) -> None:
        layout = machine.layout
        if staging < layout.transfer_chunk:
            raise ProfileError(
                f"staging_slots is {staging}, must be at least {layout.transfer_chunk}, one chunk of transfers"
            )
        if policy.place is not None:
            raise PolicyError(f"{policy.name} places experts at no cost, which no hardware does; simulate it")
        self._machine, self._device, self._policy = machine, machine.device, policy
        self._residents = Residents(policy, shape, slots, estimates)
        self._slots = Slots(self._residents, staging)
        if self._slots.num_slots > layout.num_slots:
            raise ProfileError(f"{policy.name} needs {self._slots.num_slots} slots, the machine has {layout.num_slots}")
        self._score = getattr(self._residents.state, "score", None)
        self._copies: list[Copy] = []
        self._link = Link(self._device, machine.sources, self._slots, machine.targets, self._score, self._copies.append)
        self._pending: deque[tuple[Event, Action]] = deque()  # what happens when a kernel has run, in order
        self._due: list[tuple[int, Action]] = []  # what happens at a time of the host's clock
        self._num_freeing = 0  # kernels that have freed slots, over the run
        self._dropped: set[int] = set()  # experts whose prefetch the running layer's beginning dropped
        self._note_last: Action = _nothing  # what is left to note of the last layer, done while the device is busy
        self.forwards: list[ForwardRecord] = []
        self._load_residents()

    def log(
        self, passes: Sequence[Pass], forwards: Sequence[Forward], progress: Callable[[int], None] | None = None
    ) -> Iterator[LogChunk]:
        """Run passes, and hand on what was measured when all have run.

        Args:
            passes: those of the machine, from its first on.
            forwards: the same as policies may see them.
            progress: told of each forward that has run.

        Raises:
            PlanError, PolicyError: as the simulator raises them.
        """
        device = self._device
        gc.collect()
        device.reserve(_EVENTS_PER_LAYER * len(passes) * self._machine.layout.num_layers)
        device.synchronize()
        start = device.event()
        start.record(device.compute)
        with torch.inference_mode(), without_collection():
            for pass_, forward in zip(passes, forwards, strict=True):
                self._run_forward(pass_, forward)
                if progress is not None:
                    progress(1)
        device.synchronize()
        return log_of(device, start, self.forwards, self._copies)

    def moe_layer(self, step: Step, hidden: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """Output of a layer's routed experts, split over hits, transfers and CPU as the policy plans.

        Args:
            step: what the policy is shown.
            hidden: [T, H] bfloat16 on the device.
            expert_ids: [T, K] int32.
            gates: [T, K] float32, the model's scale applied.

        Returns:
            [T, H] bfloat16.
        """
        record = self._record({})
        self._begin(step.layer, record)
        self._machine.set_layer(hidden, expert_ids, gates)
        gate = self._machine.read_gate(len(hidden))
        self._serve(step, gate, record, len(hidden))
        self._device.synchronize()
        self._settle()
        return self._machine.buffers.out[: len(hidden)].clone()

    def _load_residents(self) -> None:
        for layer, expert in np.argwhere(self._residents.resident).tolist():
            self._machine.load(layer, expert, int(self._slots.slot_of[layer, expert]))
        self._device.synchronize()

    def _run_forward(self, pass_: Pass, forward: Forward) -> None:
        machine, device = self._machine, self._device
        note = ForwardRecord(pass_, forward.number, device.event())
        shared = {
            "forward": forward.number,
            "pass_id": pass_.pass_id,
            "request": int(pass_.requests.min()),
            "kind": forward.kind,
            "num_tokens": machine.extents[forward.number].total,
            "kv_len": int(pass_.kv_lens.sum()),
        }
        for layer in range(machine.layout.num_layers):
            record = self._record({**shared, "layer": layer})
            note.layers.append(record)
            if layer == 0 or not self._policy.prefetches:
                self._begin(layer, record)
            else:
                self._after(note.layers[-2].end, lambda layer=layer, record=record: self._begin(layer, record))
            before_ns = perf_counter_ns()
            gate = machine.start_layer(forward.number, layer)
            record.host_ns = perf_counter_ns() - before_ns
            self._note_last()
            self._serve(step_at(forward, layer), gate, record, shared["num_tokens"])
        event = machine.end_forward(forward.number)
        self._note_last()
        self._wait(event)
        self._settle()
        self._slots.boundary(end_of(forward))
        self._count_unused()
        note.end.record(device.compute)
        self.forwards.append(note)

    def _record(self, row: dict[str, Any]) -> LayerRecord:
        return LayerRecord(row | dict.fromkeys(PREFETCH_COUNTS, 0), self._device.event(), self._device.event())

    def _begin(self, layer: int, record: LayerRecord) -> None:
        """A layer begins: its prefetches that have not started are dropped, and events are counted as its own."""
        if self._link.counts:
            self._count_unused()
        self._link.counts = record.row
        self._slots.begin(layer)
        self._dropped = self._link.drop(layer)

    def _serve(self, step: Step, gate: Event, record: LayerRecord, num_tokens: int) -> None:
        """From the ids of a gate to the launch of the layer's last kernel."""
        self._wait(gate)
        self._settle()
        before_ns = perf_counter_ns()
        at_gate, num_resident, promoted = self._read(step)
        decide_ns = perf_counter_ns()
        plan = self._decide(step)
        decided_ns = perf_counter_ns()
        hits = self._slots.activate(step.load > 0)
        transfers = plan.transfers
        if promoted is not None:  # it heads the first chunk
            rest = transfers[transfers != promoted.expert]
            transfers = np.concatenate([np.array([promoted.expert], np.int64), rest])
        read_ns = decide_ns - before_ns
        wait_ns = self._act(step, plan, at_gate, hits, transfers, promoted, record, num_tokens)
        record.host_ns += perf_counter_ns() - before_ns - (decided_ns - decide_ns) - wait_ns
        record.lead_ns += read_ns
        record.decide_ns = decided_ns - decide_ns
        capacity = self._residents.capacity_of(step.layer)
        self._note_last = partial(
            self._note, step, plan, hits, transfers, capacity, num_resident, self._dropped, promoted, record
        )

    def _read(self, step: Step) -> tuple[NDArray[np.bool_], int, Copy | None]:
        """Residents of the pool and the layer, and the prefetch in flight that the layer misses."""
        residents = self._residents
        self._link.is_held = True
        at_gate = residents.of_pool(step.layer, residents.resident).copy()
        num_resident = int(np.count_nonzero(residents.resident[step.layer]))
        current = self._link.current
        if current is not None and current.layer == step.layer and step.load[current.expert] > 0:
            return at_gate, num_resident, current
        return at_gate, num_resident, None

    def _decide(self, step: Step) -> Plan:
        plan = self._residents.decide(step)
        if len(plan.prefetches) and self._score is None:
            raise PolicyError(
                f"{self._policy.name} prefetches, so its state needs a score, [L, E], to rank residents by"
            )
        return plan

    def _act(
        self,
        step: Step,
        plan: Plan,
        at_gate: NDArray[np.bool_],
        hits: NDArray[np.int64],
        transfers: NDArray[np.int64],
        promoted: Copy | None,
        record: LayerRecord,
        num_tokens: int,
    ) -> int:
        """Put the plan into effect, and launch everything up to the layer's end; returns ns spent waiting for the CPU."""
        machine, device, slots, link = self._machine, self._device, self._slots, self._link
        layer, size = step.layer, machine.layout.transfer_chunk
        record.plan.record(device.compute)
        acts_ns = perf_counter_ns()
        demanded, copies = transfers, record.transfers
        if promoted is not None:
            promoted.is_promoted = True
            copies.append(promoted)
            demanded = transfers[1:]
        link.begin_batch()
        freed = None
        if len(demanded) and slots.is_free_now():
            freed = slots.take(layer, demanded[0])
            with device.copying():  # busy while the rest is prepared
                copies.append(link.demand(layer, int(demanded[0]), freed))
        if plan.clear_prefetches:
            link.clear()
        leaving = slots.retain(at_gate, plan.retained, demanded)
        hit_slots = slots.slot_of[layer, hits]
        ends = np.minimum(len(hits) + size * np.arange(1 + -(-len(transfers) // size)), len(hits) + len(transfers))
        events = [device.event() for _ in ends]  # a group's kernel has run
        first_serial, self._num_freeing = self._num_freeing, self._num_freeing + len(events)
        slots.give(slots.slot_of[layer, leaving].tolist(), events[0], first_serial)
        on_cpu = np.sort(plan.on_cpu)
        num_rows = machine.write_index(num_tokens, np.concatenate([hits, transfers]), ends, hit_slots, on_cpu)
        if len(hits):
            machine.run_hits()
            record.hits_end = events[0]
        events[0].record(device.compute)
        record.lead_ns = perf_counter_ns() - acts_ns
        if len(on_cpu):
            machine.start_cpu(layer, on_cpu, num_rows, num_tokens)
        if len(hits):
            self._after(events[0], partial(slots.used, hits))
        waiting = self._assign(layer, plan, demanded, freed, events, first_serial, promoted is not None)
        machine.name_slots(len(hits), slots.slot_of[layer, transfers].tolist())
        if len(transfers) or not len(hits):
            machine.fetch()
        del waiting[: len(copies) - (promoted is not None)]
        self._run_chunks(layer, copies, promoted, waiting, events, first_serial)
        waited_ns = 0
        if len(on_cpu):
            before_ns = perf_counter_ns()
            machine.wait_cpu(self._poll if self._policy.prefetches else None)
            waited_ns = perf_counter_ns() - before_ns
            record.cpu_ns = perf_counter_ns() - acts_ns
        machine.end_layer(num_tokens)
        record.end.record(device.compute)
        self._after(record.end, slots.enter)
        link.is_held = False
        if len(plan.prefetches):  # a policy may reuse its arrays before they are queued
            prefetches, priority = plan.prefetches.copy(), plan.prefetch_priority.copy()
            self._due.append((acts_ns + plan.prefetch_delay_ns, partial(link.issue, prefetches, priority)))
            self._issue_due()
            link.pick()
        return waited_ns

    def _assign(
        self,
        layer: int,
        plan: Plan,
        demanded: NDArray[np.int64],
        freed: Freed | None,
        events: list[Event],
        first_serial: int,
        has_promoted: bool,
    ) -> list[tuple[int, Freed]]:
        """The slot of each demand copy, in order: slots are free in the order of kernels, which is known before they run."""
        slots, size, assigned = self._slots, self._machine.layout.transfer_chunk, []
        stays = plan.retained[self._residents.number(layer, demanded)].tolist()
        place = int(has_promoted)  # among all transfers
        gone: list[int] = []
        for expert, stay in zip(demanded.tolist(), stays, strict=True):
            if freed is None:
                freed = slots.take(layer, expert)
            assigned.append((expert, freed))
            if not stay:
                gone.append(freed.slot)
            freed = None
            place += 1
            if place % size == 0 and gone:
                group = place // size
                slots.give(gone, events[group], first_serial + group)
                gone = []
        if gone:
            group = len(events) - 1
            slots.give(gone, events[group], first_serial + group)
        return assigned

    def _run_chunks(
        self,
        layer: int,
        copies: list[Copy],
        promoted: Copy | None,
        waiting: list[tuple[int, Freed]],
        events: list[Event],
        first_serial: int,
    ) -> None:
        """Launch each copy behind the kernel that frees its slot, and the kernel of each chunk behind its last copy."""
        machine, slots, link, device = self._machine, self._slots, self._link, self._device
        size, place = machine.layout.transfer_chunk, 0
        for group, event in enumerate(events):
            if group > 0:
                device.compute.wait_event(copies[min(size * group, len(copies)) - 1].end)  # copies land in order
                machine.run_chunk(group)
                event.record(device.compute)
            if group == 1 and promoted is not None:
                self._after(event, partial(slots.used, [promoted.expert]))
            last = place
            while last < len(waiting) and waiting[last][1].serial <= first_serial + group:
                last += 1
            if last > place:
                with device.copying():
                    copies += [link.demand(layer, expert, freed) for expert, freed in waiting[place:last]]
                place = last

    def _note(
        self,
        step: Step,
        plan: Plan,
        hits: NDArray[np.int64],
        transfers: NDArray[np.int64],
        capacity: int,
        num_resident: int,
        dropped: set[int],
        promoted: Copy | None,
        record: LayerRecord,
    ) -> None:
        """Columns of the log that are known by now; the device is busy meanwhile."""
        self._note_last = _nothing
        on_cpu, num_late = np.sort(plan.on_cpu), int(promoted is not None)
        late = set() if promoted is None else {promoted.expert}
        missed = {*transfers.tolist(), *on_cpu.tolist()}
        record.row.update(
            capacity=capacity,
            num_resident=num_resident,
            num_activated=len(hits) + len(missed),
            num_promoted=num_late,
            prefetch_late=num_late,
            prefetch_unserved=len(dropped & missed - late),
            hits=hits,
            hit_tokens=int(step.load[hits].sum()),
            transfers=transfers,
            transfer_loads=step.load[transfers],
            on_cpu=on_cpu,
            cpu_loads=step.load[on_cpu],
            retained=np.flatnonzero(plan.retained),
            prefetch_layers=plan.prefetches[:, 0].copy(),
            prefetch_experts=plan.prefetches[:, 1].copy(),
        )

    # Waiting

    def _after(self, event: Event | None, action: Action) -> None:
        """Do something when an event has come, in order; at once where nobody could tell the difference."""
        if self._policy.prefetches and event is not None:
            self._pending.append((event, action))
        else:
            action()

    def _wait(self, event: Event) -> None:
        if self._policy.prefetches:
            self._poll()
            while not event.query():
                self._poll()
        event.synchronize()

    def _poll(self) -> None:
        """Do what has become due, and let an idle link look for a prefetch."""
        self._link.notice()
        self._issue_due()
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()[1]()
        self._link.pick()

    def _settle(self) -> None:
        """The device has done all that was launched, but for copies: do what follows from it."""
        self._link.notice()
        self._issue_due()
        while self._pending:
            self._pending.popleft()[1]()
        self._count_unused()

    def _issue_due(self) -> None:
        while self._due and self._due[0][0] <= perf_counter_ns():
            self._due.pop(0)[1]()

    def _count_unused(self) -> None:
        self._link.counts["prefetch_unused"] += self._slots.num_unused
        self._slots.num_unused = 0


def _nothing() -> None:
    """Nothing is left to note."""
