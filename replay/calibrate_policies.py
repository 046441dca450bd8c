"""Measures what a policy costs at a gate, by running it in the executor on recorded routing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from policies.contract import Estimates, Policy
from policies.log import LogChunk
from replay.calibrate import ShapeMeasured, small_arena
from replay.calibrate_costs import LayerCosts
from replay.calibrate_layers import STAGING, TRANSFER_CHUNK
from replay.calibrate_log import read_log
from replay.layout import Layout
from replay.machine import Machine
from replay.repeats import Repeated
from replay.run import replay
from tracer.schema import ModelShape, Pass

WARM_FORWARDS = 3  # of each run, in which policies are compiled and caches fill


class PolicyCost(NamedTuple):
    """What a policy costs at a gate."""

    time: Repeated  # from the reading of the gate to the plan's first copy, beyond gate_sync
    decide_us: float  # part of it: the decision and the check of its plan, a median


def policy_time(chunks: Iterable[LogChunk], layer_ns: Callable[[int, int], float], costs: LayerCosts) -> Repeated:
    """What a layer takes before t2 beyond its own part and `gate_sync`: the decision and what the executor pays for it.

    What a forward takes beyond the tail, for what the policy does at its end, is shared out over its layers.

    Args:
        chunks: the log of a run.
        layer_ns: of the layer's part without routed experts, by tokens and committed positions.
        costs: at this shape.
    """
    samples = []
    for forward in list(read_log(chunks))[WARM_FORWARDS:]:
        layers = forward.layers
        beyond_ns = forward.after_layers - costs.tail.mean_ns
        for layer in layers:
            beyond_ns += layer.before + costs.first_copy_ns - costs.gate_sync_ns
            beyond_ns -= layer_ns(layer.num_tokens, layer.kv_len)
        # the roundtrip carries what comes later behind the CPU
        beyond_ns -= costs.after_cpu_ns * sum(layer.ends_by_cpu for layer in layers[:-1])
        samples.append(beyond_ns / len(layers))
    found = Repeated.of(samples)
    return found._replace(median_ns=max(0.0, found.median_ns), mean_ns=max(0.0, found.mean_ns))


class PolicyRuns:
    """A machine on which policies run over some passes of a trace, at one shape's sizes.

    Args:
        measured: at the shape of the experts and of everything else.
        traced: shape of the passes.
        passes: at least WARM_FORWARDS + 1.
        device: its name.
        pool_bytes: of host memory, which experts share.
        most_slots: of all layers together.
    """

    def __init__(
        self,
        measured: ShapeMeasured,
        traced: ModelShape,
        passes: Sequence[Pass],
        device: str,
        pool_bytes: int,
        most_slots: int,
    ) -> None:
        shape, cpu, self._layers = measured
        layout = Layout(
            *(shape, traced.num_layers, traced.num_experts, traced.top_k, most_slots + STAGING, TRANSFER_CHUNK),
            cpu_workers=cpu.num_workers,
            cpu_kernel=cpu.kernel,
        )
        arena = small_arena(shape, traced.num_layers, traced.num_experts, pool_bytes, device)
        self._machine = Machine(layout, device, arena, passes)
        self._passes, self._traced = passes, traced

    def cost(self, policy: Policy, slots: int, estimates: Estimates) -> PolicyCost:
        """Run a policy once.

        Raises:
            PolicyError, PlanError: as any run of it does.
            ProfileError: it needs more slots than there are.
        """
        ran = replay(self._machine, self._passes, policy, self._traced, slots, estimates, STAGING)
        rate, costs = self._layers.layer, self._layers.costs
        return PolicyCost(policy_time(ran.chunks, rate.ns, costs), ran.decide_us)

    def close(self) -> None:
        """End what runs beside this thread."""
        self._machine.close()
