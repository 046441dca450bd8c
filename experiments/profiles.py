"""Hardware profiles and model shapes as YAML: the shipped ones by name, own ones by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from yaml import YAMLError

from policies.profile import HardwareProfile, ProfileError
from tracer.schema import ModelShape, TraceError, choices


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
    return _record(HardwareProfile, values, where)


def shape_from_dict(values: Mapping[str, Any], where: str) -> ModelShape:
    """Check the keys and types of a model shape and make it."""
    return _record(ModelShape, values, where)


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
        values: Any = OmegaConf.to_container(OmegaConf.create(text))
    except YAMLError as error:
        raise ProfileError(f"{name_or_path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ProfileError(f"{name_or_path}: must hold keys and values")
    return values


def _record(kind: type, values: Any, where: str) -> Any:
    """Make a dataclass from a mapping whose keys and types are checked."""
    if not isinstance(values, Mapping):
        raise ProfileError(f"{where} is {values!r}, must hold keys and values")
    allowed = {field.name: field for field in fields(kind)}
    for key in values:
        if key not in allowed:
            raise ProfileError(f"{where}: unknown key {key!r}; {choices(str(key), allowed)}")
    missing = [
        name
        for name, field in allowed.items()
        if name not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ProfileError(f"{where}: missing {', '.join(missing)}")
    hints = get_type_hints(kind)
    made = {key: _converted(value, hints[key], f"{where}: {key}") for key, value in values.items()}
    try:
        return kind(**made)
    except TraceError as error:
        raise ProfileError(f"{where}: {error}") from None


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A value as a field of this type holds it, refused if YAML gave another type."""
    arguments = get_args(hint)
    if NoneType in arguments:
        return None if value is None else _converted(value, arguments[0], where)
    if is_dataclass(hint):
        return _record(hint, value, where)  # type: ignore[arg-type]  # a class, not an instance
    if get_origin(hint) is tuple:
        is_long = arguments[-1] is Ellipsis
        if not isinstance(value, (list, tuple)) or not (is_long or len(value) == len(arguments)):
            raise ProfileError(f"{where} is {value!r}, must be a list{'' if is_long else f' of {len(arguments)}'}")
        return tuple(_converted(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise ProfileError(f"{where} is {value!r}, must hold keys and values")
        return {str(key): _converted(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number:
        return value
    if hint is int and is_number and float(value).is_integer():
        return int(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, (str, int, float)):
        return str(value)
    raise ProfileError(f"{where} is {value!r}, must be {_WORDS[hint]}")


_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
