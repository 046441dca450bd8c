"""Where traces and models are found: shipped ones by name, any other by path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tracer.exchange import put_back
from tracer.schema import TraceError, choices

DATA_DIRECTORY = Path(__file__).parent / "data"


def find_trace(name_or_path: str) -> Path:
    """Directory of a shipped trace (`proxy-tiny`) or of any other (`runs/mine.trace`).

    Raises:
        TraceError: there is neither; the message lists the shipped names.
    """
    shipped = {path.stem: path for path in sorted(DATA_DIRECTORY.glob("*.trace"))}
    return _find("trace", name_or_path, shipped)


def find_model(name_or_path: str) -> Path:
    """Directory of a shipped model (`proxy-tiny`) or of any other (`/models/LLaDA2.0-mini`).

    Raises:
        TraceError: there is neither; the message lists the shipped names.
    """
    shipped = {path.parent.name: path.parent for path in sorted(DATA_DIRECTORY.glob("*/model.safetensors.index.json"))}
    return _find("model", name_or_path, shipped)


def _find(what: str, name_or_path: str, shipped: Mapping[str, Path]) -> Path:
    if name_or_path in shipped:
        return shipped[name_or_path]
    path = Path(name_or_path)
    if name_or_path:
        put_back(path)
        if path.is_dir():
            return path
    raise TraceError(
        f"{what} {name_or_path!r}: no such directory, nor a shipped {what}; {choices(name_or_path, shipped)}"
    )
