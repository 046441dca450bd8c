"""`oled-replay`: run a policy on a trace with real copies, kernels and CPU experts, once or over a grid."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments import collect, replay_machine
from experiments import config as schema
from experiments.cli import hydra_command
from experiments.collect import shown, table_of
from experiments.columns import WIDTH, wrap
from experiments.kept import of_this_process
from experiments.keys import refuse_unknown
from experiments.replay_config import Replay, conditions_of, register
from experiments.replay_result import write
from experiments.run import setting_for
from experiments.table import format_table


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
    arguments = schema.arguments_of(config)
    directory, kept = arguments["output"], of_this_process()
    conditions = conditions_of(arguments["config"])
    setting = setting_for(arguments | {"engine": "compiled"}, kept)  # whose settings are the same
    is_cell = HydraConfig.get().mode == RunMode.MULTIRUN
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


if __name__ == "__main__":
    main()
