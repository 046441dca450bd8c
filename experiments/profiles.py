"""Hardware profiles and model shapes as YAML: the shipped ones by name, own ones by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from policies.profile import HardwareProfile, ProfileError
from tracer.records import make_record
from tracer.schema import ModelShape, choices


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


def profile_from_dict(values: Mapping[str, Any], where: str) -> HardwareProfile:
    """Check the keys and types of a profile and make it; `where` stands in error messages."""
    return make_record(HardwareProfile, values, where, ProfileError)


def shape_from_dict(values: Mapping[str, Any], where: str) -> ModelShape:
    """Check the keys and types of a model shape and make it."""
    return make_record(ModelShape, values, where, ProfileError)


def changes_of(profile: HardwareProfile) -> str:
    """Where a profile differs from the shipped one whose name it bears, as `key=value`; empty for any other name."""
    if profile.name not in names("hardware"):
        return ""
    return ", ".join(_differences(asdict(load_profile(profile.name)), asdict(profile)))


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
        text = shipped.read_text()
    elif own.suffix in (".yaml", ".yml"):
        try:
            text = own.read_text()
        except OSError as error:
            raise ProfileError(f"{own}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ProfileError(f"{own}: cannot be read: not a text in UTF-8") from None
    else:
        raise ProfileError(
            f"{group} {str(name_or_path)!r}: not known; {choices(str(name_or_path), names(group))}, or the path of a .yaml file"
        )
    try:
        # OmegaConf's YAML, as everywhere in the configuration: it reads 55e9 as a number and leaves dates text
        values: Any = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    except (YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:
        # OSError is OmegaConf's word for a text that holds a single value, recursion that of an alias within itself
        raise ProfileError(f"{name_or_path}: not YAML that can be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ProfileError(f"{name_or_path}: must hold keys and values")
    return values
