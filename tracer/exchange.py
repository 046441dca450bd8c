"""A whole directory takes the place of another of its name, and whatever stops that leaves one of the two there."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

_TAKEN = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)  # somebody else gave or took the name at the same moment


def partial_beside(path: Path) -> Path:
    """Name of a hidden directory for what is to take the place of `path` when it is complete."""
    return _hidden(path, "partial")


def take_place(partial: Path, path: Path, check: Callable[[], None]) -> None:
    """Give a complete directory its name; what had the name is removed.

    Whatever is raised meanwhile, by a signal too, one of the two has the name then. A process that is killed at once
    can leave what had it as a hidden `.NAME.replaced-*`, which `put_back` finds.

    Args:
        partial: on the same file system.
        path: absent, or a directory.
        check: raises if what has the name now must stay; called before each attempt.

    Raises:
        OSError: the name cannot be taken.
    """
    while True:
        check()
        try:
            _exchange(partial, path)
            return
        except OSError as error:
            if error.errno not in _TAKEN or not partial.exists():
                raise


def put_back(path: Path) -> None:
    """Give a directory its name again that it lost to a process killed while it took its place."""
    with suppress(OSError):  # where it may not be written, nobody was replacing anything
        if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
            return
        left = path.parent.glob(f".{escape(path.name)}.replaced-*")
        if latest := max(left, key=lambda found: found.stat().st_ctime_ns, default=None):
            latest.rename(path)


def _exchange(partial: Path, path: Path) -> None:
    if not path.exists():
        partial.rename(path)
        return
    replaced = _hidden(path, "replaced")
    try:
        path.rename(replaced)
        partial.rename(path)
    finally:
        if replaced.exists():
            if path.exists():
                gone = replaced.rename(partial_beside(path))  # half removed, it must not be put back
                with suppress(FileNotFoundError):  # somebody else found it, and removes it too
                    shutil.rmtree(gone)
            else:
                replaced.rename(path)


def _hidden(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}-{secrets.token_hex(4)}"
