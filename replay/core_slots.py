"""The expert slots of the GPU: who lies in which, who is resident by the timing rules, and when a slot is free again.

One fungible set of slots: the capacity of all pools, and staging. Slots are freed in the order in which kernels that
read them run, and taken in that order, so that it is known when a plan is made which slot each of its copies will go
to, and after which kernel. Residency follows the rules of the simulator: a resident that is not retained is one no
longer when its slot becomes free.
"""

from __future__ import annotations

from policies.jit import jit
from policies.pool import pool_of
from replay.core_state import (
    COUNTED,
    EXECUTION,
    FREE_FIRST,
    LAYER,
    NUM_FREE,
    UNUSED,
)


@jit
def take(core, layer, expert):
    """Give an expert the slot that is free first; returns the event after which it may be written, or -1."""
    at, free = core.at, core.free
    if at[NUM_FREE] == 0:
        raise RuntimeError("no slot is free: capacity and staging do not add up")
    first = at[FREE_FIRST]
    core.slot_of[layer, expert] = free[first, 0]
    at[FREE_FIRST] = (first + 1) % len(free)
    at[NUM_FREE] -= 1
    return free[first, 1]


@jit
def give(core, slot, event):
    """A slot is free once an event has come, which is that of the last kernel that frees any."""
    at, free = core.at, core.free
    place = (at[FREE_FIRST] + at[NUM_FREE]) % len(free)
    free[place, 0], free[place, 1] = slot, event
    at[NUM_FREE] += 1


@jit
def give_now(core, slot):
    """A slot is free at once, and taken before those that wait for a kernel."""
    at, free = core.at, core.free
    place = (at[FREE_FIRST] - 1) % len(free)
    free[place, 0], free[place, 1] = slot, -1
    at[FREE_FIRST] = place
    at[NUM_FREE] += 1


@jit
def lose(core, layer, expert):
    """An expert is resident no longer."""
    core.resident[layer, expert] = False
    if core.untried[layer, expert]:
        core.untried[layer, expert] = False
        core.counts[core.at[COUNTED], UNUSED] += 1


@jit
def leave(core, layer, expert):
    """A resident leaves, and its slot is free at once."""
    lose(core, layer, expert)
    give_now(core, core.slot_of[layer, expert])


@jit
def activate(core, load):
    """The gate of the running layer is read; returns the number of hits, which are in use from now on."""
    layer, num_hits = core.at[LAYER], 0
    resident, in_use, is_hit = core.resident, core.in_use, core.is_hit
    for expert in range(load.size):
        activated = load[expert] > 0
        hit = activated and resident[layer, expert]
        in_use[layer, expert] = is_hit[expert] = hit
        num_hits += hit
        if activated:
            core.untried[layer, expert] = False
            core.last_activated[layer, expert] = core.at[EXECUTION]
    core.at[EXECUTION] += 1
    return num_hits


@jit
def release(core, retained):
    """Residents of the running layer's pool that are not retained leave: at once, or, if in use, when they were used."""
    layer, num_experts = core.at[LAYER], core.is_hit.size
    first = pool_of(core.capacity, layer)
    resident, in_use = core.resident, core.in_use
    for row in range(first, first + retained.size // num_experts):
        for expert in range(num_experts):
            if resident[row, expert] and not retained[(row - first) * num_experts + expert]:
                if in_use[row, expert]:
                    core.leaving[row, expert] = True
                else:
                    leave(core, row, expert)


@jit
def used(core, expert):
    """A kernel over a resident of the running layer has run; it leaves if it is not retained."""
    layer = core.at[LAYER]
    core.in_use[layer, expert] = False
    if core.leaving[layer, expert]:
        core.leaving[layer, expert] = False
        lose(core, layer, expert)


@jit
def used_hits(core):
    """The kernel over the hits of the running layer has run."""
    for expert in range(core.is_hit.size):
        if core.is_hit[expert]:
            used(core, expert)


@jit
def enter(core):
    """The running layer ends: the transfers that it retains become residents."""
    layer = core.at[LAYER]
    resident, entering = core.resident[layer], core.entering[layer]
    for expert in range(entering.size):
        resident[expert] |= entering[expert]
        entering[expert] = False


@jit
def free_slots(core, layer):
    """Free slots of a layer's pool: capacity less residents, the prefetch in progress and what will be retained."""
    first = pool_of(core.capacity, layer)
    last = first + core.resident.shape[0] // core.capacity.size
    free = core.capacity[first]
    resident, in_flight, entering = core.resident, core.in_flight, core.entering
    for row in range(first, last):
        for expert in range(resident.shape[1]):
            free -= resident[row, expert]
        for expert in range(resident.shape[1]):
            free -= in_flight[row, expert]
        for expert in range(resident.shape[1]):
            free -= entering[row, expert]
    return free


@jit
def give_way(core, layer, expert):
    """Evict the resident of lowest score from an expert's pool, if it scores strictly below that expert.

    Ties: the one activated least recently, then the highest number. Experts in use are safe. Returns whether one left.
    """
    first = pool_of(core.capacity, layer)
    last = first + core.resident.shape[0] // core.capacity.size
    resident, in_use, score, activated = core.resident, core.in_use, core.score, core.last_activated
    lowest, since = score[layer, expert], 0
    victim_layer = victim = -1
    for row in range(first, last):
        for other in range(resident.shape[1]):
            if not resident[row, other] or in_use[row, other]:
                continue
            value = score[row, other]
            if value < lowest or (victim >= 0 and value == lowest and activated[row, other] <= since):
                lowest, since, victim_layer, victim = value, activated[row, other], row, other
    if victim < 0:
        return False
    leave(core, victim_layer, victim)
    return True


@jit
def forget_evicted(core, before):
    """Who was resident before a forward's end and is no longer has left."""
    for layer in range(before.shape[0]):
        for expert in range(before.shape[1]):
            if before[layer, expert] and not core.resident[layer, expert]:
                leave(core, layer, expert)
