"""Hardware profiles and model shapes as YAML: the shipped ones by name, own ones by path."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import ScalarToken, YAMLError, scan

from policies.profile import HardwareProfile, ProfileError
from policies.registry import POLICIES
from tracer.records import make_record
from tracer.schema import ModelShape, choices

_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|0[bx][0-9a-fA-F_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


def names(group: str) -> list[str]:
    """Names of the shipped YAML files of a configuration group, `hardware` or `shape`."""
    return sorted(Path(entry.name).stem for entry in (files("conf") / group).iterdir() if entry.name.endswith(".yaml"))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """A shipped profile by name, or an own one by the path of its YAML file.

    Raises:
        ProfileError: no such profile, not YAML, or its keys and values are not those of a profile.
    """
    return profile_from_dict(_read("hardware", name_or_path), str(name_or_path))


def load_shape(name: str) -> ModelShape:
    """A shipped model shape by name: sizes to charge for, whatever model the trace is of.

    Raises:
        ProfileError: no such shape.
    """
    return shape_from_dict(_read("shape", name), name)


def find_profile(hardware: str | Path | HardwareProfile) -> HardwareProfile:
    """The profile that is named, or the one that is given, checked as one from a file is.

    Raises:
        ProfileError: as for `load_profile`.
    """
    if isinstance(hardware, HardwareProfile):
        return profile_from_dict(asdict(hardware), f"profile {hardware.name}")
    if not isinstance(hardware, (str, Path)):
        raise ProfileError(f"hardware is {hardware!r}, must be the name of a profile, a path, or a HardwareProfile")
    return load_profile(hardware)


def find_shape(shape: str | ModelShape, traced: ModelShape) -> ModelShape:
    """The shape that is named, `trace` being that of the traced model, or the one that is given, checked.

    Raises:
        ProfileError: no such shape, or a value is of another type.
    """
    if isinstance(shape, ModelShape):
        return shape_from_dict(asdict(shape), "shape")
    if not isinstance(shape, str):
        raise ProfileError(f"shape is {shape!r}, must be trace, the name of a shape, or a ModelShape")
    return traced if shape == "trace" else load_shape(shape)


def profile_from_dict(values: Mapping[str, Any], where: str) -> HardwareProfile:
    """Check the keys and types of a profile and make it; `where` stands in error messages.

    Raises:
        ProfileError: a key is not known or missing, or its value is of another type or impossible.
    """
    profile = make_record(HardwareProfile, values, where, ProfileError)
    allowed = ("default", *POLICIES)
    for name in profile.policy_ns:
        if name not in allowed:
            raise ProfileError(f"{where}: policy_ns.{name}: no such policy; {choices(name, allowed)}")
    return profile


def shape_from_dict(values: Mapping[str, Any], where: str) -> ModelShape:
    """Check the keys and types of a model shape and make it."""
    return make_record(ModelShape, values, where, ProfileError)


def changes_of(profile: HardwareProfile) -> str:
    """Where a profile differs from the shipped one whose name it bears, as `key=value`; empty for any other name."""
    if profile.name not in names("hardware"):
        return ""
    return ", ".join(_differences(_shipped(profile.name), asdict(profile)))


@cache
def _shipped(name: str) -> dict[str, Any]:
    return asdict(load_profile(name))  # read once for all cells of a grid


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], group: str = "") -> Iterator[str]:
    for key, value in now.items():
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping):
            yield from _differences(before[key], value, f"{group}{key}.")
        elif value != before.get(key):
            yield f"{group}{key}={value:g}" if isinstance(value, float) else f"{group}{key}={value}"


def profile_hash(profile: HardwareProfile) -> str:
    """SHA-256 over all values of a profile."""
    return hashlib.sha256(json.dumps(asdict(profile), sort_keys=True).encode()).hexdigest()


def _read(group: str, name_or_path: str | Path) -> dict[str, Any]:
    shipped = files("conf") / group / f"{name_or_path}.yaml"
    own = Path(name_or_path)
    if isinstance(name_or_path, str) and own.name == name_or_path and shipped.is_file():
        text = shipped.read_text(encoding="utf-8")
    elif own.suffix in (".yaml", ".yml"):
        try:
            text = own.read_text(encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"{own}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ProfileError(f"{own}: cannot be read: not a text in UTF-8") from None
    else:
        raise ProfileError(
            f"{group} {str(name_or_path)!r}: not known; {choices(str(name_or_path), names(group))}, or the path of a .yaml file"
        )
    _refuse_other_bases(text, name_or_path)
    try:
        # OmegaConf's YAML, as everywhere in the configuration: it reads 55e9 as a number and leaves dates text
        values: Any = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    except (YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:
        # OSError is OmegaConf's word for a text that holds a single value, recursion that of an alias within itself
        raise ProfileError(f"{name_or_path}: not YAML that can be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ProfileError(f"{name_or_path}: must hold keys and values")
    return values


def _refuse_other_bases(text: str, where: str | Path) -> None:
    """Refuse numbers that YAML 1.1 takes for something else: 010 for 8, and 1:30 for 90."""
    with suppress(YAMLError):  # the one who loads it reports it
        for token in scan(text):
            if isinstance(token, ScalarToken) and token.plain and _OTHER_BASE.fullmatch(token.value):
                raise ProfileError(
                    f"{where}, line {token.start_mark.line + 1}: {token.value} is not what it looks like in YAML; "
                    "must be a decimal number without leading zeros, or text in quotes"
                )
