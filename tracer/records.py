"""Plain data from JSON and YAML, and the dataclasses made of it, with every key and type checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tracer.schema import TraceError, choices

Record = TypeVar("Record")

LARGEST_INT = 10**300  # what has a float


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        TraceError: it cannot be read, is not UTF-8, not JSON, or not an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise TraceError(f"{path}: must hold a JSON object, found {type(values).__name__}")
    return values


def make_record(kind: type[Record], values: Any, where: str, error: type[ValueError]) -> Record:
    """Make a dataclass, and those within it, from mappings.

    Args:
        kind: of which all fields are numbers, texts, truth values, or tuples, mappings and dataclasses of them.
        values: its fields by name; those with a default may be missing.
        where: stands at the head of messages.
        error: what to raise.

    Raises:
        error: a key is unknown or missing, or a value is of another type or is refused by the dataclass itself.
    """
    if not isinstance(values, Mapping):
        raise error(f"{where} is {values!r}, must hold keys and values")
    allowed = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for key in values:
        if key not in allowed:
            raise error(f"{where}: unknown key {key!r}; {choices(str(key), allowed)}")
    missing = [
        name
        for name, field in allowed.items()
        if name not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise error(f"{where}: missing {', '.join(missing)}")
    hints = get_type_hints(kind)
    made = {key: _converted(value, hints[key], f"{where}: {key}", error) for key, value in values.items()}
    try:
        return kind(**made)
    except ValueError as refusal:
        raise error(f"{where}: {refusal}") from None


def _converted(value: Any, hint: Any, where: str, error: type[ValueError]) -> Any:
    """A value as a field of this type holds it, refused if it is of another type."""
    arguments, origin = get_args(hint), get_origin(hint)
    if hint is Any:
        return value
    if NoneType in arguments:
        return None if value is None else _converted(value, arguments[0], where, error)
    if is_dataclass(hint):
        return make_record(hint, value, where, error)  # type: ignore[arg-type]  # a class, not an instance
    if origin is tuple:
        is_long = arguments[-1] is Ellipsis
        if not isinstance(value, (list, tuple)) or not (is_long or len(value) == len(arguments)):
            raise error(f"{where} is {value!r}, must be a list{'' if is_long else f' of {len(arguments)}'}")
        return tuple(_converted(item, arguments[0], f"{where}[{i}]", error) for i, item in enumerate(value))
    if origin in (Mapping, dict):
        if not isinstance(value, Mapping):
            raise error(f"{where} is {value!r}, must hold keys and values")
        return {str(key): _converted(item, arguments[1], f"{where}.{key}", error) for key, item in value.items()}
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise error(f"{where} is {value}, must be within {LARGEST_INT:g}")
    if hint is float and is_number:
        return value if isinstance(value, (int, float)) else float(value)
    if hint is int and is_number and float(value).is_integer():
        return int(float(value)) if not isinstance(value, int) else value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, (str, int, float)):
        return str(value)
    raise error(f"{where} is {value!r}, must be {_WORDS[hint]}")


_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
