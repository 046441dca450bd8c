"""What the knobs of all policies share: refusing a value that is not allowed, and naming those that were changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from policies.contract import PolicyError

_UNLIMITED = int(np.iinfo(np.int64).max)


def require_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is none of the allowed ones.

    Raises:
        PolicyError: with the allowed values.
    """
    if value not in allowed:
        raise PolicyError(f"{name} {value!r}: allowed are {', '.join(allowed)}")


def require_limit(name: str, value: int | None) -> None:
    """Refuse a limit below 0; None is no limit.

    Raises:
        PolicyError: with what is allowed.
    """
    if value is not None and value < 0:
        raise PolicyError(f"{name} is {value}: must be at least 0, or null for no limit")


def limit_of(value: int | None) -> int:
    """A limit as compiled code compares with it: that of None is never reached."""
    return _UNLIMITED if value is None else value


def variant_of(knobs: Any) -> str:
    """The knobs that differ from their defaults, as `key=value`, joined by ", "."""
    changed = [(field.name, getattr(knobs, field.name)) for field in fields(knobs)]
    defaults = {field.name: field.default for field in fields(knobs)}
    return ", ".join(f"{name}={_plain(value)}" for name, value in changed if value != defaults[name])


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
