"""Compile with numba, keeping the machine code in a cache that is named by the sources it was made from."""

from __future__ import annotations

import hashlib
import os
import pickle
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher

Function = TypeVar("Function")

_ROOT = Path(__file__).resolve().parent.parent  # of this installation

# compiled code holds values of the schema's enums as constants
_SOURCES = (
    "policies/**/*.py",
    "simulator/**/*.py",
    "replay/arrange.py",
    "replay/calibrate_plans.py",
    "replay/core_*.py",
    "replay/cpu_*.py",
    "tracer/schema.py",
)

# what reading a damaged pickle can raise
_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    MemoryError,
)


@cache
def _files(*patterns: str) -> tuple[Path, ...]:
    return tuple(sorted({path for pattern in patterns for path in _ROOT.glob(pattern)}))


@cache
def source_hash(*patterns: str) -> str:
    """SHA-256 over the names and contents of this installation's source files that match any of the patterns."""
    digest = hashlib.sha256()
    for path in _files(*patterns):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cache_dir() -> Path | None:
    """Directory of compiled code: one for each state of the sources that it is made from; None without a home.

    numba's own cache looks only at the file of the function itself: a function that calls a helper in another
    file keeps the helper's old code. Code is looked for in this directory, named by all sources, or nowhere.
    `OLEDSIM_CACHE_DIR` moves it; the default is the user's cache directory.
    """
    made_of = f"{source_hash(*_SOURCES)} {numba.__version__} {np.__version__}"
    name = f"numba-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    if own := os.environ.get("OLEDSIM_CACHE_DIR"):
        return Path(own).absolute() / name
    try:
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user whom the system does not know
        return None
    return users.absolute() / "oledsim" / name


_in_cache_dir = FunctionCache._impl_class._locator_classes[0]  # numba's, for `numba.config.CACHE_DIR`


class _Locator(_in_cache_dir):
    """Places code of the sources that name the directory by module alone: other installations of them find it too."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Directory of a file's code within that of all."""
        path = Path(py_file).resolve()
        if path in _files(*_SOURCES):
            return path.parent.name
        return super().get_suitable_cache_subpath(py_file)


class _Cache(FunctionCache):
    """numba's cache in the one directory that it is given, which no damage and no full disk makes fail."""

    class _impl_class(FunctionCache._impl_class):  # noqa: N801  # numba's name
        _locator_classes = (_Locator,)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Compiled code for these types; None, so that it is made, where there is none that can be read."""
        try:
            return super().load_overload(sig, target_context)
        except _DAMAGE:
            with suppress(OSError):
                self.flush()
        except OSError:
            pass
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code if there is room for it."""
        with suppress(OSError):
            super().save_overload(sig, data)


class _Compiled(CPUDispatcher):
    """A function that compiled code calls as one without ways in for Python and C.

    These take a third of the time of compiling in functions whose arguments have many arrays, and most functions are
    called by compiled ones alone. One that is called both ways is compiled for each.
    """

    @cached_property
    def _inner(self) -> CPUDispatcher:
        alone = {**self.targetoptions, "no_cpython_wrapper": True}
        return _cached(CPUDispatcher(self.py_func, targetoptions=alone), "from_compiled")

    @property
    def _numba_type_(self) -> types.Dispatcher:
        return types.Dispatcher(self._inner)


def _cached(compiled: CPUDispatcher, part: str) -> CPUDispatcher:
    found = _cache_of(compiled.py_func, part)
    if found is not None:
        compiled._cache = found  # what cache=True sets, to a cache that looks elsewhere too
    return compiled


def _cache_of(function: Any, part: str) -> _Cache | None:
    """The function's part of the cache; None where the directory cannot be written.

    numba reads its cache setting when it makes a cache, so it is set for that moment only: other users of numba in
    the process keep theirs.
    """
    directory = cache_dir()
    if directory is None:
        return None
    directory /= part
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
    try:
        made = _Cache(function)
    except RuntimeError:  # numba's word for a directory that cannot be written
        return None
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    return made if Path(made.cache_path).is_relative_to(directory) else None  # numba's environment has the last word


def jit(function: Function, **options: Any) -> Function:
    """Compile a function of the numba subset on first call, from cache where it was compiled before.

    Args:
        function: to compile.
        options: of numba.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    options = {"nopython": True, "no_cfunc_wrapper": True, **options}
    return cast(Function, _cached(_Compiled(function, targetoptions=options), "from_python"))


def jit_inner(function: Function) -> Function:
    """Like `jit`, for a function that is called by compiled code alone, through a pointer: with no way in for Python."""
    return jit(function, no_cpython_wrapper=True)


@cache
def without_cache(function: Any) -> CPUDispatcher:
    """What `jit` made of a function, but compiled once in each process."""
    return CPUDispatcher(function.py_func, targetoptions=function.targetoptions)
