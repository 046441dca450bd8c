"""`sweep`: the grid of a Python call, run in parallel processes, as one table."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from joblib import Parallel, delayed, effective_n_jobs

from experiments.cells import Grid, Outcome, one_thread_each
from experiments.collect import collect, name_of_cell, write_table
from experiments.ended import leaving_nothing
from experiments.errors import ConfigError
from experiments.grid import batches, cells
from experiments.kept import of_this_process
from experiments.policy import OwnPolicy, is_own, name_of
from experiments.profiles import changes_of
from experiments.progress import Progress
from experiments.run import DEFAULTS, run_unless_done, setting_for
from policies.profile import HardwareProfile
from tracer.schema import ModelShape

Numbered = tuple[int, str, dict[str, Any]]  # a cell: its number, what tells it from others, and its arguments


def sweep(
    trace: str | Path | Sequence[str | Path],
    policy: Any = "oled",
    slots_per_layer: int | Sequence[int | None] | None = None,
    hardware: str | Path | HardwareProfile | Sequence[str | Path | HardwareProfile] = "rtx5090",
    *,
    cache_gib: float | Sequence[float] | None = None,
    knobs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    shape: str | ModelShape | Sequence[str | ModelShape] = "trace",
    expert_dtype: str | Sequence[str | None] | None = None,
    warmup_requests: int | Sequence[int] = 1,
    calibration: str | Sequence[str] = "auto",
    staging_slots: int | Sequence[int | None] | None = None,
    engine: str | Sequence[str] = "compiled",
    seed: int | Sequence[int] = 0,
    output: str | Path | None = None,
    decisions: bool = False,
    jobs: int | None = None,
    progress: bool = False,
) -> pl.DataFrame:
    """Run `simulate` for every combination of values, and give the results as one table.

    Arguments before `output` are those of `simulate`, each a value or a list of values. Combinations that are the same
    run, as sizes are for `full` and `ondemand`, run once. Runs share the trace and, where only the machine differs, the
    decisions.

    Args:
        trace: as for `simulate`, as all arguments before `output`.
        policy: or pairs of a policy and its knobs, as `("oled", {"coop": False})`.
        slots_per_layer: of the cache.
        hardware: machines.
        cache_gib: of the cache, instead of `slots_per_layer`.
        knobs: of every policy.
        shape: whose sizes are charged.
        expert_dtype: number format of the experts.
        warmup_requests: that are not counted.
        calibration: what policies learn beforehand.
        staging_slots: for experts in transit.
        engine: that simulates.
        seed: of policies that draw random numbers.
        output: directory in which each run has one of its own, beside sweep.parquet. Started again with the same
            directory, a sweep goes on where it stopped; other runs that lie there are in the table too.
        decisions: write decisions.parquet for each run.
        jobs: processes; None is one for each processor, 1 runs in this one.
        progress: show a bar on stderr when it is a terminal.

    Returns:
        One row for each run: its summary, `run`, the name of its directory, and a column for each argument that varies
        and that no other column shows; in an order that does not depend on that of the values.

    Raises:
        ConfigError: runs failed or were killed, of which it says why; what is finished is kept in `output`.
    """
    given = {key: value for key, value in locals().items() if key not in ("jobs", "progress", "output")}
    axes = {key: _values(value) for key, value in given.items()}
    found = cells(axes, lambda value: name_of(_with_knobs(value)[0]))
    varied = [key for key, values in axes.items() if len(values) > 1]
    numbers = count()
    work = [[_numbered(next(numbers), cell.values, varied) for cell in part] for part in batches(found)]
    with ExitStack() as stack:
        directory = Path(output or stack.enter_context(TemporaryDirectory(prefix="oledsim-"))).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        name = secrets.token_hex(8)
        grid = Grid(name, directory / f".{name}.journal", os.getpid())
        bar = Progress("sweep", grid.journal, len(found), has_lines=False, has_bar=progress)
        with leaving_nothing(directory, bar), one_thread_each():
            num_jobs = min(effective_n_jobs(-1 if jobs is None else jobs), len(work))
            run_all: Any = Parallel(n_jobs=num_jobs, batch_size=1)  # pyright: ignore[reportArgumentType]
            outcomes = run_all(delayed(_run_batch)(grid, directory, part) for part in work)
        failed = [outcome for part in outcomes for outcome in part if outcome.error is not None]
        if failed:
            texts = "; ".join(f"{outcome.label or 'the run'}: {outcome.error}" for outcome in failed)
            raise ConfigError(f"sweep: {len(failed)} of {len(found)} runs failed: {texts}")
        table = collect(directory, grid.name).table
        if output is not None:
            write_table(table, directory / "sweep.parquet")
    return table


def _run_batch(grid: Grid, directory: Path, part: Sequence[Numbered]) -> list[Outcome]:
    """Run some cells in this process."""
    grid.enter_process()
    return [grid.run(cell[1], partial(_run_cell, grid, directory, cell)) for cell in part]


def _run_cell(grid: Grid, directory: Path, cell: Numbered) -> None:
    number, label, arguments = cell
    kept = of_this_process()
    setting = setting_for(arguments, kept)
    own = directory / name_of_cell(setting.config())
    if not isinstance(setting.policy, str):  # another class can have its name
        own = own.with_name(f"{own.name}-{number}")
    run_unless_done(arguments | {"output": own}, kept)
    grid.note(own, [label], None)


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple, range)) and not _is_pair(value) else [value]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _with_knobs(value: Any) -> tuple[str | OwnPolicy, Mapping[str, Any]]:
    return value if _is_pair(value) else (value, {})


def _numbered(number: int, values: Mapping[str, Any], varied: Sequence[str]) -> Numbered:
    policy, knobs = _with_knobs(values["policy"])
    arguments = {**DEFAULTS, **values} | {"policy": policy, "knobs": {**(values["knobs"] or {}), **knobs}}
    return number, " ".join(f"{key}={_shown(values[key])}" for key in varied), arguments


def _shown(value: Any) -> str:
    """A value of an argument as a message shows it."""
    if isinstance(value, HardwareProfile):
        changes = changes_of(value)
        return f"{value.name} with {changes}" if changes else value.name
    policy, knobs = _with_knobs(value)
    if is_own(policy):
        return name_of(policy)
    return " ".join([str(policy), *(f"{key}={knob}" for key, knob in knobs.items())])
