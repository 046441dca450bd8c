"""Attach to a running model and write the trace of what it does."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from tracer.adapters.adapter import EXPERIMENTAL, Adapter, dtype_name
from tracer.adapters.forward import Rules
from tracer.adapters.hooks import Hooks, arguments_of
from tracer.adapters.recording import Recording
from tracer.adapters.registry import find_adapter
from tracer.own_version import own_version
from tracer.rows import encode
from tracer.schema import GATE_DTYPES, Pass, TraceError, TraceMetadata, counted
from tracer.store import TraceWriter

ROWS = ("all", "block")
_LIBRARIES = ("transformers", "vllm", "sglang", "dinfer")


class Session:
    """A model under observation, from `with` to its end; each answered request is written when it is complete.

    An error within `with` ends the trace: the request that ran is dropped, and the complete ones before it are kept
    beside `path`, as NAME.finished.trace, which the error's notes say. Nothing takes the name of `path` then.
    """

    def __init__(
        self, adapter: Adapter, path: Path, name: str, gate_dtype: str, rows: str, overwrite: bool, checkpoint_hash: str
    ) -> None:
        self.path = path
        self.num_requests = 0
        self.num_forwards = 0
        self.recording: Recording | None = None
        self._adapter = adapter
        self._name = name
        self._gate_dtype = gate_dtype
        self._rows = rows
        self._overwrite = overwrite
        self._checkpoint_hash = checkpoint_hash
        self._hooks = Hooks()
        self._writer: TraceWriter | None = None
        self._settings: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        try:
            self._adapter.install(self._hooks, self)
            answers = self._adapter.generate()
            if answers is not None:
                self._hooks.wrap(*answers, self._around_generate)
        except BaseException:
            self._hooks.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.remove()
        if error is None:
            if self._writer is None:
                raise TraceError(
                    f"{self.path}: no request was answered while the model was attached; no trace was made"
                )
            self._writer.close()
        elif self._writer is not None:
            self._keep_finished(error)

    @contextmanager
    def request(self, **settings: Any) -> Iterator[Recording]:
        """Record all forwards within as one request; calls of the engine's own `generate` do this by themselves.

        Args:
            **settings: how it decodes. `mask_id` is needed; `block_length`, `threshold`, `temperature` and what else is
                plain goes into the trace's metadata, and must be the same for all of its requests.

        Raises:
            TraceError: a request runs already, settings differ from those before, or what hooks showed is no request.
        """
        if self.recording is not None:
            raise TraceError(f"request {self.num_requests}: runs already; end it before the next begins")
        settings = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
        self._check_settings(settings)
        self.recording = Recording(self.num_requests, self._rules(settings["mask_id"]), settings)
        try:
            yield self.recording
            self._write(self.recording, settings)
        finally:
            self.recording = None

    def _around_generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.recording is not None:
            return original(*args, **kwargs)
        with self.request(**self._adapter.settings(arguments_of(original, args, kwargs))):
            return original(*args, **kwargs)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if "mask_id" not in settings:
            raise TraceError("mask_id is not known; pass it with the request")
        if self._settings is not None and settings != self._settings:
            names = sorted(name for name in settings | self._settings if settings.get(name) != self._settings.get(name))
            found = ", ".join(f"{name} {settings.get(name)} after {self._settings.get(name)}" for name in names)
            raise TraceError(f"request {self.num_requests}: {found}; all requests of a trace are decoded alike")

    def _rules(self, mask_id: int) -> Rules:
        shape = self._adapter.shape
        return Rules(
            layer_ids=shape.layer_ids,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            weight_sum=self._adapter.weight_sum,
            mask_id=mask_id,
            unmasked=self._adapter.unmasked,
            logits_shift=self._adapter.logits_shift,
            rows=self._rows,
        )

    def _write(self, recording: Recording, settings: dict[str, Any]) -> None:
        metadata = self._metadata(settings)
        passes = [_widened(item, self.num_forwards + i) for i, item in enumerate(recording.finish())]
        encode(passes, metadata)  # before the first of them is written: no part of a bad request may stay in the trace
        if self._writer is None:
            self._writer = TraceWriter(self.path, metadata, overwrite=self._overwrite, keep_finished=True)
            self._settings = settings
        for item in passes:
            self._writer.write(item)
        self._writer.flush()
        self.num_forwards += len(passes)
        self.num_requests += 1

    def _metadata(self, settings: dict[str, Any]) -> TraceMetadata:
        weights = next(self._adapter.model.parameters())
        decode = {"loop": f"{self._adapter.name} (the engine's own)"} | settings
        special_ids = {name: decode.pop(name) for name in ("mask_id", "eos_id") if name in decode}
        details = {
            "engine": self._adapter.engine,
            "adapter": {"name": self._adapter.name, "status": self._adapter.status, "rows": self._rows},
            "versions": _versions(),
            **special_ids,
            "dtype": dtype_name(weights.dtype),
            "device": str(weights.device),
            **self._adapter.details(),
        }
        if self._checkpoint_hash:
            details["checkpoint_hash"] = self._checkpoint_hash
        return TraceMetadata(
            shape=self._adapter.shape,
            source=f"model:{self._name}",
            gate_dtype=self._gate_dtype,
            decode=decode,
            details=details,
        )

    def _keep_finished(self, error: BaseException) -> None:
        """Put the complete requests under another name, so that they are not taken for all that was asked for."""
        assert self._writer is not None
        kept = _free_name(self.path)
        self._writer.path = kept
        with suppress(TraceError):  # the error that led here is the one to report
            self._writer.close()
        if kept.exists():
            error.add_note(f"what was complete before it, {counted(self.num_requests, 'request')}, is kept in {kept}")
        elif self._writer.kept is not None:
            error.add_note(
                f"oled-doctor --recover {self._writer.kept} makes a trace of the complete requests before it"
            )


def attach(
    target: Any,
    adapter: str,
    path: str | Path,
    *,
    name: str | None = None,
    gate_dtype: str = "float16",
    rows: str = "all",
    overwrite: bool = False,
    checkpoint_hash: str = "",
) -> Session:
    """Attach to somebody else's model; the trace is written while `with` lasts.

    Args:
        target: the engine's object that the adapter asks for.
        adapter: its name, one of `ADAPTERS`.
        path: of the trace.
        name: of the model, as the trace's source; None takes that of its configuration.
        gate_dtype: how gates are stored.
        rows: `all` records every token that a forward ran; `block` only those of the block that it decoded, which is
            what an engine with a cache of keys and values would run.
        overwrite: replace a trace of that name, at the end.
        checkpoint_hash: of the weights, if `tracer.checkpoint.checkpoint_hash` was asked for it.

    Raises:
        TraceError: there is no such adapter, the target is not what it attaches to, or the name is taken.
    """
    path = Path(path)
    for value, allowed, key in ((gate_dtype, GATE_DTYPES, "gate_dtype"), (rows, ROWS, "rows")):
        if value not in allowed:
            raise TraceError(f"{key} {value!r}: allowed are {', '.join(allowed)}")
    if path.exists() and not overwrite:
        raise TraceError(f"{path}: exists already; choose another name, or ask to overwrite it")
    made = find_adapter(adapter)(target)
    if made.status == EXPERIMENTAL:
        warnings.warn(
            f"adapter {adapter} is experimental: it was written from {made.engine}'s source, but never run against it; check the trace with oled-doctor",
            stacklevel=2,
        )
    if name is None:
        config = made.model.config
        name = Path(str(getattr(config, "_name_or_path", "") or getattr(config, "model_type", "unknown"))).name
    return Session(made, path, name, gate_dtype, rows, overwrite, checkpoint_hash)


def _widened(item: Pass, pass_id: int) -> Pass:
    """A pass of this number with ids and gates in the types of the schema."""
    expert_ids, gates = item.expert_ids.astype(np.int64), item.gates.astype(np.float64)
    return replace(item, pass_id=pass_id, expert_ids=expert_ids, gates=gates)


def _versions() -> dict[str, str]:
    found = {"oledsim": own_version(), "torch": torch.__version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _free_name(path: Path) -> Path:
    """NAME.finished.trace beside NAME.trace, numbered where that is taken."""
    stem = path.name.removesuffix(".trace")
    kept, number = path.with_name(f"{stem}.finished.trace"), 2
    while kept.exists():
        kept, number = path.with_name(f"{stem}.finished-{number}.trace"), number + 1
    return kept
