"""Types and defaults of the command line: every key of `oled-simulate`, and the policies' knobs as a config group."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, asdict, dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from experiments import decision_log
from experiments.errors import ConfigError
from experiments.policy import FROM_FILE, heeded
from experiments.profiles import load_profile, profile_from_dict, shape_from_dict
from policies.build import PolicyModule
from policies.custom import installed
from policies.profile import HardwareProfile
from policies.registry import POLICIES
from tracer.schema import ModelShape

_PLAIN = ("expert_dtype", "warmup_requests", "calibration", "staging_slots", "engine", "seed")


def _default(entry: Field[Any]) -> Any:
    """Default of a dataclass field as Hydra knows it."""
    if entry.default_factory is not NO_DEFAULT:
        return field(default_factory=entry.default_factory)
    return MISSING if entry.default is NO_DEFAULT else entry.default


# Keys of a hardware profile; the types of their values are checked where the profile is made.
Hardware = make_dataclass(
    "Hardware",
    [("path", Any, None), *((entry.name, Any, _default(entry)) for entry in fields(HardwareProfile))],
    namespace={"__module__": __name__},
)


@dataclass
class Cache:
    """Size of the expert cache on the GPU, by one of these; by neither it has 40 slots for each layer."""

    slots_per_layer: int | None = None
    gib: float | None = None  # GiB of expert slots of all layers, staging not included


@dataclass
class Output:
    """Where results go, and in what detail."""

    dir: str = MISSING  # outputs/DATE/TIME, for a multirun multirun/DATE/TIME
    overwrite: bool = False  # replace a finished run of another configuration
    per_layer: bool = False  # result.parquet with one row for each layer execution
    timeline: bool = False  # timeline.pftrace, which ui.perfetto.dev shows
    timeline_from_forward: int | None = None  # first one shown; null is the first decode forward that is counted
    timeline_forwards: int | None = 20  # how many; null is all that follow
    decisions: bool | None = None  # decisions.parquet; null writes it for a single run, not for cells of a multirun


@dataclass
class Simulate:
    """Every key of `oled-simulate`."""

    trace: str = MISSING  # name of a shipped trace, or a path
    policy: Any = MISSING  # group: a policy with its knobs
    hardware: Hardware = MISSING  # pyright: ignore[reportInvalidTypeForm]  # group: a machine; `path` names an own file
    shape: Any = MISSING  # group: whose sizes are charged
    cache: Cache = field(default_factory=Cache)
    expert_dtype: str | None = None  # number format of the experts, if not the shape's
    warmup_requests: int = 1
    calibration: str = "auto"  # shipped record of the traced model, else the warm-up requests; `warmup`; or a path
    staging_slots: int | None = None  # GPU slots beyond the cache; null is twice the transfer chunk
    engine: str = "compiled"  # or des, the reference, which says the same and takes longer
    seed: int = 0
    output: Output = field(default_factory=Output)


def register(arguments: Sequence[str] = ()) -> None:
    """Put the schemas where Hydra finds them; the YAML files in conf/ only choose values.

    Args:
        arguments: the command line. Where it chooses policies with a `path` beside others, all have the keys
            `path` and `knobs`, as one command line sets them for all cells of a grid; others heed neither.
    """
    store = ConfigStore.instance()
    store.store(name="simulate_schema", node=Simulate)
    store.store(group="shape", name="trace", node={})
    chosen = {name for text in arguments if text.startswith("policy=") for name in re.findall(r"[\w.-]+", text[7:])}
    for name in _modules():
        node = OmegaConf.structured(_policy_class(name, not chosen.isdisjoint(FROM_FILE)))
        store.store(group="policy", name=name, node=_open(node))
    for name in installed().keys() - POLICIES.keys() - set(FROM_FILE):
        store.store(group="policy", name=name, node=_open(OmegaConf.create({"name": name, "path": None, "knobs": {}})))
    store.store(
        group="policy", name="custom", node=_open(OmegaConf.create({"name": None, "path": MISSING, "knobs": {}}))
    )


def policy_of(config: DictConfig, choice: str) -> tuple[str, dict[str, Any]]:
    """Name and knobs of the policy that a configuration asks for.

    Args:
        config: the node `policy`.
        choice: option of the group that its knobs are from.

    Raises:
        ConfigError: the name is that of another policy.
    """
    knobs = heeded(OmegaConf.to_container(config, throw_on_missing=True))  # type: ignore[arg-type]
    if choice == "custom":
        return choice, knobs
    name = knobs.pop("name")
    if name != choice:
        raise ConfigError(f"policy.name is {name!r} with the knobs of {choice}; a policy is chosen by policy={name}")
    return name, knobs["knobs"] if choice in installed() else knobs


def arguments_of(config: DictConfig) -> dict[str, Any]:
    """Arguments of `simulate` that a command's configuration asks for, within Hydra's run of it.

    Where `output.decisions` is null, single runs write decisions, and cells of a multirun do not.

    Raises:
        ConfigError, ProfileError: one of them is not what it must be.
    """
    settings = HydraConfig.get()
    is_cell, overrides = settings.mode == RunMode.MULTIRUN, list(settings.overrides.task)
    record: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    if record["output"]["decisions"] is None:
        record["output"]["decisions"] = not is_cell
    policy, knobs = policy_of(config.policy, settings.runtime.choices["policy"])
    return {
        **{key: record[key] for key in _PLAIN},
        "trace": config.trace,
        "policy": policy,
        "knobs": knobs,
        "hardware": hardware_of(config.hardware, overrides),
        "shape": shape_of(config.shape),
        "slots_per_layer": config.cache.slots_per_layer,
        "cache_gib": config.cache.gib,
        **{key: value for key, value in record["output"].items() if key != "dir"},
        "output": Path(settings.runtime.output_dir),
        "config": record,
        "overrides": overrides,
        "progress": not is_cell,
    }


def hardware_of(config: DictConfig, overrides: Sequence[str]) -> HardwareProfile:
    """The machine that a configuration asks for.

    Args:
        config: the node `hardware`.
        overrides: what stood on the command line; with `hardware.path` the keys set there go over the file's.

    Raises:
        ProfileError: the file cannot be read, or a key or value is not one of a profile.
    """
    values: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    path = values.pop("path")
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"hardware.path is {path!r}, must be the path of a .yaml file")
    if path is None:
        missing = [key for key, value in values.items() if value == MISSING]
        known = {key: value for key, value in values.items() if key not in missing}
        return profile_from_dict(known, f"hardware={known.get('name', '')}")
    merged = OmegaConf.create(asdict(load_profile(path)))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group, _, key = override.key_or_group.partition(".")
        if group != "hardware":
            continue
        value = override.value()
        changes = {key: value} if key else value if isinstance(value, dict) else {}  # a text chooses of the group
        for name, changed in changes.items():
            if name != "path":
                OmegaConf.update(merged, str(name), changed)
    return profile_from_dict(OmegaConf.to_container(merged), str(path))  # type: ignore[arg-type]


def shape_of(config: DictConfig) -> ModelShape | Literal["trace"]:
    """The sizes that a configuration charges; an empty node means those of the traced model."""
    values: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    return shape_from_dict(values, "shape") if values else "trace"


_BESIDE = " beside others"  # ends the names of classes with the keys `path` and `knobs`


@cache
def _policy_class(name: str, is_beside: bool) -> type:
    """A schema with the knobs of a policy: mutable, because Hydra cannot override keys of a frozen dataclass."""
    knobs = _modules()[name].Knobs
    hints = get_type_hints(knobs)
    entries = [(entry.name, hints[entry.name], _default(entry)) for entry in fields(knobs)]
    beside = [("path", Any, None), ("knobs", dict[str, Any], field(default_factory=dict))] if is_beside else []
    own = {entry.name for entry in fields(knobs)}
    beside = [entry for entry in beside if entry[0] not in own]
    return make_dataclass(
        f"policy={name}{_BESIDE * is_beside}",
        [("name", str, name), *entries, *beside],
        namespace={"__module__": __name__},
    )


def __getattr__(name: str) -> type:
    """The schemas of policies, which processes of a launcher look for by name when they are sent a configuration."""
    policy = name.removeprefix("policy=").removesuffix(_BESIDE)
    if not name.startswith("policy=") or policy not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _policy_class(policy, name.endswith(_BESIDE))


def _modules() -> dict[str, PolicyModule]:
    return {**POLICIES, "log": decision_log}


def _open(node: DictConfig) -> DictConfig:
    """The node, to whose `knobs` any key can be added."""
    if "knobs" in node:
        node.knobs._set_flag("struct", False)
    return node
