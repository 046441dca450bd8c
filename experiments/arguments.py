"""The arguments of `simulate` that are plain values, held to their types before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import ConfigError
from experiments.policy import is_own
from tracer.records import make_record
from tracer.schema import WEIGHT_BITS, TraceError
from tracer.store import TraceReader

ENGINES = ("compiled", "des")
REPLAY = "replay"  # what results call the engine of runs on hardware
DEFAULT_SLOTS = 40  # of each layer, where no size is given


@dataclass(frozen=True)
class Arguments:
    """Plain values as `simulate` takes them; where no cache size was given, the default one is filled in."""

    slots_per_layer: int | None
    cache_gib: float | None
    knobs: dict[str, Any] | None
    expert_dtype: str | None
    warmup_requests: int
    calibration: str
    staging_slots: int | None
    engine: str
    seed: int
    overwrite: bool
    per_layer: bool
    decisions: bool
    timeline: bool
    timeline_from_forward: int | None
    timeline_forwards: int | None
    config: dict[str, Any] | None
    overrides: tuple[str, ...]
    progress: bool


def checked(given: Mapping[str, Any]) -> Arguments:
    """The plain values among the arguments of a call, with the others checked too.

    Raises:
        ConfigError: an argument is of another type or beyond what it can be, or two sizes of the cache are given.
        TraceError: the number format is not known.
    """
    values = {name: given[name] for name in Arguments.__annotations__}
    if values["slots_per_layer"] is not None and values["cache_gib"] is not None:
        raise ConfigError("simulate: slots_per_layer and cache_gib both say how large the cache is; give one of them")
    if values["slots_per_layer"] is None and values["cache_gib"] is None:
        values["slots_per_layer"] = DEFAULT_SLOTS
    arguments = make_record(Arguments, values, "simulate", ConfigError)
    for name, kinds in (("trace", (str, Path, TraceReader)), ("output", (str, Path, type(None)))):
        if not isinstance(given[name], kinds) or "\0" in str(given[name]):
            raise ConfigError(f"simulate: {name} is {given[name]!r}, must be a path")
    if not isinstance(given["policy"], str) and not is_own(given["policy"]):
        raise ConfigError(
            f"simulate: policy is {given['policy']!r}, must be text, or a subclass of PlainPolicy or an object of one"
        )
    if arguments.expert_dtype is not None and arguments.expert_dtype not in WEIGHT_BITS:
        raise TraceError(f"expert_dtype is {arguments.expert_dtype!r}, allowed are {', '.join(WEIGHT_BITS)}")
    if arguments.engine not in ENGINES:
        raise ConfigError(f"engine is {arguments.engine!r}, must be one of {', '.join(ENGINES)}")
    if arguments.seed < 0:
        raise ConfigError(f"seed is {arguments.seed}, must be 0 or more")
    return arguments
