"""What decisions take on a machine, in closed form: without prefetches nothing but the clock outlives a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from policies.jit import jit
from policies.log import PREFETCH_COUNTS, LogChunk
from policies.profile import Costs, copy_ns, cpu_batch_ns, kernel_ns, layer_ns
from simulator.drive import Decisions
from simulator.rows import CPU_END, END, HITS_END, LINK_BUSY, PLAN, START, TIMES, timed


def time(decisions: Iterable[Decisions], costs: Costs, staging: int) -> Iterator[LogChunk]:
    """When everything happens, for decisions of a policy that does not prefetch.

    Args:
        decisions: of a run, in order.
        costs: what everything takes.
        staging: slots beyond the cache for transfers, at least a chunk of them.
    """
    now_ns = 0
    for stretch in decisions:
        layers, scalars = stretch.layers, stretch.forwards.scalars
        num_forwards, num_rows = len(scalars["forward"]), len(layers)
        transfers = layers.lists["transfers"]
        times = np.empty((len(TIMES), num_rows), np.int64)
        starts, ends = (np.empty(transfers.values.size, np.int64) for _ in range(2))
        forward_times = np.empty((2, num_forwards), np.int64)
        now_ns = time_rows(
            costs,
            staging,
            now_ns,
            (scalars["num_tokens"], scalars["kv_len"]),
            (layers.lists["hits"].offsets, transfers.offsets, layers.lists["on_cpu"].offsets),
            layers.scalars["hit_tokens"],
            (layers.lists["transfer_loads"].values, layers.lists["cpu_loads"].values),
            (stretch.num_free, stretch.num_freed, stretch.transfer_retained),
            times,
            (starts, ends),
            forward_times,
        )
        counts = np.zeros((len(PREFETCH_COUNTS), num_rows), np.int32)
        yield LogChunk(timed(layers, times, counts, starts, ends), stretch.forwards.table(*forward_times))


@jit
def time_rows(costs, staging, now_ns, sizes, offsets, hit_tokens, loads, slots, times, copies, forwards):
    """Fill the times of a stretch of whole forwards; returns when the last one ends.

    Args:
        costs: Costs.
        staging: slots for transfers.
        now_ns: the stretch begins.
        sizes: tokens and committed positions of each forward, [F].
        offsets: of hits, transfers and CPU experts, [rows + 1].
        hit_tokens: [rows]
        loads: of each transfer and each CPU expert.
        slots: free for demand copies beside staging when the plan acts, and freed by the kernel over the hits, [rows];
            and for each transfer whether it is retained.
        times: [len(TIMES), rows], filled here.
        copies: start and end of each transfer, filled here.
        forwards: [2, F] start and end of each forward, filled here.
    """
    tokens, kv_lens = sizes
    hits, transfers, on_cpu = offsets
    transfer_loads, cpu_loads = loads
    num_free, num_freed, is_retained = slots
    starts, ends = copies
    num_layers = hit_tokens.size // tokens.size
    most = 1
    for row in range(hit_tokens.size):
        most = max(most, hits[row + 1] - hits[row] + transfers[row + 1] - transfers[row] + 1)
    freed_ns = np.empty(most, np.int64)  # of one layer execution: when its slots become free, in order
    plain_copy_ns, slow_copy_ns = copy_ns(costs, False), copy_ns(costs, True)
    for forward in range(tokens.size):
        forwards[0, forward] = now_ns
        gate_ns = layer_ns(costs, tokens[forward], kv_lens[forward]) + costs.gate_sync_ns
        for row in range(forward * num_layers, (forward + 1) * num_layers):
            times[START, row] = now_ns
            plan_ns = now_ns + gate_ns + costs.policy_ns
            hits_end_ns = plan_ns + kernel_ns(costs, hits[row + 1] - hits[row], hit_tokens[row])
            first, last = transfers[row], transfers[row + 1]

            num_on_cpu, cpu_tokens = on_cpu[row + 1] - on_cpu[row], 0
            for place in range(on_cpu[row], on_cpu[row + 1]):
                cpu_tokens += cpu_loads[place]
            batch_ns = cpu_batch_ns(costs, num_on_cpu, cpu_tokens, last > first)
            cpu_end_ns = plan_ns + batch_ns + (costs.cpu_roundtrip_ns if num_on_cpu > 0 else 0)

            # The copy that finds no free slot waits for the next one to become free. One always does: see Link of the
            # reference engine.
            link_ns, gpu_ns, link_busy_ns = plan_ns, hits_end_ns, 0
            room = staging + num_free[row]
            waits = last - first > room
            num_known = num_freed[row] if waits else 0
            freed_ns[:num_known] = hits_end_ns
            chunk, chunk_tokens = first, 0  # first transfer of the chunk that is being copied, tokens so far
            for place in range(first, last):
                start_ns = link_ns
                if waits and place - first >= room:
                    start_ns = max(link_ns, freed_ns[place - first - room])
                link_ns = start_ns + (slow_copy_ns if start_ns < plan_ns + batch_ns else plain_copy_ns)
                starts[place], ends[place] = start_ns, link_ns
                link_busy_ns += link_ns - start_ns
                chunk_tokens += transfer_loads[place]
                if place + 1 == last or place + 1 - chunk == costs.transfer_chunk:
                    gpu_ns = max(gpu_ns, link_ns) + kernel_ns(costs, place + 1 - chunk, chunk_tokens)
                    if waits:
                        for copied in range(chunk, place + 1):
                            freed_ns[num_known] = gpu_ns
                            num_known += not is_retained[copied]
                    chunk, chunk_tokens = place + 1, 0

            now_ns = max(gpu_ns, cpu_end_ns)
            times[PLAN, row], times[HITS_END, row], times[CPU_END, row] = plan_ns, hits_end_ns, cpu_end_ns
            times[END, row], times[LINK_BUSY, row] = now_ns, link_busy_ns
        now_ns += costs.tail_ns
        forwards[1, forward] = now_ns
    return now_ns
