"""The link from host to GPU: a plan's copies put on it in order, prefetches one by one when it is idle.

Copies of a plan are put on their stream at once, each behind the event that frees its slot. A prefetch is chosen when
the link is idle, which `poll` finds out; and what the rules let happen when a kernel has run is noticed there too.
"""

from __future__ import annotations

from functools import partial

from policies.jit import jit
from replay.core_commands import COPY, carry_out, has_come
from replay.core_slots import enter, free_slots, give_way, take, used, used_hits
from replay.core_state import (
    COPY_BEGIN,
    COPY_BYTES,
    COPY_END,
    COPY_EXPERT,
    COPY_LAYER,
    COUNTED,
    CURRENT,
    DROPPED_BEGIN,
    DROPPED_FLAG,
    DROPPED_VICTIM,
    FREE_FIRST,
    IS_GAPLESS,
    IS_HELD,
    IS_PROMOTED,
    LANDED,
    LAST_END,
    LAYER,
    NUM_COMMANDS,
    NUM_COPIES,
    NUM_FREE,
    NUM_PENDING,
    NUM_QUEUED,
    PENDING_FIRST,
    STARTED,
    WAITS,
    command,
    let_copies_wait,
    record_copies,
)

USED_HITS, USED_ONE, ENTER, BEGIN = 0, 1, 2, 3  # what happens when a kernel has run


@jit
def put_copy(core, layer, expert, event):
    """Put a copy on the stream, into the slot that was taken for it, behind an event that frees it if that is not -1.

    Returns its number.
    """
    at, copies = core.at, core.copies
    if event >= 0:
        let_copies_wait(core, event)
        at[IS_GAPLESS] = 0
    number = at[NUM_COPIES]
    at[NUM_COPIES] += 1
    copies[number, COPY_LAYER], copies[number, COPY_EXPERT] = layer, expert
    copies[number, COPY_BEGIN] = at[LAST_END] if at[IS_GAPLESS] else record_copies(core)
    command(core, COPY, core.targets[core.slot_of[layer, expert]], core.sources[layer, expert], at[COPY_BYTES])
    copies[number, COPY_END] = at[LAST_END] = record_copies(core)
    copies[number, IS_PROMOTED] = 0
    at[IS_GAPLESS] = 1
    return number


# What happens when a kernel has run


@jit
def begin(core, layer):
    """A layer begins: its prefetches that have not started are dropped, and events are counted as its own."""
    at, queue, keys = core.at, core.queue, core.queue_keys
    at[LAYER] = layer
    at[COUNTED] += 1
    core.dropped[:] = False
    kept = 0
    for row in range(at[NUM_QUEUED]):
        if queue[row, 0] == layer:
            core.dropped[queue[row, 1]] = True
        else:
            queue[kept, 0], queue[kept, 1] = queue[row, 0], queue[row, 1]
            for part in range(3):  # by element: whole rows take long to compile
                keys[kept, part] = keys[row, part]
            kept += 1
    core.counts[at[COUNTED], DROPPED_BEGIN] += at[NUM_QUEUED] - kept
    at[NUM_QUEUED] = kept


@jit
def happen(core, what, which):
    """Do one of the things that happen when a kernel has run."""
    if what == USED_HITS:
        used_hits(core)
    elif what == USED_ONE:
        used(core, which)
    elif what == ENTER:
        enter(core)
    else:
        begin(core, which)


@jit
def after(core, event, what, which):
    """Let something happen when an event has come, in order; at once where nobody could tell the difference."""
    at = core.at
    if not at[WAITS]:
        happen(core, what, which)
        return
    place = (at[PENDING_FIRST] + at[NUM_PENDING]) % len(core.pending)
    core.pending[place, 0], core.pending[place, 1], core.pending[place, 2] = event, what, which
    at[NUM_PENDING] += 1


@jit
def next_pending(core):
    """Do what is the next to happen, its event having come."""
    at, place = core.at, core.at[PENDING_FIRST]
    at[PENDING_FIRST] = (place + 1) % len(core.pending)
    at[NUM_PENDING] -= 1
    happen(core, core.pending[place, 1], core.pending[place, 2])


# Prefetches


@jit
def clear(core):
    """Drop what is queued, because the policy says so."""
    core.counts[core.at[COUNTED], DROPPED_FLAG] += core.at[NUM_QUEUED]
    core.at[NUM_QUEUED] = 0


@jit
def notice(core):
    """Note that the prefetch in progress has landed, if it has."""
    at, current = core.at, core.at[CURRENT]
    if current < 0 or not has_come(core, core.copies[current, COPY_END]):
        return
    layer, expert = core.copies[current, COPY_LAYER], core.copies[current, COPY_EXPERT]
    was_missed = core.copies[current, IS_PROMOTED] != 0
    at[CURRENT] = -1
    core.in_flight[layer, expert] = False
    core.resident[layer, expert] = True
    core.untried[layer, expert] = not was_missed
    core.in_use[layer, expert] = was_missed
    core.counts[at[COUNTED], LANDED] += 1


@jit
def pick(core):
    """Write down the next prefetch, if there is one and the link is idle."""
    at, queue = core.at, core.queue
    if at[NUM_QUEUED] == 0 or at[IS_HELD] or at[CURRENT] >= 0:
        return
    if at[LAST_END] >= 0 and not has_come(core, at[LAST_END]):
        return
    if at[NUM_COPIES] == len(core.copies):
        return  # there is room again at the next gate
    while at[NUM_QUEUED] > 0:
        layer, expert = queue[at[NUM_QUEUED] - 1, 0], queue[at[NUM_QUEUED] - 1, 1]
        is_needed = not (core.resident[layer, expert] or core.entering[layer, expert])
        has_slot = is_needed and free_slots(core, layer) > 0
        if has_slot and not _is_free_now(core):
            return  # a demand copy has borrowed the free slot until its kernel has run
        at[NUM_QUEUED] -= 1
        if has_slot or (is_needed and give_way(core, layer, expert)):
            core.in_flight[layer, expert] = True
            take(core, layer, expert)
            at[IS_GAPLESS] = 0
            at[CURRENT] = put_copy(core, layer, expert, -1)
            core.counts[at[COUNTED], STARTED] += 1
            return
        core.counts[at[COUNTED], DROPPED_VICTIM] += 1


@jit
def _is_free_now(core):
    at = core.at
    if at[NUM_FREE] == 0:
        return False
    event = core.free[at[FREE_FIRST], 1]
    return event < 0 or has_come(core, event)


# While the calling thread waits


@jit
def poll(core):
    """Do what has become due, and let an idle link look for a prefetch, which is written down."""
    notice(core)
    at = core.at
    while at[NUM_PENDING] > 0 and has_come(core, core.pending[at[PENDING_FIRST], 0]):
        next_pending(core)
    pick(core)


@jit
def settle(core):
    """A gate's ids are there, so all kernels before it have run: do what follows from it, and hold the link.

    Returns:
        Slots of the running layer's pool that hold neither a resident nor a copy in flight.
    """
    notice(core)
    while core.at[NUM_PENDING] > 0:
        next_pending(core)
    core.at[IS_HELD] = 1
    return free_slots(core, core.at[LAYER])


@partial(jit, nogil=True)
def wait_on_gpu(core, event):
    """Wait until an event has come, with prefetches put on the GPU's streams meanwhile; 0, or the driver's error."""
    error = 0
    while True:
        if core.at[WAITS]:
            poll(core)
            if core.at[NUM_COMMANDS] > 0:
                error = carry_out(core, 0, core.at[NUM_COMMANDS])
                core.at[NUM_COMMANDS] = 0
        if error != 0 or has_come(core, event):
            return error
