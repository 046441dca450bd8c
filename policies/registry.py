"""The policies by name; a new one costs its own file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from policies import (
    fiddler,
    finemoe,
    full,
    gate_ahead,
    hybrimoe,
    ideal_free,
    ideal_min,
    ideal_min_global,
    ideal_prefetch,
    ktransformers,
    lfu,
    lru,
    moe_infinity,
    oled,
    ondemand,
    prev_set,
    sida,
    swapmoe,
)
from policies.build import PolicyModule, build_from
from policies.contract import Context, Policy, PolicyError
from policies.custom import build_custom, installed, installed_module
from tracer.schema import choices

# Each module has a dataclass Knobs and a function build(knobs, context) -> Policy. Its NamedTuples must differ from those
# of other modules in name or in field types: numba dispatches calls from Python by these, and would do so slowly.
POLICIES: dict[str, PolicyModule] = {
    "full": full,
    "ondemand": ondemand,
    "lru": lru,
    "lfu": lfu,
    "prev_set": prev_set,
    "oled": oled,
    "moe_infinity": moe_infinity,
    "finemoe": finemoe,
    "hybrimoe": hybrimoe,
    "ktransformers": ktransformers,
    "fiddler": fiddler,
    "swapmoe": swapmoe,
    "sida": sida,
    "gate_ahead": gate_ahead,
    "ideal_free": ideal_free,
    "ideal_min": ideal_min,
    "ideal_min_global": ideal_min_global,
    "ideal_prefetch": ideal_prefetch,
}


def build_policy(name: str, knobs: Mapping[str, Any] | object, context: Context) -> Policy:
    """The policy of this name, ready for a run.

    Args:
        name: one of POLICIES or of an installed package, or `custom`: a class in a file.
        knobs: those that differ from their defaults, by name, or the policy's whole Knobs.
        context: what it may be built from.

    Raises:
        PolicyError: the name, a knob or its value is not allowed, or the context lacks what the policy needs.
    """
    if name == "custom":
        built = build_custom(cast(Mapping[str, Any], knobs), context)
        require_own_name(built.name)
        return built
    return replace(build_from(policy_module(name), name, knobs, context), name=name)


def require_own_name(name: str) -> None:
    """Refuse a policy of the user's that tables would show as one of ours.

    Raises:
        PolicyError: with the names that are taken.
    """
    if name in (*POLICIES, "custom", "log"):
        raise PolicyError(f"a class {name} would pass for the policy of that name; it must have another")


def policy_module(name: str) -> PolicyModule:
    """The module of this policy, or what stands for that of an installed package: its Knobs and its build.

    Raises:
        PolicyError: there is no such policy, or the package cannot be used.
    """
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]
    if isinstance(name, str) and name in installed():
        return installed_module(name)
    raise PolicyError(f"no policy {name!r}; {choices(str(name), [*POLICIES, *installed(), 'custom'])}")
