"""Make a policy of its module and its knobs, with every knob checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

from policies.contract import Context, Policy, PolicyError
from policies.knobs import variant_of
from tracer.records import make_record
from tracer.schema import choices

LARGEST_KNOB = 10**15  # compiled code counts in 64 bits, and adds knobs up


class PolicyModule(Protocol):
    """What a policy's file has, or what stands for one."""

    Knobs: type[Any]  # a dataclass

    def build(self, knobs: Any, context: Context) -> Policy:
        """The policy with these knobs."""
        ...


def build_from(module: PolicyModule, name: str, knobs: Mapping[str, Any] | object, context: Context) -> Policy:
    """The policy that a module makes, ready for a run.

    Args:
        module: of the policy.
        name: of it, for messages.
        knobs: those that differ from their defaults, by name, or the policy's whole Knobs.
        context: what it may be built from.

    Raises:
        PolicyError: a knob or its value is not allowed, or the context lacks what the policy needs.
    """
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
    built = module.build(made, replace(context, policy=name))
    return replace(built, variant=variant_of(made))
