"""What is needed to make a run again: inputs with their hashes, settings, versions and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.profiles import profile_hash
from policies.contract import Policy
from policies.jit import source_hash
from policies.profile import HardwareProfile
from tracer.store import TraceReader

PACKAGES = ("experiments", "policies", "simulator", "tracer")
LIBRARIES = ("oledsim", "numpy", "numba", "polars", "pyarrow", "simpy", "hydra-core")


def manifest(
    reader: TraceReader,
    profile: HardwareProfile,
    policy: Policy,
    config: Mapping[str, Any],
    seed: int,
    calibration: str,
) -> dict[str, Any]:
    """The record that stands beside every result, as plain data."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": dict(config),
        "seed": seed,
        "policy": {"name": policy.name, "variant": policy.variant, "misses": policy.misses, "pool": policy.pool},
        "calibration": calibration,
        "trace": {
            "name": reader.path.stem,
            "source": reader.metadata.source,
            "content_hash": reader.metadata.content_hash,
        },
        "profile": {**json.loads(json.dumps(asdict(profile))), "hash": profile_hash(profile)},
        "sources": sources(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
        "source_tree": _source_tree(),
        "host": {"system": platform.platform(), "machine": platform.machine(), "num_cpus": os.cpu_count()},
    }


def sources() -> str:
    """Names the code that made a result; a sweep takes up only results of the code that it runs with."""
    return source_hash("conf/**/*.yaml", *(f"{package}/*.py" for package in PACKAGES))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def _source_tree() -> dict[str, Any]:
    """Commit and dirty flag of the checkout that this file lies in; both null when it is an installed copy."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(changes.strip())}
