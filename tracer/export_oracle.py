"""A trace as the binary format oracleGeneral of libCacheSim: one record for each expert that a layer activates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tracer.exchange import partial_beside
from tracer.schema import ModelShape, Pass, TraceError

RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])  # 24 bytes, packed
NEVER = -1
_CHUNK = 1 << 18  # records in memory
_LARGEST = np.iinfo(np.uint32).max


def write_oracle(
    passes: Iterable[Pass],
    shape: ModelShape,
    path: Path,
    *,
    layer: int | None = None,
    expert_bytes: int = 1,
    overwrite: bool = False,
    on_pass: Callable[[], Any] = lambda: None,
) -> int:
    """Write the accesses of a trace, whole or not at all; memory does not grow with the trace.

    `time` is the number of the pass, `id` is layer * E + expert + 1 with the layer counted from 0 (libCacheSim keeps 0
    for itself), `next` is the record in which the id comes again. Layer executions are in the order of the run, the
    experts of one by ascending id.

    Args:
        passes: of the trace.
        shape: of its model.
        path: file to be made.
        layer: true id of the one layer to write, None for all, which then are one cache.
        expert_bytes: `size` of every record.
        overwrite: replace a file of that name.
        on_pass: called after each.

    Returns:
        How many records there are.

    Raises:
        TraceError: the layer is not there, a number is too large for the format, or the file cannot be written.
    """
    if layer is not None and layer not in shape.layer_ids:
        raise TraceError(f"layer {layer}: the trace has MoE layers {shape.layer_ids[0]} to {shape.layer_ids[-1]}")
    if not 1 <= expert_bytes <= _LARGEST:
        raise TraceError(f"{expert_bytes} bytes of an expert: must be 1 to {_LARGEST}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise TraceError(f"{path}: exists already; choose another name, or ask to overwrite it")
    indices = list(range(shape.num_layers)) if layer is None else [shape.layer_ids.index(layer)]
    partial = partial_beside(path)
    try:
        with partial.open("xb+") as file:
            num_records = 0
            for number, pass_ in enumerate(passes):
                ids = _ids(pass_, indices, shape.num_experts)
                records = np.empty(ids.size, RECORD)
                records["time"], records["id"], records["size"], records["next"] = number, ids, expert_bytes, NEVER
                file.write(records.tobytes())
                num_records += ids.size
                on_pass()
            _fill_next(file, num_records, shape.num_layers * shape.num_experts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return num_records


def _ids(pass_: Pass, indices: list[int], num_experts: int) -> NDArray[np.int64]:
    """Experts that layers activate, numbered over all layers from 1, layer by layer and ascending."""
    parts = [index * num_experts + np.unique(pass_.expert_ids[index]) for index in indices]
    return np.concatenate(parts) + 1


def _fill_next(file: BinaryIO, num_records: int, num_ids: int) -> None:
    """Say in each record where its id comes again, from the end backwards."""
    following = np.full(num_ids + 1, NEVER, np.int64)
    for start in range((num_records - 1) // _CHUNK * _CHUNK, -1, -_CHUNK):
        file.seek(start * RECORD.itemsize)
        records = np.frombuffer(file.read(_CHUNK * RECORD.itemsize), RECORD).copy()
        ids = records["id"].astype(np.int64)
        order = np.argsort(ids, kind="stable")
        is_last = np.append(np.diff(ids[order]) != 0, True)
        later = np.append(order[1:], 0) + start
        records["next"][order] = np.where(is_last, following[ids[order]], later)
        is_first = np.append(True, np.diff(ids[order]) != 0)
        following[ids[order[is_first]]] = order[is_first] + start
        file.seek(start * RECORD.itemsize)
        file.write(records.tobytes())
