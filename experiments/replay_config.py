"""Keys of `oled-replay`: those of `oled-simulate`, and how the hardware is used."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.config_store import ConfigStore

from experiments import config
from experiments.arguments import REPLAY
from experiments.errors import ConfigError
from replay.layout import FACTORS

GENERATED = "generated"
MODES = ("closed", "open")


@dataclass
class Conditions:
    """How a run uses the hardware."""

    mode: str = "closed"  # the policy decides while it runs; or open, it executes what the simulator decided
    device: str | None = None  # cuda, cuda:N or cpu; null is cuda where there is one
    h2d_bytes_factor: int = 1
    forwards: int | None = None  # of the trace, the first; null is all
    weights: str = GENERATED  # or the directory of a checkpoint
    distinct_experts: int | None = None  # with host memory of their own; null is all
    allow_pageable: bool = False
    slow_link: bool = False
    repeat: int = 0  # tells runs of one configuration apart


@dataclass
class Replay(config.Simulate, Conditions):
    """Every key of `oled-replay`."""

    engine: str = REPLAY
    # as given: Hydra takes any number for a truth value
    allow_pageable: Any = False
    slow_link: Any = False


def register(arguments: Sequence[str]) -> None:
    """Put the schemas where Hydra finds them."""
    config.register(arguments)
    ConfigStore.instance().store(name="replay_schema", node=Replay)


def conditions_of(record: Mapping[str, Any]) -> Conditions:
    """The conditions that a configuration asks for.

    Raises:
        ConfigError: one of them is beyond what it can be.
    """
    found = Conditions(**{entry.name: record[entry.name] for entry in fields(Conditions)})
    for key, value, allowed in (
        ("engine", record["engine"], (REPLAY,)),
        ("mode", found.mode, MODES),
        ("h2d_bytes_factor", found.h2d_bytes_factor, FACTORS),
    ):
        if value not in allowed:
            raise ConfigError(f"{key} is {_shown(value)}, allowed are {', '.join(map(str, allowed))}")
    for key in ("allow_pageable", "slow_link"):
        value = getattr(found, key)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {_shown(value)}, must be true or false")
    for key in ("forwards", "distinct_experts"):
        value = getattr(found, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key} is {value}, must be 1 or more, or null for all")
        if value is not None and value > sys.maxsize:
            raise ConfigError(f"{key} is {value}, must be at most {sys.maxsize}, or null for all")
    if found.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", found.device):
        raise ConfigError(f"device is {_shown(found.device)}, allowed are cuda, cuda:N and cpu")
    if record["output"]["timeline"]:
        raise ConfigError("output.timeline: oled-compare draws the timelines of replays, beside the simulated ones")
    return found


def _shown(value: Any) -> str:
    """A value as it was typed, where there is anything to see of it."""
    return "null" if value is None else str(value) if str(value).strip() else repr(value)
