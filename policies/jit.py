"""Compile with numba, keeping the machine code in a cache that is named by the sources it was made from."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np

Function = TypeVar("Function")

# compiled code holds values of the schema's enums as constants
_SOURCES = ("policies/**/*.py", "simulator/**/*.py", "tracer/schema.py")


@cache
def source_hash(*patterns: str) -> str:
    """SHA-256 over the names and contents of this installation's source files that match any of the patterns."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cache_dir() -> Path:
    """Directory of compiled code: one for each state of the sources that it is made from.

    numba's own cache looks only at the file of the function itself: a function that calls a helper in another
    file keeps the helper's old code. With the directory named by all sources, no stale code can be found.
    `OLEDSIM_CACHE_DIR` moves it; the default is the user's cache directory.
    """
    made_of = f"{source_hash(*_SOURCES)} {numba.__version__} {np.__version__}"
    base = (
        os.environ.get("OLEDSIM_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oledsim"
    )
    return Path(base) / f"numba-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"


def jit(function: Function) -> Function:
    """Compile a function of the numba subset on first call, from cache where it was compiled before.

    numba reads its cache setting when it decorates, so it is set for that moment only: other users of numba in
    the process keep theirs.
    """
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(cache_dir())  # type: ignore[attr-defined]
    try:
        compiled: Any = numba.njit(cache=True)(cast(Any, function))
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    return compiled
