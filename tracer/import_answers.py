"""Answers of servers: the files that hold them, and their values, each held to the type that it must have."""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.files import first_line
from tracer.schema import TraceError

WIRE_DTYPES = ("uint8", "int16", "uint16", "int32", "int64")


def read_answers(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each answer of a file, with its place: one JSON value in all, or one in each line.

    Raises:
        TraceError: it cannot be read, or holds something else.
    """
    name = path.name.removesuffix(".gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if name.endswith(".json"):
                yield from _each(str(path), json.load(file))
            elif name.endswith(".jsonl"):
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield from _each(f"{path}, line {number}", json.loads(line))
            else:
                raise TraceError(f"{path}: must be a .npy, .npz, .json or .jsonl file")
    except (OSError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or first_line(error)}") from None
    except (ValueError, RecursionError, EOFError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: is not JSON: {first_line(error)}") from None


def _each(where: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, answer in enumerate(value if isinstance(value, list) else [value]):
        place = f"{where}, answer {number}" if isinstance(value, list) else where
        if not isinstance(answer, dict):
            raise TraceError(f"{place}: is {type(answer).__name__}, must be an answer of a server")
        yield place, answer


def object_at(where: str, holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object of this key; one without entries where it is absent or null.

    Raises:
        TraceError: there is something else.
    """
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TraceError(f"{where}: {key} is {type(value).__name__}, must be an object")
    return value


def objects_at(where: str, holder: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The list of objects of this key; an empty one where it is absent or null.

    Raises:
        TraceError: there is something else.
    """
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TraceError(f"{where}: {key} must be a list of objects")
    return value


def count_at(where: str, holder: Mapping[str, Any], key: str) -> int | None:
    """The count of this key; None where it is absent or null.

    Raises:
        TraceError: there is something else.
    """
    value = holder.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TraceError(f"{where}: {key} is {value!r}, must be a whole number of 0 or more")
    return value


def tokens_at(where: str, holder: Mapping[str, Any], key: str) -> list[int] | None:
    """The token ids of this key; None where it is absent or null.

    Raises:
        TraceError: there is something else.
    """
    value = holder.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise TraceError(f"{where}: {key} must be a list of token ids, each from 0 to {(1 << 31) - 1}")
    return value


def decode_array(where: str, routed: Any) -> NDArray[Any]:
    """An array as a server sends it: base64 of a `.npy`, its bytes with shape and dtype beside, or nested lists.

    Raises:
        TraceError: it is none of these.
    """
    try:
        if isinstance(routed, str):
            content = io.BytesIO(base64.b64decode(routed, validate=True))
            return np.lib.format.read_array(content, allow_pickle=False)  # np.load would take archives too
        if isinstance(routed, dict):
            return decode_ids(where, routed["data"], routed.get("dtype", "int32")).reshape(routed["shape"])
        return np.array(routed)
    except (KeyError, TypeError, ValueError, EOFError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{where}: routed_experts cannot be decoded: {first_line(error)}") from None


def decode_ids(where: str, text: Any, dtype: Any) -> NDArray[Any]:
    """Ids from base64 of their bytes, without a shape.

    Raises:
        TraceError: it is something else, or of another type.
    """
    if dtype not in WIRE_DTYPES:
        raise TraceError(f"{where}: ids are {dtype!r}, must be one of {', '.join(WIRE_DTYPES)}")
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype).newbyteorder("<"))
    except (TypeError, ValueError, binascii.Error) as error:
        raise TraceError(f"{where}: routed_experts are no base64 of {dtype}: {first_line(error)}") from None
