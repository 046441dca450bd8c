"""One forward of somebody else's model, while it runs and until it is known what it accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.decode_sample import predict
from tracer.schema import ForwardKind, TraceError

WEIGHT_TOLERANCE = 1e-4  # of a sum of weights, relative, where they have 32 bits
ROUNDED_TOLERANCE = 2e-2  # where they have 16


@dataclass(frozen=True)
class Rules:
    """What the passes of a request depend on beside its forwards.

    `weight_sum` is what the engine's weights of a token sum to, None where it normalises them later.
    """

    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    weight_sum: float | None
    mask_id: int
    unmasked: ForwardKind  # of a forward that decodes a block without masks
    logits_shift: int = 0  # row p of the logits is of position p + shift
    rows: str = "all"  # or block: only the rows of the block that is decoded


class Forward:
    """What hooks showed of one forward over T tokens."""

    expert_ids: NDArray[np.uint16]  # [L, T, K]
    gates: NDArray[np.float32]  # [L, T, K]
    argmax_ids: NDArray[np.int64]  # [T] -1 where unknown
    p_argmax: NDArray[np.float64]  # [T] NaN where unknown
    p_current: NDArray[np.float64]  # [T] NaN where unknown
    wall_ns: int

    def __init__(self, live: Tensor, positions: Tensor | None, region: slice | None) -> None:
        self.live = live  # [T] the engine's own, which it may change later
        self.token_ids = live.cpu().numpy().astype(np.int64)  # a copy
        self.positions = (
            np.arange(len(live)) if positions is None else positions.flatten().cpu().numpy().astype(np.int64)
        )
        self.region = region
        self.routed: list[tuple[int, Tensor, Tensor]] = []
        self.router_inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self._began = perf_counter_ns()

    def finish(self, logits: Tensor | None, rules: Rules) -> None:
        """Check and gather what the hooks showed, and read the logits [1, R, V] or [R, V] of the last R rows.

        Raises:
            TraceError: a hook fired too often or never, or what it showed cannot be.
        """
        self._check_hooks(rules)
        _, ids, weights = zip(*self.routed, strict=True)
        expert_ids = stacked(ids).cpu().numpy()
        if expert_ids.min() < 0 or expert_ids.max() >= rules.num_experts:
            raise TraceError(
                f"expert ids {expert_ids.min()} to {expert_ids.max()}: must be 0 to {rules.num_experts - 1}"
            )
        self.expert_ids = expert_ids.astype(np.uint16)
        is_exact = weights[0].dtype in (torch.float32, torch.float64)
        self._normalise(stacked(weights).double().cpu().numpy(), rules, is_exact)
        self._predict(logits, rules.logits_shift)
        self.wall_ns = perf_counter_ns() - self._began

    def free(self) -> None:
        """Let go of what only its own pass needed."""
        self.routed.clear()
        del self.live

    def _check_hooks(self, rules: Rules) -> None:
        fired = [layer_id for layer_id, _, _ in self.routed]
        if fired != list(rules.layer_ids):
            raise TraceError(_miscount(fired, rules.layer_ids))
        rows = (len(self.token_ids), rules.top_k)
        for layer_id, ids, weights in self.routed:
            if tuple(ids.shape) != rows or tuple(weights.shape) != rows:
                raise TraceError(
                    f"layer {layer_id}: ids {list(ids.shape)} and weights {list(weights.shape)}, must be {list(rows)}"
                )

    def _normalise(self, weights: NDArray[np.float64], rules: Rules, is_exact: bool) -> None:
        """Make gates of weights: each row sums to 1, as in a trace."""
        total = weights.sum(axis=-1, keepdims=True)
        expected = rules.weight_sum
        if expected is None:
            wrong, allowed = ~(total > 0), "above 0"
        else:
            tolerance = WEIGHT_TOLERANCE if is_exact else ROUNDED_TOLERANCE
            wrong, allowed = ~(np.abs(total / expected - 1) <= tolerance), f"{expected:g}"
        if wrong.any():
            layer, row, _ = np.argwhere(wrong)[0]
            raise TraceError(
                f"layer {rules.layer_ids[layer]}: weights of row {row} sum to {total[layer, row, 0]:g}, must be {allowed}"
            )
        self.gates = (weights / total).astype(np.float32)

    def _predict(self, logits: Tensor | None, shift: int) -> None:
        size = len(self.token_ids)
        self.argmax_ids = np.full(size, -1)
        self.p_argmax, self.p_current = np.full(size, np.nan), np.full(size, np.nan)
        if logits is None:
            return
        rows = logits.detach().flatten(0, -2)
        first = size - len(rows) + shift
        rows = rows[: len(rows) - shift]
        here = slice(first, first + len(rows))
        guess = predict(rows, self.token_ids[here])
        if not np.isfinite(guess.p_argmax).all():
            raise TraceError("logits are not finite")
        self.argmax_ids[here], self.p_argmax[here] = guess.argmax_ids, guess.p_argmax
        self.p_current[here] = guess.p_current


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all layers, which may lie on several devices, on that of the first."""
    return torch.stack([values.to(tensors[0].device) for values in tensors])


def _miscount(fired: list[int], expected: tuple[int, ...]) -> str:
    """Which hooks fired too often or never."""
    counts = Counter(fired)
    often = [f"{counts[i]} times in layer {i}" for i in sorted(counts) if counts[i] > 1]
    never = [str(i) for i in expected if not counts[i]]
    unknown = [str(i) for i in sorted(counts) if i not in expected]
    faults = [f"fired {', '.join(often)}"] if often else []
    faults += [f"never fired in layer{'s' if len(never) > 1 else ''} {', '.join(never)}"] if never else []
    faults += [f"fired in layers without experts: {', '.join(unknown)}"] if unknown else []
    faults = faults or [f"fired in the order {', '.join(map(str, fired))}"]
    skipped = "; CUDA graphs and torch.compile skip hooks" if never else ""
    return f"the hook of the gates {' and '.join(faults)}; each of the {len(expected)} MoE layers must fire once, in order{skipped}"
