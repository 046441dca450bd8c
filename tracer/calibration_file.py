"""The small file that a calibration is kept in, checked when it is read."""

from __future__ import annotations

import os
import secrets
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.files import first_line
from tracer.schema import SKETCH_SIZE, Calibration, TraceError

_FORMAT = 1
_LEVELS = 255  # of scores and shares
_MAX_COUNT = 10**12  # whose sums over layers and experts stay whole numbers of 64 bits
# what numpy and zipfile raise for damaged headers, one byte of which can ask for anything
_UNREADABLE = (
    *(OSError, ValueError, EOFError, AttributeError, TypeError, RuntimeError, MemoryError, OverflowError, KeyError),
    *(SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


def save(path: Path | str, calibration: Calibration) -> None:
    """Write a calibration as one compressed npz, in place of what the path holds; equal ones give equal bytes.

    Scores and shares are rounded to 255ths (a share to no less than one), sketches to float32, and `importance` to
    float32; a calibration that was loaded is written without loss.
    """
    num_experts = calibration.load.shape[1]
    id_type = np.min_scalar_type(num_experts - 1)
    shares = np.where(calibration.token_experts < 0, 0, np.maximum(1, np.rint(calibration.token_shares * _LEVELS)))
    counts = {
        name: values.astype(np.min_scalar_type(int(values.max(initial=0))))
        for name in ("load", "prefill_load", "request_loads", "token_ids")
        for values in [getattr(calibration, name)]
    }
    arrays = {
        "format": np.int64(_FORMAT),
        "name": np.str_(calibration.name),
        "checkpoint_hash": np.str_(calibration.checkpoint_hash),
        "num_requests": np.int64(calibration.num_requests),
        "num_activated": np.int64(calibration.num_activated),
        **counts,
        "importance": calibration.importance.astype(np.float32),
        "map_ids": calibration.map_ids.astype(id_type),
        "map_scores": np.rint(calibration.map_scores * _LEVELS).astype(np.uint8),
        "map_sketches": calibration.map_sketches.astype(np.float32),
        "token_experts": np.where(shares == 0, 0, calibration.token_experts).astype(id_type),
        "token_shares": shares.astype(np.uint8),
    }
    if calibration.content_hashes:
        arrays["content_hashes"] = np.array(calibration.content_hashes)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path | str) -> Calibration:
    """Read what `save` wrote.

    Raises:
        TraceError: the file is missing or damaged, of another format, its arrays do not fit each other, or a value is one
            that no requests give.
    """
    path = Path(path)
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except _UNREADABLE as error:
        raise TraceError(f"{path}: cannot be read as a calibration: {first_line(error)}") from None
    _check(path, arrays)
    shares = arrays["token_shares"] / _LEVELS
    return Calibration(
        name=str(arrays["name"]),
        checkpoint_hash=str(arrays["checkpoint_hash"]),
        num_requests=int(arrays["num_requests"]),
        num_activated=int(arrays["num_activated"]),
        load=arrays["load"].astype(np.int64),
        prefill_load=arrays["prefill_load"].astype(np.int64),
        importance=arrays["importance"].astype(np.float64),
        request_loads=arrays["request_loads"].astype(np.int64),
        map_ids=arrays["map_ids"].astype(np.int64),
        map_scores=arrays["map_scores"] / _LEVELS,
        map_sketches=arrays["map_sketches"].astype(np.float64),
        token_ids=arrays["token_ids"].astype(np.int64),
        token_experts=np.where(shares == 0, -1, arrays["token_experts"].astype(np.int64)),
        token_shares=shares,
        content_hashes=tuple(arrays.get("content_hashes", np.array([], str)).tolist()),
    )


_SHAPES = {
    "format": "",
    "name": "",
    "checkpoint_hash": "",
    "num_requests": "",
    "num_activated": "",
    "load": "LE",
    "prefill_load": "LE",
    "importance": "LE",
    "request_loads": "NLE",
    "map_ids": "MLS",
    "map_scores": "MLS",
    "map_sketches": "MD",
    "token_ids": "V",
    "token_experts": "VLW",
    "token_shares": "VLW",
}  # a letter is a size, the same in all arrays
_OPTIONAL = {"content_hashes": "H"}
_KINDS = {
    "name": "U",
    "checkpoint_hash": "U",
    "content_hashes": "U",
    "importance": "f",
    "map_sketches": "f",
}  # all others are whole numbers


def _check(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Refuse what a calibration cannot hold."""
    if missing := [name for name in _SHAPES if name not in arrays]:
        raise TraceError(f"{path}: no array {missing[0]}; a calibration has {', '.join(_SHAPES)}")
    sizes = {"D": SKETCH_SIZE}
    for name, letters in (_SHAPES | {name: _OPTIONAL[name] for name in _OPTIONAL if name in arrays}).items():
        found = arrays[name]
        kinds = _KINDS.get(name, "iu")
        if found.dtype.kind not in kinds or found.ndim != len(letters):
            raise TraceError(
                f"{path}: {name} is {found.dtype} {list(found.shape)}, must be of kind {kinds} [{letters}]"
            )
        for letter, size in zip(letters, found.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise TraceError(
                    f"{path}: {name} has shape {list(found.shape)}, [{letters}] with {letter} {sizes[letter]}"
                )
    if arrays["format"] != _FORMAT:
        raise TraceError(f"{path}: calibration format {arrays['format']}: this version reads format {_FORMAT}")
    for name, is_good, allowed in _laws(arrays, sizes["E"]):
        if not is_good:
            raise TraceError(f"{path}: {name} {allowed}")


def _laws(arrays: dict[str, NDArray[Any]], num_experts: int) -> Iterator[tuple[str, Any, str]]:
    """What the values of any record obey, one law after the other, each as far as the ones before it hold."""
    for name, most in (
        ("load", _MAX_COUNT),
        ("prefill_load", _MAX_COUNT),
        ("request_loads", _MAX_COUNT),
        ("num_activated", _MAX_COUNT),
        ("num_requests", _MAX_COUNT),
        ("token_ids", _MAX_COUNT),
        ("map_scores", _LEVELS),
        ("token_shares", _LEVELS),
    ):
        values = arrays[name]
        yield name, _within(values, most), f"holds a number beyond 0 to {most}"
    for name in ("map_ids", "token_experts"):
        yield name, _within(arrays[name], num_experts - 1), f"holds an expert beyond 0 to {num_experts - 1}"
    for name in ("map_ids", "request_loads"):
        yield name, arrays[name].size, "is empty; a calibration is of one request or more"
    load, kept = arrays["load"].astype(np.int64), arrays["request_loads"]
    found = int(arrays["num_requests"])
    yield "num_requests", found >= len(kept), f"is {found}, must be at least the {len(kept)} of request_loads"
    yield "request_loads", (kept.sum(axis=0, dtype=np.int64) <= load).all(), "adds up to more than load"
    least, most, found = np.count_nonzero(load), int(load.sum()), int(arrays["num_activated"])
    yield "num_activated", least <= found <= most, f"is {found}, must be {least} to {most} with this load"
    importance, sketches = arrays["importance"], arrays["map_sketches"]
    yield "importance", (np.isfinite(importance) & (importance >= 0)).all(), "must be finite, 0 or more"
    is_known = np.isfinite(sketches).all() or np.isnan(sketches).all()
    yield "map_sketches", is_known, "must be finite, or NaN for all maps where none is known"
    shares = arrays["token_shares"]
    yield "map_ids", _all_differ(arrays["map_ids"].astype(np.int64)), "holds an expert twice in one map and layer"
    chosen = np.where(shares == 0, -1 - np.arange(shares.shape[-1]), arrays["token_experts"].astype(np.int64))
    yield "token_experts", _all_differ(chosen), "holds an expert twice for one token and layer"
    falls = (shares[..., 1:] <= shares[..., :-1]).all()
    yield "token_shares", falls, "must fall from the most frequent expert on"
    yield "token_ids", (np.diff(arrays["token_ids"].astype(np.int64)) > 0).all(), "must ascend"


def _within(values: NDArray[Any], most: int) -> bool:
    return bool(values.min(initial=0) >= 0 and values.max(initial=0) <= most)


def _all_differ(values: NDArray[np.int64]) -> bool:
    """No value stands twice in one row of the last axis."""
    return bool((np.diff(np.sort(values, axis=-1), axis=-1) != 0).all())
