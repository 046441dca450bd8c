"""A plan put into effect: slots assigned, kernels told, and everything up to the layer's end written down."""

from __future__ import annotations

import numpy as np

from policies.jit import jit
from policies.pool import number_in_pool
from replay.arrange import arrange
from replay.core_commands import RECORD_COMPUTE
from replay.core_link import BEGIN, ENTER, USED_HITS, USED_ONE, after, clear, put_copy
from replay.core_slots import activate, give, release, take
from replay.core_state import (
    COPY_END,
    COPY_EXPERT,
    COPY_LAYER,
    COUNTED,
    CURRENT,
    IS_GAPLESS,
    IS_PROMOTED,
    LATE,
    LAYER,
    NUM_COMMANDS,
    NUM_COPIES,
    NUM_EVENTS,
    UNSERVED,
    launch,
    let_compute_wait,
    record,
    record_compute,
)

# of what `act` answers
PLAN_EVENT, HITS_EVENT, FIRST_COPY, PROMOTED_COPY, NUM_ROWS, NUM_FIRST, NUM_RESIDENT = range(7)


@jit
def act(core, transfers, on_cpu, retained, clears, load, ids, chunk):
    """Put a plan into effect: the hits, the copies and the chunks, as commands.

    Args:
        core: of the run, the gate of its layer being read.
        transfers: of the plan, [G] int64.
        on_cpu: of the plan, ascending.
        retained: of the plan.
        clears: the plan drops what is queued.
        load: [E] int64.
        ids: [T, K] int32 experts of each token.
        chunk: transfers of one kernel.

    Returns:
        Hits, ascending; transfers in the order of their kernels; and [7] int64: event of the plan; of the kernel over
        the hits, or -1; number of the first demand copy; of the promoted one, or -1; rows of the CPU's batch; commands
        up to the kernel over the hits, which are urgent; residents of the layer at the gate.
    """
    at, copies, works = core.at, core.copies, core.works
    layer, num_experts = at[LAYER], load.size
    answer = np.full(7, -1)
    answer[NUM_RESIDENT] = core.resident[layer].sum()
    num_hits = activate(core, load)
    promoted = _promoted(core, load)
    answer[PROMOTED_COPY] = promoted
    order = _ordered(core, transfers, promoted)
    _count_unserved(core, order, on_cpu, promoted)
    if clears:
        clear(core)
    release(core, retained)
    experts = np.empty(num_hits + order.size, np.int64)
    place = 0
    for expert in range(num_experts):
        if core.is_hit[expert]:
            experts[place] = expert
            place += 1
    for expert in order:
        experts[place] = expert
        place += 1

    num_groups = 1 + (order.size + chunk - 1) // chunk
    answer[PLAN_EVENT] = record_compute(core)
    first_event = at[NUM_EVENTS]  # of the groups' kernels
    at[NUM_EVENTS] += num_groups
    for expert in experts[:num_hits]:
        if core.leaving[layer, expert]:
            give(core, core.slot_of[layer, expert], first_event)
    behind = _assign(core, order, retained, promoted, first_event, chunk)
    ends = np.empty(num_groups, np.int64)
    for group in range(num_groups):
        ends[group] = min(num_hits + chunk * group, experts.size)
    slots = np.empty(experts.size, np.int32)
    for job in range(experts.size):
        slots[job] = core.slot_of[layer, experts[job]]
    answer[NUM_ROWS] = arrange(
        ids, experts, ends, slots, on_cpu, core.index, core.layout, core.cpu_tokens, core.cpu_ends
    )

    at[IS_GAPLESS] = 0
    answer[FIRST_COPY] = at[NUM_COPIES]
    skipped = int(promoted >= 0)
    next_copy = skipped
    if next_copy < order.size and behind[next_copy] < 0:  # the link is busy while the rest is launched
        put_copy(core, layer, order[next_copy], -1)
        next_copy += 1
    launch(core, works[0] if num_hits else works[-1])
    record(core, RECORD_COMPUTE, first_event)
    if num_hits:
        answer[HITS_EVENT] = first_event
        after(core, first_event, USED_HITS, 0)
    answer[NUM_FIRST] = at[NUM_COMMANDS]
    for group in range(num_groups):
        if group > 0:
            last = min(chunk * group, order.size) - 1
            number = promoted if last < skipped else answer[FIRST_COPY] + last - skipped
            let_compute_wait(core, copies[number, COPY_END])
            launch(core, works[group])
            record(core, RECORD_COMPUTE, first_event + group)
            if group == 1 and promoted >= 0:
                after(core, first_event + 1, USED_ONE, order[0])
        while next_copy < order.size and behind[next_copy] <= first_event + group:
            put_copy(core, layer, order[next_copy], behind[next_copy])
            next_copy += 1
    return experts[:num_hits], order, answer


@jit
def _promoted(core, load):
    """Number of the prefetch in progress, if the layer misses its expert; -1 otherwise."""
    current, copies = core.at[CURRENT], core.copies
    if current < 0 or copies[current, COPY_LAYER] != core.at[LAYER] or load[copies[current, COPY_EXPERT]] == 0:
        return -1
    copies[current, IS_PROMOTED] = 1
    core.counts[core.at[COUNTED], LATE] += 1
    return current


@jit
def _ordered(core, transfers, promoted):
    """Transfers, the promoted one first."""
    order = transfers.copy()
    if promoted >= 0:
        order[0], place = core.copies[promoted, COPY_EXPERT], 1
        for expert in transfers:
            if expert != order[0]:
                order[place] = expert
                place += 1
    return order


@jit
def _count_unserved(core, order, on_cpu, promoted):
    count = 0
    for expert in order:
        count += core.dropped[expert]
    for expert in on_cpu:
        count += core.dropped[expert]
    if promoted >= 0:
        count -= core.dropped[order[0]]
    core.counts[core.at[COUNTED], UNSERVED] += count


@jit
def _assign(core, order, retained, promoted, first_event, chunk):
    """Take the slot of each demand copy, in order; returns the event of this layer that frees it, or -1.

    Kernels before this layer's have run, as its gate has been read.
    """
    layer, behind = core.at[LAYER], np.full(order.size, -1)
    gone = np.empty(chunk, np.int32)
    num_gone = 0
    for place in range(order.size):
        expert = order[place]
        if place > 0 or promoted < 0:
            event = take(core, layer, expert)
            behind[place] = event if event >= first_event else -1
            if retained[number_in_pool(core.capacity, core.is_hit.size, layer, expert)]:
                core.entering[layer, expert] = True
            else:
                gone[num_gone] = core.slot_of[layer, expert]
                num_gone += 1
        if (place + 1) % chunk == 0 or place + 1 == order.size:
            for slot in gone[:num_gone]:
                give(core, slot, first_event + place // chunk + 1)
            num_gone = 0
    return behind


@jit
def finish(core, combine, following):
    """The end of a layer, and what the GPU does next: another layer up to its gate, or the tail of the forward.

    Args:
        core: of the run.
        combine: number of the sum over experts.
        following: of what comes next.

    Returns:
        Event of the layer's end, and of the next gate or the forward's tokens.
    """
    launch(core, combine)
    end = record_compute(core)
    after(core, end, ENTER, 0)
    launch(core, following)
    return end, record_compute(core)


@jit
def begin_after(core, event, layer):
    """Let a layer begin when an event has come."""
    after(core, event, BEGIN, layer)
