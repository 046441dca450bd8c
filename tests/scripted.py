"""Policies whose plans are given by hand or drawn at random, and passes and costs to run them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Estimates, Plan, Policy, Step, View
from policies.log import LogChunk
from policies.profile import Costs
from tracer.schema import ForwardKind, ModelShape, Pass

ESTIMATES = Estimates(1, 1, 1)


def make_shape(num_layers: int, num_experts: int, top_k: int = 1) -> ModelShape:
    return ModelShape(tuple(range(num_layers)), num_experts, top_k, hidden=8, expert_intermediate=4)


def make_costs(**changes: float) -> Costs:
    """Round numbers in ns: layer 100, kernel 20, copy 50, CPU expert 70; the rest is 0 and chunks hold 4."""
    costs = Costs(
        n_a_ns=100.0,
        n_b_ns=0.0,
        n_c_ns=0.0,
        g_a_ns=20.0,
        g_b_ns=0.0,
        g_c_ns=0.0,
        h2d_latency_ns=50.0,
        h2d_bytes_per_s=1e9,
        expert_bytes=0,
        cpu_a_ns=0.0,
        cpu_b0_ns=70.0,
        cpu_b1_ns=0.0,
        cpu_roundtrip_ns=0,
        tail_ns=0,
        gate_sync_ns=0,
        policy_ns=0,
        h2d_slowdown=1.0,
        cpu_slowdown=1.0,
        transfer_chunk=4,
    )
    return costs._replace(**changes)


def make_pass(
    index: int, layers: Sequence[Sequence[int] | Mapping[int, int]], *, request: int = 0, kv_len: int = 0
) -> Pass:
    """One denoising pass of top-1 tokens: for each layer the experts with one token each, or {expert: load}.

    All layers of a pass have the same tokens, so what a layer lacks goes to its first expert.
    """
    routes = []
    for layer in layers:
        loads = dict(layer) if isinstance(layer, Mapping) else dict.fromkeys(layer, 1)
        routes.append([expert for expert, load in loads.items() for _ in range(load)])
    num_tokens = max(len(route) for route in routes)
    ids = np.array([[*route, *route[:1] * (num_tokens - len(route))] for route in routes], np.int64)
    zeros = np.zeros(num_tokens)
    one = np.array([num_tokens])
    return Pass(
        pass_id=index,
        requests=np.array([request]),
        blocks=np.array([0]),
        iterations=np.array([index]),
        kinds=np.array([int(ForwardKind.DENOISE)]),
        num_tokens=one,
        kv_lens=np.array([kv_len]),
        num_masked_in=one,
        num_accepted=np.array([1]),
        wall_ns=-1,
        cos_router_input=np.full((1, len(layers)), np.nan, np.float32),
        cos_layer_output=np.full((1, len(layers)), np.nan, np.float32),
        positions=np.arange(num_tokens),
        token_ids_in=zeros.astype(np.int64),
        is_masked_in=zeros == 0,
        argmax_ids=zeros.astype(np.int64),
        p_argmax=zeros + 0.5,
        p_current=np.full(num_tokens, np.nan),
        accepted=zeros == 1,
        edited=zeros == 1,
        expert_ids=ids[:, :, None],
        gates=np.ones((*ids.shape, 1)),
    )


@dataclass(frozen=True)
class Script:
    """One plan. By default every miss is a transfer, ascending, and what is resident stays."""

    transfers: Sequence[int] | None = None
    on_cpu: Sequence[int] = ()
    retained: Sequence[int] | None = None  # numbers within the pool
    prefetches: Sequence[tuple[int, int] | tuple[int, int, float] | tuple[int, int, float, float]] = ()
    clear: bool = False
    delay_ns: int = 0
    score: Mapping[tuple[int, int], float] = field(default_factory=dict)  # (layer, expert), set before planning


class ScriptedState(NamedTuple):
    score: NDArray[np.float64]  # [L, E]


class Scoreless(NamedTuple):
    clock: NDArray[np.int64]


def scripted(
    shape: ModelShape,
    plans: Mapping[tuple[int, int], Script] | None = None,
    *,
    capacity: int | Sequence[int],
    residents: Mapping[int, Sequence[int]] | None = None,
    score: Mapping[tuple[int, int], float] | None = None,
    pool: str = "layer",
    has_score: bool = True,
    seen: list[View] | None = None,
    boundary: Callable[..., Any] | None = None,
    place: Callable[..., Any] | None = None,
) -> Policy:
    """A policy that answers (forward, layer) with the given plan, or else with `Script()`.

    Args:
        capacity: of each layer, of all of them, or of the global pool.
        residents: experts of a layer at the start.
        score: at the start, by (layer, expert); 0 elsewhere.
        seen: collects a copy of every view.
    """
    plans = plans or {}

    def init(params: Any, shape: ModelShape, slots: int) -> Any:
        resident = np.zeros((shape.num_layers, shape.num_experts), bool)
        for layer, experts in (residents or {}).items():
            resident[layer, list(experts)] = True
        scores = np.zeros(resident.shape)
        for target, value in (score or {}).items():
            scores[target] = value
        num_pools = 1 if pool == "global" else shape.num_layers
        sizes = np.full(num_pools, capacity) if isinstance(capacity, int) else np.array(capacity)
        return (ScriptedState(scores) if has_score else Scoreless(np.zeros(1, np.int64))), resident, sizes

    def decide(params: Any, state: Any, step: Step, view: View) -> Plan:
        if seen is not None:
            seen.append(view._replace(**{k: getattr(view, k).copy() for k in ("resident", "in_flight", "capacity")}))
        script = plans.get((step.forward, step.layer), Script())
        for target, value in script.score.items():
            state.score[target] = value
        missed = np.flatnonzero((step.load > 0) & ~view.resident[step.layer])
        transfers = [e for e in missed if e not in script.on_cpu] if script.transfers is None else script.transfers
        here = view.resident.reshape(-1) if pool == "global" else view.resident[step.layer]
        retained = np.zeros(here.size, bool)
        first = step.layer * shape.num_experts if pool == "global" else 0
        if script.retained is None:
            retained |= here
            flying = view.in_flight[step.layer] & (step.load > 0)
            retained[first + np.flatnonzero(flying)] = True
        else:
            retained[list(script.retained)] = True
        rows = [(*prefetch, 0.0, 0.0)[:4] for prefetch in script.prefetches]
        return Plan(
            np.array(transfers, np.int64),
            np.array(script.on_cpu, np.int64),
            retained,
            np.array([row[:2] for row in rows], np.int64).reshape(-1, 2),
            np.array([row[2:] for row in rows], np.float64).reshape(-1, 2),
            script.clear,
            script.delay_ns,
        )

    return Policy("scripted", None, init, decide, boundary, place, pool=pool, sized=False)


def random_policy(
    shape: ModelShape,
    seed: int,
    *,
    capacity: Sequence[int],
    pool: str = "layer",
    cpu_ratio: float = 0.3,
    prefetches: bool = False,
    moves_slots: bool = False,
) -> Policy:
    """A policy of random valid plans, which depend on what is resident and on nothing else of the past."""
    num_layers, num_experts = shape.num_layers, shape.num_experts

    def init(params: Any, shape: ModelShape, slots: int) -> Any:
        rng = np.random.default_rng(seed)
        resident = np.zeros((num_layers, num_experts), bool)
        for row, size in zip(resident.reshape(len(capacity), -1), capacity, strict=True):
            row[rng.permutation(row.size)[: rng.integers(0, size + 1)]] = True
        return ScriptedState(rng.integers(0, 4, resident.shape).astype(float)), resident, np.array(capacity)

    def decide(params: Any, state: Any, step: Step, view: View) -> Plan:
        rng = np.random.default_rng((seed, step.forward, step.layer))
        missed = rng.permutation(np.flatnonzero((step.load > 0) & ~view.resident[step.layer]))
        on_cpu = (rng.random(missed.size) < cpu_ratio) & ~view.in_flight[step.layer, missed]
        transfers = missed[~on_cpu]
        index = 0 if pool == "global" else step.layer
        first = step.layer * num_experts if pool == "global" else 0
        flying = view.in_flight.reshape(len(capacity), -1)[index]
        held = view.resident.reshape(len(capacity), -1)[index].copy()
        held[first + transfers] = True
        retained = np.zeros(held.size, bool)
        choice = rng.permutation(np.flatnonzero(held & ~flying))
        room = int(view.capacity[index] - flying.sum())
        retained[choice[: rng.integers(0, room + 1) if rng.random() < 0.5 else room]] = True
        retained |= held & flying
        state.score[:] = rng.integers(0, 4, state.score.shape)
        targets = np.empty((0, 2), np.int64)
        if prefetches and rng.random() < 0.7:
            targets = rng.permutation(np.argwhere(~view.resident & ~view.in_flight))[: rng.integers(0, 6)]
        return Plan(
            transfers,
            missed[on_cpu],
            retained,
            targets,
            rng.integers(0, 2, (len(targets), 2)).astype(float),
            bool(prefetches and rng.random() < 0.4),
            int(rng.choice([0, 0, 30, 400])) if prefetches else 0,
        )

    def boundary(params: Any, state: Any, end: Any, view: View) -> Any:
        rng = np.random.default_rng((seed, end.forward))
        sizes = view.capacity.copy()
        giver, taker = rng.integers(0, num_layers, 2)
        moved = min(int(sizes[giver] - view.in_flight[giver].sum()), int(num_experts - sizes[taker]), 1)
        sizes[giver] -= moved
        sizes[taker] += moved
        evictions = np.zeros_like(view.resident)
        for layer in range(num_layers):
            excess = int(view.resident[layer].sum() + view.in_flight[layer].sum() - sizes[layer])
            evictions[layer, np.flatnonzero(view.resident[layer])[: max(excess, 0)]] = True
        return sizes, evictions

    moves = boundary if moves_slots and pool == "layer" else None
    return Policy("random", None, init, decide, moves, pool=pool, sized=False)


def layer_rows(chunks: Iterable[LogChunk]) -> list[dict[str, Any]]:
    """Every layer execution as plain Python values."""
    return [row for chunk in chunks for row in _rows(chunk.layers)]


def forward_rows(chunks: Iterable[LogChunk]) -> list[dict[str, Any]]:
    """Every forward as plain Python values."""
    return [row for chunk in chunks for row in _rows(chunk.forwards)]


def _rows(table: Any) -> list[dict[str, Any]]:
    columns = {name: values.tolist() for name, values in table.scalars.items()}
    columns |= {name: [values[i].tolist() for i in range(len(values))] for name, values in table.lists.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
