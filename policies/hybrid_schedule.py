"""HybriMoE's split of a layer: GPU and CPU take experts from opposite ends of one line until they meet."""

from __future__ import annotations

from policies.jit import jit
from policies.retention import by_priority, ids_of


@jit
def hybrid_split(load, missed, estimates):
    """Split the misses of a layer between copies to the GPU and execution on the CPU, by what would finish first.

    The misses stand in line by load, most tokens first, then lowest id, behind the hits. Again and again the GPU
    would take the first, after its copy, or the CPU the last; who would finish earlier takes it, the GPU when equal.

    Source: HybriMoE, hybrid scheduling, and its released code; the code's constants become the policy's estimates.
    Differs: kernels of the GPU cost nothing here, so that it takes all hits first and only copies take time.

    Args:
        load: [E] int64, tokens routed to each expert.
        missed: [E] bool.
        estimates: Estimates, whole ns.

    Returns:
        Transfers in issue order (load descending, then id) and CPU experts ascending: int64.
    """
    line = by_priority(missed, load)
    first, last = 0, line.size
    gpu_ns = cpu_ns = 0
    while first < last:
        gpu_end_ns = gpu_ns + estimates.h2d_ns
        cpu_end_ns = cpu_ns + estimates.cpu_b0_ns + estimates.cpu_b1_ns * load[line[last - 1]]
        if gpu_end_ns <= cpu_end_ns:
            gpu_ns = gpu_end_ns
            first += 1
        else:
            cpu_ns = cpu_end_ns
            last -= 1
    left = missed.copy()
    for expert in line[:first]:
        left[expert] = False
    return line[:first].copy(), ids_of(left)
