"""What policies may learn beforehand: a record that ships with the traced model, or requests that are not evaluated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from policies.contract import Context
from tracer.calibration import Calibrator
from tracer.calibration_file import load
from tracer.merge import content_hashes
from tracer.parts import join, split
from tracer.schema import Calibration, ModelShape, Pass, TraceError, TraceMetadata
from tracer.shipped import DATA_DIRECTORY
from tracer.store import TraceReader


class FirstRequests:
    """What passes do for a trace's first requests: the calibration split, disjoint from what is evaluated.

    Of a pass that they share with later requests, it is their part alone, as if they had run without these.
    """

    def __init__(self, passes: Iterable[Pass], num_requests: int) -> None:
        self._passes, self._num_requests = passes, num_requests

    def __iter__(self) -> Iterator[Pass]:
        first: set[int] = set()
        for pass_ in self._passes:
            requests = pass_.requests.tolist()
            first.update([request for request in requests if request not in first][: self._num_requests - len(first)])
            if first.issuperset(requests):
                yield pass_
            elif mine := [part for part in split(pass_) if int(part.requests[0]) in first]:
                yield join(mine, pass_.pass_id, pass_.wall_ns)
            else:
                return


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
        TraceError: the record cannot be read, is of another shape, or is of requests that are evaluated.
    """
    shape = reader.metadata.shape
    context = Context(shape, passes=reader, has_signals=reader.has_signals, lacks=reader.metadata.lacks, seed=seed)
    if calibration not in ("auto", "warmup"):
        path = Path(calibration)
        found = load(path)
        if found.load.shape != (shape.num_layers, shape.num_experts):
            raise TraceError(
                f"{path}: is of {found.load.shape[0]} layers of {found.load.shape[1]} experts, the trace has "
                f"{shape.num_layers} of {shape.num_experts}"
            )
        _check_disjoint(path, found, reader, warmup_requests)
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
            raise TraceError(
                f"{error}; warmup_requests says how many there are, calibration=PATH takes a record that "
                f"`oled-generate record` makes"
            ) from None

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


def recorded(readers: Sequence[TraceReader], num_requests: int | None = None) -> Calibration:
    """The record of the first requests of these traces, one trace after the other; of all requests without a number.

    Raises:
        TraceError: the traces are of several models, lack gates, hold fewer requests, or no decode forward of these
            requests alone.
    """
    first, total = readers[0].metadata, sum(reader.num_requests for reader in readers)
    for reader in readers:
        if "gates" in reader.metadata.lacks:
            raise TraceError(f"{reader.path}: gates are null in this trace; a record is made of them too")
        if _model(reader.metadata) != _model(first) or reader.metadata.shape != first.shape:
            raise TraceError(f"{reader.path}: is of another model than {readers[0].path}; a record is of one")
    wanted = total if num_requests is None else num_requests
    if not 1 <= wanted <= total:
        raise TraceError(f"requests {wanted}: must be 1 to {total}, the requests of the traces")
    calibrator = Calibrator(first.shape, *_model(first))
    signals = all(reader.has_signals for reader in readers)
    numbers: dict[tuple[int, int], int] = {}  # in the record, by trace and request
    hashes: list[str] = []
    for index, reader in enumerate(readers):
        if len(numbers) == wanted:
            break
        hashes += content_hashes(reader.metadata)
        for pass_ in FirstRequests(reader.passes(signals=signals), wanted - len(numbers)):
            requests = [numbers.setdefault((index, request), len(numbers)) for request in pass_.requests.tolist()]
            calibrator.add(replace(pass_, requests=np.array(requests)))
    return replace(calibrator.finish(), num_requests=len(numbers), content_hashes=tuple(dict.fromkeys(hashes)))


def warnings_of(context: Context, reader: TraceReader, calibration: str) -> list[str]:
    """What to say of a record that was named, where it is of another model than the trace of the run."""
    if calibration in ("auto", "warmup"):
        return []
    found, metadata = context.calibration, reader.metadata
    if (found.name, found.checkpoint_hash) == _model(metadata):
        return []
    record, trace = (
        f"{name}, checkpoint {checkpoint[:8] or 'unknown'}"
        for name, checkpoint in ((found.name, found.checkpoint_hash), _model(metadata))
    )
    return [f"calibration {Path(calibration).name} is of another model ({record}) than the trace ({trace})"]


def shipped_record(source: str) -> Path | None:
    """The record that ships with the model of a trace's source, if one does."""
    kind, _, name = source.partition(":")
    path = DATA_DIRECTORY / f"{name}.calibration.npz"
    return path if kind == "proxy" and path.is_file() else None


def _check_disjoint(path: Path, found: Calibration, reader: TraceReader, warmup_requests: int) -> None:
    """Refuse a record of requests that are evaluated; the first ones of the one trace that both are of may be warm-up."""
    own, theirs = set(content_hashes(reader.metadata)), set(found.content_hashes)
    is_first = len(own | theirs) == 1
    if own.isdisjoint(theirs) or (is_first and found.num_requests <= warmup_requests):
        return
    can_be = is_first and found.num_requests < reader.num_requests
    needed = f"warmup_requests of {found.num_requests} or more" if can_be else "a record of others"
    raise TraceError(f"{path}: is of requests that this run evaluates; needs {needed}")


def _model(metadata: TraceMetadata) -> tuple[str, str]:
    """Name and hash of the checkpoint, empty where unknown, as records have them."""
    return metadata.source, metadata.details.get("checkpoint_hash") or ""


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
    plural = "" if found.num_requests == 1 else "s"
    return f"{path.name}: {found.num_requests} request{plural} of {found.name}, sha256 {digest}"
