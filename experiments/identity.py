"""What tells runs apart: what was asked for, of which trace and machine, and by which code."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from experiments import decision_log
from experiments.arguments import DEFAULT_SLOTS
from experiments.errors import ConfigError
from experiments.policy import contents_of, heeded
from policies.jit import source_hash
from policies.registry import POLICIES

PACKAGES = ("experiments", "policies", "simulator", "tracer")
# these ignore the cache size: runs that differ only in it are the same
UNSIZED = tuple(
    name for name, module in {**POLICIES, "log": decision_log}.items() if not getattr(module, "SIZED", True)
)
_PLACE = ("dir", "overwrite")  # keys of `output` that say where results go, not what they are


def asked(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration asks for, as plain data: without the place of the results, and without a size nobody heeds.

    Raises:
        ConfigError: it holds something that JSON has no form for.
    """
    values = {key: value for key, value in config.items() if key != "hydra"}
    values["output"] = {key: value for key, value in values.get("output", {}).items() if key not in _PLACE}
    if "policy" in values:
        values["policy"] = heeded(values["policy"])
    if "cache" in values:
        sizes = {key: value for key, value in values["cache"].items() if value is not None}
        values["cache"] = sizes or {"slots_per_layer": DEFAULT_SLOTS}
    if values.get("policy", {}).get("name") in UNSIZED:
        values.pop("cache", None)
    try:
        return json.loads(json.dumps(values))
    except TypeError as error:
        raise ConfigError(f"config: {error}; must be texts, numbers, lists and mappings of these") from None


def identity(config: Mapping[str, Any], *contents: str) -> str:
    """SHA-256 that is the same for runs that must have the same results.

    Args:
        config: what was asked for.
        contents: hashes of what it only names: of the trace, the machine, and what policies learn beforehand.

    Raises:
        PolicyError: the file of the user's policy cannot be read.
    """
    own = asked(config)
    parts = [own, *contents, contents_of(own.get("policy", {})), sources()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sources() -> str:
    """Names the code that made a result; a sweep takes up only results of the code that it runs with."""
    return source_hash("conf/**/*.yaml", *(f"{package}/**/*.py" for package in PACKAGES))


def versions(distributions: Iterable[str]) -> dict[str, str | None]:
    """Of Python and of these; None where one is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in distributions}}


@cache
def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def differences(before: Mapping[str, Any], now: Mapping[str, Any], group: str = "") -> list[str]:
    """Dotted keys at which two configurations differ, in order; of groups with different names the name alone."""
    if group and before.get("name") != now.get("name"):
        return [f"{group}name"]
    keys: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            keys += differences(old, new, f"{group}{key}.")
        elif old != new:
            keys.append(f"{group}{key}")
    return keys
