"""What the knobs of all policies share: refusing a value that is not allowed, and naming those that were changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from policies.contract import PolicyError


def require_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is none of the allowed ones.

    Raises:
        PolicyError: with the allowed values.
    """
    if value not in allowed:
        raise PolicyError(f"{name} {value!r}: allowed are {', '.join(allowed)}")


def variant_of(knobs: Any) -> str:
    """The knobs that differ from their defaults, as `key=value`, joined by ", "."""
    changed = [(field.name, getattr(knobs, field.name)) for field in fields(knobs)]
    defaults = {field.name: field.default for field in fields(knobs)}
    return ", ".join(f"{name}={_plain(value)}" for name, value in changed if value != defaults[name])


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
