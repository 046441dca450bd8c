"""The version of oledsim, as traces and commands say it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Of the installed package; sources can run without one, as on a machine that has a GPU for a while."""
    try:
        return version("oledsim")
    except PackageNotFoundError:
        return "of a source tree that is not installed"
