"""Passes as parts, one for each of their requests, and parts side by side as a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracer.schema import Pass, Signals
from tracer.tables import FORWARD_FIELDS, TOKEN_FIELDS

# of arrays with an entry for each token, the axis that it stands on
_OF_TOKENS = dict.fromkeys(TOKEN_FIELDS.values(), 0) | {"expert_ids": 1, "gates": 1}
_OF_SIGNALS = {"score_ids": 1, "scores": 1, "input_norm": 1, "sketch": 0, "ahead_ids": 2}
_AXES = dict.fromkeys(FORWARD_FIELDS.values(), 0) | _OF_TOKENS


def split(pass_: Pass) -> list[Pass]:
    """What a pass does for each of its requests, as passes of one request that share its id and wall time."""
    parts = []
    stops = np.cumsum(pass_.num_tokens)
    for row, (stop, size) in enumerate(zip(stops.tolist(), pass_.num_tokens.tolist(), strict=True)):
        tokens = slice(stop - size, stop)
        signals = None if pass_.signals is None else Signals(**_cut(pass_.signals, _OF_SIGNALS, tokens))
        requests = {name: getattr(pass_, name)[row : row + 1] for name in FORWARD_FIELDS.values()}
        cut = _cut(pass_, _OF_TOKENS, tokens)
        parts.append(Pass(pass_id=pass_.pass_id, wall_ns=pass_.wall_ns, signals=signals, **requests, **cut))
    return parts


def join(parts: Sequence[Pass], pass_id: int, wall_ns: int = -1) -> Pass:
    """One pass of passes whose requests ascend; it has signals where all of them do."""
    signals = [part.signals for part in parts if part.signals is not None]
    return Pass(
        pass_id=pass_id,
        wall_ns=wall_ns,
        signals=Signals(**_joined(signals, _OF_SIGNALS)) if len(signals) == len(parts) else None,
        **_joined(parts, _AXES),
    )


def _cut(record: Any, axes: dict[str, int], tokens: slice) -> dict[str, Any]:
    return {name: getattr(record, name)[(slice(None),) * axis + (tokens,)] for name, axis in axes.items()}


def _joined(records: Sequence[Any], axes: dict[str, int]) -> dict[str, Any]:
    return {name: np.concatenate([getattr(record, name) for record in records], axis) for name, axis in axes.items()}
