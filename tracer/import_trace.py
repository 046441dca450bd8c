"""A trace made of what others recorded, written request by request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tracer.import_forwards import Forward, Tokens, check_gates, check_ids, forwards_of, pass_of
from tracer.import_shape import found_layers, shape_for
from tracer.import_table import Request
from tracer.schema import NO_GATES, ModelShape, TraceError, TraceMetadata
from tracer.store import TraceWriter


@dataclass(frozen=True)
class Import:
    """What a trace is made from, beyond the requests.

    Args:
        format: for its `source`.
        files: their names, for its metadata.
        num_experts: of a layer, where no shape says so.
        layer_ids: of the MoE layers, where no shape says so; None are those in which the first request routed something.
        shape: of the model.
        gate_dtype: in which gates are stored, where there are any.
        is_autoregressive: every decode forward runs one token.
        skip_bad: leave out requests that are not sound.
    """

    format: str
    files: tuple[str, ...]
    num_experts: int | None = None
    layer_ids: tuple[int, ...] | None = None
    shape: ModelShape | None = None
    gate_dtype: str = "float16"
    is_autoregressive: bool = True
    skip_bad: bool = False


@dataclass
class Outcome:
    """What became of the requests."""

    num_requests: int = 0
    skipped: list[str] = field(default_factory=list)  # why, for each that was left out


def write_import(
    requests: Iterable[Tokens | Request],
    path: Path,
    settings: Import,
    *,
    overwrite: bool = False,
    on_request: Callable[[], Any] = lambda: None,
) -> Outcome:
    """Write a trace of these requests, whole or not at all; the first sound one decides its layers and columns.

    Raises:
        TraceError: a request is not sound, with its place; there is none; or the trace cannot be written.
    """
    outcome, reading = Outcome(), _Reading(settings)
    writer: TraceWriter | None = None
    num_passes = 0
    with ExitStack() as stack:
        for request in requests:
            try:
                forwards = reading.read(request)
            except TraceError as error:
                if not settings.skip_bad:
                    raise TraceError(f"{request.name}: {error}") from None
                outcome.skipped.append(f"{request.name}: {error}")
                continue
            writer = writer or stack.enter_context(TraceWriter(path, reading.metadata, overwrite=overwrite))
            for forward in forwards:
                writer.write(pass_of(forward, reading.metadata.shape, num_passes, outcome.num_requests))
                num_passes += 1
            outcome.num_requests += 1
            on_request()
        if writer is None:
            why = outcome.skipped[0] if outcome.skipped else f"{', '.join(settings.files)}: holds no request"
            raise TraceError(why)
    return outcome


class _Reading:
    """Reads requests as forwards over the MoE layers, each held to what the first one had."""

    def __init__(self, settings: Import) -> None:
        self._settings = settings
        self._metadata: TraceMetadata | None = None

    @property
    def metadata(self) -> TraceMetadata:
        """Of the trace; there once a request was read."""
        assert self._metadata is not None
        return self._metadata

    def read(self, request: Tokens | Request) -> list[Forward]:
        """Forwards of a request.

        Raises:
            TraceError: it is not sound, or not like the first one.
        """
        if isinstance(request, Tokens):
            request, layer_ids = self._of_moe_layers(request)
            top_k = request.expert_ids.shape[-1]
        else:
            layer_ids, top_k = request.layer_ids, request.forwards[0].expert_ids.shape[-1]
        shape = self._shape(layer_ids, top_k)
        forwards = list(_sound_tokens(request, shape) if isinstance(request, Tokens) else _sound(request, shape))
        if not forwards:
            raise TraceError("no token of it was run")
        lacks = {what for what, name in _FIELDS.items() if getattr(forwards[0], name) is None}
        if self._metadata is None:
            self._metadata = self._made(shape, lacks)
        elif missing := sorted(lacks - self._metadata.lacks):
            raise TraceError(f"has no {', '.join(missing)}, and the requests before have")
        null = {name: None for what, name in _FIELDS.items() if what in self._metadata.lacks}
        return [replace(forward, **null) for forward in forwards]

    def _of_moe_layers(self, tokens: Tokens) -> tuple[Tokens, tuple[int, ...]]:
        """The same over MoE layers only, and these: engines keep a column for each layer of the model."""
        ids, settings = tokens.expert_ids, self._settings
        wanted = settings.shape.layer_ids if settings.shape else settings.layer_ids
        if wanted is None:
            wanted = found_layers(ids) if self._metadata is None else self._metadata.shape.layer_ids
        if len(wanted) == ids.shape[1] and wanted[-1] >= ids.shape[1]:
            return tokens, wanted
        if wanted[-1] >= ids.shape[1]:
            raise TraceError(f"arrays of {ids.shape[1]} layers, and the MoE layers are {wanted[0]} to {wanted[-1]}")
        others = np.delete(ids, wanted, axis=1)
        if (others > 0).any():
            layer = np.delete(np.arange(ids.shape[1]), wanted)[np.argwhere(others > 0)[0][1]]
            raise TraceError(f"layer {layer} routes to experts, and is none of the {len(wanted)} MoE layers")
        return replace(tokens, expert_ids=ids[:, wanted]), wanted

    def _shape(self, layer_ids: tuple[int, ...], top_k: int) -> ModelShape:
        if self._metadata is None:
            return shape_for(layer_ids, self._settings.num_experts, top_k, self._settings.shape)
        shape = self._metadata.shape
        if (layer_ids, top_k) != (shape.layer_ids, shape.top_k):
            before = f"{list(shape.layer_ids)} and {shape.top_k}"
            raise TraceError(f"layers {list(layer_ids)} and top {top_k}, and the requests before have {before}")
        return shape

    def _made(self, shape: ModelShape, lacks: set[str]) -> TraceMetadata:
        settings = self._settings
        details: dict[str, Any] = {"imported": {"files": list(settings.files)}, "lacks": sorted(lacks - {"gates"})}
        return TraceMetadata(
            shape=shape,
            source=f"import:{settings.format}",
            gate_dtype=NO_GATES if "gates" in lacks else settings.gate_dtype,
            decode={"loop": "autoregressive", "block_length": 1} if settings.is_autoregressive else {},
            details=details,
        )


_FIELDS = {"gates": "gates", "token_ids": "token_ids", "confidence": "p_argmax"}  # by what `TraceMetadata.lacks` says


def _sound_tokens(tokens: Tokens, shape: ModelShape) -> Iterator[Forward]:
    run = tokens.positions >= tokens.num_cached
    check_ids(tokens.expert_ids[run], tokens.positions[run], shape.layer_ids, shape.num_experts)
    yield from forwards_of(tokens)


def _sound(request: Request, shape: ModelShape) -> Iterator[Forward]:
    for forward in request.forwards:
        check_ids(forward.expert_ids.transpose(1, 0, 2), forward.positions, shape.layer_ids, shape.num_experts)
        if forward.gates is not None:
            check_gates(forward.gates.transpose(1, 0, 2), forward.positions, shape.layer_ids)
        yield forward
