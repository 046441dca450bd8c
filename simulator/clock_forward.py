"""One forward in compiled code: the GPU stream, the policy at its gates, and what goes on beside it."""

from __future__ import annotations

import numpy as np

from policies.contract import View
from policies.jit import jit, jit_inner
from policies.log import PREFETCH_COUNTS
from policies.pool import pool_of
from policies.profile import cpu_batch_ns, kernel_ns, layer_ns
from policies.steps import end_of, step_at
from simulator.clock_link import (
    BUSY,
    act,
    clear,
    drop,
    hold_back,
    order_transfers,
    wake,
)
from simulator.clock_slots import (
    activate,
    begin,
    enter,
    free_slots,
    recount,
    release,
    retain,
    use,
)
from simulator.loop import is_movable, is_placeable, is_sound, replace
from simulator.pointers import borrowed, function_at
from simulator.rows import (
    CPU_END,
    END,
    HITS,
    HITS_END,
    LINK_BUSY,
    NUM_PROMOTED,
    PLAN,
    START,
    TRANSFERS,
    write_decision,
)

_LATE = PREFETCH_COUNTS.index("prefetch_late")
_UNSERVED = PREFETCH_COUNTS.index("prefetch_unserved")


@jit
def run_forward(
    decide, boundary, place, spending, running, addresses, at, forward, held, works, rows, costs, sizes, now
):
    """Run a forward: a loop of PolicyLoop.

    Args:
        decide: kind of the policy's function, as `function_at` takes it.
        boundary: likewise.
        place: likewise.
        spending: likewise of `spend`, which the compiler would copy to every place where it is called.
        running: likewise of `run_plan`.
        addresses: of these.
        at: of what the policy's functions are bound to.
        forward: Forward.
        held: Held.
        works: Works with room for what the forward brings.
        rows: Rows with room for it.
        costs: Costs.
        sizes: tokens of the forward, and committed positions before them.
        now: [1] ns since the start of the run, changed in place.
    """
    forward, held, works, rows, costs = borrowed((forward, held, works, rows, costs))
    slots = works.slots
    num_layers, num_experts = held.resident.shape
    dropped = np.empty(num_experts, np.bool_)
    gate_ns = layer_ns(costs, sizes[0], sizes[1]) + costs.gate_sync_ns
    for layer in range(num_layers):
        row = rows.size[0]
        rows.times[START, row] = now[0]
        works.tally[:] = 0
        begin(slots, layer)
        drop(works, layer, dropped)
        now[0] = function_at(spending, addresses[3])(works, held, now[0], 0, gate_ns)
        step = step_at(forward, layer)
        if addresses[2] != 0:
            held.asked_at[0] = -1
            placed = function_at(place, addresses[2])(None, None, at[2], step)
            held.asked_at[0] = layer
            if not is_placeable(placed, layer, _view_at(slots, held, layer)):
                return None, placed, None
            replace(held.resident[layer], placed)
            recount(slots, held, works.tally)
        hold_back(works)
        held.asked_at[0] = layer
        view = _view_at(slots, held, layer)
        plan = function_at(decide, addresses[0])(None, None, at[0], step, view)
        if not is_sound(plan, step, view) or (plan.prefetches.shape[0] > 0 and works.score.shape[0] == 0):
            return plan, None, None
        transfers, num_promoted = order_transfers(works, layer, step.load, plan.transfers)
        write_decision(rows, step, view, plan, transfers)
        rows.numbers[NUM_PROMOTED, row] = num_promoted
        works.tally[_LATE] = num_promoted
        works.tally[_UNSERVED] = _num_unserved(dropped, step.load, held.resident[layer], transfers[:num_promoted])
        not_retained = _not_retained(plan.retained, held, layer)
        activate(slots, held, step.load)
        now[0] = function_at(spending, addresses[3])(works, held, now[0], 0, costs.policy_ns)
        now[0] = function_at(running, addresses[4])(
            None,
            addresses[3],
            works,
            rows,
            held,
            costs,
            now[0],
            step.load,
            plan,
            transfers,
            num_promoted,
            not_retained,
        )
        if layer < num_layers - 1:
            _end_row(works, rows)
    now[0] = function_at(spending, addresses[3])(works, held, now[0], 0, costs.tail_ns)
    if addresses[1] != 0:
        held.asked_at[0] = num_layers
        view = _view_at(slots, held, 0)
        moves = function_at(boundary, addresses[1])(None, None, at[1], end_of(forward), view)
        capacity, evictions = moves
        if not is_movable(capacity, evictions, view):
            return None, None, moves
        for layer in range(num_layers):
            for expert in range(num_experts):
                held.resident[layer, expert] &= not evictions[layer, expert]
        for pool in range(capacity.size):
            held.capacity[pool] = capacity[pool]
        recount(slots, held, works.tally)
    _end_row(works, rows)
    return None, None, None


@jit
def _end_row(works, rows):
    """The next layer begins, or the forward has ended: what happens from now on counts in another row."""
    row, tally = rows.size[0], works.tally
    for count in range(BUSY):
        rows.counts[count, row] = tally[count]
    rows.times[LINK_BUSY, row] = tally[BUSY]
    rows.size[0] += 1


@jit
def _view_at(slots, held, layer):
    free = free_slots(slots, held, layer)
    return View(held.shown_resident, held.shown_in_flight, held.shown_capacity, free, held.estimates)


@jit
def _num_unserved(dropped, load, resident, promoted):
    """Misses whose prefetch was dropped when the layer began, and is not in progress either."""
    count = 0
    for expert in range(load.size):
        count += dropped[expert] & (load[expert] > 0) & (not resident[expert])
    for expert in promoted:
        count -= dropped[expert]
    return count


@jit
def _not_retained(retained, held, layer):
    """Numbers of the residents of a layer's pool that a plan does not retain."""
    start = pool_of(held.capacity, layer) * held.resident.shape[1]
    resident = held.resident.ravel()[start : start + retained.size]
    numbers, size = np.empty(retained.size + 1, np.int64), 0
    for number in range(retained.size):
        numbers[size] = number
        size += resident[number] & (not retained[number])
    return numbers[:size]


@jit_inner
def run_plan(spending, address, works, rows, held, costs, plan_ns, load, plan, transfers, num_promoted, not_retained):
    """From the moment when a plan acts to the end of its layer; returns the time then.

    Args:
        spending: kind of `spend`, as `function_at` takes it.
        address: of it.
        works: Works.
        rows: Rows.
        held: Held.
        costs: Costs.
        plan_ns: time since the start of the run.
        load: [E] of the layer.
        plan: Plan.
        transfers: those of the plan, in the order of the log.
        num_promoted: how many of them, the first, were copied already when the gate was read, as a prefetch.
        not_retained: numbers of the residents of the pool at the gate that the plan does not retain.
    """
    slots, link, row = works.slots, works.link, rows.size[0]
    if plan.clear_prefetches:
        clear(works)
    retain(slots, held, works.tally, not_retained, plan.retained, transfers[num_promoted:])
    batch_ns = cpu_batch_ns(costs, plan.on_cpu.size, _tokens_of(plan.on_cpu, load), transfers.size > 0)
    cpu_end_ns = plan_ns + batch_ns + (costs.cpu_roundtrip_ns if plan.on_cpu.size > 0 else 0)
    act(works, plan_ns, num_promoted, plan, plan_ns + batch_ns)

    hits = rows.hits[rows.offsets[HITS, row] : rows.offsets[HITS, row + 1]]
    kernel = kernel_ns(costs, hits.size, _tokens_of(hits, load))
    now_ns = hits_end_ns = function_at(spending, address)(works, held, plan_ns, 0, kernel)
    use(slots, held, works.tally, hits)
    wake(works, now_ns)

    for first in range(0, transfers.size, costs.transfer_chunk):  # a kernel over each chunk when it has landed
        end = min(first + costs.transfer_chunk, transfers.size)
        kernel = kernel_ns(costs, end - first, _tokens_of(transfers[first:end], load))
        now_ns = function_at(spending, address)(works, held, now_ns, end, kernel)
        first_demanded = max(first, num_promoted)
        use(slots, held, works.tally, transfers[first:first_demanded])
        release(slots, transfers[first_demanded:end])
        wake(works, now_ns)

    now_ns = function_at(spending, address)(works, held, now_ns, 0, max(cpu_end_ns - now_ns, 0))
    enter(slots, held, transfers)
    first = rows.offsets[TRANSFERS, row]
    for place in range(transfers.size):
        rows.transfer_start_ns[first + place] = link.start_ns[place]
        rows.transfer_end_ns[first + place] = link.end_ns[place]
    rows.times[PLAN, row], rows.times[HITS_END, row] = plan_ns, hits_end_ns
    rows.times[CPU_END, row], rows.times[END, row] = cpu_end_ns, now_ns
    return now_ns


@jit
def _tokens_of(experts, load):
    tokens = 0
    for expert in experts:
        tokens += load[expert]
    return tokens
