"""What each row of a trace may hold: the checks that writer, reader and doctor share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracer.checks import Finding, Index, Layout, found_at, lay_out, refuse_errors
from tracer.gates import FIXED_POINT_SUM, STORED_SUM_TOLERANCE
from tracer.schema import NO_GATES, ForwardKind, TraceError, TraceMetadata
from tracer.tables import AHEAD_COLUMNS, Columns, Group

MAX_PROBABILITY = 1 + 1e-6  # a softmax in 32 bits may end just above 1

_UNMASKED_KINDS = (ForwardKind.IDLE, ForwardKind.COMMIT, ForwardKind.EDIT)


def require_sound(group: Group, metadata: TraceMetadata, last_pass: int) -> Layout:
    """How the rows of a group hang together, each of which was checked.

    Raises:
        TraceError: they do not fit together, or one holds what it may not, with pass, request and layer.
    """
    layout, findings = lay_out(group, metadata.shape, last_pass)
    if layout is None:
        raise TraceError(str(findings[0]))
    refuse_errors(check_rows(group, metadata), check_forwards(group, layout.token_forward, metadata))
    return layout


def check_rows(group: Group, metadata: TraceMetadata) -> Iterator[Finding]:
    """Check each routing row, and each row of signals, by itself."""
    routing, num_experts = group.routing, metadata.shape.num_experts
    ids = routing["expert_ids"]
    in_range = f"0 to {num_experts - 1}"
    outside = np.any(ids >= num_experts, axis=1)
    yield from found_at(outside, routing, "expert id out of range", in_range, lambda row: int(ids[row].max()))
    if metadata.shape.top_k > 1:
        zero = np.all(ids == 0, axis=1)
        yield from found_at(
            zero,
            routing,
            "all expert ids are zero, as in a buffer that was never filled",
            f"{metadata.shape.top_k} different experts",
            lambda row: ids[row].tolist(),
        )
        unsorted = np.any(ids[:, 1:] <= ids[:, :-1], axis=1) & ~zero
        ordered = np.sort(ids[unsorted], axis=1)
        twice = unsorted.copy()
        twice[unsorted] = np.any(ordered[:, 1:] == ordered[:, :-1], axis=1)
        yield from found_at(
            twice,
            routing,
            "expert twice in one top-k",
            f"{metadata.shape.top_k} different experts",
            lambda row: ids[row].tolist(),
        )
        yield from found_at(
            unsorted & ~twice, routing, "expert ids unsorted", "ascending ids", lambda row: ids[row].tolist()
        )
    if metadata.gate_dtype != NO_GATES:
        yield from _check_gates(routing, metadata.gate_dtype)
    if group.signals is not None:
        yield from _check_signals(group.routing, group.signals, metadata)


def _check_gates(routing: Columns, gate_dtype: str) -> Iterator[Finding]:
    gates = routing["gates"]
    proper = np.ones(gates.shape[0], bool)
    if gate_dtype != "uint8":
        finite = np.all(np.isfinite(gates), axis=1)
        negative = np.any(gates < 0, axis=1)
        yield from found_at(~finite, routing, "gate not finite", "finite gates", lambda row: gates[row].tolist())
        yield from found_at(negative, routing, "gate negative", "0 or more", lambda row: gates[row].tolist())
        proper = finite & ~negative
    total = np.where(
        proper, gates.sum(axis=1, dtype=np.float64 if gate_dtype != "uint8" else np.int64, where=proper[:, None]), 0
    )
    target = FIXED_POINT_SUM if gate_dtype == "uint8" else 1
    tolerance = STORED_SUM_TOLERANCE[gate_dtype]
    yield from found_at(
        proper & (np.abs(total - target) > tolerance),
        routing,
        "gates with a wrong sum",
        f"a sum of {target}" + (f" within {tolerance:g}" if tolerance else " exactly"),
        lambda row: f"a sum of {total[row]:.6g}",
    )


def _check_signals(routing: Columns, signals: Columns, metadata: TraceMetadata) -> Iterator[Finding]:
    shape = metadata.shape
    in_range = f"0 to {shape.num_experts - 1}"
    for name in ("score_ids", *AHEAD_COLUMNS):
        ids = signals[name]
        outside = np.any(ids >= shape.num_experts, axis=1)
        yield from found_at(
            outside, signals, f"{name} out of range", in_range, lambda row, ids=ids: int(ids[row].max())
        )
    scores = signals["scores"]
    if metadata.gate_dtype != "uint8":
        wrong = ~np.all((scores >= 0) & (scores <= 1), axis=1)
        yield from found_at(wrong, signals, "score out of range", "0 to 1", lambda row: scores[row].tolist())
    norm = signals["input_norm"]
    wrong = ~(np.isfinite(norm) & (norm >= 0))
    yield from found_at(wrong, signals, "input_norm not a length", "finite, 0 or more", lambda row: norm[row])
    layer = np.searchsorted(np.array(shape.layer_ids), signals["layer"])
    for depth, name in enumerate(AHEAD_COLUMNS, start=1):
        null = signals[name] < 0
        beyond = layer + depth >= shape.num_layers
        yield from found_at(
            np.where(beyond, ~null.all(axis=1), null.any(axis=1)),
            signals,
            f"{name} missing, or more than there can be",
            f"null in the last {depth} layers, and all there in the others",
            lambda row, null=null: f"{np.count_nonzero(~null[row])} ids",
        )
    sketch = np.isfinite(signals["sketch"])
    wrong = (layer == 0) & ~sketch.all(axis=1)
    yield from found_at(
        wrong, signals, "sketch missing or not finite", "one in the first MoE layer", lambda row: "none"
    )
    if routing["pass_id"].size == signals["pass_id"].size:
        chosen = routing["expert_ids"]
        among = (signals["score_ids"][:, None, :] == chosen[:, :, None]).any(axis=2).all(axis=1)
        yield from found_at(
            ~among, signals, "chosen expert without a score", "scores of all chosen", lambda row: chosen[row].tolist()
        )


def check_forwards(group: Group, token_forward: Index, metadata: TraceMetadata) -> Iterator[Finding]:
    """Check each forward of a group by itself, with its tokens; `token_forward` has each token's row of forwards."""
    forwards, tokens = group.forwards, group.tokens
    yield from _check_masks(forwards, tokens, token_forward)
    for name in ("p_argmax", "p_current"):
        p = tokens[name]
        outside = (p < 0) | (p > MAX_PROBABILITY)
        yield from found_at(outside, tokens, f"{name} is no probability", "0 to 1, or null", lambda row, p=p: p[row])
    masked_p = tokens["is_masked_in"] & ~np.isnan(tokens["p_current"])
    yield from found_at(
        masked_p, tokens, "p_current of a mask", "null", lambda row: tokens["p_current"][row], "warning"
    )
    last_id = (metadata.shape.vocab or 1 << 31) - 1
    least_in = -1 if "token_ids" in metadata.lacks else 0
    for name, least in (("token_id_in", least_in), ("argmax_id", -1)):  # -1 stands for null
        ids = tokens[name]
        outside = (ids < least) | (ids > last_id)
        yield from found_at(
            outside, tokens, f"{name} out of range", f"0 to {last_id}", lambda row, ids=ids: int(ids[row])
        )
    block, kind = forwards["block"], forwards["kind"]
    yield from found_at(
        (block < -1) | ((block == -1) != (kind == ForwardKind.PREFILL)),
        forwards,
        "block and kind disagree",
        "block -1 for prefill, 0 or more for all others",
        lambda row: f"block {block[row]} and {ForwardKind(kind[row]).name.lower()}",
    )
    for columns, name, least in (
        (forwards, "iteration", 0),
        (forwards, "kv_len", 0),
        (forwards, "wall_ns", -1),
        (tokens, "position", 0),
    ):
        values = columns[name]
        allowed = "0 or more" if least == 0 else "0 or more, or null"
        yield from found_at(
            values < least, columns, f"negative {name}", allowed, lambda row, values=values: int(values[row])
        )


def _check_masks(forwards: Columns, tokens: Columns, token_forward: Index) -> Iterator[Finding]:
    masked, accepted = tokens["is_masked_in"], tokens["accepted"]
    for name, flags in (("num_masked_in", masked), ("num_accepted", accepted)):
        counts = np.bincount(token_forward[flags], minlength=forwards[name].size)
        yield from found_at(
            counts != forwards[name],
            forwards,
            f"{name} disagrees with tokens",
            "the number of such tokens",
            lambda row, counts=counts, name=name: f"{forwards[name][row]} for {counts[row]} tokens",
        )
    yield from found_at(accepted & ~masked, tokens, "accepted, but not masked", "masked tokens", lambda row: "no mask")
    yield from found_at(
        tokens["edited"] & masked, tokens, "edited, but masked", "tokens without a mask", lambda row: "a mask"
    )
    kind = forwards["kind"]
    any_masked = np.bincount(token_forward[masked], minlength=kind.size) > 0
    yield from found_at(
        np.isin(kind, _UNMASKED_KINDS) & any_masked,
        forwards,
        "masks in a forward that has none by its kind",
        "idle, commit and edit without masks",
        lambda row: f"{ForwardKind(kind[row]).name.lower()} with masks",
    )
    yield from found_at(
        (kind == ForwardKind.DENOISE) & ~any_masked,
        forwards,
        "denoise without masks",
        "idle, commit or edit where no mask is left",
        lambda row: "no mask",
        "warning",
    )
