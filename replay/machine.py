"""Everything that a run uses and that outlives it: slots, host experts, kernels, the model's layers and the recorded routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.profile import ProfileError
from replay.arena import Arena
from replay.arrange import Index
from replay.cpu_experts import Batch, CpuExperts
from replay.device import Work
from replay.devices import open_device
from replay.expert_kernel import ExpertKernels, expert_kernels, make_buffers
from replay.layer import Extent, Model
from replay.layout import FACTORS, Layout
from replay.link_state import LinkState, busy_link
from tracer.schema import Pass


class Works(NamedTuple):
    """Numbers of what a machine's device can be told to do."""

    groups: NDArray[np.int64]  # kernel over group 0, with its fetch; over groups 1, 2, ...; last the fetch alone
    combine: dict[int, int]  # by tokens: sum over experts
    layer: dict[tuple[Extent, int], int]  # what precedes a layer's experts, and sends the gate's ids to the host
    tail: dict[Extent, int]  # what follows the last layer, and sends the chosen tokens to the host


class _Views(NamedTuple):
    """The parts of static memory that a layer of so many tokens uses."""

    gates: Tensor
    x: Tensor
    host_ids: Tensor
    host_x: Tensor
    host_array: NDArray[np.int32]


class Machine:
    """A device and its host, ready to run passes that are known beforehand; nothing is allocated while they run.

    Args:
        layout: sizes.
        device: its name.
        arena: experts in host memory, with `most_h2d_bytes_factor - 1` experts of padding.
        passes: that will be run; a run names them by their place here.
        progress: told of each layer of each extent that is ready, of `num_steps(passes)`.

    Raises:
        ProfileError: the device has too little memory, or the shape does not say what a layer is.
    """

    def __init__(
        self,
        layout: Layout,
        device: str,
        arena: Arena,
        passes: Sequence[Pass],
        progress: Callable[[int], object] | None = None,
    ) -> None:
        if arena.padding < layout.most_h2d_bytes_factor - 1:
            raise ProfileError(
                f"copies of {layout.most_h2d_bytes_factor} experts' size: the arena was made for {1 + arena.padding} at most"
            )
        self.layout, self.device, self.arena = layout, open_device(device), arena
        self.extents = [Extent.of(pass_) for pass_ in passes]
        try:
            self._get_ready(passes, progress)
        except BaseException:
            self.device.close()
            raise

    def _get_ready(self, passes: Sequence[Pass], progress: Callable[[int], object] | None) -> None:
        layout, shape, where = self.layout, self.layout.shape, self.device.torch_device
        num_tokens, top_k = max(extent.total for extent in self.extents), layout.top_k
        layout.require_room(where)
        slots = torch.zeros(layout.num_slots, layout.slot_numel, dtype=torch.bfloat16, device=where)
        self.buffers = make_buffers(slots, num_tokens, top_k, shape.hidden)
        self.num_groups = 1 + -(-layout.num_experts // layout.transfer_chunk)
        self.index = Index(self.num_groups, layout.num_experts, num_tokens * top_k, where)
        kernels = expert_kernels(self.buffers, self.index, shape.hidden, shape.expert_intermediate)
        self._token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=where)
        self._model = Model(shape, layout.num_layers, set(self.extents), self.buffers, self._token_ids, where)
        self._ids, self._gates = self._upload(passes)
        self._ids_now, self._gates_now = (
            torch.zeros(layout.num_layers * num_tokens * top_k, dtype=kind, device=where)
            for kind in (torch.int32, torch.float32)
        )
        self._chosen = torch.zeros(num_tokens, dtype=torch.int64, pin_memory=where.type == "cuda")
        self._views = self._make_views(num_tokens)
        self.works = self._make_works(kernels, progress)
        self.cpu = CpuExperts(
            shape.hidden, shape.expert_intermediate, num_workers=layout.cpu_workers, kernel=layout.cpu_kernel
        )
        self._warm_cpu()
        self.set_factor(1)

    def set_factor(self, factor: int) -> None:
        """Let copies of later runs read and write so many times an expert's size, as over a slower link."""
        if factor not in FACTORS or factor > self.layout.most_h2d_bytes_factor:
            allowed = [str(each) for each in FACTORS if each <= self.layout.most_h2d_bytes_factor]
            raise ProfileError(f"h2d_bytes_factor is {factor}, this machine allows {', '.join(allowed)}")
        self.copy_bytes = factor * 2 * self.layout.expert_numel

    def close(self) -> None:
        """End the threads beside this one."""
        self.cpu.close()
        self.device.close()

    # Addresses, for copies

    def targets(self) -> NDArray[np.int64]:
        """Of each slot, [S]."""
        return self.buffers.slots.data_ptr() + np.arange(self.layout.num_slots) * 2 * self.layout.slot_numel

    def sources(self) -> NDArray[np.int64]:
        """Of each expert in host memory, [L, E]."""
        return np.array([[expert.data_ptr() for expert in layer] for layer in self.arena.experts])

    def routing(self, number: int) -> list[tuple[int, int, int]]:
        """What brings a pass's routing to where its layers read it: address to write, address to read, bytes."""
        pairs = ((self._ids_now, self._ids[number]), (self._gates_now, self._gates[number]))
        return [(now.data_ptr(), one.data_ptr(), one.numel() * one.element_size()) for now, one in pairs]

    # One by one

    def start_layer(self, number: int, layer: int) -> None:
        """Launch what precedes the experts of a pass's layer."""
        self.device.launch(self.works.layer[self.extents[number], layer])

    def busy_link(self) -> LinkState | None:
        """The link's state while experts are copied; None where there is none, or nobody can tell."""
        return busy_link(self.device, self.buffers.slots[0, : self.layout.expert_numel], self.arena.experts[0][0])

    # The host's part of a layer

    def ids(self, num_tokens: int) -> NDArray[np.int32]:
        """Where the gate's ids are once its event has come, [T, K]."""
        return self._views[num_tokens].host_array

    def start_cpu(self, layer: int, experts: NDArray[np.int64], num_rows: int, num_tokens: int) -> None:
        """Begin the CPU's batch, arranged in `index`."""
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

    def wait_cpu(self, meanwhile: Callable[[], None] | None) -> None:
        """Wait until the CPU's rows are there, which the sum over experts reads where they lie."""
        while meanwhile is not None and not self.cpu.has_answer():
            meanwhile()
        self.cpu.wait()

    def set_layer(self, hidden: Tensor, ids: Tensor, gates: Tensor) -> None:
        """Put the input of one MoE layer where kernels and CPU read it, in place of what model and trace say."""
        views = self._views[len(hidden)]
        for view, given in ((views.x, hidden), (views.host_x, hidden), (views.gates, gates), (views.host_ids, ids)):
            view.copy_(given)
        self.buffers.stream.zero_()
        self.buffers.shared.zero_()
        self.device.synchronize()

    def _warm_cpu(self) -> None:
        """Have the CPU's kernel compiled before anything is measured."""
        one, views = np.zeros(1, np.int64), next(iter(self._views.values()))
        self.cpu.start(Batch([self.arena.experts[0][0]], one + 1, one, views.host_x, self.buffers.host_rows[:1]))
        self.cpu.wait()

    def _upload(self, passes: Sequence[Pass]) -> tuple[list[Tensor], list[Tensor]]:
        """Routing of all passes on the device, each [L, T, K]."""
        where, scale = self.device.torch_device, self.layout.shape.gate_scale
        ids = [torch.from_numpy(pass_.expert_ids.astype(np.int32)).to(where) for pass_ in passes]
        gates = [torch.from_numpy((pass_.gates * scale).astype(np.float32)).to(where) for pass_ in passes]
        return ids, gates

    def _make_views(self, num_tokens: int) -> dict[int, _Views]:
        layout = self.layout
        pinned = self.device.torch_device.type == "cuda"
        host_ids = torch.zeros(num_tokens, layout.top_k, dtype=torch.int32, pin_memory=pinned)
        host_x = torch.zeros(num_tokens, layout.shape.hidden, dtype=torch.bfloat16, pin_memory=pinned)
        return {
            count: _Views(
                self.buffers.gates[:count],
                self.buffers.x[:count],
                host_ids[:count],
                host_x[:count],
                host_ids[:count].numpy(),
            )
            for count in sorted({extent.total for extent in self.extents})
        }

    def _make_works(self, kernels: ExpertKernels, progress: Callable[[int], object] | None) -> Works:
        add, layout = self.device.add, self.layout

        def hits() -> None:
            kernels.fetch()
            kernels.run(0, layout.num_experts)

        groups = [add(hits)]
        groups += [
            add(lambda group=group: kernels.run(group, layout.transfer_chunk), is_warm=group > 1)
            for group in range(1, self.num_groups)
        ]
        groups.append(add(kernels.fetch))
        combine = {count: add(lambda count=count: kernels.combine(count)) for count in self._views}
        layers, tails = {}, {}
        for extent in sorted(set(self.extents)):
            is_aligned = extent.total * layout.top_k % 4 == 0  # kernels differ where addresses are not
            for layer in range(layout.num_layers):
                layers[extent, layer] = add(self._layer(kernels, extent, layer), is_warm=layer > 0 and is_aligned)
                if progress is not None:
                    progress(1)
            tails[extent] = add(self._tail(kernels, extent))
        return Works(np.array(groups), combine, layers, tails)

    def _layer(self, kernels: ExpertKernels, extent: Extent, layer: int) -> Work:
        count, top_k, views = extent.total, self.layout.top_k, self._views[extent.total]
        size = count * top_k
        part = slice(layer * size, (layer + 1) * size)
        ids, gates = (now[part].view(count, top_k) for now in (self._ids_now, self._gates_now))
        work = self._model.layer(extent, layer)

        def run() -> None:
            views.gates.copy_(gates)
            work()
            kernels.move(ids, views.host_ids)
            kernels.move(views.x, views.host_x)

        return run

    def _tail(self, kernels: ExpertKernels, extent: Extent) -> Work:
        work, count = self._model.tail(extent), extent.total

        def run() -> None:
            work()
            kernels.move(self._model.chosen[:count], self._chosen[:count])

        return run


def num_steps(passes: Sequence[Pass], num_layers: int) -> int:
    """Layers of extents that a machine for these passes has to make ready."""
    return num_layers * len({Extent.of(pass_) for pass_ in passes})
