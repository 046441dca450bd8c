"""Everything that a run uses and that outlives it: slots, host experts, kernels, the model's layers and the recorded routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.profile import ProfileError
from replay.arena import MIB, Arena
from replay.arrange import Index
from replay.cpu_experts import Batch, BatchTimes, CpuExperts
from replay.device import Device, Event, Work
from replay.expert_kernel import expert_kernels, make_buffers
from replay.layer import Extent, Model
from tracer.schema import ModelShape, Pass

FACTORS = (1, 2, 4)


@dataclass(frozen=True)
class Layout:
    """Sizes of a machine."""

    shape: ModelShape  # of the experts and of everything else
    num_layers: int  # MoE layers that routing is for
    num_experts: int
    top_k: int
    num_slots: int
    transfer_chunk: int
    most_h2d_bytes_factor: int = 1  # copies can be so many times the size of an expert
    cpu_workers: int | None = None
    cpu_kernel: str = "rows"

    def __post_init__(self) -> None:
        if self.most_h2d_bytes_factor not in FACTORS:
            raise ProfileError(
                f"h2d_bytes_factor is {self.most_h2d_bytes_factor}, allowed are {', '.join(map(str, FACTORS))}"
            )

    @property
    def expert_numel(self) -> int:
        """Numbers of an expert, in bfloat16."""
        return 3 * self.shape.hidden * self.shape.expert_intermediate

    @property
    def slot_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.most_h2d_bytes_factor * 2 * self.expert_numel


class _Views(NamedTuple):
    """The parts of static memory that a layer of so many tokens uses."""

    ids: Tensor
    gates: Tensor
    x: Tensor
    host_ids: Tensor
    host_x: Tensor
    host_array: NDArray[np.int32]


class Machine:
    """A device and its host, ready to run passes that are known beforehand; nothing is allocated while they run.

    Args:
        layout: sizes.
        device: streams and events.
        arena: experts in host memory, with `most_h2d_bytes_factor - 1` experts of padding.
        passes: that will be run; a run names them by their place here.

    Raises:
        ProfileError: the device has too little memory, or the shape does not say what a layer is.
    """

    def __init__(self, layout: Layout, device: Device, arena: Arena, passes: Sequence[Pass]) -> None:
        self.layout, self.device, self.arena = layout, device, arena
        self.extents = [Extent.of(pass_) for pass_ in passes]
        shape, where = layout.shape, device.torch_device
        num_tokens, top_k = max(extent.total for extent in self.extents), layout.top_k
        _require_room(layout, where)
        slot_numel = layout.most_h2d_bytes_factor * layout.expert_numel
        slots = torch.zeros(layout.num_slots, slot_numel, dtype=torch.bfloat16, device=where)
        self.buffers = make_buffers(slots, num_tokens, top_k, shape.hidden)
        self.set_factor(1)
        num_groups = 1 + -(-layout.num_experts // layout.transfer_chunk)
        self.index = Index(num_groups, layout.num_experts, num_tokens * top_k, where)
        kernels = expert_kernels(self.buffers, self.index, shape.hidden, shape.expert_intermediate)
        chunk, captured = layout.transfer_chunk, device.captured

        def hits() -> None:
            kernels.fetch()
            kernels.run(0, layout.num_experts)

        self._fetch = captured(kernels.fetch)
        self._groups: list[Work] = [captured(hits)]
        for group in range(1, num_groups):
            self._groups.append(captured(lambda group=group: kernels.run(group, chunk)))
        totals = sorted({extent.total for extent in self.extents})
        self._combine = {count: captured(lambda count=count: kernels.combine(count)) for count in totals}
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=where)
        self.model = Model(shape, layout.num_layers, set(self.extents), self.buffers, token_ids, device)
        self._ids, self._gates = self._upload(passes)
        self._views = self._make_views(num_tokens, totals)
        self.cpu = CpuExperts(
            shape.hidden, shape.expert_intermediate, num_workers=layout.cpu_workers, kernel=layout.cpu_kernel
        )
        self._chosen = torch.zeros(num_tokens, dtype=torch.int64, pin_memory=where.type == "cuda")

    def set_factor(self, factor: int) -> None:
        """Let copies of later runs read and write so many times an expert's size, as over a slower link."""
        if factor not in FACTORS or factor > self.layout.most_h2d_bytes_factor:
            allowed = [str(each) for each in FACTORS if each <= self.layout.most_h2d_bytes_factor]
            raise ProfileError(f"h2d_bytes_factor is {factor}, this machine allows {', '.join(allowed)}")
        self.targets = list(self.buffers.slots[:, : factor * self.layout.expert_numel].unbind())
        self.sources = self.arena.sources(factor)

    def close(self) -> None:
        """End the threads beside this one."""
        self.cpu.close()
        self.device.close()

    # One layer, in the order of its calls; all but the last return before the device has done it

    def start_layer(self, number: int, layer: int) -> Event:
        """Launch what precedes the experts; when the event has come, the gate's ids are on the host."""
        extent = self.extents[number]
        views = self._views[extent.total]
        views.ids.copy_(self._ids[number][layer], non_blocking=True)
        views.gates.copy_(self._gates[number][layer], non_blocking=True)
        self.model.run_layer(extent, layer)
        return self.read_gate(extent.total)

    def read_gate(self, num_tokens: int) -> Event:
        """Bring the gate's ids, and what the CPU computes with, to the host."""
        views = self._views[num_tokens]
        views.host_ids.copy_(views.ids, non_blocking=True)
        views.host_x.copy_(views.x, non_blocking=True)
        event = self.device.event()
        event.record(self.device.compute)
        return event

    def write_index(
        self,
        num_tokens: int,
        experts: NDArray[np.int64],
        ends: NDArray[np.int64],
        slots: NDArray[np.int32],
        on_cpu: NDArray[np.int64],
    ) -> int:
        """Tell kernels and CPU who computes what, by the ids that the gate gave; returns rows of the CPU's batch."""
        return self.index.write(self._views[num_tokens].host_array, experts, ends, slots, on_cpu)

    def name_slots(self, first: int, slots: list[int]) -> None:
        """Name the slots of jobs from `first` on, which `write_index` had not known; `fetch` brings them along."""
        at = self.index.slot + first
        self.index.array[at : at + len(slots)] = slots

    def run_hits(self) -> None:
        """Launch the kernel over group 0, which fetches what `write_index` wrote."""
        self._groups[0]()

    def fetch(self) -> None:
        """Launch the fetch alone."""
        self._fetch()

    def run_chunk(self, group: int) -> None:
        """Launch the kernel over a group from 1 on."""
        self._groups[group]()

    def start_cpu(self, layer: int, experts: NDArray[np.int64], num_rows: int, num_tokens: int) -> None:
        """Begin the CPU's batch, arranged by `write_index`."""
        index, weights = self.index, self.arena.experts[layer]
        self.cpu.start(
            Batch(
                [weights[expert] for expert in experts.tolist()],
                index.cpu_ends[: len(experts)],
                index.cpu_tokens[:num_rows],
                self._views[num_tokens].host_x,
                self.buffers.host_rows[:num_rows],
            )
        )

    def wait_cpu(self, meanwhile: Callable[[], None] | None) -> BatchTimes:
        """Wait until the CPU's rows are there, which `end_layer` reads where they lie."""
        while meanwhile is not None and not self.cpu.has_answer():
            meanwhile()
        return self.cpu.wait()

    def end_layer(self, num_tokens: int) -> None:
        """Launch the sum over experts."""
        self._combine[num_tokens]()

    def end_forward(self, number: int) -> Event:
        """Launch the tail; when the event has come, the chosen tokens are on the host."""
        self.model.run_tail(self.extents[number])
        count = self.extents[number].total
        self._chosen[:count].copy_(self.model.chosen[:count], non_blocking=True)
        event = self.device.event()
        event.record(self.device.compute)
        return event

    def load(self, layer: int, expert: int, slot: int) -> None:
        """Copy an expert into a slot, outside of any run."""
        with self.device.copying():
            self.device.copy(self.targets[slot], self.sources[layer][expert])

    def set_layer(self, hidden: Tensor, ids: Tensor, gates: Tensor) -> None:
        """Put the input of one MoE layer where kernels read it, in place of what the model and the trace say."""
        views = self._views[len(hidden)]
        views.x.copy_(hidden)
        views.ids.copy_(ids)
        views.gates.copy_(gates)
        self.buffers.stream.zero_()
        self.buffers.shared.zero_()

    def _upload(self, passes: Sequence[Pass]) -> tuple[list[Tensor], list[Tensor]]:
        """Routing of all passes on the device, each [L, T, K]."""
        where, scale = self.device.torch_device, self.layout.shape.gate_scale
        ids = [torch.from_numpy(pass_.expert_ids.astype(np.int32)).to(where) for pass_ in passes]
        gates = [torch.from_numpy((pass_.gates * scale).astype(np.float32)).to(where) for pass_ in passes]
        return ids, gates

    def _make_views(self, num_tokens: int, totals: Sequence[int]) -> dict[int, _Views]:
        layout, where = self.layout, self.device.torch_device
        pinned = where.type == "cuda"
        ids = torch.zeros(num_tokens, layout.top_k, dtype=torch.int32, device=where)
        host_ids = torch.zeros(num_tokens, layout.top_k, dtype=torch.int32, pin_memory=pinned)
        host_x = torch.zeros(num_tokens, layout.shape.hidden, dtype=torch.bfloat16, pin_memory=pinned)
        return {
            count: _Views(
                ids[:count],
                self.buffers.gates[:count],
                self.buffers.x[:count],
                host_ids[:count],
                host_x[:count],
                host_ids[:count].numpy(),
            )
            for count in totals
        }


def _require_room(layout: Layout, where: torch.device) -> None:
    if where.type != "cuda":
        return
    free = torch.cuda.mem_get_info(where)[0]
    if layout.slot_bytes > free:
        one = layout.slot_bytes // layout.num_slots
        raise ProfileError(
            f"{layout.num_slots} slots of {one / MIB:.4g} MiB need {layout.slot_bytes / MIB:.0f} MiB of GPU memory, "
            f"{free / MIB:.0f} MiB are free: at most {free // one} slots fit, staging included"
        )
