"""A bound on time: what no policy of this cache size can be sooner than, on this trace and machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experiments.results import Warmup, routed_tokens
from policies.contract import Policy
from policies.log import LogChunk, Table
from policies.profile import Costs, copy_ns
from simulator.fewest_misses import FewestMisses
from tracer.schema import ForwardKind


class LowerBound:
    """Sums the log of a run, of which it reads what is the same for all policies: which experts are activated.

    Args:
        policy: of the run.
        num_layers, num_experts: of the trace.
        warmup_requests: that are not counted.
        costs: of the run.
        staging_slots: slots beyond the cache.
        num_misses: the fewest, where they are known.
    """

    def __init__(
        self,
        policy: Policy,
        num_layers: int,
        num_experts: int,
        warmup_requests: int,
        costs: Costs,
        staging_slots: int,
        num_misses: int | None = None,
    ) -> None:
        self._policy, self._num_layers, self._num_experts = policy, num_layers, num_experts
        self._warmup, self._costs, self._staging_slots = Warmup(warmup_requests), costs, staging_slots
        self._known = num_misses
        self._packed: FewestMisses | None = None
        self._starts_empty = True
        self._resident_ns = 0.0

    def add(self, chunk: LogChunk) -> None:
        """Add the next stretch of whole forwards."""
        layers, kinds = chunk.layers, chunk.forwards.scalars["kind"]
        if not len(kinds):
            return
        counted = ~self._warmup.of(chunk.forwards)[1] & (kinds != ForwardKind.PREFILL)
        of_layers = np.repeat(counted, self._num_layers)
        if self._packed is None:
            capacity = layers.scalars["capacity"][: self._num_layers]
            slots = capacity[0] if self._policy.pool == "global" else capacity.sum()
            self._packed = FewestMisses(self._num_layers, self._num_experts, int(slots) + self._staging_slots)
            # what a layer holds at its first gate was there from the start or came by prefetch
            held, landed = (
                layers.scalars[name][: self._num_layers].sum() for name in ("num_resident", "prefetch_landed")
            )
            self._starts_empty = bool(held <= landed)
        if self._known is None:
            self._packed.add(layers, of_layers)
        copied = self._policy.misses == "h2d"
        self._resident_ns += float(resident_ns(self._costs, layers, copied)[of_layers].sum())
        self._resident_ns += self._costs.tail_ns * int(np.count_nonzero(counted))

    @property
    def num_misses(self) -> int:
        """The fewest misses of counted decode forwards."""
        if self._known is not None:
            return self._known
        return 0 if self._packed is None else self._packed.num_misses

    def tpot_ms(self, num_accepted: int) -> float | None:
        """The least time per accepted position; None where residents are a gift, or nothing is accepted."""
        if not self._starts_empty or self._policy.place is not None or not num_accepted:
            return None
        return max(self._resident_ns, self.num_misses * miss_ns(self._costs)) / num_accepted / 1e6


def resident_ns(costs: Costs, layers: Table, copied: bool) -> NDArray[np.float64]:
    """The least time of each layer execution, [rows], if all its experts were resident.

    Where misses are copied that is the time of `full`, with the decision time of the run's own policy. A policy that
    runs some on the CPU can be sooner than that, as the GPU works beside it: of both together, each counted with a
    weight that makes it the same for any number of experts on the CPU, there is still a least time.
    """
    rows = layers.scalars
    non_expert_ns = np.floor(costs.n_a_ns + costs.n_b_ns * rows["num_tokens"] + costs.n_c_ns * rows["kv_len"] + 0.5)
    fixed_ns = non_expert_ns + costs.gate_sync_ns + costs.policy_ns
    experts, tokens = rows["num_activated"], routed_tokens(layers)
    on_gpu = np.floor(costs.g_a_ns + costs.g_b_ns * experts + costs.g_c_ns * tokens + 0.5)
    if copied:
        return fixed_ns + on_gpu
    cpu_a_ns = costs.cpu_a_ns + costs.cpu_roundtrip_ns
    on_cpu = cpu_a_ns + costs.cpu_b0_ns * experts + costs.cpu_b1_ns * tokens
    per_expert_ns = costs.g_b_ns + costs.cpu_b0_ns
    weight = costs.cpu_b0_ns / per_expert_ns if per_expert_ns else 1.0  # of the GPU
    token_ns = min(weight * costs.g_c_ns, (1 - weight) * costs.cpu_b1_ns)
    on_both = weight * (costs.g_a_ns + costs.g_b_ns * experts) + (1 - weight) * cpu_a_ns + token_ns * tokens
    return fixed_ns + np.minimum(np.minimum(on_gpu, on_cpu), on_both)


def miss_ns(costs: Costs) -> float:
    """Time of a miss where link and CPU serve misses side by side, each as fast as it can."""
    by_copy, on_cpu = copy_ns(costs, False), costs.cpu_b0_ns + costs.cpu_b1_ns
    return 1 / (1 / by_copy + 1 / on_cpu) if by_copy and on_cpu else 0.0
