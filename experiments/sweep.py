"""A multirun as one table: where each cell lies, whether it is done, and all cells that are done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from omegaconf import DictConfig, OmegaConf
from polars import selectors

from experiments.cli import ERROR_FILE
from experiments.files import MANIFEST, SUMMARY
from experiments.manifest import sources
from experiments.table import SECTION, format_table
from policies.registry import POLICIES
from tracer.records import read_object
from tracer.schema import TraceError

# these ignore the cache size, so a sweep has one cell of each
UNSIZED = tuple(name for name, module in POLICIES.items() if not getattr(module, "SIZED", True))
_NAMED_BY_COLUMNS = ("policy", "trace", "hardware", "cache.slots_per_layer", "output.dir")


def cell_name(root: DictConfig) -> str:
    """Directory of a cell in its sweep, the same for the same configuration: resolver `cell_name` of conf/.

    A cell that is run again meets its own result; sizes that a policy ignores share one directory.
    """
    config: dict[str, Any] = OmegaConf.to_container(root)  # type: ignore[assignment]
    config.pop("hydra", None)
    config["output"].pop("dir")
    policy = str(config["policy"]["name"])
    size = [] if policy in UNSIZED else [str(config["cache"]["slots_per_layer"])]
    if policy in UNSIZED:
        config.pop("cache")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:10]
    return "-".join([policy, *size, digest])


# at import, so that the processes of a launcher know it too
OmegaConf.register_new_resolver("cell_name", lambda *, _root_: cell_name(_root_), replace=True)


def is_done(directory: Path, trace_hash: str, profile_hash: str) -> bool:
    """The directory holds the whole result of this trace and profile, made by this code."""
    found = _result(directory)
    if found is None:
        return False
    manifest = found[1]
    return (manifest["trace"]["content_hash"], manifest["profile"]["hash"]) == (trace_hash, profile_hash)


def _result(directory: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Summary and manifest of a directory, if they are there, whole, and made by this code."""
    try:
        summary, manifest = read_object(directory / SUMMARY), read_object(directory / MANIFEST)
    except (FileNotFoundError, TraceError):
        return None
    return (summary, manifest) if manifest.get("sources") == sources() else None


def collect(sweep: Path) -> tuple[pl.DataFrame, list[str]]:
    """All cells below a directory that are done and were made by this code, as one table; empty if there are none.

    Returns:
        The table, with every value of the summaries, and the names of the columns that were added to it: one for each
        key that was swept and that no other column shows.
    """
    summaries, configs = [], []
    for path in sorted(sweep.rglob(SUMMARY)):
        found = _result(path.parent)
        if found is not None and not (path.parent / ERROR_FILE).exists():
            summaries.append(found[0])
            configs.append(found[1]["config"])
    swept = _swept(configs)
    rows = [summary | {key: column[row] for key, column in swept.items()} for row, summary in enumerate(summaries)]
    return table_of(rows, list(swept)), list(swept)


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


def finish(sweep: Path) -> None:
    """Write `sweep.parquet` of all cells that are done, and print it as a table."""
    table, swept = collect(sweep)
    if table.is_empty():
        return
    write_table(table, sweep / "sweep.parquet")
    print(f"{format_table(table, swept)}\n\nWritten: {shown(sweep)}")


def shown(path: Path) -> str:
    """A path as a person would type it from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def write_table(table: pl.DataFrame, path: Path) -> None:
    """Write a Parquet file that is there whole or not at all."""
    partial = path.with_name(f".partial-{path.name}")
    table.write_parquet(partial)
    partial.replace(path)


def _swept(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Values, cell by cell, of the keys set on the command line that differ between cells and stand in no column."""
    given = [
        dict(override.lstrip("+").split("=", 1) for override in config["overrides"] if "=" in override)
        for config in configs
    ]
    keys = {key for cell in given for key in cell if key not in _NAMED_BY_COLUMNS and not key.startswith("policy.")}
    columns = {
        key: [_value(config, key, cell) for config, cell in zip(configs, given, strict=True)] for key in sorted(keys)
    }
    return {key: _one_type(values) for key, values in columns.items() if len(set(map(str, values))) > 1}


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
