"""Runs of named policies in simulated time, to be drawn as points beside curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl
from omegaconf import OmegaConf
from yaml import YAMLError

from experiments import metrics
from experiments.curves_table import SCHEMA
from experiments.errors import ConfigError
from experiments.identity import UNSIZED
from experiments.run import simulate
from policies.contract import PolicyError
from tracer.schema import ModelShape
from tracer.store import TraceReader


@dataclass(frozen=True)
class Point:
    """One run."""

    policy: str
    knobs: dict[str, Any]
    slots_per_layer: int


def points_of(policies: str, slots: str, shape: ModelShape) -> list[Point]:
    """The runs that two lists with commas ask for: every policy at every size, once where it ignores the size.

    Args:
        policies: each `NAME` or `NAME KNOB=VALUE ...`.
        slots: expert slots for each layer.
        shape: of the trace.

    Raises:
        ConfigError: they cannot be read, or no cache has such a size.
    """
    if not policies.strip():
        return []
    sizes = [text.strip() for text in slots.split(",")]
    if not all(size.isdecimal() and 1 <= int(size) <= shape.num_experts for size in sizes):
        raise ConfigError(
            f"points_slots={slots}: must be whole numbers from 1 to {shape.num_experts}, the experts of a layer of this trace"
        )
    points = []
    for text in policies.split(","):
        name, *knobs = text.split() or [""]
        if not name or any("=" not in knob for knob in knobs):
            raise ConfigError(f"points={policies}: {text!r} must be NAME or NAME KNOB=VALUE ...")
        try:
            values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(knobs))
        except YAMLError:
            raise ConfigError(f"points={policies}: {text!r} has a value that cannot be read") from None
        points += [Point(name, values, int(size)) for size in (sizes[:1] if name in UNSIZED else sizes)]
    return points


def run_point(
    point: Point, reader: TraceReader, hardware: str, shape: str, warmup_requests: int, facts: dict[str, Any]
) -> pl.DataFrame:
    """One row of the table of curves, for all layers together.

    Raises:
        PolicyError: the policy cannot be run so; other errors as of `simulate`.
    """
    try:
        result = simulate(
            reader,
            point.policy,
            point.slots_per_layer,
            hardware,
            knobs=point.knobs,
            shape=shape,
            warmup_requests=warmup_requests,
            progress=True,
        )
    except PolicyError as error:
        raise PolicyError(f"points: {point.policy} with {point.slots_per_layer} slots a layer: {error}") from error
    summary, decoded = result.summary, metrics.decode(result.forwards)
    row = {
        "curve": summary["policy"] + (f" ({summary['variant']})" if summary["variant"] else ""),
        "is_point": True,
        "policy": summary["policy"],
        "layer": None,
        "hits": int(decoded["num_hits"].sum()),
        "activated": int(decoded["num_activated"].sum()),
        **{name: summary[name] for name in ("misses", "pool", "slots_per_layer", "hit_ratio")},
        **{name: summary[name] for name in ("utilization", "utilization_slot_weighted")},
        **facts,
    }
    return pl.DataFrame([row], schema=SCHEMA)
