"""Decision logs of two runs: their hash over a stretch, and the first place where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.compare_runs import Ran
from experiments.errors import ConfigError
from experiments.files import DECISIONS
from experiments.log_tables import from_arrow
from policies.log import DECIDED, LAYER_COLUMNS, LAYER_LISTS, DecisionHash, Table


def read_layers(directory: Path, first: int, stop: int) -> Table:
    """Layer executions of the forwards from `first` to before `stop`, from a run's decision log.

    Raises:
        ConfigError: the run has no such log, or it is damaged.
    """
    path = directory / DECISIONS
    if not path.is_file():
        raise ConfigError(f"{directory}: has no {DECISIONS}; run it with output.decisions=true")
    try:
        columns = [*LAYER_COLUMNS, *LAYER_LISTS]
        table = pq.read_table(path, columns=columns, filters=[("forward", ">=", first), ("forward", "<", stop)])
        return from_arrow(table, LAYER_COLUMNS, LAYER_LISTS)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ConfigError(f"{path}: is not a decision log that can be read: {' '.join(str(error).split())}") from None


def decision_hash(run: Ran) -> str | None:
    """Hash of the decisions of a run's counted forwards; None where it was cut and its log is not at hand."""
    if run.is_whole:
        return run.facts["decision_hash"]
    if run.directory is None or not (run.directory / DECISIONS).is_file():
        return None
    layers = read_layers(run.directory, 0, run.forwards.height)
    digest = DecisionHash()
    digest.update(layers, ~run.forwards["warmup"].to_numpy()[layers.scalars["forward"]])
    return digest.hexdigest()


def first_difference(a: Ran, b: Ran) -> str | None:
    """Where two runs first decide otherwise, in words; None where they do not, or a log is not at hand."""
    if any(run.directory is None or not (run.directory / DECISIONS).is_file() for run in (a, b)):
        return None
    stop = a.forwards.height
    layers_a, layers_b = (read_layers(run.directory, 0, stop) for run in (a, b) if run.directory)
    for row in range(min(len(layers_a), len(layers_b))):
        for name in DECIDED:
            ids_a, ids_b = layers_a.lists[name][row], layers_b.lists[name][row]
            if name == "transfers":  # their order is no decision
                ids_a, ids_b = np.sort(ids_a), np.sort(ids_b)
            if not np.array_equal(ids_a, ids_b):
                return f"{_place(layers_a, row)}: {name} {_shown(ids_a)} simulated, {_shown(ids_b)} replayed"
    return None


def _place(layers: Table, row: int) -> str:
    request, forward, layer = (int(layers.scalars[name][row]) for name in ("request", "forward", "layer"))
    return f"request {request}, forward {forward}, layer {layer}"


def _shown(ids: Any) -> str:
    listed = ids.tolist()
    return f"[{', '.join(map(str, listed[:8]))}{', ...' if len(listed) > 8 else ''}]"
