"""What is needed to make a run again: inputs with their hashes, settings, versions and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from experiments.identity import sources, versions
from experiments.policy import file_hash
from experiments.profiles import profile_hash
from experiments.setting import Setting
from policies.contract import Policy

LIBRARIES = ("oledsim", "numpy", "numba", "polars", "pyarrow", "simpy", "hydra-core")


def manifest(setting: Setting, policy: Policy) -> dict[str, Any]:
    """The record that stands beside every result, as plain data."""
    config, reader = setting.config(policy.variant), setting.reader
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": setting.identity(config),
        "config": config,
        "overrides": list(setting.given.overrides),
        "seed": setting.given.seed,
        "policy": {
            "name": policy.name,
            "variant": policy.variant,
            "misses": policy.misses,
            "pool": policy.pool,
            "file": {"path": str(Path(policy.file).absolute()), "sha256": file_hash(policy.file)}
            if policy.file
            else None,
        },
        "calibration": setting.calibration,
        "trace": {
            "name": reader.path.stem,
            "source": reader.metadata.source,
            "content_hash": reader.metadata.content_hash,
        },
        "profile": {**json.loads(json.dumps(asdict(setting.profile))), "hash": profile_hash(setting.profile)},
        "sources": sources(),
        "versions": versions(LIBRARIES),
        "source_tree": _source_tree(),
        "host": {"system": platform.platform(), "machine": platform.machine(), "num_cpus": os.cpu_count()},
    }


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
