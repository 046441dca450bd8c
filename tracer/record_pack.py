"""Pack what a recording made into a few tar files of limited size."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tracer.corpus import WORKLOADS

MAX_TARS = 4
MAX_TAR_BYTES = 15 << 20
_BLOCK = 512
_END = 22 * _BLOCK  # two blocks end a tar, which is then filled up to whole records of 20
# By importance; weights are not among them, nor what is hidden because it is not whole.
PATTERNS = (
    "report.json",
    "*.jsonl",
    "*.npz",
    "training/*.jsonl",
    "training/checkpoint/config.json",
    "training/checkpoint/training.json",
    "training/checkpoint/tokenizer*.json",
    *(f"traces/*-{workload}.trace/*.parquet" for workload in WORKLOADS),
    "traces/*-signals.trace/*.parquet",
    "traces/*.trace/*.parquet",
)


def pack(directory: Path, out: Path, patterns: Iterable[str] = PATTERNS) -> dict[str, Any]:
    """Write part-1.tar and so on, each in place of what has its name, and remove those that are too many.

    Every file goes into the first tar with room for it. Traces appear whole, so that this may be called while others
    are being recorded.

    Returns:
        Names of the tars with their bytes, and the files for which there was no room; ready for JSON.
    """
    out.mkdir(parents=True, exist_ok=True)
    bins: list[tuple[int, list[Path]]] = []
    left_out = []
    for path in _files(directory, patterns):
        size = 2 * _BLOCK + -(-path.stat().st_size // _BLOCK) * _BLOCK
        for i, (used, paths) in enumerate(bins):
            if used + size <= MAX_TAR_BYTES:
                bins[i] = (used + size, [*paths, path])
                break
        else:
            if len(bins) == MAX_TARS or _END + size > MAX_TAR_BYTES:
                left_out.append(path.relative_to(directory).as_posix())
            else:
                bins.append((_END + size, [path]))
    tars = {}
    for i, (_, paths) in enumerate(bins, start=1):
        target = out / f"part-{i}.tar"
        partial = out / f".{target.name}.partial"
        with tarfile.open(partial, "w") as tar:
            for path in paths:
                tar.add(path, path.relative_to(directory).as_posix(), filter=_plain)
        partial.replace(target)
        tars[target.name] = target.stat().st_size
    for old in out.glob("part-*.tar"):
        if old.name not in tars:
            old.unlink()
    return {"tars": tars, "left_out": left_out}


def _files(directory: Path, patterns: Iterable[str]) -> Iterable[Path]:
    found = {}
    for pattern in patterns:
        for path in sorted(directory.glob(pattern)):
            is_hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
            if path.is_file() and not is_hidden:
                found[path] = None
    return found


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without time and owner, so that equal files give equal tars."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
