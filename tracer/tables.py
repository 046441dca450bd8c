"""The tables of trace format 1: their columns, and arrays to Arrow and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tracer.schema import (
    MAX_AHEAD_DEPTH,
    NO_GATES,
    NUM_AHEAD,
    NUM_SCORES,
    SCHEMA_VERSION,
    SKETCH_SIZE,
    ForwardKind,
    ModelShape,
    TraceError,
    TraceMetadata,
)

KIND_NAMES = tuple(kind.name.lower() for kind in ForwardKind)
REQUIRED_TABLES = ("forwards", "tokens", "routing")
TABLES = (*REQUIRED_TABLES, "signals")
AHEAD_COLUMNS = tuple(f"ahead{depth}_ids" for depth in range(1, MAX_AHEAD_DEPTH + 1))
# the field of Pass that a column holds
FORWARD_FIELDS = {
    "request": "requests",
    "block": "blocks",
    "iteration": "iterations",
    "kind": "kinds",
    "num_tokens": "num_tokens",
    "kv_len": "kv_lens",
    "num_masked_in": "num_masked_in",
    "num_accepted": "num_accepted",
    "cos_router_input": "cos_router_input",
    "cos_layer_output": "cos_layer_output",
}
TOKEN_FIELDS = {
    "position": "positions",
    "token_id_in": "token_ids_in",
    "is_masked_in": "is_masked_in",
    "argmax_id": "argmax_ids",
    "p_argmax": "p_argmax",
    "p_current": "p_current",
    "accepted": "accepted",
    "edited": "edited",
}

Columns = dict[str, NDArray[Any]]  # arrays of one table, [N] or [N, width]; -1 or NaN stands for null


class Group(NamedTuple):
    """The same passes' rows of every table."""

    forwards: Columns
    tokens: Columns
    routing: Columns
    signals: Columns | None = None


_KIND_TYPE = pa.dictionary(pa.int32(), pa.string())
_NUMPY = {
    pa.bool_(): np.bool_,
    pa.uint8(): np.uint8,
    pa.uint16(): np.uint16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.float16(): np.float16,
    pa.float32(): np.float32,
    _KIND_TYPE: np.int8,
}
_FLOATS = {"float32": pa.float32(), "float16": pa.float16(), "uint8": pa.uint8(), NO_GATES: pa.float16()}


@dataclass(frozen=True)
class Column:
    """One column: the type of a value on disk, and the length of its lists (0: a plain value)."""

    name: str
    stored: pa.DataType
    width: int = 0
    nullable: bool = False

    @property
    def arrow_type(self) -> pa.DataType:
        """Type of the whole column; most versions of Arrow read no fixed-size lists from Parquet that may be null."""
        if not self.width:
            return self.stored
        return pa.list_(self.stored) if self.nullable else pa.list_(self.stored, self.width)

    @property
    def parquet_path(self) -> str:
        """What Parquet calls the column that holds the values."""
        return f"{self.name}.list.element" if self.width else self.name

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the array; a null must differ from every value, so nullable uint16 becomes int32."""
        if self.stored == pa.uint16() and self.nullable:
            return np.dtype(np.int32)
        return np.dtype(_NUMPY[self.stored])

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value of an integer column, null included."""
        limits = np.iinfo(_NUMPY[self.stored])
        return (-1 if self.nullable else int(limits.min)), int(limits.max)


def columns_of(table: str, metadata: TraceMetadata) -> tuple[Column, ...]:
    """Columns of one table, in order."""
    return _columns(table, metadata.shape, metadata.gate_dtype, "token_ids" in metadata.lacks)


@cache
def _columns(table: str, shape: ModelShape, gate_dtype: str, lacks_token_ids: bool) -> tuple[Column, ...]:
    gate = _FLOATS[gate_dtype]
    keys = (Column("pass_id", pa.int32()), Column("request", pa.int32()))
    layer_keys = (*keys, Column("layer", pa.int32()), Column("position", pa.int32()))
    num_scores, num_ahead = signal_widths(shape)
    if table == "forwards":
        counts = ("num_tokens", "kv_len", "num_masked_in", "num_accepted")
        return (
            *keys,
            Column("block", pa.int32()),
            Column("iteration", pa.int32()),
            Column("kind", _KIND_TYPE),
            *(Column(name, pa.int32()) for name in counts),
            Column("wall_ns", pa.int64(), nullable=True),
            Column("cos_router_input", pa.float32(), shape.num_layers, nullable=True),
            Column("cos_layer_output", pa.float32(), shape.num_layers, nullable=True),
        )
    if table == "tokens":
        return (
            *keys,
            Column("position", pa.int32()),
            Column("token_id_in", pa.int32(), nullable=lacks_token_ids),
            Column("is_masked_in", pa.bool_()),
            Column("argmax_id", pa.int32(), nullable=True),
            Column("p_argmax", pa.float32(), nullable=True),
            Column("p_current", pa.float32(), nullable=True),
            Column("accepted", pa.bool_()),
            Column("edited", pa.bool_()),
        )
    if table == "routing":
        gates = Column("gates", gate, shape.top_k, nullable=gate_dtype == NO_GATES)
        return (*layer_keys, Column("expert_ids", pa.uint16(), shape.top_k), gates)
    return (
        *layer_keys,
        Column("score_ids", pa.uint16(), num_scores),
        Column("scores", gate, num_scores),
        Column("input_norm", pa.float32()),
        Column("sketch", pa.float32(), SKETCH_SIZE, nullable=True),
        *(Column(name, pa.uint16(), num_ahead, nullable=True) for name in AHEAD_COLUMNS),
    )


def signal_widths(shape: ModelShape) -> tuple[int, int]:
    """How many router scores, and how many experts ahead, a model of this many experts can have."""
    return min(NUM_SCORES, shape.num_experts), min(NUM_AHEAD, shape.num_experts)


def _is_null(values: NDArray[Any]) -> NDArray[np.bool_]:
    return np.isnan(values) if values.dtype.kind == "f" else values < 0


def to_arrow(columns: tuple[Column, ...], arrays: Mapping[str, NDArray[Any]]) -> pa.Table:
    """Build a table; a row of a nullable list is null when all its values are."""
    built = []
    for column in columns:
        values = arrays[column.name]
        null = _is_null(values) if column.nullable else None
        if column.stored == _KIND_TYPE:
            built.append(pa.DictionaryArray.from_arrays(pa.array(values, pa.int32()), pa.array(KIND_NAMES)))
        elif column.width:
            whole = np.ones(len(values), bool) if null is None else ~np.all(null, axis=1)
            flat = pa.array(values[whole].reshape(-1).astype(_NUMPY[column.stored], copy=False))
            built.append(_lists(column, flat, whole))
        else:
            built.append(pa.array(values, type=column.stored, mask=null))
    return pa.Table.from_arrays(built, schema=schema_of(columns))


def _lists(column: Column, flat: pa.Array, whole: NDArray[np.bool_]) -> pa.Array:
    """Lists of one width, null where not `whole`."""
    if not column.nullable:
        return pa.FixedSizeListArray.from_arrays(flat, type=column.arrow_type)
    offsets = np.concatenate([[0], np.cumsum(whole * column.width)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=column.arrow_type, mask=pa.array(~whole))


def schema_of(columns: Iterable[Column]) -> pa.Schema:
    """Arrow schema of a table."""
    return pa.schema([pa.field(c.name, c.arrow_type, nullable=c.nullable) for c in columns])


def from_arrow(columns: Iterable[Column], table: pa.Table) -> Columns:
    """Take the arrays out of a table.

    Raises:
        TraceError: a null, or an unknown forward kind, where a value must be.
    """
    return {column.name: _array(column, table.column(column.name).combine_chunks()) for column in columns}


def _array(column: Column, data: pa.Array) -> NDArray[Any]:
    if column.stored == _KIND_TYPE:
        return _kinds(data)
    if data.null_count and not column.nullable:
        raise TraceError(f"column {column.name} holds {data.null_count} nulls; each row needs a value")
    present = data.drop_null() if data.null_count else data
    if column.width:
        lengths = pc.list_value_length(present).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
        if (lengths != column.width).any():
            raise TraceError(f"column {column.name} holds lists of other lengths than {column.width}")
        present = present.flatten()
        if present.null_count:
            raise TraceError(
                f"column {column.name} holds lists with {present.null_count} nulls; a list is whole or null"
            )
    values = present.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    values = values.reshape(-1, column.width) if column.width else values
    if not data.null_count:
        return values
    array = np.full((len(data), *values.shape[1:]), np.nan if column.dtype.kind == "f" else -1, column.dtype)
    array[data.is_valid().to_numpy(zero_copy_only=False)] = values
    return array


def _kinds(data: pa.Array) -> NDArray[np.int8]:
    names = data.cast(pa.string())
    codes = pc.index_in(names, pa.array(KIND_NAMES))  # pyright: ignore[reportAttributeAccessIssue]
    if codes.null_count:
        unknown = sorted({str(name) for name in pc.unique(names.filter(codes.is_null())).to_pylist()})  # pyright: ignore[reportAttributeAccessIssue]
        raise TraceError(f"column kind holds {', '.join(unknown)}; allowed are {', '.join(KIND_NAMES)}")
    return codes.to_numpy().astype(np.int8)


class ContentHash:
    """SHA-256 over the values of every column in order, whatever the compression and the row groups."""

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {}

    def update(self, table: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the next rows of a table."""
        for name, values in arrays.items():
            digest = self._columns.setdefault(f"{table}.{name}", hashlib.sha256())
            digest.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8).data)

    def hexdigest(self) -> str:
        """The hash of everything added so far."""
        lines = [f"{name} {digest.hexdigest()}\n" for name, digest in sorted(self._columns.items())]
        return hashlib.sha256("".join([f"format {SCHEMA_VERSION}\n", *lines]).encode()).hexdigest()
