"""Policy and clock together in compiled code, for policies that prefetch: their decisions depend on what has landed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numba import typeof

from policies.check import LACKS_SCORE
from policies.contract import Estimates, Policy
from policies.log import PREFETCH_COUNTS, LogChunk
from policies.profile import Costs
from policies.residents import Residents
from policies.steps import Forward, blank_forward, read_all
from simulator import des
from simulator.clock_forward import run_forward, run_plan
from simulator.clock_link import (
    Works,
    idle_link,
    noted_copies,
    spend,
)
from simulator.clock_queue import empty_queue, most_started, nothing_pending, with_room
from simulator.clock_slots import (
    slot_table,
)
from simulator.link import Copy
from simulator.loop import Functions, PolicyLoop, functions_of
from simulator.pointers import answer_of, pointer_for, pointer_to
from simulator.rows import (
    Forwards,
    RowBuffer,
    decided,
    timed,
)
from tracer.schema import ModelShape, Pass


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
    functions = functions_of(policy, residents, shape)
    if functions is None:
        return des.simulate(
            *(passes, policy, shape, slots, costs, estimates),
            staging_slots=staging_slots,
            chunk_forwards=chunk_forwards,
            on_copy=on_copy,
        )
    return _Run(policy, functions, residents, shape, costs, staging_slots, on_copy).log(passes, chunk_forwards)


class _Run:
    def __init__(
        self,
        policy: Policy,
        functions: Functions,
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
            *(
                run_plan,
                spending.kind,
                *kinds,
                typeof(blank_forward(shape, False).load[0]),
                answer_of(functions.decide.pointer),
            ),
            *(typeof(numbers), typeof(0), typeof(numbers)),
        )
        self._loop = PolicyLoop(
            *(run_forward, functions, policy, residents, shape),
            *(self._works, rows, costs, (0, 0), self._now_ns),
            others=(spending, running),
            lacks=LACKS_SCORE,
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
