"""The policy that a run asks for: one of ours, of an installed package, of the user's own, or a log played back."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import decision_log
from experiments.errors import ConfigError
from policies.build import build_from
from policies.contract import Context, Policy, PolicyError
from policies.custom import installed
from policies.plain import PlainPolicy
from policies.plain_build import built_of_object, module_of
from policies.registry import POLICIES, build_policy, require_own_name

FROM_FILE = ("custom", "log")  # policies whose key `path` names a file
OwnPolicy = PlainPolicy | type[PlainPolicy]


def is_own(policy: Any) -> bool:
    """Whether this is a class of the user's, or an object of one."""
    kind = policy if inspect.isclass(policy) else type(policy)
    return issubclass(kind, PlainPolicy) and kind is not PlainPolicy


def name_of(policy: str | OwnPolicy) -> str:
    """What messages call it."""
    return policy if isinstance(policy, str) else (policy if inspect.isclass(policy) else type(policy)).__name__


def built(policy: str | OwnPolicy, knobs: Mapping[str, Any] | None, context: Context) -> Policy:
    """The policy, ready for a run.

    Args:
        policy: a registered name, that of an installed package's policy, `custom` or `log`; or a subclass of
            PlainPolicy, or an object of one, which stays as it is.
        knobs: those that differ from their defaults.
        context: what it may be built from.

    Raises:
        PolicyError: it cannot be built so.
        ConfigError: knobs are given beside an object, which has its own.
    """
    given = dict(knobs or {})
    if policy == "log":
        return replace(build_from(decision_log, "log", given, context), file=str(given.get("path")))
    if isinstance(policy, str):
        return build_policy(policy, given, context)
    require_own_name(name_of(policy))
    if inspect.isclass(policy):
        return build_from(module_of(policy), name_of(policy), given, context)
    if given:
        raise ConfigError(f"simulate: knobs beside an object of {name_of(policy)}, which has its own; must be a class")
    return built_of_object(policy, context)


def heeded(config: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's part of a configuration without the keys that only other cells of its grid heed."""
    name = config.get("name")
    others = ("path", "knobs") if name in POLICIES else {"log": ("knobs",)}.get(str(name), ())
    if name in installed():
        others = ("path",)
    return {key: value for key, value in config.items() if key not in others}


def label(config: Mapping[str, Any]) -> str:
    """What directories call a policy, from its part of a configuration."""
    return str(config.get("name") or Path(str(config.get("path"))).stem)


def contents_of(config: Mapping[str, Any]) -> str:
    """What decides beyond our own code, from the policy's part of a configuration: hash of a file, or a version.

    Raises:
        PolicyError: the file cannot be read.
    """
    if "path" in config:
        return file_hash(str(config["path"]))
    point = installed().get(str(config.get("name")))
    return f"{point.value} {point.dist.version if point.dist else ''}" if point else ""


def has_changed(file: Mapping[str, str] | None) -> bool:
    """Whether a file holds something else than when a manifest noted it; one that has gone is not held against a run."""
    return file is not None and Path(file["path"]).is_file() and file_hash(file["path"]) != file["sha256"]


def file_hash(path: str) -> str:
    """SHA-256 of a file.

    Raises:
        PolicyError: it cannot be read.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from None
