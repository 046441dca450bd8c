"""`oled-simulate`: replay a trace under a policy in simulated time, once or over a grid."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments import collect
from experiments import config as schema
from experiments.calibration import context_of
from experiments.cli import hydra_command
from experiments.collect import shown, table_of
from experiments.identity import identity
from experiments.keys import refuse_unknown
from experiments.profiles import profile_hash
from experiments.run import simulate
from experiments.table import format_table
from tracer.files import metadata_hash
from tracer.shipped import find_trace
from tracer.store import TraceReader


def main() -> None:
    """Entry point of the command."""
    schema.register(sys.argv[1:])
    hydra_command("oled-simulate", "simulate", run, collect.finish)


def run(config: DictConfig) -> None:
    """Run one configuration and write its files; print its table, unless it is a cell of a multirun."""
    refuse_unknown(config, schema.Simulate)  # knobs and the sizes of a shape are checked where they are used
    settings = HydraConfig.get()
    overrides = list(settings.overrides.task)
    directory = Path(settings.runtime.output_dir)
    is_cell = settings.mode == RunMode.MULTIRUN
    policy, knobs = schema.policy_of(config.policy, settings.runtime.choices["policy"])
    reader = TraceReader(find_trace(config.trace))
    profile = schema.hardware_of(config.hardware, overrides)
    record: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    if config.output.decisions is None:
        record["output"]["decisions"] = not is_cell
    _, calibration = context_of(reader, config.warmup_requests, config.calibration)
    contents = metadata_hash(reader.metadata), profile_hash(profile), calibration
    if is_cell and collect.is_done(directory, identity(record, *contents)):
        return
    result = simulate(
        reader,
        policy,
        config.cache.slots_per_layer,
        profile,
        cache_gib=config.cache.gib,
        knobs=knobs,
        shape=schema.shape_of(config.shape),
        expert_dtype=config.expert_dtype,
        warmup_requests=config.warmup_requests,
        calibration=config.calibration,
        staging_slots=config.staging_slots,
        engine=config.engine,
        seed=config.seed,
        output=directory,
        overwrite=config.output.overwrite,
        per_layer=config.output.per_layer,
        decisions=record["output"]["decisions"],
        timeline=config.output.timeline,
        timeline_from_forward=config.output.timeline_from_forward,
        timeline_forwards=config.output.timeline_forwards,
        config=record,
        overrides=overrides,
        progress=True,
    )
    if not is_cell:
        print(f"{format_table(table_of([result.summary]))}\n\nWritten: {shown(directory)}")


if __name__ == "__main__":
    main()
