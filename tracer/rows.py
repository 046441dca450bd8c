"""Passes to the rows of a trace, and rows back to passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.checks import Layout, refuse_errors
from tracer.gates import INPUT_SUM_TOLERANCE, quantise_gates, restore_gates
from tracer.parts import join
from tracer.schema import (
    MAX_AHEAD_DEPTH,
    NO_GATES,
    SKETCH_SIZE,
    ForwardKind,
    ModelShape,
    Pass,
    Signals,
    TraceError,
    TraceMetadata,
)
from tracer.tables import AHEAD_COLUMNS, FORWARD_FIELDS, TOKEN_FIELDS, Columns, Group, columns_of, signal_widths
from tracer.values import check_forwards, check_rows

_KEYS = ("pass_id", "request", "layer", "position")


def encode(passes: Sequence[Pass], metadata: TraceMetadata) -> Group:
    """Turn passes into new arrays of rows, each token's ids ascending and its gates as they are stored.

    Many passes at once take a fraction of the time that each of them would take alone.

    Raises:
        TraceError: one is not such that a trace can hold it; the message names pass, request and layer.
    """
    shape = metadata.shape
    for pass_ in passes:
        _check_pass(pass_, shape)
    whole = join(passes, passes[0].pass_id)
    sizes = [pass_.requests.size for pass_ in passes]
    pass_id, wall_ns = (np.repeat([getattr(pass_, name) for pass_ in passes], sizes) for name in ("pass_id", "wall_ns"))
    token_forward = whole.token_requests(np.arange(pass_id.size))  # a forward is one request in one pass
    token_keys = {"pass_id": pass_id[token_forward], "request": whole.requests[token_forward]}
    num_layers, num_tokens = shape.num_layers, whole.positions.size
    # memory is sorted by layer and token, disk by forward, layer and position
    order = np.argsort(np.broadcast_to(token_forward, (num_layers, num_tokens)), axis=None, kind="stable")
    token = order % num_tokens
    keys = {
        **{name: values[token] for name, values in token_keys.items()},
        "layer": np.array(shape.layer_ids)[order // num_tokens],
        "position": whole.positions[token],
    }
    ids = whole.expert_ids.reshape(-1, shape.top_k)[order]
    by_id = np.argsort(ids, axis=1, kind="stable")
    ids = np.take_along_axis(ids, by_id, axis=1)
    gates = np.take_along_axis(whole.gates.reshape(-1, shape.top_k)[order], by_id, axis=1)
    _check_routing(ids, gates, keys, metadata)
    forwards = {name: getattr(whole, field) for name, field in FORWARD_FIELDS.items()}
    forwards |= {"pass_id": pass_id, "wall_ns": wall_ns}
    tokens = token_keys | {name: getattr(whole, field) for name, field in TOKEN_FIELDS.items()}
    routing = keys | {"expert_ids": ids, "gates": quantise_gates(gates, metadata.gate_dtype)}
    signals = None
    if whole.signals is not None:
        signals = _convert("signals", keys | _encode_signals(whole.signals, order, metadata), metadata)
    group = Group(
        _convert("forwards", forwards, metadata),
        _convert("tokens", tokens, metadata),
        _convert("routing", routing, metadata),
        signals,
    )
    refuse_errors(check_rows(group, metadata), check_forwards(group, token_forward, metadata))
    return group


def _encode_signals(signals: Signals, order: NDArray[np.int64], metadata: TraceMetadata) -> Columns:
    num_scores, num_ahead = signal_widths(metadata.shape)
    num_tokens = signals.sketch.shape[0]
    scores = signals.scores.reshape(-1, num_scores)[order]
    sketch = np.where((order < num_tokens)[:, None], signals.sketch[order % num_tokens], np.nan)
    ahead = signals.ahead_ids.transpose(1, 0, 2, 3).reshape(MAX_AHEAD_DEPTH, -1, num_ahead)[:, order]
    return {
        "score_ids": signals.score_ids.reshape(-1, num_scores)[order],
        "scores": np.rint(scores * 255) if metadata.gate_dtype == "uint8" else scores,
        "input_norm": signals.input_norm.reshape(-1)[order],
        "sketch": sketch,
        **dict(zip(AHEAD_COLUMNS, ahead, strict=True)),
    }


def _convert(table: str, arrays: Columns, metadata: TraceMetadata) -> Columns:
    """Arrays in the types of their columns, new ones, and every NaN the same."""
    converted: Columns = {}
    for column in columns_of(table, metadata):
        values, dtype = arrays[column.name], column.dtype
        if dtype.kind in "iu" and values.size:
            low, high = column.bounds
            if values.min() < low or values.max() > high:
                bad = (values < low) | (values > high)
                where = _place(arrays, int(np.argwhere(bad)[0][0]))
                raise TraceError(f"{where}: {column.name} {values[bad][0]}; allowed is {low} to {high}")
        converted[column.name] = values.astype(dtype)
        if dtype.kind == "f":
            converted[column.name][np.isnan(values)] = np.nan
    return converted


def _place(arrays: Columns, row: int) -> str:
    """Names a row by those of pass, request, layer and position that its table has."""
    return ", ".join(f"{name.removesuffix('_id')} {arrays[name][row]}" for name in _KEYS if name in arrays)


def _expected_shapes(pass_: Pass, shape: ModelShape) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    num_requests, num_tokens = len(pass_.requests), len(pass_.positions)
    for field in FORWARD_FIELDS.values():
        size = (num_requests, shape.num_layers) if field.startswith("cos_") else (num_requests,)
        yield field, getattr(pass_, field), size
    for field in TOKEN_FIELDS.values():
        yield field, getattr(pass_, field), (num_tokens,)
    rows = (shape.num_layers, num_tokens)
    yield "expert_ids", pass_.expert_ids, (*rows, shape.top_k)
    yield "gates", pass_.gates, (*rows, shape.top_k)
    if pass_.signals is not None:
        num_scores, num_ahead = signal_widths(shape)
        yield "score_ids", pass_.signals.score_ids, (*rows, num_scores)
        yield "scores", pass_.signals.scores, (*rows, num_scores)
        yield "input_norm", pass_.signals.input_norm, rows
        yield "sketch", pass_.signals.sketch, (num_tokens, SKETCH_SIZE)
        yield "ahead_ids", pass_.signals.ahead_ids, (shape.num_layers, MAX_AHEAD_DEPTH, num_tokens, num_ahead)


def _check_pass(pass_: Pass, shape: ModelShape) -> None:
    where = f"pass {pass_.pass_id}"
    for field, values, size in _expected_shapes(pass_, shape):
        if values.shape != size:
            raise TraceError(f"{where}: {field} has shape {list(values.shape)}; needs {list(size)}")
    if not pass_.requests.size or (np.diff(pass_.requests) <= 0).any() or pass_.requests[0] < 0:
        raise TraceError(f"{where}: requests {pass_.requests.tolist()}; needs one or more, ascending from 0 or more")
    if (pass_.num_tokens < 1).any() or pass_.num_tokens.sum() != pass_.positions.size:
        found = f"num_tokens {pass_.num_tokens.tolist()} for {pass_.positions.size} positions"
        raise TraceError(f"{where}: {found}; needs 1 or more for each request, and their sum")
    unknown = set(pass_.kinds.tolist()) - set(ForwardKind)
    if unknown:
        raise TraceError(f"{where}: kind {sorted(unknown)}; allowed is 0 to {max(ForwardKind)}")
    request = pass_.token_requests(pass_.requests)
    falls = np.flatnonzero((np.diff(pass_.positions) <= 0) & (np.diff(request) == 0))
    if falls.size:
        found = pass_.positions[falls[0] : falls[0] + 2].tolist()
        raise TraceError(f"{where}, request {request[falls[0]]}: positions {found}; needs ascending ones")


def _check_routing(ids: NDArray[np.int64], gates: NDArray[np.float64], keys: Columns, metadata: TraceMetadata) -> None:
    """Refuse what the stored types could not even show; `check_rows` sees the rest once it is stored."""

    def refuse(bad: NDArray[np.bool_], what: str, values: NDArray[Any], allowed: str) -> None:
        if bad.any():
            row = int(bad.argmax())
            raise TraceError(f"{_place(keys, row)}: {what} {values[row].tolist()}; {allowed}")

    last = metadata.shape.num_experts - 1
    refuse((ids[:, 0] < 0) | (ids[:, -1] > last), "expert ids", ids, f"allowed is 0 to {last}")
    if metadata.gate_dtype == NO_GATES:
        refuse(~np.isnan(gates).all(axis=1), "gates", gates, "allowed is NaN, as the trace has none")
        return
    refuse(~np.all(np.isfinite(gates) & (gates >= 0), axis=1), "gates", gates, "allowed are finite ones, 0 or more")
    total = gates.sum(axis=1)
    refuse(np.abs(total - 1) > INPUT_SUM_TOLERANCE, "gates with the sum", total, f"must be 1 ± {INPUT_SUM_TOLERANCE:g}")


def decode(group: Group, layout: Layout, shape: ModelShape) -> Iterator[Pass]:
    """Cut a row group into passes: one read-only array for each field, and a slice of it for each pass."""
    forwards = {name: _memory(values) for name, values in group.forwards.items()}
    tokens = {name: _memory(values) for name, values in group.tokens.items()}
    first_forward = np.flatnonzero(np.diff(forwards["pass_id"], prepend=-1))
    last_forward = np.append(first_forward[1:], forwards["pass_id"].size)
    token_end = np.cumsum(forwards["num_tokens"])
    order = None
    if first_forward.size < forwards["pass_id"].size:  # several requests in a pass: sort by layer before request
        pass_index = np.repeat(np.arange(first_forward.size), last_forward - first_forward)[layout.routing_forward]
        order = np.argsort(pass_index * shape.num_layers + layout.routing_layer, kind="stable")

    def by_layer(values: NDArray[Any]) -> NDArray[Any]:
        return values if order is None else values[order]

    expert_ids = _memory(by_layer(group.routing["expert_ids"]))
    gates = _read_only(restore_gates(by_layer(group.routing["gates"])))
    signals = _decode_signals({name: by_layer(v) for name, v in group.signals.items()}) if group.signals else None
    for i, j in zip(first_forward.tolist(), last_forward.tolist(), strict=True):
        start, stop = (int(token_end[i - 1]) if i else 0), int(token_end[j - 1])
        rows = slice(start * shape.num_layers, stop * shape.num_layers)
        size = (shape.num_layers, stop - start, -1)
        yield Pass(
            pass_id=int(forwards["pass_id"][i]),
            wall_ns=int(forwards["wall_ns"][i]),
            expert_ids=expert_ids[rows].reshape(size),
            gates=gates[rows].reshape(size),
            signals=_cut_signals(signals, rows, size) if signals else None,
            **{field: forwards[name][i:j] for name, field in FORWARD_FIELDS.items()},
            **{field: tokens[name][start:stop] for name, field in TOKEN_FIELDS.items()},
        )


def _decode_signals(columns: Columns) -> Columns:
    scores = columns["scores"]
    return {
        "score_ids": _memory(columns["score_ids"]),
        "scores": _read_only(scores.astype(np.float64) / (255 if scores.dtype == np.uint8 else 1)),
        "input_norm": _read_only(columns["input_norm"].astype(np.float64)),
        "sketch": _read_only(columns["sketch"].astype(np.float64)),
        "ahead_ids": _memory(np.stack([columns[name] for name in AHEAD_COLUMNS], axis=1)),
    }


def _cut_signals(columns: Columns, rows: slice, size: tuple[int, int, int]) -> Signals:
    num_layers, num_tokens, _ = size
    ahead = columns["ahead_ids"][rows].reshape(num_layers, num_tokens, MAX_AHEAD_DEPTH, -1)
    return Signals(
        score_ids=columns["score_ids"][rows].reshape(size),
        scores=columns["scores"][rows].reshape(size),
        input_norm=columns["input_norm"][rows].reshape(num_layers, num_tokens),
        sketch=columns["sketch"][rows][:num_tokens],
        ahead_ids=ahead.transpose(0, 2, 1, 3),
    )


def _memory(values: NDArray[Any]) -> NDArray[Any]:
    """A column as the records hold it: int64, float64, and bool; cosines stay float32."""
    if values.dtype.kind in "iu":
        values = values.astype(np.int64, copy=False)
    elif values.dtype == np.float32 and values.ndim == 1:
        values = values.astype(np.float64)
    return _read_only(values)


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    values.flags.writeable = False
    return values
