"""`oled-simulate`: replay a trace under a policy in simulated time, once or over a grid."""

from __future__ import annotations

import sys

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments import collect, knobs_help  # noqa: F401 - registers what the help asks for
from experiments import config as schema
from experiments.cli import hydra_command
from experiments.collect import shown, table_of
from experiments.kept import of_this_process
from experiments.keys import refuse_unknown
from experiments.run import run_unless_done, simulate
from experiments.table import format_table


def main() -> None:
    """Entry point of the command."""
    schema.register(sys.argv[1:])
    hydra_command("oled-simulate", "simulate", run, collect.finish)


def run(config: DictConfig) -> None:
    """Run one configuration and write its files; print its table, unless it is a cell of a multirun."""
    refuse_unknown(config, schema.Simulate)  # knobs and the sizes of a shape are checked where they are used
    arguments = schema.arguments_of(config)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        run_unless_done(arguments, of_this_process())
        return
    result = simulate(**arguments)
    print(f"{format_table(table_of([result.summary]))}\n\nWritten: {shown(arguments['output'])}")


if __name__ == "__main__":
    main()
