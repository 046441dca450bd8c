"""A multirun as one table: where each cell lies, whether it is done, and all runs that are."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from omegaconf import DictConfig, OmegaConf
from polars import selectors

from experiments.cells import cells_of
from experiments.files import read_run, write_parquet
from experiments.identity import asked, sources
from experiments.policy import has_changed, label
from experiments.ranking import read_forwards, with_differences
from experiments.table import SECTION, format_table
from experiments.whole import whole_file
from policies.registry import POLICIES

_NAMED_BY_COLUMNS = ("policy", "trace", "hardware", "calibration", "cache.slots_per_layer")
_GIB = "cache.gib"
_NAMED_BY_GROUPS = ("policy.", "output.")  # knobs stand in the column variant; what a place is, no number depends on


def cell_name(root: DictConfig) -> str:
    """Directory of a cell in its sweep, the same for the same configuration: resolver `cell_name` of conf/.

    A cell that is run again meets its own result; sizes that a policy ignores share one directory.
    """
    return name_of_cell(asked(OmegaConf.to_container(root)))  # type: ignore[arg-type]


def name_of_cell(config: Mapping[str, Any]) -> str:
    """Directory of a cell by what was asked for."""
    policy = label(config["policy"])
    size = [f"{value}{'gib' * (key == 'gib')}" for key, value in config.get("cache", {}).items()]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10]
    return "-".join([policy, *size, digest])


# at import, so that the processes of a launcher know it too
OmegaConf.register_new_resolver("cell_name", lambda *, _root_: cell_name(_root_), replace=True)


class Collected(NamedTuple):
    """Runs as one table, with every value of their summaries, and in `run` the directory of each.

    `swept` names the columns that were added: one for each key that differs and that no other column shows.
    """

    table: pl.DataFrame
    swept: list[str]
    num_stale: int  # runs left out, for other code than this made them


def collect(sweep: Path, grid: str | None = None) -> Collected:
    """The cells of a grid that did not fail, and other runs that lie whole in its directory.

    Args:
        sweep: directory of a multirun.
        grid: whose cells to look for at any depth; other runs lie directly in `sweep`.
    """
    cells = cells_of(sweep)
    failed = {directory for directory, cell in cells.items() if cell["error"] is not None}
    own = {directory for directory, cell in cells.items() if cell["grid"] == grid}
    beside = {path for path in sweep.iterdir() if path.is_dir() and not path.name.startswith(".")}
    found = {directory: read_run(directory) for directory in sorted(({sweep} | beside | own) - failed)}
    whole = {directory: run for directory, run in found.items() if run is not None}
    runs = {directory: run for directory, run in whole.items() if _is_current(run.manifest)}
    columns = _swept([run.manifest for run in runs.values()])
    swept = [key for key in columns if key != _GIB]  # slots say it
    rows = [
        run.summary | {"run": str(directory.relative_to(sweep))} | {key: column[row] for key, column in columns.items()}
        for row, (directory, run) in enumerate(runs.items())
    ]
    directories = list(runs)
    ranked = with_differences(rows, lambda row: read_forwards(directories[row]), swept)
    return Collected(table_of(ranked, swept), swept, len(whole) - len(runs))


def _is_current(manifest: Mapping[str, Any]) -> bool:
    """Whether a run was made by the code that is here now, ours and that of the user's policy."""
    return manifest.get("sources") == sources() and not has_changed(manifest.get("policy", {}).get("file"))


def table_of(summaries: Iterable[Mapping[str, Any]], swept: Sequence[str] = ()) -> pl.DataFrame:
    """Summaries as one table, in an order that does not depend on theirs: by machine and model, size, then policy."""
    table = pl.DataFrame(list(summaries), infer_schema_length=None)
    if table.is_empty():
        return table
    policies = list(POLICIES)
    rank = pl.Series("rank", [policies.index(name) if name in policies else len(policies) for name in table["policy"]])
    keys = [*SECTION, *swept, "slots_per_layer", "rank", "policy", "misses", "variant", "decision_hash"]
    ordered = table.with_columns(rank).sort(keys).drop("rank")
    return ordered.with_columns(selectors.by_dtype(pl.Null).cast(pl.Float64))


def finish(sweep: Path, grid: str) -> None:
    """Write `sweep.parquet` of all cells that are done, and print it as a table."""
    table, swept, num_stale = collect(sweep, grid)
    if num_stale:
        print(f"{shown(sweep)}: left out of the table, as made by other code than this: {num_stale}", file=sys.stderr)
    if table.is_empty():
        return
    write_table(table, sweep / "sweep.parquet")
    print(f"{format_table(table, swept)}\n\nWritten: {shown(sweep)}")


def shown(path: Path) -> str:
    """A path as a person would type it from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def write_table(table: pl.DataFrame, path: Path) -> None:
    """Write a Parquet file that is there whole or not at all."""
    with whole_file(path) as partial:
        write_parquet(table, partial)


def _swept(manifests: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Values, run by run, of the keys set on the command line that differ between runs and stand in no column."""
    given = [
        dict(override.lstrip("+").split("=", 1) for override in manifest["overrides"] if "=" in override)
        for manifest in manifests
    ]
    configs = [manifest["config"] for manifest in manifests]
    plain = {key for config in configs for key, value in config.items() if not isinstance(value, (Mapping, list))}
    keys = plain.union(*given, _varied_costs(configs), {_GIB}).difference(_NAMED_BY_COLUMNS)
    columns = {
        key: [_value(config, key, cell) for config, cell in zip(configs, given, strict=True)]
        for key in sorted(keys)
        if not key.startswith(_NAMED_BY_GROUPS)
    }
    return {key: _one_type(values) for key, values in columns.items() if len(set(map(str, values))) > 1}


def _varied_costs(configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Numbers of the profile that differ between runs on machines of one name."""
    found: dict[tuple[str, str], set[Any]] = {}
    for profile in (config.get("hardware", {}) for config in configs):
        for key, value in profile.items():
            if isinstance(value, (int, float)):
                found.setdefault((str(profile.get("name")), key), set()).add(value)
    return {f"hardware.{key}" for (_, key), values in found.items() if len(values) > 1}


def _value(config: Mapping[str, Any], key: str, given: Mapping[str, str]) -> Any:
    """What a cell's configuration holds at a dotted key; of a config group the option that was chosen."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return given.get(key)
        value = value[part]
    return given.get(key) if isinstance(value, (Mapping, list)) else value


def _one_type(values: list[Any]) -> list[Any]:
    """Values that one column can hold: as text where they are not all numbers or all of one type."""
    types = {type(value) for value in values if value is not None}
    if len(types) <= 1:
        return values
    as_type = float if types == {int, float} else str
    return [None if value is None else as_type(value) for value in values]
