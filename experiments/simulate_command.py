"""`oled-simulate`: replay a trace under a policy in simulated time, once or over a grid."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments import collect, knobs_help  # noqa: F401 - registers what the help asks for
from experiments import config as schema
from experiments.cli import hydra_command
from experiments.collect import shown, table_of
from experiments.kept import of_this_process
from experiments.keys import refuse_unknown
from experiments.run import run_unless_done, simulate
from experiments.table import format_table

_PLAIN = ("expert_dtype", "warmup_requests", "calibration", "staging_slots", "engine", "seed")


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
    record: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    if config.output.decisions is None:
        record["output"]["decisions"] = not is_cell
    policy, knobs = schema.policy_of(config.policy, settings.runtime.choices["policy"])
    plain = {key: record[key] for key in _PLAIN}
    arguments = plain | {
        "trace": config.trace,
        "policy": policy,
        "knobs": knobs,
        "hardware": schema.hardware_of(config.hardware, overrides),
        "shape": schema.shape_of(config.shape),
        "slots_per_layer": config.cache.slots_per_layer,
        "cache_gib": config.cache.gib,
        **{key: value for key, value in record["output"].items() if key != "dir"},
        "output": directory,
        "config": record,
        "overrides": overrides,
        "progress": not is_cell,
    }
    if is_cell:
        run_unless_done(arguments, of_this_process())
        return
    result = simulate(**arguments)
    print(f"{format_table(table_of([result.summary]))}\n\nWritten: {shown(directory)}")


if __name__ == "__main__":
    main()
