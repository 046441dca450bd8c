"""Hydra's side of a grid: the sweeper that gives a launcher the cells in batches, and what a batch does there."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from experiments.cells import Grid, one_thread_each
from experiments.compose import Composer
from experiments.ended import leaving_nothing, was_killed
from experiments.errors import ConfigError
from experiments.grid import NUM_BATCHES, batches, cells
from experiments.messages import USER_ERRORS
from experiments.progress import Progress

_PLUGIN = "hydra_plugins.oledsim"  # Hydra makes sweepers of modules in this package only


class Job(Protocol):
    """What a command does for each configuration."""

    program: str
    run: Callable[[DictConfig], None]
    grid: str


@dataclass
class GridSweeperConf:
    """Keys of `hydra.sweeper`."""

    _target_: str = f"{_PLUGIN}.GridSweeper"
    num_batches: int = NUM_BATCHES  # most jobs that the launcher is given


def register() -> None:
    """Let Hydra find the sweeper, as `hydra/sweeper=grid`."""
    sys.modules[_PLUGIN] = sys.modules[__name__]
    ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridSweeperConf, provider="oledsim")
    Plugins.instance().register(GridSweeper)


class GridSweeper(Sweeper):
    """Every combination of the values on the command line, as a few jobs that run many cells each.

    A job of a launcher costs a composed configuration, a message to another process and, on a cluster, a place in a
    queue; and cells that run in one process one after the other share what they have in common.
    """

    __module__ = _PLUGIN

    def __init__(self, num_batches: int) -> None:
        if not (isinstance(num_batches, int) and num_batches >= 1):
            raise ConfigError(f"hydra.sweeper.num_batches is {num_batches}, must be 1 or more")
        self._num_batches = num_batches

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Hydra's hook: keep what the sweep needs."""
        self._context, self._config, self._job = hydra_context, config, task_function

    def sweep(self, arguments: list[str]) -> None:
        """Run the cells of a command line.

        Raises:
            HydraException, OmegaConfBaseException: a value cannot be used; nothing was run.
            ConfigError: it cannot be launched so.
        """
        loader, config = self._context.config_loader, self._config
        axes = _axes(OverridesParser.create(config_loader=loader).parse_overrides(arguments))
        composer = Composer(loader, config)
        _check(composer, axes)
        found = cells(axes, lambda text: text.partition("=")[2])
        parts = batches(found, self._num_batches)
        directory = Path(config.hydra.sweep.dir).absolute()
        if (directory / "routing.parquet").exists():
            raise ConfigError(f"{directory}: is a trace; a grid needs a directory of its own")
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, directory / "multirun.yaml")
        for left in directory.glob(".*.journal"):  # of a multirun that was killed
            left.unlink(missing_ok=True)
        grid = Grid(self._job.grid, directory / f".{self._job.grid}.journal", os.getpid())
        varied = [key for key, values in axes.items() if len(values) > 1]
        work = [
            [(tuple(cell.values.values()), " ".join(cell.values[key] for key in varied)) for cell in part]
            for part in parts
        ]
        batch = Batches(grid, self._job.run, work, loader, config)
        with leaving_nothing(directory, Progress(self._job.program, grid.journal, len(found))):
            self._launch(batch, [list(part[0].values.values()) for part in parts])

    def _launch(self, batch: Batches, overrides: list[list[str]]) -> None:
        settings, name = self._config.hydra.launcher, self._config.hydra.runtime.choices["hydra/launcher"]
        if "n_jobs" in settings and "batch_size" in settings:  # joblib
            with read_write(settings):
                settings.batch_size = 1  # of ours, which hold many cells
                settings.n_jobs = _num_processes(settings.n_jobs, len(overrides))
        try:
            launcher = Plugins.instance().instantiate_launcher(self._context, batch, self._config)
            with one_thread_each(), warnings.catch_warnings():
                # joblib replaces a process that has grown, as one does that compiles, and loses nothing
                warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
                returned = launcher.launch(overrides, initial_job_idx=0)
            for each in returned:
                _ = each.return_value  # raises what the job raised
        except USER_ERRORS:
            raise
        except Exception as error:  # a launcher can fail in any way; what a cell does wrong does not come here
            if was_killed(error):
                raise
            remote = str(error.__cause__ or "").strip('"\n ').rpartition("\n")[2]  # last line of a process's traceback
            text = " ".join(f"{error} {remote}".split())
            raise ConfigError(f"hydra/launcher={name}: {type(error).__name__}: {text}") from error


@dataclass(frozen=True)
class Batches:
    """What launchers call: job number n runs the cells of batch n, wherever it is."""

    grid: Grid
    run: Callable[[DictConfig], None]
    cells: Sequence[Sequence[tuple[tuple[str, ...], str]]]  # overrides and label, by batch
    loader: ConfigLoader
    master: DictConfig

    def __call__(self, _: DictConfig) -> None:
        """Run the cells of the job that Hydra is in."""
        number = int(HydraConfig.get().job.num)
        self.grid.enter_process()
        composer = _composer_of(self)
        first = sum(map(len, self.cells[:number]))
        for index, (overrides, label) in enumerate(self.cells[number], first):
            self._run_cell(composer, index, overrides, label)

    def _run_cell(self, composer: Composer, index: int, overrides: Sequence[str], label: str) -> None:
        config = composer.compose(overrides)
        with open_dict(config.hydra):
            config.hydra.job.num, config.hydra.job.id = index, str(index)
        settings = HydraConfig.instance()
        before = settings.cfg
        settings.set_config(config)
        try:
            directory = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir).absolute()
            with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
                config.hydra.runtime.output_dir = str(directory)
            settings.set_config(config)  # which copies
            own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            outcome = self.grid.run(label, lambda: self._run_in(directory, own), directory)
            self.grid.note(directory, overrides, outcome.error)
        finally:
            settings.cfg = before

    def _run_in(self, directory: Path, config: DictConfig) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.run(config)


_composers: dict[str, Composer] = {}


def _composer_of(batch: Batches) -> Composer:
    """The one of this process and grid, so that batches share what they composed."""
    if batch.grid.name not in _composers:
        _composers.clear()
        _composers[batch.grid.name] = Composer(batch.loader, batch.master)
    return _composers[batch.grid.name]


def _axes(overrides: Sequence[Override]) -> dict[str, list[str]]:
    """The overrides of each key, as texts: one for each value that it is to have."""
    axes: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            axes[key] = [str(override.input_line)]
        elif override.is_discrete_sweep():
            axes[key] = [f"{key}={_short(value)}" for value in override.sweep_string_iterator()]
            if not axes[key]:
                raise ConfigError(f"{override.input_line}: holds no value; must be one or more")
        else:
            raise ConfigError(f"{override.input_line}: cannot be swept; must be values with commas, range() or glob()")
    return axes


def _short(value: str) -> str:
    """A value as people write it: large whole floats with an exponent, which say the same."""
    if not re.fullmatch(r"-?[1-9]\d{6,}\.0", value):
        return value
    digits = value.removesuffix(".0")
    kept = len(digits.lstrip("-")) % 3 or 3
    kept += digits.startswith("-")
    rest = digits[kept:].rstrip("0")
    return f"{digits[:kept]}{'.' * bool(rest)}{rest}e{len(digits) - kept}"


def _check(composer: Composer, axes: dict[str, list[str]]) -> None:
    """Compose each value of each key once with every choice of groups, so that mistakes are found before the work."""
    groups = [key for key in axes if composer.is_group(key)]
    for choice in product(*(axes[key] for key in groups)):
        first = {key: values[0] for key, values in axes.items()} | dict(zip(groups, choice, strict=True))
        composer.compose(list(first.values()))
        for key in sorted(axes.keys() - set(groups)):
            for text in axes[key][1:]:
                composer.compose(list((first | {key: text}).values()))


def _num_processes(asked: int, num_batches: int) -> int:
    from joblib import effective_n_jobs

    return min(effective_n_jobs(asked), num_batches)
