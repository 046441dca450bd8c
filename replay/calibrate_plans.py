"""Layers made to be measured: so many hits, copies and CPU experts each, as passes and a policy that plans them so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Policy, plain_plan
from policies.jit import jit
from tracer.schema import ForwardKind, ModelShape, Pass

PassSize = tuple[int, int]  # tokens and committed positions of a pass


class Design(NamedTuple):
    """One kind of layer; a forward has layers of one kind only."""

    num_tokens: int
    kv_len: int
    num_hits: int
    num_transfers: int = 0
    num_on_cpu: int = 0
    cpu_load: int = 1  # rows of each CPU expert

    @property
    def pass_size(self) -> PassSize:
        """Of its passes."""
        return self.num_tokens, self.kv_len

    @property
    def kind(self) -> str:
        """In words."""
        if self.num_on_cpu:
            return "with copies and CPU experts" if self.num_transfers else "with CPU experts"
        return "with copies" if self.num_transfers else "with hits alone"

    def is_possible(self, top_k: int) -> bool:
        """Some routing to K experts a token has these loads."""
        on_gpu, rest = self._on_gpu(top_k)
        has_load = on_gpu <= rest <= on_gpu * self.num_tokens
        return has_load and 1 <= self.cpu_load <= self.num_tokens

    def loads(self, top_k: int) -> NDArray[np.int64]:
        """Rows of each expert: hits, then transfers, which share evenly what the CPU leaves, then those on the CPU."""
        on_gpu, rest = self._on_gpu(top_k)
        shared = (rest + np.arange(on_gpu)[::-1]) // max(1, on_gpu)
        return np.concatenate([shared, np.full(self.num_on_cpu, self.cpu_load)])

    def hit_rows(self, top_k: int) -> int:
        """Rows of all hits."""
        return int(self.loads(top_k)[: self.num_hits].sum())

    def last_chunk(self, top_k: int, transfer_chunk: int) -> tuple[int, int]:
        """Experts and rows of the last chunk of transfers."""
        size = (self.num_transfers - 1) % transfer_chunk + 1
        end = self.num_hits + self.num_transfers
        return size, int(self.loads(top_k)[end - size : end].sum())

    def _on_gpu(self, top_k: int) -> tuple[int, int]:
        """Experts on the GPU, and their rows."""
        rows = self.num_tokens * top_k - self.num_on_cpu * self.cpu_load
        return self.num_hits + self.num_transfers, rows


class Plans(NamedTuple):
    """The plan of each layer execution, numbered forward * L + layer."""

    num_layers: int
    transfers: NDArray[np.int64]
    transfer_ends: NDArray[np.int64]  # [executions + 1] of each in `transfers`, from 0
    on_cpu: NDArray[np.int64]
    cpu_ends: NDArray[np.int64]
    retained: NDArray[np.bool_]  # [E] of every layer


@dataclass(frozen=True, eq=False)
class Designed:
    """Passes of designed layers, one for each design, the policy that serves them so, and the shape of both."""

    shape: ModelShape
    passes: Sequence[Pass]
    policy: Policy
    slots: int


def designed(shape: ModelShape, num_layers: int, num_residents: int, designs: Sequence[Design]) -> Designed:
    """Passes and plans of some designs, in this order.

    The first `num_residents` experts of each layer stay on the GPU for good. Hits rotate through them, and misses
    through all others, so that no cache of the host or the GPU holds their weights.

    Args:
        shape: whose number of experts and K it is.
        num_layers: of each pass.
        num_residents: of each layer, at least as many as any design has hits.
        designs: possible ones, with no more misses than there are experts beside residents.
    """
    shape = replace(shape, layer_ids=tuple(range(num_layers)))
    passes, num_others = [], shape.num_experts - num_residents
    transfers, on_cpu = [], []  # of each layer execution
    retained = np.arange(shape.num_experts) < num_residents
    first_hit = first_miss = 0
    for number, design in enumerate(designs):
        num_missed = design.num_transfers + design.num_on_cpu
        routes = []
        for _ in range(num_layers):
            hits = (first_hit + np.arange(design.num_hits)) % num_residents
            missed = num_residents + (first_miss + np.arange(num_missed)) % num_others
            first_hit, first_miss = first_hit + design.num_hits, first_miss + num_missed
            transfers.append(missed[: design.num_transfers])
            on_cpu.append(missed[design.num_transfers :])
            routes.append(_route(np.concatenate([hits, missed]), design, shape.top_k))
        passes.append(pass_of(number, np.stack(routes), design.kv_len))

    plans = Plans(num_layers, *_in_a_row(transfers), *_in_a_row(on_cpu), retained)
    return Designed(shape, passes, Policy("designed", plans, init, decide), num_layers * num_residents)


def init(params: Plans, shape: ModelShape, slots: int) -> tuple[tuple[()], NDArray[np.bool_], NDArray[np.int64]]:
    """Start with what stays for good."""
    num_residents = int(params.retained.sum())
    return (), np.tile(params.retained, (shape.num_layers, 1)), np.full(shape.num_layers, num_residents)


@jit
def decide(params, state, step, view):
    """The plan of this layer execution; compiled as those of policies are."""
    row = step.forward * params.num_layers + step.layer
    transfers = params.transfers[params.transfer_ends[row] : params.transfer_ends[row + 1]]
    on_cpu = params.on_cpu[params.cpu_ends[row] : params.cpu_ends[row + 1]]
    return plain_plan(transfers.copy(), on_cpu.copy(), params.retained.copy())


def _in_a_row(parts: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All values, and where each part ends, from 0."""
    return np.concatenate(parts), np.cumsum([0, *(len(part) for part in parts)])


def pass_of(number: int, expert_ids: NDArray[np.int64], kv_len: int) -> Pass:
    """One denoising pass of one request with this routing, [L, T, K]."""
    num_layers, num_tokens, top_k = expert_ids.shape
    one, known = np.array([num_tokens]), np.zeros(num_tokens, np.bool_)
    unknown = np.full((1, num_layers), np.nan, np.float32)
    return Pass(
        pass_id=number,
        requests=np.array([0]),
        blocks=np.array([0]),
        iterations=np.array([number]),
        kinds=np.array([int(ForwardKind.DENOISE)]),
        num_tokens=one,
        kv_lens=np.array([kv_len]),
        num_masked_in=one,
        num_accepted=np.array([1]),
        wall_ns=-1,
        cos_router_input=unknown,
        cos_layer_output=unknown,
        positions=np.arange(kv_len, kv_len + num_tokens),
        token_ids_in=np.zeros(num_tokens, np.int64),
        is_masked_in=~known,
        argmax_ids=np.zeros(num_tokens, np.int64),
        p_argmax=np.full(num_tokens, 0.5),
        p_current=np.full(num_tokens, np.nan),
        accepted=known,
        edited=known,
        expert_ids=expert_ids,
        gates=np.full(expert_ids.shape, 1 / top_k),
    )


def grid_passes(shape: ModelShape, num_layers: int, sizes: Sequence[PassSize]) -> Iterator[Pass]:
    """A pass of each number of tokens and committed positions, whose routing does not matter."""
    for number, (num_tokens, kv_len) in enumerate(sizes):
        ids = np.broadcast_to(np.arange(shape.top_k), (num_layers, num_tokens, shape.top_k))
        yield pass_of(number, ids, kv_len)


def _route(experts: NDArray[np.int64], design: Design, top_k: int) -> NDArray[np.int64]:
    """Ids [T, K] in which each expert has its load, no token an expert twice.

    Rows are dealt out to tokens in turns, and none is turned to twice before all have been: no load exceeds T.
    """
    return np.repeat(experts, design.loads(top_k)).reshape(top_k, design.num_tokens).T
