"""Routing from any Parquet or CSV table, request by request in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tracer.files import PARQUET_ERRORS, first_line
from tracer.import_forwards import Forward
from tracer.import_mapping import DECODE, TableMapping
from tracer.schema import ForwardKind, TraceError

_BATCH_ROWS = 1 << 16
_KINDS = {kind.name.lower(): int(kind) for kind in ForwardKind} | {DECODE: int(ForwardKind.DENOISE)}
_BRACKETS = str.maketrans("[](){},;|", " " * 9)

Rows = dict[str, NDArray[Any]]  # arrays of rows; expert_ids and gates are [N, K], all others [N]


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a table: its forwards over these layers, numbered as in the table."""

    name: str  # file and request, for messages
    layer_ids: tuple[int, ...]
    forwards: list[Forward]


def read_table(paths: Iterable[Path], mapping: TableMapping) -> Iterator[Request]:
    """Requests of tables, one after the other; the rows of one stand together, in any order.

    Raises:
        TraceError: with file and request, what is missing or does not fit.
    """
    seen: set[str] = set()
    for path in paths:
        pending: list[Rows] = []
        name = ""
        for name_of_run, rows in _runs(path, mapping):
            if pending and name_of_run != name:
                yield _request(f"{path}: request {name}", pending, mapping)
                pending = []
            if not pending:
                name = name_of_run
                if name in seen:
                    raise TraceError(
                        f"{path}: rows of request {name} stand in several places; the table must be sorted by "
                        f"{mapping.columns.request or 'request'}"
                    )
                seen.add(name)
            pending.append(rows)
        if pending:
            yield _request(f"{path}: request {name}", pending, mapping)


def _runs(path: Path, mapping: TableMapping) -> Iterator[tuple[str, Rows]]:
    """Stretches of rows of one request."""
    try:
        mapping = mapping.over(_names(path))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    for batch in _batches(path, mapping.columns.names()):
        if not batch.num_rows:
            continue
        if not mapping.columns.request:
            yield path.name, _rows(path, batch, mapping)
            continue
        names = batch.column(mapping.columns.request)
        if names.null_count:
            raise TraceError(f"{path}: column {mapping.columns.request} holds nulls; each row is of a request")
        if pa.types.is_nested(names.type):
            raise TraceError(f"{path}: column {mapping.columns.request} is {names.type}, must be of numbers or text")
        codes = pc.dictionary_encode(names)  # pyright: ignore[reportAttributeAccessIssue]
        changes = np.flatnonzero(np.diff(codes.indices.to_numpy(zero_copy_only=False))) + 1
        rows = _rows(path, batch, mapping)
        for start, stop in zip([0, *changes.tolist()], [*changes.tolist(), batch.num_rows], strict=True):
            yield str(names[start].as_py()), {key: values[start:stop] for key, values in rows.items()}


def _names(path: Path) -> list[str]:
    try:
        if path.suffix == ".parquet":
            return pq.read_schema(path).names
        if path.name.removesuffix(".gz").endswith(".csv"):
            with csv.open_csv(path) as reader:
                return reader.schema.names
    except PARQUET_ERRORS as error:
        raise TraceError(f"cannot be read: {first_line(error)}") from None
    raise TraceError("must be a .parquet or .csv file")


def _batches(path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False)
        else:
            with csv.open_csv(path, csv.ReadOptions(use_threads=False)) as reader:
                for batch in reader:
                    yield batch.select(names)
    except PARQUET_ERRORS as error:
        raise TraceError(f"{path}: cannot be read: {first_line(error)}") from None


def _rows(path: Path, batch: pa.RecordBatch, mapping: TableMapping) -> Rows:
    columns = mapping.columns
    rows: Rows = {"expert_ids": _lists(path, batch, columns.expert_ids, np.int64)}
    if columns.gates:
        rows["gates"] = _lists(path, batch, columns.gates, np.float64)
    for ours, dtype in _PLAIN.items():
        if name := getattr(columns, ours):
            column = batch.column(name)
            rows[ours] = _plain(path, column.fill_null(-1) if ours == "token_id" else column, name, dtype)
    if columns.kind:
        rows["kind"] = _kinds(path, batch.column(columns.kind), mapping)
    return rows


_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("position", "layer", "forward", "token_id", "block", "iteration"), np.int64),
    **dict.fromkeys(("masked", "accepted"), np.bool_),
    **dict.fromkeys(("p_argmax", "p_current"), np.float64),
}


def _plain(path: Path, column: pa.Array, name: str, dtype: Any) -> NDArray[Any]:
    try:
        if dtype is np.float64:
            return column.cast(pa.float64()).to_numpy(zero_copy_only=False)  # a null becomes NaN
        if column.null_count:
            raise TraceError(f"{path}: column {name} holds nulls; each row needs a value")
        kind = pa.bool_() if dtype is np.bool_ else pa.int64()
        return column.cast(kind).to_numpy(zero_copy_only=False).astype(dtype)
    except pa.ArrowException as error:
        raise TraceError(f"{path}: column {name}: {first_line(error)}") from None


def _kinds(path: Path, column: pa.Array, mapping: TableMapping) -> NDArray[np.int64]:
    if pa.types.is_nested(column.type):
        raise TraceError(f"{path}: column {mapping.columns.kind} is {column.type}, must be of text")
    codes = pc.dictionary_encode(column.cast(pa.string()))  # pyright: ignore[reportAttributeAccessIssue]
    table = []
    for value in codes.dictionary.to_pylist():
        if value not in mapping.kinds:
            raise TraceError(
                f"{path}: column {mapping.columns.kind} holds {value!r}; kinds has {', '.join(mapping.kinds)}"
            )
        table.append(_KINDS[mapping.kinds[value]])
    if codes.indices.null_count:
        raise TraceError(f"{path}: column {mapping.columns.kind} holds nulls; each row needs a value")
    return np.array(table, np.int64)[codes.indices.to_numpy(zero_copy_only=False)]


def _lists(path: Path, batch: pa.RecordBatch, names: tuple[str, ...], dtype: Any) -> NDArray[Any]:
    """Lists of equal length as [N, K]: of one column of lists, text or numbers, or of several columns of numbers."""
    parts = [_numbers(path, batch.column(name), name, dtype) for name in names]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _numbers(path: Path, column: pa.Array, name: str, dtype: Any) -> NDArray[Any]:
    kind = column.type
    if column.null_count:
        raise TraceError(f"{path}: column {name} holds nulls; each row needs a value")
    try:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            lengths = np.unique(pc.list_value_length(column).to_numpy(zero_copy_only=False))  # pyright: ignore[reportAttributeAccessIssue]
            values = column.flatten().to_numpy(zero_copy_only=False)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            texts = [text.translate(_BRACKETS).split() for text in column.to_pylist()]
            lengths = np.unique([len(text) for text in texts])
            values = np.array([number for text in texts for number in text], np.float64)
        else:
            lengths, values = np.ones(1, int), column.to_numpy(zero_copy_only=False)
        if lengths.size != 1 or lengths[0] < 1:
            raise TraceError(f"{path}: column {name} holds lists of {lengths.tolist()} numbers; all must be as long")
        with np.errstate(invalid="ignore"):  # what has no whole number is refused next
            found = values.astype(dtype)
        if dtype is np.int64 and not np.array_equal(found, values):
            raise TraceError(f"{path}: column {name} holds numbers that are not whole")
    except (ValueError, TypeError, pa.ArrowException) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{path}: column {name} is {kind}, must be of numbers, or lists of them: {first_line(error)}"
        ) from None
    return found.reshape(-1, int(lengths[0]))


def _request(where: str, parts: list[Rows], mapping: TableMapping) -> Request:
    """Put the rows of one request in order.

    Raises:
        TraceError: a forward has not the same tokens in all layers, or a token not as many experts as others.
    """
    widths = {part["expert_ids"].shape[1] for part in parts}
    if len(widths) > 1:
        raise TraceError(f"{where}: tokens of {sorted(widths)} experts; all must have as many")
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    if "token_id" in rows and (rows["token_id"] < 0).any():
        del rows["token_id"]
    if "forward" not in rows:
        is_prompt = rows["kind"] == ForwardKind.PREFILL if "kind" in rows else rows["position"] < mapping.num_prompt
        rows["kind"] = np.where(is_prompt, int(ForwardKind.PREFILL), int(ForwardKind.DENOISE))
        rows["forward"] = np.where(is_prompt, -1, rows["position"])
    order = np.lexsort((rows["position"], rows["layer"], rows["forward"]))  # stable: experts of a token as they came
    rows = {key: values[order] for key, values in rows.items()}
    rows = _joined(where, rows)
    layers = np.unique(rows["layer"])
    bounds = np.flatnonzero(np.diff(rows["forward"])) + 1
    forwards: list[Forward] = []
    for start, stop in zip([0, *bounds.tolist()], [*bounds.tolist(), rows["forward"].size], strict=True):
        part = {key: values[start:stop] for key, values in rows.items()}
        forwards.append(_forward(where, part, layers, forwards, is_autoregressive=not mapping.columns.forward))
    return Request(where, tuple(layers.tolist()), forwards)


def _joined(where: str, rows: Rows) -> Rows:
    """Rows of one expert each, put together to rows of a token in a layer."""
    keys = [rows[name] for name in ("forward", "layer", "position")]
    is_first = np.ones(keys[0].size, bool)
    is_first[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    if is_first.all():
        return rows
    counts = np.unique(np.diff([*np.flatnonzero(is_first).tolist(), is_first.size]))
    if rows["expert_ids"].shape[1] != 1 or counts.size != 1:
        at = int(np.flatnonzero(~is_first)[0])
        raise TraceError(
            f"{where}: several rows for position {rows['position'][at]} in layer {rows['layer'][at]} of one forward; "
            "must be one of all its experts, or one for each, as many for every token"
        )
    joined = {key: values[is_first] for key, values in rows.items()}
    for name in ("expert_ids", "gates"):
        if name in rows:
            joined[name] = rows[name].reshape(-1, int(counts[0]))
    return joined


def _forward(
    where: str, rows: Rows, layers: NDArray[np.int64], before: list[Forward], *, is_autoregressive: bool
) -> Forward:
    size, remainder = divmod(rows["layer"].size, layers.size)
    number = int(rows["forward"][0])
    grid = rows["layer"].reshape(layers.size, -1) if not remainder else rows["layer"][None]
    positions = rows["position"][:size]
    if remainder or (grid != layers[:, None]).any() or (rows["position"].reshape(grid.shape) != positions).any():
        found = {int(layer): int(np.count_nonzero(rows["layer"] == layer)) for layer in layers}
        raise TraceError(
            f"{where}, {'prompt' if is_autoregressive and number < 0 else f'forward {number}'}: tokens of layers "
            f"{found} differ; every layer must have the same positions"
        )
    kind = ForwardKind(int(rows["kind"][0])) if "kind" in rows else ForwardKind.DENOISE
    is_prefill = kind == ForwardKind.PREFILL
    last = before[-1] if before else None
    default = (0 if last is None else last.block + 1) if is_autoregressive else 0
    block = -1 if is_prefill else int(rows["block"][0]) if "block" in rows else max(default, 0)
    follows = last is not None and last.block == block
    iteration = int(rows["iteration"][0]) if "iteration" in rows else last.iteration + 1 if last and follows else 0
    decoded = np.full(size, is_autoregressive and not is_prefill)
    grid_size = (layers.size, size, -1)
    return Forward(
        kind=kind,
        block=block,
        iteration=iteration,
        kv_len=int(positions[0]),
        positions=positions,
        expert_ids=rows["expert_ids"].reshape(grid_size),
        gates=rows["gates"].reshape(grid_size) if "gates" in rows else None,
        token_ids=rows["token_id"][:size] if "token_id" in rows else None,
        masked=rows["masked"][:size] if "masked" in rows else decoded,
        accepted=rows["accepted"][:size] if "accepted" in rows else decoded,
        p_argmax=rows["p_argmax"][:size] if "p_argmax" in rows else None,
        p_current=rows["p_current"][:size] if "p_current" in rows else None,
    )
