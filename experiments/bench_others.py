"""Other simulators of expert caches, driven so that they count what ours count."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.errors import ConfigError

_MODULES = {"libcachesim": "libcachesim", "moe-policylang": "moe_policylang"}


class Timed(NamedTuple):
    """What a run of another simulator found, and how long its loop over the accesses took."""

    num_hits: int
    seconds: float


def installed(name: str) -> str | None:
    """Version of a simulator that is installed; None if it is not."""
    if find_spec(_MODULES[name]) is None:
        return None
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def missing(name: str) -> str:
    """What to say of a simulator that is not installed."""
    return f"{name} is not installed, so nothing is compared with it; CONTRIBUTING.md says how to bring it"


def look_in(directory: Path) -> None:
    """Look for simulators in a directory too, after all others: moe-policylang has a package named as one of ours.

    Raises:
        ConfigError: there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"--others {directory}: must be the directory of pip install --target")
    sys.path.append(str(directory))


class LibCacheSim:
    """libcachesim's caches over some streams, one cache for each; their hits and times are summed.

    Each stream is a file of fixed records in the format oracleGeneral, with the next use of each access, which Belady
    needs. Caches and readers are made anew for each run, as runs use them up; that is not timed.

    Args:
        streams: ids from 0, int32.
        directory: for their files.
    """

    NAME = "libcachesim"
    _HASH_POWER = 16  # of its table of objects; with the default of 24, clearing it is most of the time

    def __init__(self, streams: Sequence[NDArray[np.int32]], directory: Path) -> None:
        self._library: Any = import_module(_MODULES[self.NAME])
        self._streams = [(stream.size, directory / f"{number}.oracleGeneral") for number, stream in enumerate(streams)]
        for stream, (_, path) in zip(streams, self._streams, strict=True):
            records = np.zeros(stream.size, [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
            records["time"] = np.arange(stream.size) // 1000
            records["id"] = stream.astype(np.uint64) + 1  # it keeps 0 for itself
            records["size"] = 1
            records["next"] = _next_use(stream)
            records.tofile(path)

    def run(self, cache: str, capacity: int) -> Timed:
        """Run LRU, LFU or Belady, with as many slots in each cache."""
        library = self._library
        num_hits, seconds = 0, 0.0
        for size, path in self._streams:
            if size == 0:
                continue
            setting = library.ReaderInitParam(ignore_obj_size=True)
            reader = library.TraceReader(str(path), library.TraceType.ORACLE_GENERAL_TRACE, setting)
            made = getattr(library, cache)(cache_size=capacity, hashpower=self._HASH_POWER)
            start = perf_counter()
            missed_ratio, _ = made.process_trace(reader)
            seconds += perf_counter() - start
            num_hits += size - round(missed_ratio * size)
        return Timed(num_hits, seconds)


def _next_use(stream: NDArray[np.int32]) -> NDArray[np.int64]:
    """Index of the next access of the same id, -1 if there is none."""
    order = np.argsort(stream, kind="stable")
    is_same = stream[order][1:] == stream[order][:-1]
    following = np.full(stream.size, -1, np.int64)
    following[order[:-1][is_same]] = order[1:][is_same]
    return following


class PolicyLang:
    """moe-policylang's offline replay of one layer, whose every step activates as many experts.

    Args:
        active: [forwards, E].
    """

    NAME = "moe-policylang"
    _POLICIES = {"LRU": "policy_topk_lru", "LFU": "policy_topk_lfu", "Belady": "policy_belady"}  # noqa: RUF012

    stream: NDArray[np.int32]  # experts in the order in which it visits them

    def __init__(self, active: NDArray[np.bool_]) -> None:
        self._replay: Any = import_module(f"{_MODULES[self.NAME]}.benchmark.replay")
        self._scores = np.random.default_rng(0).random(active.shape) + active
        self._top_k = int(active[0].sum())
        self.stream = np.concatenate(
            [np.argpartition(-scores, self._top_k - 1)[: self._top_k] for scores in self._scores]
        ).astype(np.int32)

    def run(self, cache: str, capacity: int) -> Timed:
        """Run LRU, LFU or what it calls Belady."""
        start = perf_counter()
        num_hits, _ = getattr(self._replay, self._POLICIES[cache])(self._scores, self._top_k, capacity)
        return Timed(int(num_hits), perf_counter() - start)
