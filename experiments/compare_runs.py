"""Runs to be compared, simulated or replayed: from directories of results, of sweeps, or of an earlier comparison."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from experiments import metrics
from experiments.arguments import REPLAY
from experiments.cells import cells_of
from experiments.compare_facts import CONDITIONS, NEEDED, check_facts
from experiments.errors import ConfigError
from experiments.files import MANIFEST, RESULT, SUMMARY, forwards_in, read_run, write_parquet

RUNS, TABLES = "runs.json", "runs.parquet"  # what a comparison keeps of its runs
# of a table of forwards: what tells whether two runs did the same work, and what is compared
SHARED = ("pass_id", "kind", "warmup", "requests", "num_accepted", "num_activated")
_PREFETCHES = ("prefetch_issued", "prefetch_started", "prefetch_late", "prefetch_unserved")
COLUMNS = (*SHARED, "time_ns", "num_hits", *_PREFETCHES)
# of a profile: how it was made, and what a simulated slower link changes
_ABOUT_PROFILE = ("hash", "h2d_bytes_per_s", "assumed", "provisional")


@dataclass(frozen=True, eq=False)
class Ran:
    """One run.

    Args:
        name: what messages call it.
        facts: its summary, and of its manifest what tells runs apart: plain data.
        forwards: at least COLUMNS, one row for each forward.
        directory: of its files, where they are at hand.
        is_whole: holds all of its forwards, so that what the summary says is true of them.
    """

    name: str
    facts: Mapping[str, Any]
    forwards: pl.DataFrame
    directory: Path | None = None
    is_whole: bool = True

    @property
    def is_replay(self) -> bool:
        """Whether its times were measured."""
        return self.facts["engine"] == REPLAY

    @property
    def factor(self) -> float:
        """How often every copied byte was copied, or was charged."""
        return self.facts["h2d_bytes_factor"]

    @property
    def bytes_per_s(self) -> float:
        """Of the link, as experts see it: six digits, so that a quotient in a command line meets ours."""
        return float(f"{self.facts['h2d_bytes_per_s'] / self.factor:.6g}")

    @cached_property
    def counted(self) -> pl.DataFrame:
        """Its decode forwards that are not warm-up."""
        return metrics.decode(self.forwards)

    @property
    def tpot_ms(self) -> float:
        """Time per output token."""
        value = metrics.tpot_ms(self.forwards)
        if not value:
            raise ConfigError(f"{self.name}: no token was accepted in a counted forward; must be longer to be compared")
        return value

    def cut(self, num_forwards: int) -> Ran:
        """Its first forwards alone."""
        if num_forwards == self.forwards.height:
            return self
        return Ran(self.name, self.facts, self.forwards.head(num_forwards), self.directory, is_whole=False)


def ran(
    name: str,
    summary: Mapping[str, Any],
    manifest: Mapping[str, Any],
    forwards: pl.DataFrame,
    directory: Path | None = None,
) -> Ran:
    """A run from what `simulate` returns, or a replay in the same form.

    Raises:
        ConfigError: something is missing, or of another type.
    """
    config, profile = manifest.get("config", {}), manifest.get("profile", {})
    for key, value in (("config", config), ("profile", profile)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: {MANIFEST}: {key} is {value!r}, must hold keys and values")
    own = {key: value for key, value in profile.items() if key not in _ABOUT_PROFILE}
    engine = summary.get("engine", config.get("engine"))
    facts = {
        **summary,
        "engine": engine,
        "h2d_bytes_factor": summary.get("h2d_bytes_factor") or 1,
        "h2d_bytes_per_s": profile.get("h2d_bytes_per_s"),
        "machine_digest": hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest(),
        "seed": manifest.get("seed"),
        "staging_slots": config.get("staging_slots"),
    }
    if engine is None or facts["h2d_bytes_per_s"] is None:
        raise ConfigError(f"{name}: manifest.json does not say by which engine and profile; must be of this version")
    return _checked(name, facts, forwards, directory, (SUMMARY, MANIFEST))


def _checked(
    name: str, facts: Mapping[str, Any], forwards: pl.DataFrame, directory: Path | None, files: tuple[str, str]
) -> Ran:
    if missing := [key for key in NEEDED if key not in facts]:
        raise ConfigError(f"{name}: the summary lacks {', '.join(missing)}; must be of a run of this version")
    check_facts(facts, name, *files)
    if missing := [column for column in COLUMNS if column not in forwards.columns]:
        raise ConfigError(
            f"{name}: {RESULT} has no column {missing[0]}; must have one row for each forward (output.per_layer=false)"
        )
    return Ran(name, {**dict.fromkeys(CONDITIONS), **facts}, forwards, directory)


def read_runs(paths: Sequence[Path]) -> list[Ran]:
    """All runs in some directories, each of one run, of a sweep, or of an earlier comparison.

    A run that is found twice, be it as a copy, counts once: its repeats would be alike to the nanosecond.

    Raises:
        ConfigError: a directory holds none, or one that is damaged.
    """
    found: dict[str, Ran] = {}
    for path in paths:
        runs = list(_runs_in(path))
        if not runs:
            raise ConfigError(
                f"{path}: holds no run; must be a directory of oled-simulate, oled-replay or oled-compare, or hold such"
            )
        for run in runs:
            found.setdefault(_content(run), run)
    return list(found.values())


def _content(run: Ran) -> str:
    """Tells a run from all others."""
    digest = hashlib.sha256(json.dumps(run.facts, sort_keys=True).encode())
    digest.update(run.forwards["time_ns"].to_numpy().tobytes())
    return digest.hexdigest()


def _runs_in(path: Path) -> Iterator[Ran]:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    failed = {directory for directory, cell in cells_of(path).items() if cell["error"] is not None}
    for file in sorted({*path.rglob(SUMMARY), *path.rglob(RUNS)}):
        directory = file.parent
        if any(part.startswith(".") for part in directory.relative_to(path).parts) or directory in failed:
            continue
        if file.name == RUNS:
            yield from _read_kept(directory)
        else:
            yield _read_one(directory)


def _read_one(directory: Path) -> Ran:
    found = read_run(directory)
    if found is None:
        raise ConfigError(f"{directory}: is not the whole of a run, or is damaged; remove it, or run it again")
    return ran(str(directory), found.summary, found.manifest, _table(forwards_in(directory)), directory)


def _table(path: Path) -> pl.DataFrame:
    try:
        present = pl.read_parquet_schema(path)
        return pl.read_parquet(path, columns=[column for column in COLUMNS if column in present])
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ConfigError(f"{path}: is not a Parquet file that can be read: {' '.join(str(error).split())}") from None


def write_runs(runs: Sequence[Ran], directory: Path) -> None:
    """Keep of runs what comparing them again needs; `read_runs` reads it."""
    facts = [{"name": run.name, **run.facts} for run in runs]
    (directory / RUNS).write_text(json.dumps(facts, indent=1) + "\n")
    tables = [run.forwards.select(pl.lit(nth, pl.Int32).alias("run"), *COLUMNS) for nth, run in enumerate(runs)]
    write_parquet(pl.concat(tables), directory / TABLES)


def _read_kept(directory: Path) -> Iterator[Ran]:
    try:
        kept = json.loads((directory / RUNS).read_text(encoding="utf-8"))
        table = pl.read_parquet(directory / TABLES)
        tables = {nth: rows.drop("run") for (nth,), rows in table.partition_by("run", as_dict=True).items()}
        for nth, facts in enumerate(kept):
            name = facts.pop("name")
            yield _checked(name, facts, tables[nth], None, (RUNS, RUNS))
    except ConfigError:
        raise
    except (pl.exceptions.PolarsError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{directory}: {RUNS} and {TABLES} are damaged: {' '.join(str(error).split())}") from None
