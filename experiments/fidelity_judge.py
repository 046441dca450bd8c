"""Judges a fidelity run: simulates its cells with its own profile, holds both together, and keeps what was found."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from experiments.arguments import REPLAY
from experiments.compare_files import write
from experiments.compare_judge import compare
from experiments.compare_runs import Ran, read_runs
from experiments.compare_table import as_markdown
from experiments.errors import ConfigError
from experiments.fidelity_grid import MANIFEST, PROFILE, WORKLOADS, Cell, FirstForwards, shape_of, slowed
from experiments.fidelity_log import read_log
from experiments.fidelity_terms import terms_as_markdown, terms_of
from experiments.files import RunFiles, write_parquet
from experiments.identity import sources
from experiments.kept import BUDGET_BYTES, Kept
from experiments.manifest import manifest as manifest_of
from experiments.measured_files import write_measured
from experiments.profiles import load_profile, profile_hash
from experiments.run import DEFAULTS, run, setting_for
from experiments.whole import whole_directory
from policies.log import LogChunk
from policies.profile import HardwareProfile
from tracer.files import metadata_hash
from tracer.records import read_object
from tracer.schema import ModelShape
from tracer.shipped import find_trace

TERMS, WORDS, BY_WORKLOAD = "terms.parquet", "terms.md", "workloads.md"
_OF_MACHINE = ("device", "is_pinned", "cpu_kernel", "num_distinct_experts", "machine")  # the same for all its replays
_DIGITS = 8  # of a profile's hash in a directory's name


@dataclass(frozen=True, eq=False)
class Measured:
    """A fidelity run that was brought home.

    Args:
        directory: of its files.
        manifest: what it says of itself.
        profile: of its machine, measured by it.
        reader: of the forwards that it ran.
        shape: sizes that it ran.
        kept: what simulations of its cells share.
    """

    directory: Path
    manifest: Mapping[str, Any]
    profile: HardwareProfile
    reader: FirstForwards
    shape: ModelShape
    kept: Kept

    def arguments(self, cell: Cell, profile: HardwareProfile, output: Path) -> dict[str, Any]:
        """Of `simulate`, for a cell."""
        return {
            **DEFAULTS,
            "trace": self.reader,
            "policy": cell.policy,
            "slots_per_layer": cell.slots_per_layer or None,
            "hardware": profile,
            "shape": self.shape,
            "warmup_requests": self.manifest["warmup_requests"],
            "output": output,
            "overwrite": True,
        }


def judge(directory: Path, output: Path) -> str:
    """Simulate the cells of a run, compare, and write what was found to a directory of its own in `output`.

    The results of both sides, as `oled-simulate` and `oled-replay` write them, go to `results` in the run's directory.

    Raises:
        ConfigError: it is not a run, or nothing in it can be compared.
    """
    measured = read_measured(directory)
    results = directory / "results"
    terms = list(write_results(measured, results))
    runs = read_runs([results])
    comparison = compare(runs)
    target = output / name_of(measured)
    with whole_directory(target) as partial:
        write(comparison, partial)
        write_parquet(pl.DataFrame(terms, infer_schema_length=None), partial / TERMS)
        (partial / WORDS).write_text(terms_as_markdown(terms), encoding="utf-8")
        shutil.copyfile(directory / PROFILE, partial / PROFILE)
        kept = {**measured.manifest, "judged": {"command": sys.argv[1:], "sources": sources()}}
        (partial / MANIFEST).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        if parts := _by_workload(runs):
            (partial / BY_WORKLOAD).write_text(as_markdown(compare(parts)), encoding="utf-8")
    lines = [f"{one.verdict:<10} {one.name} ({one.limit}): {one.found}" for one in comparison.targets]
    return "\n".join([*lines, f"Written: {target}"])


def read_measured(directory: Path) -> Measured:
    """Open a run that was brought home, its packs taken apart.

    Raises:
        ConfigError: it is none, or of another version of its trace.
    """
    for name in (MANIFEST, PROFILE):
        if not (directory / name).is_file():
            raise ConfigError(
                f"{directory}: holds no {name}; must be a run's directory, or its packs taken apart by tar xf"
            )
    manifest = read_object(directory / MANIFEST)
    if not manifest.get("runs"):
        raise ConfigError(f"{directory}: no cell of this run was finished")
    profile = load_profile(directory / PROFILE)
    reader = FirstForwards(find_trace(manifest["trace"]["name"]), manifest["per_request"])
    for what, found, noted in (
        (manifest["trace"]["name"], metadata_hash(reader.metadata), manifest["trace"]["hash"]),
        (PROFILE, profile_hash(profile), manifest["profile_hash"]),
    ):
        if found != noted:
            raise ConfigError(f"{directory}: ran with another {what} than the one that is here")
    shape = shape_of(manifest["shape"], reader.metadata.shape)
    return Measured(directory, manifest, profile, reader, shape, Kept(BUDGET_BYTES))


def write_results(measured: Measured, results: Path) -> Iterator[dict[str, Any]]:
    """Write simulated and replayed results of every cell; yields what parts of a layer took on each side."""
    of_cell: dict[Cell, list[Path]] = {}
    for entry in measured.manifest["runs"]:
        of_cell.setdefault(Cell(**entry["cell"]), []).append(measured.directory / entry["file"])
    for cell, paths in of_cell.items():
        print(f"{cell.name}: {len(paths)} runs", file=sys.stderr, flush=True)
        simulated = results / "simulated" / cell.name
        run(measured.arguments(cell, slowed(measured.profile, cell.factor), simulated), measured.kept)
        logs = []
        for path in paths:
            chunk, notes = read_log(path)
            _write_replayed(measured, cell, chunk, notes, results / "replayed" / path.stem)
            logs.append(chunk)
        yield {"cell": cell.name, **terms_of(simulated, logs)}


def _write_replayed(measured: Measured, cell: Cell, chunk: LogChunk, notes: Mapping[str, Any], output: Path) -> None:
    """Write one replay as `oled-replay` does."""
    setting = setting_for(measured.arguments(cell, measured.profile, output), measured.kept)
    policy = measured.kept.policy(setting)
    manifest = manifest_of(setting, policy)
    manifest["config"]["engine"] = REPLAY
    about = {
        "mode": "closed",
        "h2d_bytes_factor": cell.factor,
        "host_us_per_layer": notes["host_us"],
        "decide_us_per_layer": notes["decide_us"],
        **{key: measured.manifest[key] for key in _OF_MACHINE},
    }
    with RunFiles(output, setting.given, manifest["config"]) as files:
        write_measured(files, setting, policy, [chunk], notes["decide_us"], about, manifest)


def read_workloads(directory: Path) -> list[Ran]:
    """The runs of a comparison, each as one run for each text of its trace; none where the trace is of one."""
    return _by_workload(read_runs([directory]))


def _by_workload(runs: Sequence[Ran]) -> list[Ran]:
    parts = []
    for one in runs:
        for request, name in enumerate(WORKLOADS.get(one.facts["trace"], ())):
            rows = one.forwards.filter(pl.col("requests").list.contains(request))
            # the hash of decisions stays that of the whole run: where it is equal, so is every part
            facts = {**one.facts, "trace": f"{one.facts['trace']}:{name}", "trace_hash": name}
            if rows.height:
                parts.append(Ran(f"{one.name}:{name}", facts, rows))
    return parts


def name_of(measured: Measured) -> str:
    """What the directory of a run's findings is called: date, machine, and the profile's hash."""
    manifest = measured.manifest
    gpu = re.split(r"[;,]", measured.profile.machine)[0]
    words = "-".join(re.findall(r"[a-z0-9]+", gpu.lower())[:4])
    return f"{manifest['created'][:10]}-{words}-{manifest['profile_hash'][:_DIGITS]}"
