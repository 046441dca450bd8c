"""A decision log as a policy: what somebody decided, decided again under any machine's costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.contract import End, Plan, Policy, PolicyError, Step, View
from policies.log import Ragged
from policies.pool import number_in_pool, part_of_pool, pool_of
from tracer.schema import ModelShape


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a log says: row forward * L + layer is a layer execution."""

    num_layers: int
    num_experts: int
    pool: str  # layer or global
    capacity: NDArray[np.int64]  # [rows] slots of the layer, or of the pool
    lists: Mapping[str, Ragged]  # hits, transfers, on_cpu, retained, prefetch_layers and prefetch_experts
    has_prefetches: bool

    def __len__(self) -> int:
        return len(self.capacity)

    def number(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of a layer's experts within its pool."""
        return experts + layer * self.num_experts if self.pool == "global" else experts

    def mask(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """What is named of a pool, [E] or [L * E]."""
        mask = np.zeros(self.num_experts * (self.num_layers if self.pool == "global" else 1), np.bool_)
        mask[numbers] = True
        return mask

    def found(self, row: int) -> NDArray[np.bool_]:
        """Who was resident at a gate as far as it mattered: hits, and who stayed without being copied. [E] or [L * E]."""
        lists, layer = self.lists, row % self.num_layers
        found = self.mask(lists["retained"][row])
        found[self.number(layer, lists["transfers"][row])] = False
        found[self.number(layer, lists["hits"][row])] = True
        return found


@dataclass(frozen=True)
class Params:
    """What never changes."""

    decisions: Decisions
    clear_prefetches: bool
    prefetch_delay_ns: int


@dataclass(frozen=True, eq=False)
class State:
    """What ranks residents when a prefetch needs a victim: whether the log's next execution finds them."""

    score: NDArray[np.float64]  # [L, E]


def playback(decisions: Decisions, clear_prefetches: bool, prefetch_delay_ns: int) -> Policy:
    """The policy that decides as a log says, for the trace that the log is of.

    Without prefetches residents follow from the decisions alone, so that a log either fits exactly or is refused.
    With prefetches they depend on when copies land: plans then follow the log where it names misses, and copy the
    others.

    Args:
        decisions: the log.
        clear_prefetches: a plan's prefetches replace those still queued; a log does not say.
        prefetch_delay_ns: how long after its plan a prefetch is queued; a log does not say.
    """
    sizes = decisions.capacity.reshape(-1, decisions.num_layers)
    return Policy(
        "log",
        Params(decisions, clear_prefetches, prefetch_delay_ns),
        _init,
        _decide,
        _boundary,
        pool=decisions.pool,
        misses="log" if decisions.lists["on_cpu"].values.size else "h2d",
        prefetches=decisions.has_prefetches,
        resizes=bool((sizes != sizes[0]).any()),
        sized=False,
    )


def _init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    decisions = params.decisions
    num_layers, num_experts = shape.num_layers, shape.num_experts
    score = np.stack([_part(decisions, decisions.found(layer), layer) for layer in range(num_layers)])
    resident = decisions.found(0).reshape(num_layers, num_experts) if decisions.pool == "global" else score.copy()
    for row in range(num_layers):  # what these prefetched before its layer was there
        resident[decisions.lists["prefetch_layers"][row], decisions.lists["prefetch_experts"][row]] = False
    return State(score.astype(np.float64)), resident, _capacity(decisions, 0)


def _decide(params: Params, state: State, step: Step, view: View) -> Plan:
    decisions, lists = params.decisions, params.decisions.lists
    row = step.forward * decisions.num_layers + step.layer
    if row >= len(decisions):
        raise PolicyError("the log has no row for it: it ends before the trace")
    hits, transfers, on_cpu = (lists[name][row] for name in ("hits", "transfers", "on_cpu"))
    activated, served = np.flatnonzero(step.load), np.sort(np.concatenate([hits, transfers, on_cpu]))
    if not np.array_equal(activated, served):
        raise PolicyError(
            f"the log is not of this trace: it serves experts {served.tolist()}, the trace activates {activated.tolist()}"
        )
    retained = decisions.mask(lists["retained"][row])
    following = row + decisions.num_layers
    state.score[step.layer] = (
        _part(decisions, decisions.found(following), step.layer) if following < len(decisions) else 0.0
    )
    if not decisions.has_prefetches:
        _require_fit(hits, transfers, on_cpu, view.resident[step.layer])
        return Plan(transfers, on_cpu, retained, np.empty((0, 2), np.int64), np.empty((0, 2)), False, 0)
    return _adapted(params, state, step, view, row, retained)


def _require_fit(
    hits: NDArray[np.int64], transfers: NDArray[np.int64], on_cpu: NDArray[np.int64], resident: NDArray[np.bool_]
) -> None:
    absent = hits[~resident[hits]]
    if absent.size:
        raise PolicyError(f"the log has experts {absent.tolist()} as hits, which no earlier row copied and retained")
    for name, experts in (("copies", transfers), ("computes on the CPU", on_cpu)):
        present = experts[resident[experts]]
        if present.size:
            raise PolicyError(f"the log {name} experts {present.tolist()}, which earlier rows left resident")


def _adapted(params: Params, state: State, step: Step, view: View, row: int, retained: NDArray[np.bool_]) -> Plan:
    """The row's plan for who is really resident: other misses than the log's are copied last."""
    decisions, lists, layer = params.decisions, params.decisions.lists, step.layer
    resident, in_flight = view.resident[layer], view.in_flight[layer]
    missed = (step.load > 0) & ~resident
    on_cpu, transfers = lists["on_cpu"][row], lists["transfers"][row]
    on_cpu = on_cpu[missed[on_cpu] & ~in_flight[on_cpu]]
    missed[on_cpu] = False
    named = transfers[missed[transfers]]
    transfers = np.concatenate([named, np.setdiff1d(np.flatnonzero(missed), named)])

    numbers = number_in_pool(view.capacity, step.load.size, layer, transfers)
    arriving = decisions.mask(numbers)
    pool_resident, pool_in_flight, score = (
        part_of_pool(view.capacity, layer, array) for array in (view.resident, view.in_flight, state.score)
    )
    promoted = arriving & pool_in_flight
    staying = np.flatnonzero(retained & (pool_resident | arriving) & ~promoted)
    room = view.capacity[pool_of(view.capacity, layer)] - np.count_nonzero(pool_in_flight)
    best = staying[np.argsort(-score[staying], kind="stable")][:room]
    retained = promoted | decisions.mask(best)

    at, experts = lists["prefetch_layers"][row], lists["prefetch_experts"][row]
    is_new = ~(view.resident[at, experts] | view.in_flight[at, experts])
    prefetches = np.stack([at[is_new], experts[is_new]], axis=1)
    for other, expert in zip(at.tolist(), experts.tolist(), strict=True):
        following = row - layer + other + (decisions.num_layers if other <= layer else 0)
        if following < len(decisions) and expert in lists["transfers"][following]:
            state.score[other, expert] = 0.5  # was late: over residents that the log does not find again
    priority = np.zeros((len(prefetches), 2))
    return Plan(transfers, on_cpu, retained, prefetches, priority, params.clear_prefetches, params.prefetch_delay_ns)


def _boundary(params: Params, state: State, end: End, view: View) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Capacities of the next forward, and who has left by then: whom it copies again, and who has no slot."""
    decisions = params.decisions
    evictions = np.zeros_like(view.resident)
    first = (end.forward + 1) * decisions.num_layers
    if first >= len(decisions):
        return view.capacity, evictions
    capacity = _capacity(decisions, first)
    for pool in range(capacity.size):
        row = first + pool
        resident, leaving = (part_of_pool(capacity, pool, array) for array in (view.resident, evictions))
        in_flight = part_of_pool(capacity, pool, view.in_flight)
        if not decisions.has_prefetches:
            again = np.concatenate([decisions.lists["transfers"][row], decisions.lists["on_cpu"][row]])
            leaving[again] = resident[again]
        excess = np.count_nonzero(resident & ~leaving) + np.count_nonzero(in_flight) - capacity[pool]
        if excess > 0:
            others = np.flatnonzero(resident & ~leaving & ~decisions.found(row))
            leaving[others[-excess:]] = True
    return capacity, evictions


def _capacity(decisions: Decisions, first: int) -> NDArray[np.int64]:
    """Slots of all pools in the forward that begins at this row."""
    return decisions.capacity[first : first + (1 if decisions.pool == "global" else decisions.num_layers)]


def _part(decisions: Decisions, found: NDArray[np.bool_], layer: int) -> NDArray[np.bool_]:
    """Of a pool the experts of a layer, [E]."""
    return found.reshape(-1, decisions.num_experts)[layer if decisions.pool == "global" else 0]
