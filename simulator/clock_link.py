"""The link from host to GPU in compiled code: one copy at a time, demand before prefetches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit, jit_inner
from policies.log import PREFETCH_COUNTS
from policies.pool import pool_of
from policies.profile import Costs, copy_ns
from simulator import clock_queue, clock_slots
from simulator.clock_queue import NEVER_NS, Pending, PrefetchQueue
from simulator.clock_slots import SlotTable
from tracer.schema import ModelShape

# places in Works.tally
BUSY = len(PREFETCH_COUNTS)
_ISSUED = PREFETCH_COUNTS.index("prefetch_issued")
_STARTED = PREFETCH_COUNTS.index("prefetch_started")
_LANDED = PREFETCH_COUNTS.index("prefetch_landed")
_DROPPED_BEGIN = PREFETCH_COUNTS.index("prefetch_dropped_begin")
_DROPPED_FLAG = PREFETCH_COUNTS.index("prefetch_dropped_flag")
_DROPPED_VICTIM = PREFETCH_COUNTS.index("prefetch_dropped_victim")
# of LinkState.times: the copy in progress started and lands (NEVER_NS if none), the link looks for its next copy
# (NEVER_NS if not), end of the CPU batch, and what copies take
_START, _LAND, _PICK, _SLOW_UNTIL, _COPY, _SLOW_COPY = range(6)
# of LinkState.counts: the copy in progress, by layer and expert, and its place among the running layer's transfers (-1
# if it is none of them); whether it is a prefetch; no copy starts between the reading at a gate and its plan; of the
# running layer's transfers, the next to start, how many there are to start, and how many have landed; copies noted
_AT_LAYER, _EXPERT, _PLACE, _IS_PREFETCH, _IS_HELD, _NEXT, _DEMANDED, _NUM_LANDED, _NOTED = range(9)


class LinkState(NamedTuple):
    """What the link does, and the transfers of the running layer."""

    times: NDArray[np.int64]  # [6] by the names above
    counts: NDArray[np.int64]  # [9] by the names above
    experts: NDArray[np.int64]  # [E] transfers of the running layer, in the order in which they are copied
    start_ns: NDArray[np.int64]  # [E] of their copies
    end_ns: NDArray[np.int64]  # [E]


class Works(NamedTuple):
    """All that moves while the GPU computes."""

    slots: SlotTable
    link: LinkState
    queue: PrefetchQueue
    pending: Pending
    score: NDArray[np.float64]  # [L, E] of the policy's state, which ranks residents when a prefetch needs a victim
    tally: NDArray[np.int64]  # [10] of the layer execution that is going on: PREFETCH_COUNTS, then link_busy_ns
    copies: NDArray[
        np.int64
    ]  # [N, 5] copies that landed: layer, expert, is a prefetch, start, end; [0, 5] to note none


def idle_link(shape: ModelShape, costs: Costs) -> LinkState:
    """A link at the start of a run."""
    times = np.array([0, NEVER_NS, NEVER_NS, 0, copy_ns(costs, False), copy_ns(costs, True)], np.int64)
    return LinkState(times, np.zeros(9, np.int64), *(np.zeros(shape.num_experts, np.int64) for _ in range(3)))


def noted_copies(works: Works) -> NDArray[np.int64]:
    """The copies that have landed since they were last asked for, [N, 5] as in Works."""
    copies = works.copies[: works.link.counts[_NOTED]]
    works.link.counts[_NOTED] = 0
    return copies


@jit_inner
def spend(works, held, now_ns, num_landed, busy_ns):
    """Let time pass on the GPU stream, and do what the link does meanwhile.

    At one instant copies land, kernels end, layers end, begin and plan; then prefetches enter the queue, those of
    earlier plans first, and then the link takes its next copy. So at the end of the time copies land, and nothing else
    happens yet.

    Args:
        works: Works.
        held: Held.
        now_ns: time since the start of the run.
        num_landed: wait until so many of the running layer's transfers have landed, before the stream is busy.
        busy_ns: how long it is.

    Returns:
        Time since the start of the run, afterwards.
    """
    # what is taken out of a tuple is counted as referred to, with all that it holds: so once, and not at every step
    slots, link, queue, pending, score, tally, copies = works
    times, counts = link.times, link.counts
    while counts[_NUM_LANDED] < num_landed:
        _step(slots, held, link, times, counts, queue, pending, score, tally, copies)
    if num_landed > 0:
        now_ns = max(now_ns, link.end_ns[num_landed - 1])
    now_ns += busy_ns
    while times[_LAND] <= now_ns or times[_PICK] < now_ns or clock_queue.next_due(pending)[1] < now_ns:
        _step(slots, held, link, times, counts, queue, pending, score, tally, copies)
    return now_ns


@jit
def _step(slots, held, link, times, counts, queue, pending, score, tally, copies):
    """Do what comes next; there must be something. One always comes while transfers wait: see `_pick`."""
    plan, due_ns = clock_queue.next_due(pending)
    now_ns = min(due_ns, times[_PICK], times[_LAND])
    if times[_LAND] == now_ns:
        _land(slots, held, link, times, counts, tally, copies)
    elif due_ns == now_ns:
        tally[_ISSUED] += clock_queue.issue(queue, pending, plan)
    else:
        times[_PICK] = NEVER_NS
        if counts[_IS_HELD] == 0:
            _pick(slots, held, link, times, counts, queue, score, tally, now_ns)
        return
    _wake(times, counts, queue, now_ns)


@jit
def hold_back(works):
    """The gate is read: until the plan acts no copy starts."""
    works.link.counts[_IS_HELD] = 1


@jit
def order_transfers(works, layer, load, transfers):
    """Take up the transfers of the running layer's plan.

    Returns:
        Those transfers in the order of the log, and how many of them, 1 or 0, are copied already, as a prefetch.
    """
    link = works.link
    counts, experts, size, promoted = link.counts, link.experts, 0, -1
    counts[_NUM_LANDED] = 0
    if link.times[_LAND] < NEVER_NS and counts[_AT_LAYER] == layer and load[counts[_EXPERT]] > 0:
        promoted = counts[_EXPERT]
        counts[_PLACE], experts[0], link.start_ns[0], size = 0, promoted, link.times[_START], 1
    for expert in transfers:
        if expert != promoted:
            experts[size] = expert
            size += 1
    counts[_NEXT] = counts[_DEMANDED] = size
    return experts[:size], 1 if promoted >= 0 else 0


@jit
def act(works, now_ns, num_promoted, plan, slow_until_ns):
    """The plan acts: its transfers are queued, and its prefetches when they are due."""
    link = works.link
    link.counts[_IS_HELD], link.counts[_NEXT] = 0, num_promoted
    link.times[_SLOW_UNTIL] = slow_until_ns
    wake(works, now_ns)
    if plan.prefetches.shape[0] > 0:
        num_experts = works.slots.in_use.shape[1]
        due_ns = now_ns + plan.prefetch_delay_ns
        clock_queue.postpone(works.pending, num_experts, due_ns, plan.prefetches, plan.prefetch_priority)


@jit
def clear(works):
    """Drop the prefetches that are queued, because the policy says so."""
    works.tally[_DROPPED_FLAG] += clock_queue.clear(works.queue)


@jit
def drop(works, layer, dropped):
    """Drop the prefetches that are queued for a layer that begins; sets `dropped`, [E] bool, to the experts."""
    works.tally[_DROPPED_BEGIN] += clock_queue.drop(works.queue, layer, dropped)


@jit
def wake(works, now_ns):
    """Let an idle link look for its next copy, when all else that happens at this instant has happened."""
    _wake(works.link.times, works.link.counts, works.queue, now_ns)


@jit
def _wake(times, counts, queue, now_ns):
    is_idle = times[_LAND] == NEVER_NS and times[_PICK] == NEVER_NS
    if is_idle and (counts[_NEXT] < counts[_DEMANDED] or clock_queue.num_queued(queue) > 0):
        times[_PICK] = now_ns


@jit
def _pick(slots, held, link, times, counts, queue, score, tally, now_ns):
    if counts[_NEXT] == counts[_DEMANDED]:
        target = _next_prefetch(slots, held, queue, score, tally)
        if target >= 0:
            num_experts = held.resident.shape[1]
            layer, expert = target // num_experts, target % num_experts
            clock_slots.reserve(slots, held, layer, expert)
            _start(times, counts, now_ns, layer, expert, -1, 1)
    # Without room the copy waits until a kernel ends, which wakes the link; one always ends, as simulator.link says.
    elif clock_slots.has_room(slots):
        clock_slots.hold(slots)
        place = counts[_NEXT]
        counts[_NEXT] += 1
        link.start_ns[place] = now_ns
        _start(times, counts, now_ns, clock_slots.running_layer(slots), link.experts[place], place, 0)


@jit
def _next_prefetch(slots, held, queue, score, tally):
    """Take the prefetch that starts now, as layer * E + expert, and make room for it; -1 if none does."""
    num_experts, pool, victim = held.resident.shape[1], -1, -1
    while clock_queue.num_queued(queue) > 0:
        target = clock_queue.next_target(queue)
        layer, expert = target // num_experts, target % num_experts
        is_needed = not clock_slots.holds(slots, held, layer, expert)
        has_slot = is_needed and clock_slots.unclaimed(slots, held, layer) > 0
        if has_slot and not clock_slots.has_room(slots):
            return -1  # a demand copy has borrowed the free slot; its kernel's end will wake the link
        clock_queue.take(queue)
        if is_needed and not has_slot:
            if pool != pool_of(held.capacity, layer):  # the same victim for all until one has left
                pool = pool_of(held.capacity, layer)
                victim = clock_slots.find_victim(slots, held, pool, score)
            has_slot = clock_slots.give_way(slots, held, tally, victim, score, layer, expert)
        if has_slot:
            tally[_STARTED] += 1
            return target
        tally[_DROPPED_VICTIM] += 1
    return -1


@jit
def _start(times, counts, now_ns, layer, expert, place, is_prefetch):
    counts[_AT_LAYER], counts[_EXPERT], counts[_PLACE], counts[_IS_PREFETCH] = layer, expert, place, is_prefetch
    times[_START] = now_ns
    times[_LAND] = now_ns + (times[_SLOW_COPY] if now_ns < times[_SLOW_UNTIL] else times[_COPY])


@jit
def _land(slots, held, link, times, counts, tally, copies):
    now_ns, layer, expert, place = times[_LAND], counts[_AT_LAYER], counts[_EXPERT], counts[_PLACE]
    times[_LAND] = NEVER_NS
    tally[BUSY] += now_ns - times[_START]
    if counts[_IS_PREFETCH] == 1:
        clock_slots.land(slots, held, layer, expert, place >= 0)
        tally[_LANDED] += 1
    if place >= 0:
        link.end_ns[place] = now_ns
        counts[_NUM_LANDED] += 1
    if copies.shape[0] > 0:
        noted = copies[counts[_NOTED]]
        noted[0], noted[1], noted[2], noted[3], noted[4] = layer, expert, counts[_IS_PREFETCH], times[_START], now_ns
        counts[_NOTED] += 1
