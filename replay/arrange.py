"""Which rows of a layer's tokens each expert computes, as flat arrays that kernels read."""

from __future__ import annotations

import numpy as np
import torch

from policies.jit import jit


@jit
def arrange(ids, experts, ends, slots, on_cpu, index, layout, cpu_tokens, cpu_ends):
    """Sort the rows (token, k) of a layer by expert, in the order in which experts are given.

    Args:
        ids: [T, K] int32 experts of each token.
        experts: [J] int64 of all groups, group by group.
        ends: [G] int64 end of each group in `experts`.
        slots: [J] int32 slot of each of them.
        on_cpu: [C] int64 experts that the CPU computes.
        index: [I] int32 of `Index`, written.
        layout: [3] int64, where its parts begin.
        cpu_tokens: [N] int64, written: token of each row of the CPU's batch.
        cpu_ends: [C] int64, written: end of each CPU expert's rows.

    Returns:
        Number of rows of the CPU's batch.
    """
    first_slot, first_row, first_place, num_rows = layout[0], layout[1], layout[2], ids.size
    first_source = first_place + num_rows
    for group in range(ends.size):
        index[group + 1] = ends[group]
    index[0] = 0
    largest = 0
    for expert in ids.flat:
        largest = max(largest, expert)
    count = np.zeros(largest + 1, np.int64)  # first of rows, then of where the next one goes
    for expert in ids.flat:
        count[expert] += 1
    row = 0
    for job in range(experts.size):
        index[first_slot + job] = slots[job]
        index[first_row + job] = row
        load = count[experts[job]]
        count[experts[job]] = row
        row += load
    index[first_row + experts.size] = row
    cpu_row = 0
    for job in range(on_cpu.size):
        load = count[on_cpu[job]]
        count[on_cpu[job]] = -1 - cpu_row
        cpu_row += load
        cpu_ends[job] = cpu_row
    top_k = ids.shape[1]
    for token in range(ids.shape[0]):
        for k in range(top_k):
            place, expert = token * top_k + k, ids[token, k]
            at = count[expert]
            if at >= 0:
                index[first_place + at] = place
                index[first_source + place] = place
                count[expert] = at + 1
            else:
                cpu_tokens[-1 - at] = token
                index[first_source + place] = at
                count[expert] = at - 1
    return cpu_row


class Index:
    """What kernels are told of a layer: one array of int32 in host memory that a GPU reads, and its copy there.

    Groups of experts are numbered; group g holds the jobs from entry g to entry g + 1. Then come each job's slot,
    its first row, the place token * K + k of each row, and for each place where its result lies: at the same place,
    or, negative, in row -1 - source of what the CPU computed.

    Args:
        num_groups: most of a layer.
        num_jobs: most experts of a layer.
        num_rows: most rows of a layer, tokens times K.
        device: of the kernels.
    """

    def __init__(self, num_groups: int, num_jobs: int, num_rows: int, device: torch.device) -> None:
        self.slot = num_groups + 1
        self.row_first = self.slot + num_jobs
        self.place = self.row_first + num_jobs + 1
        size = self.place + 2 * num_rows
        is_cuda = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self.device = torch.zeros(size, dtype=torch.int32, device=device) if is_cuda else self.host
        self.layout = np.array([self.slot, self.row_first, self.place])
        self.array = self.host.numpy()
        self.cpu_tokens = np.zeros(num_rows, np.int64)
        self.cpu_ends = np.zeros(num_jobs, np.int64)
