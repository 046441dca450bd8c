"""The files of a fidelity run in a few tar files, for a way home that takes few."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

from experiments.errors import ConfigError
from experiments.fidelity_grid import MANIFEST, PROFILE
from tracer.records import read_object

PACK_BYTES = 15 * 2**20


def pack_run(directory: Path, target: Path) -> str:
    """Pack what a run has found so far; returns what was packed in a line.

    Raises:
        ConfigError: it is no run that has begun.
    """
    manifest = directory / MANIFEST
    if not manifest.is_file():
        raise ConfigError(f"{directory}: holds no {MANIFEST}, it is not of a run that has begun")
    cells = [entry["file"] for entry in read_object(manifest).get("runs", [])]
    paths = pack(directory, target, [MANIFEST, PROFILE, *cells])
    sizes = ", ".join(f"{path.stat().st_size / 2**20:.1f}" for path in paths)
    return f"{target}: {len(cells)} logs in {len(paths)} packs of {sizes} MiB"


def pack(directory: Path, target: Path, names: Sequence[str], pack_bytes: int = PACK_BYTES) -> list[Path]:
    """Put files of a directory into tar files of a limited size, which `tar xf` takes apart.

    Args:
        directory: of the files.
        target: directory for `pack-0.tar` and those that follow.
        names: of the files, relative to the directory; one that is larger than the limit has a pack of its own.
        pack_bytes: limit.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        num_bytes = (directory / name).stat().st_size + 2 * tarfile.BLOCKSIZE
        if groups[-1] and size + num_bytes > pack_bytes - tarfile.RECORDSIZE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, group in enumerate(groups):
        paths.append(target / f"pack-{number}.tar")
        with tarfile.open(paths[-1], "w") as archive:
            for name in group:
                archive.add(directory / name, arcname=name)
    return paths
