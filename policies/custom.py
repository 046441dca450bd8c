"""Find policies that are not of this package: in a Python file, or among installed packages."""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from policies.build import PolicyModule, build_from
from policies.contract import Context, Policy, PolicyError
from policies.plain import PlainPolicy
from policies.plain_build import module_of
from tracer.records import make_record
from tracer.schema import choices

GROUP = "oledsim.policies"  # of entry points


@dataclass
class Knobs:
    """Whose policy, and its own knobs."""

    path: str
    """The Python file."""
    name: str | None = None
    """A class in it; null is the only one."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """Those of its own that differ from their defaults."""


def build_custom(values: Mapping[str, Any] | Knobs, context: Context) -> Policy:
    """A policy of a class in a file.

    Args:
        values: `path`, `name` and `knobs`.
        context: what it may be built from.

    Raises:
        PolicyError: the file, the class or a knob is not what it must be.
    """
    if not isinstance(values, Knobs):
        values = make_record(Knobs, values, "policy=custom", PolicyError)
    kind = load(Path(values.path), values.name)
    return build_from(module_of(kind), kind.__name__, values.knobs, context)


def load(path: Path, name: str | None = None) -> type[PlainPolicy]:
    """Run a Python file and take a class from it.

    The file runs anew each time, so that runs share nothing.

    Args:
        path: of the file.
        name: of the class, a subclass of PlainPolicy; None takes the only one that the file defines.

    Raises:
        PolicyError: it cannot be read or run, or has no such class; the message says where in it.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from None
    module = _run(path, source)
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, PlainPolicy) and value.__module__ == module.__name__
    }
    if name is None and len(own) == 1:
        return next(iter(own.values()))
    if name is None:
        found = f"found {len(own)}: {', '.join(own)}; policy.name says which" if own else "found none"
        raise PolicyError(f"{path}: must define a subclass of PlainPolicy; {found}")
    if name not in own:
        raise PolicyError(f"{path}: no subclass {name!r} of PlainPolicy; {choices(name, own)}")
    return own[name]


def _run(path: Path, source: bytes) -> ModuleType:
    module = ModuleType(f"oledsim_policy_{hashlib.sha256(source).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except SyntaxError as error:
        at = Path(error.filename or path).name
        raise PolicyError(f"{at}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except Exception as error:  # somebody's code can fail in any way
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        at = f"{path.name}, line {lines[-1]}" if lines else path.name
        raise PolicyError(f"{at}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return module


@cache
def installed() -> dict[str, EntryPoint]:
    """Policies of other packages, by name: entry points of the group, not loaded."""
    return {point.name: point for point in entry_points(group=GROUP)}


def installed_module(name: str) -> PolicyModule:
    """What an entry point leads to: a module with Knobs and build, or a subclass of PlainPolicy.

    Raises:
        PolicyError: it cannot be loaded, or is neither.
    """
    point = installed()[name]
    try:
        found = point.load()
    except Exception as error:  # somebody's code can fail in any way
        raise PolicyError(f"policy {name} of {point.value}: {type(error).__name__}: {error}") from error
    if inspect.isclass(found) and issubclass(found, PlainPolicy):
        return module_of(found)
    if hasattr(found, "Knobs") and hasattr(found, "build"):
        return cast(PolicyModule, found)
    raise PolicyError(
        f"policy {name} of {point.value}: must be a subclass of PlainPolicy, or a module with Knobs and build"
    )
