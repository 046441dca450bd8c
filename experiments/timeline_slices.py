"""What ran when during a layer execution: the slices of the GPU stream, the link and the CPU pool, from a row of the log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

from policies.log import LAYER_COLUMNS, Table
from policies.profile import Costs, kernel_ns


class Execution(NamedTuple):
    """One row of the log's layers, as plain numbers: the columns that a timeline reads."""

    forward: int
    layer: int
    num_tokens: int
    kv_len: int
    capacity: int
    num_resident: int
    num_activated: int
    hit_tokens: int
    num_promoted: int
    start_ns: int
    plan_ns: int
    hits_end_ns: int
    cpu_end_ns: int
    end_ns: int
    hits: list[int]
    transfers: list[int]
    transfer_loads: list[int]
    transfer_start_ns: list[int]
    transfer_end_ns: list[int]
    on_cpu: list[int]
    cpu_loads: list[int]
    retained: list[int]

    @property
    def num_missed(self) -> int:
        """Experts that were not resident at the gate."""
        return self.num_activated - len(self.hits)


class Slice(NamedTuple):
    """Something that goes on from `start_ns` to `end_ns`."""

    start_ns: int
    end_ns: int
    name: str
    arguments: dict[str, int | str]


def executions(layers: Table) -> Iterator[Execution]:
    """The rows of a log's layers, in order."""
    columns: list[list[int] | list[list[int]]] = []
    for name in Execution._fields:
        if name in LAYER_COLUMNS:
            columns.append(layers.scalars[name].tolist())
        else:
            offsets, values = layers.lists[name].offsets.tolist(), layers.lists[name].values.tolist()
            columns.append([values[first:last] for first, last in pairwise(offsets)])
    yield from map(Execution._make, zip(*columns, strict=True))


def layer_slice(row: Execution) -> Slice:
    """All of it, and what there was to do."""
    about: dict[str, int | str] = {
        "activated": row.num_activated,
        "missed": row.num_missed,
        "on_cpu": len(row.on_cpu),
        "resident": row.num_resident,
        "capacity": row.capacity,
    }
    return Slice(row.start_ns, row.end_ns, f"layer {row.layer}", about)


def chunk_kernels(row: Execution, costs: Costs) -> Iterator[Slice]:
    """One kernel over each chunk of transfers, when it has landed and the GPU stream is free."""
    free_ns = row.hits_end_ns
    for first in range(0, len(row.transfers), costs.transfer_chunk):
        chunk = slice(first, first + costs.transfer_chunk)
        loads = row.transfer_loads[chunk]
        start_ns = max(free_ns, *row.transfer_end_ns[chunk])
        free_ns = start_ns + kernel_ns(costs, len(loads), sum(loads))
        yield _group(row, start_ns, free_ns, "chunk", len(loads), sum(loads))


def gpu_slices(row: Execution, costs: Costs) -> Iterator[Slice]:
    """What the GPU stream does in a layer, or waits for at its gate; what else it waits for is left blank.

    The stream of a layer without misses is busy from begin to end.
    """
    decided_ns = row.plan_ns - costs.policy_ns
    gate_ns = decided_ns - costs.gate_sync_ns
    layer: dict[str, int | str] = {"layer": row.layer}
    yield Slice(row.start_ns, gate_ns, "non-expert part", layer)
    yield Slice(gate_ns, decided_ns, "gate sync", layer)
    yield Slice(decided_ns, row.plan_ns, "policy", layer)
    if row.hits:
        yield _group(row, row.plan_ns, row.hits_end_ns, "hits", len(row.hits), row.hit_tokens)
    yield from chunk_kernels(row, costs)


def demand_slices(row: Execution) -> Iterator[Slice]:
    """Copies of the transfers, but for a prefetch that was promoted to one."""
    copies = zip(row.transfers, row.transfer_start_ns, row.transfer_end_ns, strict=True)
    for expert, start_ns, end_ns in islice(copies, row.num_promoted, None):
        yield copy_slice(row.layer, expert, start_ns, end_ns)


def copy_slice(layer: int, expert: int, start_ns: int, end_ns: int) -> Slice:
    """One expert on its way to the GPU."""
    return Slice(start_ns, end_ns, f"L{layer} E{expert}", {"layer": layer, "expert": expert})


def cpu_slices(row: Execution, costs: Costs) -> Iterator[Slice]:
    """The batch of experts on the CPU, and the return of its results."""
    if not row.on_cpu:
        return
    done_ns = row.cpu_end_ns - costs.cpu_roundtrip_ns
    yield _group(row, row.plan_ns, done_ns, "batch", len(row.on_cpu), sum(row.cpu_loads))
    yield Slice(done_ns, row.cpu_end_ns, "roundtrip", {"layer": row.layer})


def _group(row: Execution, start_ns: int, end_ns: int, name: str, num_experts: int, num_tokens: int) -> Slice:
    """Experts that run together."""
    return Slice(start_ns, end_ns, name, {"layer": row.layer, "experts": num_experts, "tokens": num_tokens})
