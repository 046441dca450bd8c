"""What policies may learn beforehand: a record that ships with the traced model, or requests that are not evaluated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from policies.contract import Context
from tracer.calibration import Calibrator, load
from tracer.schema import Calibration, ModelShape, Pass, TraceError
from tracer.shipped import DATA_DIRECTORY
from tracer.store import TraceReader


class FirstRequests:
    """The passes of a trace's first requests: the calibration split, disjoint from what is evaluated."""

    def __init__(self, passes: Iterable[Pass], num_requests: int) -> None:
        self._passes, self._num_requests = passes, num_requests

    def __iter__(self) -> Iterator[Pass]:
        seen: set[int] = set()
        for pass_ in self._passes:
            seen.update(pass_.requests.tolist())
            if len(seen) > self._num_requests:
                return
            yield pass_


def context_of(
    reader: TraceReader, warmup_requests: int, calibration: str = "auto", seed: int = 0
) -> tuple[Context, str]:
    """What a policy may be built from for a run over this trace, and where its calibration is from, in words.

    Args:
        reader: of the trace of the run.
        warmup_requests: its first requests, which are not evaluated.
        calibration: `auto`, the shipped record of the model that was traced, else `warmup`: the warm-up requests; or
            the path of a record.
        seed: of the run.

    Raises:
        TraceError: the record cannot be read, or is of another shape.
    """
    shape = reader.metadata.shape
    context = Context(shape, passes=reader, has_signals=reader.has_signals, seed=seed)
    if calibration not in ("auto", "warmup"):
        path = Path(calibration)
        found = load(path)
        if found.load.shape != (shape.num_layers, shape.num_experts):
            raise TraceError(
                f"{path}: is of {found.load.shape[0]} layers of {found.load.shape[1]} experts, the trace has "
                f"{shape.num_layers} of {shape.num_experts}"
            )
        return replace(context, calibrate=lambda: found), _named(path, found)
    path = shipped_record(reader.metadata.source)
    if calibration == "auto" and path is not None:
        found = load(path)
        if _is_of(found, reader):
            return replace(context, calibrate=lambda: found), _named(path, found)
    name = f"first {warmup_requests} of {reader.num_requests} requests of the trace"
    if warmup_requests == 0:
        return context, name

    def calibrate() -> Calibration:
        try:
            return calibrated(FirstRequests(reader.passes(signals=reader.has_signals), warmup_requests), shape, name)
        except TraceError as error:
            raise TraceError(f"{error}; warmup_requests says how many there are") from None

    return replace(context, calibrate=calibrate, calibration_passes=FirstRequests(reader, warmup_requests)), name


def calibrated(passes: Iterable[Pass], shape: ModelShape, name: str) -> Calibration:
    """The record of these passes.

    Raises:
        TraceError: there is no decode forward among them.
    """
    calibrator = Calibrator(shape, name)
    for pass_ in passes:
        calibrator.add(pass_)
    return calibrator.finish()


def shipped_record(source: str) -> Path | None:
    """The record that ships with the model of a trace's source, if one does."""
    kind, _, name = source.partition(":")
    path = DATA_DIRECTORY / f"{name}.calibration.npz"
    return path if kind == "proxy" and path.is_file() else None


def _is_of(found: Calibration, reader: TraceReader) -> bool:
    """Whether a record was made by the very model that made the trace."""
    shape, details = reader.metadata.shape, reader.metadata.details
    return (
        found.name == reader.metadata.source
        and found.checkpoint_hash == details.get("checkpoint_hash")
        and found.load.shape == (shape.num_layers, shape.num_experts)
    )


def _named(path: Path, found: Calibration) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path.name}: {found.num_requests} requests of {found.name}, sha256 {digest}"
