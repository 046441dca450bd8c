"""Where models are found: shipped ones by name, any other by path."""

from __future__ import annotations

from pathlib import Path

from tracer.schema import TraceError

SHIPPED = Path(__file__).parent / "data"


def find_model(name_or_path: str) -> Path:
    """Directory of a shipped model, by its name, or of any other, by its path.

    Raises:
        TraceError: neither holds a config.json.
    """
    for directory in (SHIPPED / name_or_path, Path(name_or_path)):
        if (directory / "config.json").is_file():
            return directory
    shipped = ", ".join(sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))) or "none"
    if Path(name_or_path).is_dir():
        raise TraceError(
            f"model {name_or_path}: the directory has no config.json; a Hugging Face style checkpoint is needed"
        )
    raise TraceError(f"model {name_or_path}: no such directory; shipped models: {shipped}")
