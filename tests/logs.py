"""Logs of two engines side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from policies.log import DecisionHash, LogChunk, Table


def columns_of(chunks: Iterable[LogChunk]) -> dict[str, list[Any]]:
    """Every column of a log with its type, as plain values, whatever stretches it came in."""
    found: dict[str, list[Any]] = {}
    for chunk in chunks:
        for prefix, table in (("layers", chunk.layers), ("forwards", chunk.forwards)):
            for name, values in _plain(table):
                found.setdefault(f"{prefix}.{name}", []).extend(values)
    return found


def _plain(table: Table) -> Iterable[tuple[str, list[Any]]]:
    for name, column in table.scalars.items():
        yield f"{name} {column.dtype}", column.tolist()
    for name, column in table.lists.items():
        assert column.offsets.dtype == np.int64
        assert column.offsets[-1] == len(column.values)
        yield f"{name} {column.values.dtype}", [column[row].tolist() for row in range(len(column))]


def hash_of(chunks: Iterable[LogChunk]) -> str:
    digest = DecisionHash()
    for chunk in chunks:
        digest.update(chunk.layers, np.ones(len(chunk.layers), bool))
    return digest.hexdigest()


def same_error(calls: Iterable[Callable[[], Any]]) -> str:
    """The one error that all calls end with."""
    found = set()
    for call in calls:
        try:
            call()
        except ValueError as error:
            found.add((type(error).__name__, str(error)))
        else:
            found.add(("none", ""))
    assert len(found) == 1, found
    ((kind, message),) = found
    return f"{kind}: {message}"
