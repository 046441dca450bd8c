"""The cells of a grid: in which order they run, which are the same run, and which go to one process together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Generic, TypeVar

from experiments.identity import UNSIZED

Value = TypeVar("Value")

# Most policies decide the same whatever these are, on the command line and in Python; they vary fastest.
OF_THE_PROFILE = ("hardware", "shape", "expert_dtype", "staging_slots", "output", "per_layer", "decisions")
SIZES = ("cache.slots_per_layer", "cache.gib", "slots_per_layer", "cache_gib")
NUM_BATCHES = 32  # enough that processes end at about the same time, few enough that what each costs is small


@dataclass(frozen=True)
class Cell(Generic[Value]):
    """One cell: a value for each axis. Cells with the same `group` differ in what is of the profile alone."""

    values: Mapping[str, Value]
    group: tuple[int, ...]


def cells(axes: Mapping[str, Sequence[Value]], policy_name: Callable[[Value], str]) -> list[Cell[Value]]:
    """Every combination of values, but each run once: the cache size does not tell runs apart that ignore it.

    Traces vary slowest and what is of the profile varies fastest, so that what runs have in common is at hand.

    Args:
        axes: the values of each key.
        policy_name: what a value of the axis `policy` chooses.
    """
    keys = sorted(axes, key=lambda key: (key != "trace", key.partition(".")[0] in OF_THE_PROFILE))
    is_shared = [key.partition(".")[0] in OF_THE_PROFILE for key in keys]
    found: dict[tuple[int, ...], Cell[Value]] = {}
    for indices in product(*(range(len(axes[key])) for key in keys)):
        values = {key: axes[key][index] for key, index in zip(keys, indices, strict=True)}
        is_unsized = "policy" in values and policy_name(values["policy"]) in UNSIZED
        heeded = tuple(0 if is_unsized and key in SIZES else index for key, index in zip(keys, indices, strict=True))
        group = tuple(index for index, shared in zip(heeded, is_shared, strict=True) if not shared)
        found.setdefault(heeded, Cell(values, group))
    return list(found.values())


def batches(found: Sequence[Cell[Value]], most: int = NUM_BATCHES) -> list[list[Cell[Value]]]:
    """The cells in their order, in about equal parts that keep each group whole.

    Args:
        found: cells with those of a group side by side.
        most: parts there may be.
    """
    least = -(-len(found) // most)
    parts: list[list[Cell[Value]]] = []
    for _, group in groupby(found, key=lambda cell: cell.group):
        if parts and len(parts[-1]) < least:
            parts[-1] += group
        else:
            parts.append(list(group))
    return parts
