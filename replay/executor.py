"""Runs a policy over recorded routing with real copies, kernels and CPU experts, by the timing rules of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from policies.check import check_ranked
from policies.contract import Estimates, Plan, Policy, PolicyError, Step
from policies.log import LogChunk
from policies.profile import ProfileError, staging_of
from policies.residents import Residents
from policies.steps import Forward, end_of, step_at
from replay.asking import Asking
from replay.core_commands import COPY_ON_DEVICE
from replay.core_link import begin, settle
from replay.core_plan import (
    FIRST_COPY,
    HITS_EVENT,
    NUM_FIRST,
    NUM_RESIDENT,
    NUM_ROWS,
    PLAN_EVENT,
    PROMOTED_COPY,
    act,
    begin_after,
    finish,
)
from replay.core_slots import forget_evicted, take
from replay.core_state import IS_HELD, Told, arrays_of, command, launch, record_compute
from replay.device import without_collection
from replay.issuer import Issuer
from replay.machine import Machine
from replay.records import ForwardRecord, LayerRecord, log_of
from tracer.schema import ModelShape, Pass

# events that are made before a run; what it needs beyond is made when it is needed
_EVENTS_PER_EXPERT, _EVENTS_PER_LAYER = 1.5, 16


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
        num_forwards: at most.

    Raises:
        ProfileError: fewer staging slots than a chunk, or more slots than the machine has.
        PolicyError: the policy does not start with these slots, or places experts at no cost, which takes no hardware.
    """

    def __init__(
        self,
        machine: Machine,
        policy: Policy,
        shape: ModelShape,
        slots: int,
        estimates: Estimates,
        staging: int,
        num_forwards: int = 1,
    ) -> None:
        layout, device = machine.layout, machine.device
        staging = staging_of(layout.transfer_chunk, staging)
        check_policy(policy)
        self._machine, self._device, self._policy = machine, device, policy
        self._residents = Residents(policy, shape, slots, estimates)
        if (needed := int(self._residents.capacity.sum()) + staging) > layout.num_slots:
            raise ProfileError(f"{policy.name} needs {needed} slots, the machine has {layout.num_slots}")
        self._asking = Asking(policy, self._residents)
        self._has_score = getattr(self._residents.state, "score", None) is not None
        arrays = arrays_of(
            *(self._residents, staging, num_forwards * layout.num_layers, machine.targets(), machine.sources()),
            copy_bytes=machine.copy_bytes,
            waits=policy.prefetches,
        )
        index = machine.index
        told = Told(index.array, index.layout, index.cpu_tokens, index.cpu_ends, machine.works.groups)
        self._issuer = Issuer(device, arrays, told, policy.prefetches)
        self._is_cpu_busy = False
        self.forwards: list[ForwardRecord] = []
        self._load_residents()

    def log(
        self, passes: Sequence[Pass], forwards: Sequence[Forward], progress: Callable[[int], object] | None = None
    ) -> Iterator[LogChunk]:
        """Run passes, and hand on what was measured when all have run.

        Args:
            passes: those of the machine, from its first on.
            forwards: the same as policies may see them.
            progress: told of each forward that has run.

        Raises:
            PlanError, PolicyError: as the simulator raises them.
        """
        activated = sum(int(np.count_nonzero(forward.load)) for forward in forwards)
        events = _EVENTS_PER_EXPERT * activated + _EVENTS_PER_LAYER * len(passes) * self._machine.layout.num_layers
        self._issuer.reserve(int(events))
        try:
            with torch.inference_mode(), without_collection():
                for pass_, forward in zip(passes, forwards, strict=True):
                    self._run_forward(pass_, forward)
                    if progress is not None:
                        progress(1)
                end = record_compute(self._issuer.core)
                self._issuer.send()
        finally:
            self._let_go()
        return log_of(self._device.times_ns(self._issuer.num_events), self.forwards, int(end), self._issuer.arrays)

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
        num_tokens = len(hidden)
        self._machine.set_layer(hidden, expert_ids, gates)
        begin(self._issuer.core, step.layer)
        fetch = int(self._machine.works.groups[-1])  # in the place of another layer
        self._serve(step, num_tokens, fetch)
        self._let_go()
        settle(self._issuer.core)
        return self._machine.buffers.out[:num_tokens].clone()

    def _load_residents(self) -> None:
        core, arrays = self._issuer.core, self._issuer.arrays
        for layer, expert in np.argwhere(arrays.resident).tolist():
            take(core, layer, expert)
            target = arrays.targets[arrays.slot_of[layer, expert]]
            command(core, COPY_ON_DEVICE, target, arrays.sources[layer, expert], self._machine.copy_bytes)
            self._issuer.send()
        self._device.synchronize()

    def _run_forward(self, pass_: Pass, forward: Forward) -> None:
        machine, works, issuer = self._machine, self._machine.works, self._issuer
        extent, number, last = machine.extents[forward.number], len(self.forwards), machine.layout.num_layers - 1
        core = issuer.core
        note = ForwardRecord(pass_, number, int(record_compute(core)))
        for target, source, num_bytes in machine.routing(forward.number):
            command(core, COPY_ON_DEVICE, target, source, num_bytes)
        begin(core, 0)
        launch(core, works.layer[extent, 0])
        gate = int(record_compute(core))
        issuer.send()
        for layer in range(last + 1):
            issuer.make_room()  # while the device is busy
            issuer.wait(gate)
            following = works.layer[extent, layer + 1] if layer < last else works.tail[extent]
            record, gate = self._serve(step_at(forward, layer), extent.total, following)
            note.layers.append(record)
            if layer < last:
                begin_after(issuer.core, record.end, layer + 1)
        issuer.wait(gate)
        settle(issuer.core)
        before = self._residents.resident.copy()
        self._residents.boundary(end_of(forward))
        forget_evicted(issuer.core, before)
        self.forwards.append(note)

    def _serve(self, step: Step, num_tokens: int, following: int) -> tuple[LayerRecord, int]:
        """From the ids of a gate to the launch of what follows the layer; returns the event of that, too."""
        machine, issuer, core = self._machine, self._issuer, self._issuer.core
        start_ns = perf_counter_ns()
        free_slots = settle(core)
        decide_ns = perf_counter_ns()
        plan = self._decide(step, free_slots)
        decided_ns = perf_counter_ns()
        on_cpu = np.sort(plan.on_cpu)
        hits, transfers, answer = act(
            *(core, np.array(plan.transfers), on_cpu, np.array(plan.retained), bool(plan.clear_prefetches)),
            *(step.load, machine.ids(num_tokens), machine.layout.transfer_chunk),
        )
        noted = answer.tolist()
        acts_ns = perf_counter_ns()
        issuer.send_some(0, noted[NUM_FIRST])
        launched_ns = perf_counter_ns()
        if len(on_cpu):
            machine.start_cpu(step.layer, on_cpu, noted[NUM_ROWS], num_tokens)
            self._is_cpu_busy = True
        issuer.send(noted[NUM_FIRST])
        issuer.arrays.at[IS_HELD] = 0
        if len(plan.prefetches):
            issuer.queue(plan, acts_ns)
        waits_ns = waited_ns = perf_counter_ns()
        cpu_ns = 0
        if len(on_cpu):
            machine.wait_cpu(issuer.poll if self._policy.prefetches else None)
            self._is_cpu_busy = False
            waited_ns = perf_counter_ns()
            cpu_ns = waited_ns - acts_ns
        end, after = finish(issuer.core, machine.works.combine[num_tokens], following)
        issuer.send()
        record = LayerRecord(
            step,
            hits,
            transfers,
            on_cpu,
            np.flatnonzero(plan.retained),
            plan.prefetches.copy() if len(plan.prefetches) else plan.prefetches,
            capacity=self._residents.capacity_of(step.layer),
            num_resident=noted[NUM_RESIDENT],
            plan=noted[PLAN_EVENT],
            hits_end=noted[HITS_EVENT],
            end=int(end),
            first_copy=noted[FIRST_COPY],
            promoted_copy=noted[PROMOTED_COPY],
            cpu_ns=cpu_ns,
            decide_ns=decided_ns - decide_ns,
            lead_ns=launched_ns - decided_ns + decide_ns - start_ns,
        )
        record.host_ns = perf_counter_ns() - start_ns - record.decide_ns - (waited_ns - waits_ns)
        return record, int(after)

    def _decide(self, step: Step, free_slots: int) -> Plan:
        plan = self._asking.decide(step, free_slots)
        check_ranked(self._policy, plan, self._has_score)
        return plan

    def _let_go(self) -> None:
        """Wait until neither device nor CPU works on the run any longer, whatever has become of it."""
        if self._is_cpu_busy:
            self._machine.wait_cpu(None)
            self._is_cpu_busy = False
        self._device.synchronize()


def check_policy(policy: Policy) -> None:
    """Refuse a policy that hardware cannot follow."""
    if policy.place is not None:
        raise PolicyError(f"{policy.name} places experts at no cost, which no hardware does; simulate it")
