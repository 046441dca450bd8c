"""The expert slots of the GPU in compiled code: which are taken, by whom, and who gives way to a prefetch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from policies.log import PREFETCH_COUNTS
from policies.pool import number_in_pool, pool_of
from policies.residents import Held
from tracer.schema import ModelShape

_UNUSED = PREFETCH_COUNTS.index("prefetch_unused")
# of SlotTable.counts: all slots; those that demand copies hold, and of these such as will be retained; the running
# layer; layer executions so far
_SLOTS, _HELD, _ENTERING, _LAYER, _EXECUTIONS = range(5)


class SlotTable(NamedTuple):
    """What is known of the slots beyond who is resident. Within a pool experts are numbered as in `Plan.retained`."""

    in_use: NDArray[np.bool_]  # [L, E] a kernel of the running layer has yet to read them
    untried: NDArray[np.bool_]  # [L, E] landed by prefetch and not activated since
    last_activated: NDArray[np.int64]  # [L, E] layer execution, counted over the run; -1 if none
    leaving: NDArray[np.bool_]  # [E] hits of the running layer that are not retained
    entering: NDArray[np.bool_]  # [E] demand copies of the running layer that are retained
    num_resident: NDArray[np.int64]  # [pools]
    num_in_flight: NDArray[np.int64]  # [pools]
    counts: NDArray[np.int64]  # [5] by the names above


def slot_table(shape: ModelShape, held: Held, staging: int) -> SlotTable:
    """All slots at the start of a run: those of the pools, and staging for demand copies."""
    size, num_pools = (shape.num_layers, shape.num_experts), held.capacity.size
    counts = np.zeros(5, np.int64)
    counts[_SLOTS] = held.capacity.sum() + staging
    return SlotTable(
        in_use=np.zeros(size, np.bool_),
        untried=np.zeros(size, np.bool_),
        last_activated=np.full(size, -1, np.int64),
        leaving=np.zeros(shape.num_experts, np.bool_),
        entering=np.zeros(shape.num_experts, np.bool_),
        num_resident=held.resident.reshape(num_pools, -1).sum(axis=1),
        num_in_flight=np.zeros(num_pools, np.int64),
        counts=counts,
    )


@jit
def begin(slots, layer):
    """A layer begins."""
    slots.counts[_LAYER] = layer


@jit
def running_layer(slots):
    """The layer that began last."""
    return slots.counts[_LAYER]


@jit
def has_room(slots):
    """Some slot is free, whichever pool it belongs to."""
    taken = slots.counts[_HELD]
    for pool in range(slots.num_resident.size):
        taken += slots.num_resident[pool] + slots.num_in_flight[pool]
    return taken < slots.counts[_SLOTS]


@jit
def free_slots(slots, held, layer):
    """Slots of a layer's pool that hold neither a resident nor a prefetch in progress, as views have them."""
    pool = pool_of(held.capacity, layer)
    return held.capacity[pool] - slots.num_resident[pool] - slots.num_in_flight[pool]


@jit
def unclaimed(slots, held, layer):
    """Free slots of a layer's pool, less what will be retained of the running layer's demand copies."""
    shares_pool = pool_of(held.capacity, layer) == pool_of(held.capacity, slots.counts[_LAYER])
    return free_slots(slots, held, layer) - (slots.counts[_ENTERING] if shares_pool else 0)


@jit
def activate(slots, held, load):
    """The gate of the running layer is read: its hits are in use from now on."""
    layer, now = slots.counts[_LAYER], slots.counts[_EXECUTIONS]
    # rows and columns first: to take an array out of a tuple counts references to it, which in a loop costs most
    resident, in_use, untried = held.resident[layer], slots.in_use[layer], slots.untried[layer]
    last_activated = slots.last_activated[layer]
    for expert in range(load.size):
        is_activated = load[expert] > 0
        in_use[expert] = is_activated & resident[expert]
        untried[expert] &= not is_activated
        last_activated[expert] = now if is_activated else last_activated[expert]
    slots.counts[_EXECUTIONS] = now + 1


@jit
def retain(slots, held, tally, numbers, retained, demanded):
    """The running layer's plan acts: residents that are not retained leave, those in use when they were used.

    Args:
        slots: SlotTable.
        held: Held.
        tally: of the layer execution that is going on.
        numbers: [N] residents of the pool at the gate that are not retained.
        retained: [E] or [L * E] of the plan.
        demanded: experts of its transfers, but for a promoted one; they have yet to take a slot each.
    """
    num_experts, layer = held.resident.shape[1], slots.counts[_LAYER]
    first = number_in_pool(held.capacity, num_experts, layer, 0)
    in_use, leaving, entering, counts = slots.in_use[layer], slots.leaving, slots.entering, slots.counts
    for number in numbers:
        expert = number - first
        if 0 <= expert < num_experts and in_use[expert]:
            leaving[expert] = True
        else:
            _leave(slots, held, tally, layer * num_experts + expert)
    for expert in demanded:
        entering[expert] = retained[first + expert]
        counts[_ENTERING] += retained[first + expert]


@jit
def use(slots, held, tally, experts):
    """A kernel over these residents of the running layer has run; those that are not retained leave now."""
    layer, num_experts = slots.counts[_LAYER], held.resident.shape[1]
    in_use, leaving = slots.in_use[layer], slots.leaving
    for expert in experts:
        in_use[expert] = False
        if leaving[expert]:
            leaving[expert] = False
            _leave(slots, held, tally, layer * num_experts + expert)


@jit
def hold(slots):
    """A demand copy takes a slot."""
    slots.counts[_HELD] += 1


@jit
def release(slots, experts):
    """The kernel over these demand copies has run; those that are not retained give up their slots."""
    entering, counts = slots.entering, slots.counts
    for expert in experts:
        counts[_HELD] -= not entering[expert]


@jit
def enter(slots, held, transfers):
    """The running layer ends: the transfers that it retains become residents."""
    layer = slots.counts[_LAYER]
    entering, resident = slots.entering, held.resident[layer]
    for expert in transfers:
        if entering[expert]:
            entering[expert] = False
            resident[expert] = True
    entered = slots.counts[_ENTERING]
    slots.num_resident[pool_of(held.capacity, layer)] += entered
    slots.counts[_HELD] -= entered
    slots.counts[_ENTERING] = 0


@jit
def holds(slots, held, layer, expert):
    """An expert is resident, or will be when the running layer ends."""
    return held.resident[layer, expert] or (layer == slots.counts[_LAYER] and slots.entering[expert])


@jit
def find_victim(slots, held, pool, score):
    """The resident of a pool that gives way first, as layer * E + expert: of lowest score; -1 if there is none.

    Ties: the one activated least recently, then the highest number. Experts in use are safe, and with a score that is
    no number among the others nobody leaves.
    """
    size = held.resident.size // held.capacity.size
    start = pool * held.resident.shape[1]
    resident, in_use = held.resident.ravel(), slots.in_use.ravel()
    scores, activated = score.ravel(), slots.last_activated.ravel()
    victim, lowest, oldest = -1, np.inf, 0
    for at in range(start, start + size):
        if resident[at] and not in_use[at]:
            if np.isnan(scores[at]):
                victim = -1
                break
            if victim < 0 or scores[at] < lowest or (scores[at] == lowest and activated[at] <= oldest):
                victim, lowest, oldest = at, scores[at], activated[at]
    return victim


@jit
def give_way(slots, held, tally, victim, score, layer, expert):
    """Evict the victim of a pool, if there is one and it scores strictly below an expert that is to come."""
    if victim < 0 or not score.ravel()[victim] < score[layer, expert]:
        return False
    _leave(slots, held, tally, victim)
    return True


@jit
def reserve(slots, held, layer, expert):
    """The prefetch of an expert starts."""
    held.in_flight[layer, expert] = True
    slots.num_in_flight[pool_of(held.capacity, layer)] += 1


@jit
def land(slots, held, layer, expert, is_promoted):
    """A prefetched expert becomes resident; one that was promoted is in use until its kernel has run."""
    pool = pool_of(held.capacity, layer)
    held.in_flight[layer, expert] = False
    slots.num_in_flight[pool] -= 1
    held.resident[layer, expert] = True
    slots.num_resident[pool] += 1
    slots.untried[layer, expert] = not is_promoted
    slots.in_use[layer, expert] = is_promoted


@jit
def recount(slots, held, tally):
    """The policy has changed residents itself: count them anew, and those that left without having been activated."""
    num_layers, num_experts = held.resident.shape
    slots.num_resident[:] = 0
    for layer in range(num_layers):
        pool = pool_of(held.capacity, layer)
        for expert in range(num_experts):
            if held.resident[layer, expert]:
                slots.num_resident[pool] += 1
            elif slots.untried[layer, expert]:
                slots.untried[layer, expert] = False
                tally[_UNUSED] += 1


@jit
def _leave(slots, held, tally, at):
    """A resident leaves; `at` is layer * E + expert."""
    num_experts = held.resident.shape[1]
    held.resident.ravel()[at] = False
    slots.num_resident[pool_of(held.capacity, at // num_experts)] -= 1
    untried = slots.untried.ravel()
    if untried[at]:
        untried[at] = False
        tally[_UNUSED] += 1
