"""Hardware profiles and model shapes as YAML: the shipped ones by name, own ones by path."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from policies.profile import HardwareProfile, ProfileError, Roofline, ShapeCosts
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
    """A shipped model shape by name: sizes to charge for, whatever model the trace is of."""
    return shape_from_dict(_read("shape", name), name)


def profile_from_dict(values: Mapping[str, Any], where: str) -> HardwareProfile:
    """Check the keys and types of a profile and make it; `where` stands in error messages."""
    known = dict(values)
    roofline = known.pop("roofline", None)
    shapes = known.pop("shapes", None) or ()
    return _record(
        HardwareProfile,
        {
            **known,
            "policy_ns": dict(known.get("policy_ns") or {}),
            "assumed": tuple(known.get("assumed") or ()),
            "roofline": None if roofline is None else _record(Roofline, roofline, f"{where}: roofline"),
            "shapes": tuple(_record(ShapeCosts, entry, f"{where}: shapes[{i}]") for i, entry in enumerate(shapes)),
        },
        where,
    )


def shape_from_dict(values: Mapping[str, Any], where: str) -> ModelShape:
    """Check the keys and types of a model shape and make it."""
    return _record(ModelShape, {**values, "layer_ids": tuple(values.get("layer_ids") or ())}, where)


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
    else:
        raise ProfileError(
            f"{group} {str(name_or_path)!r}: not known; {choices(str(name_or_path), names(group))}, or the path of a .yaml file"
        )
    try:
        values = yaml.load(text, _NumberLoader)
    except yaml.YAMLError as error:
        raise ProfileError(f"{name_or_path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ProfileError(f"{name_or_path}: must hold keys and values")
    return values


class _NumberLoader(yaml.SafeLoader):
    """YAML 1.1 reads 55e9 as text; people write rates so, and mean a number."""


_NumberLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _record(kind: type, values: Any, where: str) -> Any:
    """Make a dataclass from a mapping whose keys and number types were checked."""
    if not isinstance(values, Mapping):
        raise ProfileError(f"{where}: must hold keys and values, found {values!r}")
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
    made = {}
    for key, value in values.items():
        made[key] = _checked(value, str(allowed[key].type), f"{where}: {key}")
    try:
        return kind(**made)
    except TraceError as error:
        raise ProfileError(f"{where}: {error}") from None


def _checked(value: Any, type_name: str, where: str) -> Any:
    """One value, refused if its YAML type is not the field's."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if type_name in ("float", "float | None"):
        if number or (value is None and "None" in type_name):
            return value
        raise ProfileError(f"{where} is {value!r}, must be a number")
    if type_name == "int":
        if number and int(value) == value:
            return int(value)
        raise ProfileError(f"{where} is {value!r}, must be a whole number")
    if type_name == "str":
        if isinstance(value, (str, int, float)) or hasattr(value, "isoformat"):
            return str(value)
        raise ProfileError(f"{where} is {value!r}, must be text")
    if type_name == "bool":
        if isinstance(value, bool):
            return value
        raise ProfileError(f"{where} is {value!r}, must be true or false")
    if type_name == "tuple[float, float, float]":
        items = tuple(value) if isinstance(value, (list, tuple)) else ()
        if len(items) == 3 and all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items):
            return items
        raise ProfileError(f"{where} is {value!r}, must be three numbers [a, b, c]")
    if type_name == "Mapping[str, float]" and isinstance(value, Mapping):
        for name, item in value.items():
            _checked(item, "float", f"{where}.{name}")
    return value
