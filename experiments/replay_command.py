"""`oled-replay`: run a policy on a trace with real copies, kernels and CPU experts, once or over a grid."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments import collect, replay_machine
from experiments import config as schema
from experiments.cli import hydra_command
from experiments.collect import shown, table_of
from experiments.columns import WIDTH, wrap
from experiments.kept import Kept, of_this_process
from experiments.keys import refuse_unknown
from experiments.replay_config import ENGINE, Replay, conditions_of, register
from experiments.replay_result import write
from experiments.run import setting_for
from experiments.setting import Setting
from experiments.table import format_table

_PLAIN = ("expert_dtype", "warmup_requests", "calibration", "staging_slots", "seed")


def main() -> None:
    """Entry point of the command."""
    register(sys.argv[1:])
    try:
        hydra_command("oled-replay", "replay", run, collect.finish)
    finally:
        replay_machine.of_this_process().close()


def run(config: DictConfig) -> None:
    """Run one configuration and write its files; print its table, unless it is a cell of a multirun."""
    refuse_unknown(config, Replay)
    settings = HydraConfig.get()
    directory = Path(settings.runtime.output_dir)
    is_cell = settings.mode == RunMode.MULTIRUN
    record: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    if config.output.decisions is None:
        record["output"]["decisions"] = not is_cell
    conditions = conditions_of(record)
    kept = of_this_process()
    setting = _setting(config, record, settings, directory, kept, has_bars=not is_cell)
    summary = write(setting, conditions, directory, kept, replay_machine.of_this_process(), skip_done=is_cell)
    if not is_cell and summary is not None:
        print(
            f"{wrap(_measured(summary), WIDTH)}\n\n{format_table(table_of([summary]))}\n\nWritten: {shown(directory)}"
        )


def _measured(summary: Mapping[str, Any]) -> str:
    """What the table does not say: that nothing in it is simulated, and what the executor took."""
    host, decision = summary["host_us_per_layer"], summary["decide_us_per_layer"]
    return (
        f"replayed with real copies of {summary['h2d_bytes_factor']} x the bytes, mode {summary['mode']}, device "
        f"{summary['device']}; a layer took {host:.0f} us of the host's time and {decision:.0f} us to decide; "
        f"{summary['machine']}"
    )


def _setting(
    config: DictConfig, record: Mapping[str, Any], settings: Any, directory: Path, kept: Kept, *, has_bars: bool
) -> Setting:
    """What is run, but for the conditions."""
    overrides = list(settings.overrides.task)
    policy, knobs = schema.policy_of(config.policy, settings.runtime.choices["policy"])
    arguments = {key: record[key] for key in _PLAIN} | {
        "trace": config.trace,
        "policy": policy,
        "knobs": knobs,
        "hardware": schema.hardware_of(config.hardware, overrides),
        "shape": schema.shape_of(config.shape),
        "slots_per_layer": config.cache.slots_per_layer,
        "cache_gib": config.cache.gib,
        **{key: value for key, value in record["output"].items() if key != "dir"},
        "engine": "compiled",  # whose settings are the same
        "output": directory,
        "config": record,
        "overrides": overrides,
        "progress": has_bars,
    }
    setting = setting_for(arguments, kept)
    return replace(setting, given=replace(setting.given, engine=ENGINE))


if __name__ == "__main__":
    main()
