"""A settled forward of somebody else's model as a pass of a trace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tracer.adapters.forward import Forward, Rules, stacked
from tracer.schema import ForwardKind, Pass


class Place(NamedTuple):
    """Where in its request a forward stands."""

    kind: ForwardKind
    block: int
    iteration: int


def make_pass(
    forward: Forward, place: Place, final: NDArray[np.int64], before: Forward | None, rules: Rules, request: int
) -> Pass:
    """The pass of a forward; ids and gates take few bytes, as a request is kept until it is complete.

    Args:
        forward: what its hooks showed.
        place: kind, block and iteration.
        final: [T], its tokens after the decoder has worked on them.
        before: the block's previous forward, None in its first.
        rules: of the request.
        request: its number.
    """
    rows = forward.region if rules.rows == "block" and forward.region is not None else slice(None)
    was_masked = forward.token_ids == rules.mask_id
    changed = final != forward.token_ids
    masked, accepted, edited = was_masked[rows], (changed & was_masked)[rows], (changed & ~was_masked)[rows]
    positions = forward.positions[rows]
    cos_router_input, cos_layer_output = _cosines(before, forward, positions, rules.layer_ids)
    return Pass(
        pass_id=0,
        requests=np.array([request]),
        blocks=np.array([place.block]),
        iterations=np.array([place.iteration]),
        kinds=np.array([int(place.kind)]),
        num_tokens=np.array([len(positions)]),
        kv_lens=positions[:1].copy(),
        num_masked_in=np.array([np.count_nonzero(masked)]),
        num_accepted=np.array([np.count_nonzero(accepted)]),
        wall_ns=forward.wall_ns,
        cos_router_input=cos_router_input[None],
        cos_layer_output=cos_layer_output[None],
        positions=positions,
        token_ids_in=forward.token_ids[rows],
        is_masked_in=masked,
        argmax_ids=forward.argmax_ids[rows],
        p_argmax=forward.p_argmax[rows],
        p_current=np.where(masked, np.nan, forward.p_current[rows]),
        accepted=accepted,
        edited=edited,
        expert_ids=forward.expert_ids[:, rows],
        gates=forward.gates[:, rows],
    )


def _cosines(
    before: Forward | None, now: Forward, positions: NDArray[np.int64], layer_ids: tuple[int, ...]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean cosine similarity of each layer to the forward before, [L] each; NaN where it did not run these positions."""
    unknown = np.full(len(layer_ids), np.nan, np.float32)
    if before is None or not np.isin(positions, before.positions).all():
        return unknown, unknown
    old, new = np.searchsorted(before.positions, positions), np.searchsorted(now.positions, positions)

    def mean_cosines(was: dict[int, Tensor], values: dict[int, Tensor]) -> NDArray[np.float32]:
        if not all(layer_id in was and layer_id in values for layer_id in layer_ids):
            return unknown
        cosines = [cosine_similarity(_rows(was[i], old), _rows(values[i], new), dim=-1).mean() for i in layer_ids]
        return stacked(cosines).cpu().numpy()

    return mean_cosines(before.router_inputs, now.router_inputs), mean_cosines(before.outputs, now.outputs)


def _rows(values: Tensor, index: NDArray[np.int64]) -> Tensor:
    """Rows of [1, T, H] or [T, H] in 32 bits."""
    return values.flatten(0, -2)[torch.as_tensor(index, device=values.device)].float()
