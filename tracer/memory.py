"""How much memory a model can still take on a device."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> float:
    """Bytes that can be taken on a device without pushing out others; infinite where nothing is known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_limits(), default=math.inf) if device.type == "cpu" else math.inf


def _host_limits() -> Iterator[float]:
    """What is free by each of those who may have set a limit."""
    memory = _numbers(_PROC / "meminfo")
    if "MemAvailable" in memory:
        yield memory["MemAvailable"] * 1024
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield from _cgroup_limits()
    if sys.platform == "linux":
        import resource  # is not everywhere

        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if limit != resource.RLIM_INFINITY:
            yield max(0, limit - _numbers(_PROC / "self/status").get("VmData", 0) * 1024)


def _cgroup_limits() -> Iterator[float]:
    """Of containers and services: the limit of each control group that holds this process, less what it uses."""
    own = next((line[3:] for line in _lines(_PROC / "self/cgroup") if line.startswith("0::")), None)
    if own is None:
        return
    group = _CGROUPS / own.lstrip("/")
    for folder in (group, *group.parents):
        if _CGROUPS not in (folder, *folder.parents):
            return
        limit = next(iter(_lines(folder / "memory.max")), "max")
        if limit.isdigit():
            # Pages of files count as used, but make way.
            used = _numbers(folder / "memory.stat")
            yield max(0, int(limit) - used.get("anon", 0) - used.get("kernel", 0))


def _numbers(path: Path) -> dict[str, int]:
    """First number of each line, by the line's first word."""
    words = (line.replace(":", " ").split() for line in _lines(path))
    return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:  # no such limit here
        return []


def host_peak(*, reset: bool = False) -> int | None:
    """Most bytes that this process had in memory at once, mapped files included, since it began or was last reset.

    None where the system does not say it, or cannot reset it.
    """
    if reset:
        try:
            (_PROC / "self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
    peak = _numbers(_PROC / "self/status").get("VmHWM")
    return None if peak is None else peak * 1024
