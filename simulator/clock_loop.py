"""Policy and clock together in compiled code, for policies that prefetch: their decisions depend on what has landed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numba import typeof

from policies.contract import Estimates, Policy, View
from policies.jit import jit
from policies.log import PREFETCH_COUNTS, LogChunk
from policies.pool import pool_of
from policies.profile import Costs, cpu_batch_ns, kernel_ns, layer_ns
from policies.residents import Residents
from policies.steps import Forward, blank_forward, end_of, read_all, step_at
from simulator import des
from simulator.clock_link import (
    BUSY,
    Works,
    act,
    clear,
    drop,
    hold_back,
    idle_link,
    noted_copies,
    order_transfers,
    spend,
    wake,
)
from simulator.clock_queue import empty_queue, most_started, nothing_pending, with_room
from simulator.clock_slots import (
    activate,
    begin,
    enter,
    free_slots,
    recount,
    release,
    retain,
    slot_table,
    use,
)
from simulator.link import Copy
from simulator.loop import Pointers, PolicyLoop, is_movable, is_placeable, is_sound, pointers_of
from simulator.pointers import answer_of, function_at, pointer_for, pointer_to
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
    Forwards,
    RowBuffer,
    decided,
    timed,
    write_decision,
)
from tracer.schema import ModelShape, Pass

_LATE = PREFETCH_COUNTS.index("prefetch_late")
_UNSERVED = PREFETCH_COUNTS.index("prefetch_unserved")


def simulate(
    passes: Iterable[Pass],
    policy: Policy,
    shape: ModelShape,
    slots: int,
    costs: Costs,
    estimates: Estimates,
    *,
    staging_slots: int,
    chunk_forwards: int,
    on_copy: Callable[[Copy], None] | None = None,
) -> Iterator[LogChunk]:
    """Run a compiled policy over a trace in simulated time, with the log, errors and messages of `simulator.des`.

    One whose answers are of other types than the contract's is left to `simulator.des`, which says so.

    Args:
        passes: of the run, in order.
        policy: built for this shape.
        shape: of the traced model.
        slots: expert slots of all layers together, without staging.
        costs: what everything takes.
        estimates: what the policy believes an expert costs.
        staging_slots: slots beyond the cache for transfers, at least a chunk of them.
        chunk_forwards: forwards in one stretch of the log.
        on_copy: told of every copy to the GPU, in the order of landing, after the forward in which it has landed.

    Raises:
        PlanError: a plan breaks the contract; the message says where.
        PolicyError: the policy does not start with these slots, cannot decide on this trace, or prefetches without a
            score to rank residents by.
        TraceError: a pass is not of this shape.
    """
    residents = Residents(policy, shape, slots, estimates)
    pointers = pointers_of(policy, residents, shape)
    if pointers is None:
        return des.simulate(
            *(passes, policy, shape, slots, costs, estimates),
            staging_slots=staging_slots,
            chunk_forwards=chunk_forwards,
            on_copy=on_copy,
        )
    return _Run(policy, pointers, residents, shape, costs, staging_slots, on_copy).log(passes, chunk_forwards)


class _Run:
    def __init__(
        self,
        policy: Policy,
        pointers: Pointers,
        residents: Residents,
        shape: ModelShape,
        costs: Costs,
        staging: int,
        on_copy: Callable[[Copy], None] | None,
    ) -> None:
        self._policy, self._shape, self._costs, self._on_copy = policy, shape, costs, on_copy
        pool_size = residents.of_pool(0, residents.resident).size
        self._buffer = RowBuffer(shape, pool_size, prefetches=True)
        held = residents.held
        self._works = Works(
            slots=slot_table(shape, held, staging),
            link=idle_link(shape, costs),
            queue=empty_queue(shape),
            pending=nothing_pending(),
            score=getattr(residents.state, "score", np.empty((0, shape.num_experts))),
            tally=np.zeros(len(PREFETCH_COUNTS) + 1, np.int64),
            copies=np.empty((0, 5), np.int64),
        )
        self._now_ns = np.zeros(1, np.int64)
        rows = self._buffer.reserve()
        spending = pointer_to(spend, self._works, held, 0, 0, 0)
        kinds = [typeof(argument) for argument in (spending.address, self._works, rows, held, costs, 0)]
        numbers = self._works.link.experts
        running = pointer_for(
            *(run_plan, spending.kind, *kinds, typeof(blank_forward(shape, False).load[0]), answer_of(pointers[0])),
            *(typeof(numbers), typeof(0), typeof(numbers)),
        )
        self._loop = PolicyLoop(
            *(run_forward, (*pointers, spending, running), policy, residents, shape),
            *(self._works, rows, costs, (0, 0), self._now_ns),
            lacks="its state needs a score, [L, E], to rank residents by",
        )

    def log(self, passes: Iterable[Pass], chunk_forwards: int) -> Iterator[LogChunk]:
        read: list[Pass] = []
        times: list[tuple[int, int]] = []
        first = 0
        for pass_, forward in read_all(passes, self._shape, self._policy.reads_signals):
            start_ns = int(self._now_ns[0])
            self._run_forward(pass_, forward)
            read.append(pass_)
            times.append((start_ns, int(self._now_ns[0])))
            if len(read) == chunk_forwards:
                yield self._cut(read, first, times)
                first, read, times = first + len(read), [], []
        if read:
            yield self._cut(read, first, times)

    def _run_forward(self, pass_: Pass, forward: Forward) -> None:
        queue, pending = with_room(self._works.queue, self._works.pending)
        self._works = self._works._replace(queue=queue, pending=pending)
        if self._on_copy is not None:
            most = most_started(queue, pending) + self._shape.num_layers * self._shape.num_experts + 1
            self._works = self._works._replace(copies=np.empty((most, 5), np.int64))
        sizes = int(pass_.num_tokens.sum()), int(pass_.kv_lens.sum())
        self._loop.run(forward, self._works, self._buffer.reserve(), self._costs, sizes, self._now_ns)
        if self._on_copy is not None:
            for layer, expert, is_prefetch, start_ns, end_ns in noted_copies(self._works).tolist():
                self._on_copy(Copy(layer, expert, bool(is_prefetch), start_ns=start_ns, end_ns=end_ns))

    def _cut(self, passes: list[Pass], first: int, times: list[tuple[int, int]]) -> LogChunk:
        rows, forwards = self._buffer.cut(), Forwards.of(passes, first)
        layers = timed(decided(forwards, rows), rows.times, rows.counts, rows.transfer_start_ns, rows.transfer_end_ns)
        return LogChunk(layers, forwards.table(*np.array(times, np.int64).T.copy()))


@jit
def run_forward(
    decide, boundary, place, spending, running, addresses, params, state, forward, held, works, rows, costs, sizes, now
):
    """Run a forward: a loop of PolicyLoop.

    Args:
        decide: kind of the policy's function, as `function_at` takes it.
        boundary: likewise.
        place: likewise.
        spending: likewise of `spend`, which is compiled once for all policies, as `run_plan` is: compilers would put
            a copy of them into the loop of each.
        running: likewise of `run_plan`.
        addresses: of these.
        params: of the policy.
        state: of the policy.
        forward: Forward.
        held: Held.
        works: Works with room for what the forward brings.
        rows: Rows with room for it.
        costs: Costs.
        sizes: tokens of the forward, and committed positions before them.
        now: [1] ns since the start of the run, changed in place.
    """
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
        if place is not None:
            held.asked_at[0] = -1
            placed = function_at(place, addresses[2])(params, state, step)
            held.asked_at[0] = layer
            if not is_placeable(placed, layer, _view_at(slots, held, layer)):
                return None, placed, None
            held.resident[layer] = placed
            recount(slots, held, works.tally)
        hold_back(works)
        held.asked_at[0] = layer
        view = _view_at(slots, held, layer)
        plan = function_at(decide, addresses[0])(params, state, step, view)
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
            spending,
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
    if boundary is not None:
        held.asked_at[0] = num_layers
        view = _view_at(slots, held, 0)
        moves = function_at(boundary, addresses[1])(params, state, end_of(forward), view)
        capacity, evictions = moves
        if not is_movable(capacity, evictions, view):
            return None, None, moves
        for layer in range(num_layers):
            for expert in range(num_experts):
                held.resident[layer, expert] &= not evictions[layer, expert]
        held.capacity[:] = capacity
        recount(slots, held, works.tally)
    _end_row(works, rows)
    return None, None, None


@jit
def _end_row(works, rows):
    """The next layer begins, or the forward has ended: what happens from now on counts in another row."""
    row = rows.size[0]
    for index in range(rows.counts.shape[0]):
        rows.counts[index, row] = works.tally[index]
    rows.times[LINK_BUSY, row] = works.tally[BUSY]
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


@jit
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
    for expert in hits:
        use(slots, held, works.tally, expert)
    wake(works, now_ns)

    for first in range(0, transfers.size, costs.transfer_chunk):  # a kernel over each chunk when it has landed
        end = min(first + costs.transfer_chunk, transfers.size)
        kernel = kernel_ns(costs, end - first, _tokens_of(transfers[first:end], load))
        now_ns = function_at(spending, address)(works, held, now_ns, end, kernel)
        for place in range(first, end):
            if place < num_promoted:
                use(slots, held, works.tally, transfers[place])
            else:
                release(slots, transfers[place])
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
