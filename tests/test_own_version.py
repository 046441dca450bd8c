"""The version is that of the package, and sources that are not installed run without one."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from tracer import own_version as module
from tracer.own_version import own_version


def test_the_version_is_that_of_the_package() -> None:
    assert own_version() == version("oledsim")


def test_sources_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", absent)
    assert own_version() == "of a source tree that is not installed"
