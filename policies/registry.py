"""The policies by name; a new one costs its own file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

from policies import (
    finemoe,
    full,
    gate_ahead,
    hybrimoe,
    ideal_free,
    ideal_min,
    ideal_min_global,
    ideal_prefetch,
    lfu,
    lru,
    moe_infinity,
    oled,
    ondemand,
    prev_set,
)
from policies.contract import Context, Policy, PolicyError
from policies.knobs import variant_of
from tracer.records import make_record
from tracer.schema import choices

LARGEST_KNOB = 10**15  # compiled code counts in 64 bits, and adds knobs up

# Each module has a dataclass Knobs and a function build(knobs, context) -> Policy. Its NamedTuples must differ from those
# of other modules in name or in field types: numba dispatches calls from Python by these, and would do so slowly.
POLICIES: dict[str, ModuleType] = {
    "full": full,
    "ondemand": ondemand,
    "lru": lru,
    "lfu": lfu,
    "prev_set": prev_set,
    "oled": oled,
    "moe_infinity": moe_infinity,
    "finemoe": finemoe,
    "hybrimoe": hybrimoe,
    "gate_ahead": gate_ahead,
    "ideal_free": ideal_free,
    "ideal_min": ideal_min,
    "ideal_min_global": ideal_min_global,
    "ideal_prefetch": ideal_prefetch,
}


def build_policy(name: str, knobs: Mapping[str, Any] | object, context: Context) -> Policy:
    """The policy of this name, ready for a run.

    Args:
        name: one of POLICIES.
        knobs: those that differ from their defaults, by name, or the policy's whole Knobs.
        context: what it may be built from.

    Raises:
        PolicyError: the name, a knob or its value is not allowed, or the context lacks what the policy needs.
    """
    module = policy_module(name)
    if isinstance(knobs, module.Knobs):
        knobs = vars(knobs)
    if not isinstance(knobs, Mapping):
        raise PolicyError(f"{name} was given {type(knobs).__name__}, needs its own Knobs or a mapping")
    allowed = [field.name for field in fields(module.Knobs)]
    for key in knobs:
        if key not in allowed:
            raise PolicyError(f"{name} has no knob {key!r}; {choices(str(key), allowed)}")
    made = make_record(module.Knobs, knobs, name, PolicyError)
    for key, value in vars(made).items():
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST_KNOB:
            raise PolicyError(f"{key} is {value:g}, must be within {LARGEST_KNOB:g}")
    return replace(module.build(made, replace(context, policy=name)), variant=variant_of(made))


def policy_module(name: str) -> ModuleType:
    """The module of this policy: its Knobs and its build.

    Raises:
        PolicyError: there is no such policy.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise PolicyError(f"no policy {name!r}; {choices(str(name), POLICIES)}")
    return POLICIES[name]
