"""Files and directories that are there whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.errors import ConfigError
from tracer.exchange import partial_beside, put_back, take_place


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden file to write, which takes this name when all went well, and is removed when not."""
    partial = partial_beside(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_directory(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A hidden directory to write into, which takes this name when all went well, and is removed when not.

    Args:
        path: absent, or a directory that is replaced; those above it are made, and removed again if nothing comes of it.
        check: raises if what has the name must stay; called before the work and after it.
    """
    final = path.resolve()  # of a link, what it points to is replaced
    put_back(final)
    check()
    partial = partial_beside(final)
    made = [parent for parent in final.parents if not parent.exists()]  # innermost first
    partial.mkdir(parents=True)
    try:
        yield partial
        take_place(partial, final, check)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # holds something, or is gone
                parent.rmdir()


def names_in(path: Path, allowed: Collection[str], what: str) -> list[str]:
    """Names in a directory that `what` is to take the place of; none where it is absent.

    Raises:
        ConfigError: it is no directory, one that cannot be replaced, or holds more than is allowed.
    """
    final = path.resolve()
    if not final.exists():
        return []
    if not final.is_dir() or final.is_mount() or Path.cwd().is_relative_to(final):
        raise ConfigError(
            f"{path}: {what} cannot take its place: it is a file, a mount point or the working directory, "
            "must be a directory of its own"
        )
    found = sorted(entry.name for entry in final.iterdir())
    if foreign := [name for name in found if name not in allowed]:
        raise ConfigError(f"{path}: holds {foreign[0]}, which is not of {what}; must be a directory of its own")
    return found
