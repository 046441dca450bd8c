"""Routing that others recorded, request by request, as the passes of a trace; what they did not record is null."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.schema import ForwardKind, ModelShape, Pass, TraceError


@dataclass(frozen=True, eq=False)
class Forward:
    """What one forward ran for one request. T tokens; what is None is unknown."""

    kind: ForwardKind
    block: int
    iteration: int
    kv_len: int
    positions: NDArray[np.int64]  # [T] ascending
    expert_ids: NDArray[np.int64]  # [L, T, K]
    gates: NDArray[np.float64] | None = None  # [L, T, K] not yet normalised
    token_ids: NDArray[np.int64] | None = None  # [T]
    masked: NDArray[np.bool_] | None = None  # [T] none where unknown
    accepted: NDArray[np.bool_] | None = None  # [T] none where unknown
    p_argmax: NDArray[np.float64] | None = None  # [T]
    p_current: NDArray[np.float64] | None = None  # [T]


@dataclass(frozen=True, eq=False)
class Tokens:
    """What an autoregressive engine recorded of one request: a row for each token that it ran.

    The first `num_prompt` positions are the prompt's. The last token that was generated was not run.
    """

    name: str  # of the request, for messages
    num_prompt: int
    num_cached: int  # positions of the prompt that came from a prefix cache, so that no forward ran them
    positions: NDArray[np.int64]  # [N] ascending
    expert_ids: NDArray[Any]  # [N, L, K] integers
    token_ids: NDArray[np.int64] | None = None  # [N]


def forwards_of(tokens: Tokens) -> Iterator[Forward]:
    """Forwards of an autoregressive request: the prompt at once, then one token each.

    A forward of a generated token counts as a block of one masked position that it accepts, which is how it counts as
    one token in all metrics.
    """
    is_run = tokens.positions >= tokens.num_cached
    num_read = int(np.searchsorted(tokens.positions, tokens.num_prompt))
    prompt = np.flatnonzero(is_run[:num_read])
    if prompt.size:
        yield _forward(tokens, slice(int(prompt[0]), num_read), ForwardKind.PREFILL, -1)
    for row in range(num_read, tokens.positions.size):
        yield _forward(tokens, slice(row, row + 1), ForwardKind.DENOISE, row - num_read)


def _forward(tokens: Tokens, rows: slice, kind: ForwardKind, block: int) -> Forward:
    positions = tokens.positions[rows]
    flags = np.full(positions.size, kind == ForwardKind.DENOISE)
    return Forward(
        kind=kind,
        block=block,
        iteration=0,
        kv_len=int(positions[0]),
        positions=positions,
        expert_ids=tokens.expert_ids[rows].transpose(1, 0, 2).astype(np.int64),
        token_ids=None if tokens.token_ids is None else tokens.token_ids[rows],
        masked=flags,
        accepted=flags,
    )


def pass_of(forward: Forward, shape: ModelShape, pass_id: int, request: int) -> Pass:
    """One forward of one request, which was checked, as a pass of its own."""
    size = forward.positions.size
    unknown, nobody = np.full(size, np.nan), np.zeros(size, bool)
    masked = nobody if forward.masked is None else forward.masked
    accepted = nobody if forward.accepted is None else forward.accepted
    no_cosine = np.full((1, shape.num_layers), np.nan, np.float32)
    gates = forward.gates
    return Pass(
        pass_id=pass_id,
        requests=np.array([request]),
        blocks=np.array([forward.block]),
        iterations=np.array([forward.iteration]),
        kinds=np.array([int(forward.kind)]),
        num_tokens=np.array([size]),
        kv_lens=np.array([forward.kv_len]),
        num_masked_in=np.array([int(masked.sum())]),
        num_accepted=np.array([int(accepted.sum())]),
        wall_ns=-1,
        cos_router_input=no_cosine,
        cos_layer_output=no_cosine,
        positions=forward.positions,
        token_ids_in=np.full(size, -1) if forward.token_ids is None else forward.token_ids,
        is_masked_in=masked,
        argmax_ids=np.full(size, -1),
        p_argmax=unknown if forward.p_argmax is None else forward.p_argmax,
        p_current=unknown if forward.p_current is None else np.where(masked, np.nan, forward.p_current),
        accepted=accepted,
        edited=nobody,
        expert_ids=forward.expert_ids,
        gates=np.full(forward.expert_ids.shape, np.nan) if gates is None else gates / gates.sum(-1, keepdims=True),
    )


def check_ids(ids: NDArray[Any], positions: NDArray[np.int64], layer_ids: Sequence[int], num_experts: int) -> None:
    """Refuse rows that no router gives, as engines leave them where nothing was captured.

    Args:
        ids: [N, L, K].
        positions: [N]
        layer_ids: [L] true ones, for messages.
        num_experts: of a layer.

    Raises:
        TraceError: with the first of them.
    """
    ordered = np.sort(ids, axis=-1)
    for bad, what in (
        ((ids == 0).all(axis=-1) & (ids.shape[-1] > 1), "all ids are zero, as in a buffer that was never filled"),
        ((ordered[..., 0] < 0) | (ordered[..., -1] >= num_experts), f"ids must be from 0 to {num_experts - 1}"),
        ((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1), "an expert stands twice in one top-k"),
    ):
        if bad.any():
            row, layer = np.argwhere(bad)[0].tolist()
            others = np.count_nonzero(bad) - 1
            place = f"position {positions[row]}, layer {layer_ids[layer]}"
            more = f", and {others} more of these" if others else ""
            raise TraceError(f"{place}: {what}: {ids[row, layer].tolist()}{more}")


def check_gates(gates: NDArray[np.float64], positions: NDArray[np.int64], layer_ids: Sequence[int]) -> None:
    """Refuse gates that cannot be scaled to sum to 1, [N, L, K].

    Raises:
        TraceError: with the first of them.
    """
    with np.errstate(over="ignore"):
        total = gates.sum(axis=-1)
    bad = ~(np.isfinite(gates) & (gates >= 0)).all(axis=-1) | ~((total > 0) & np.isfinite(total))
    if bad.any():
        row, layer = np.argwhere(bad)[0].tolist()
        place = f"position {positions[row]}, layer {layer_ids[layer]}"
        raise TraceError(f"{place}: gates {gates[row, layer].tolist()}, must be 0 or more, with a sum above 0")
