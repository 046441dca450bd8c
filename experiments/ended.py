"""A grid that does not end by itself: which cells were under way, and nothing half-made left of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.errors import ConfigError
from experiments.files import remove_abandoned
from experiments.progress import Progress
from tracer.exchange import put_back

_KILLED = "TerminatedWorkerError"  # joblib's, by name: its module is slow to import, and nobody may have
_MOST_LABELS = 4


def was_killed(error: BaseException) -> bool:
    """Whether joblib says so of one of its processes."""
    return type(error).__name__ == _KILLED


@contextmanager
def leaving_nothing(sweep: Path, progress: Progress) -> Iterator[None]:
    """Run a grid within it: whatever ends that early, cells are whole afterwards, or not there.

    Args:
        sweep: directory of the grid.
        progress: of its cells.

    Raises:
        ConfigError: one of joblib's processes was killed; says which cells were under way.
    """
    try:
        with progress:
            yield
    except Exception as error:
        if was_killed(error):
            raise ConfigError(_of_killed(error, list(progress.under_way))) from error
        raise
    finally:
        _tidy(sweep, [Path(directory) for directory in progress.under_way.values() if directory])


def _of_killed(error: Exception, labels: Sequence[str]) -> str:
    how = " and ".join(sorted(set(re.findall(r"(?:SIG\w+|EXIT)\(-?\d+\)", str(error))))) or "an unknown cause"
    memory = ", as systems do that are out of memory" if "SIGKILL" in how else ""
    shown = [label or "the only cell" for label in labels[:_MOST_LABELS]]
    more = [f"{len(labels) - _MOST_LABELS} more"] if len(labels) > _MOST_LABELS else []
    return (
        f"a process that runs cells was ended by {how}{memory}; under way were: {'; '.join([*shown, *more]) or 'none'}; "
        "finished cells are kept"
    )


def _tidy(sweep: Path, begun: Sequence[Path]) -> None:
    """Remove what unfinished cells left. Directories in use by other processes stay."""
    for hidden in sweep.glob(".*.partial-*"):  # also of cells that never said where they write
        remove_abandoned(sweep / hidden.name[1:].rpartition(".partial-")[0])
    for directory in begun:
        put_back(directory)
        remove_abandoned(directory)
        for path in (directory, *directory.parents):
            if path == sweep:
                break
            with suppress(OSError):  # holds something, or is gone
                path.rmdir()
