"""The wheel is whole: it runs from anywhere, with its configuration, model and trace inside."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The contents of the wheel, where no checkout is near."""
    build = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "oledsim"  # a build leaves files behind, and takes up those it finds
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info"))
    made = subprocess.run([*build, "--wheel-dir", str(wheels), str(source)], check=True, capture_output=True, text=True)
    assert "would be ignored" not in made.stdout + made.stderr  # of directories of data that look like packages
    (wheel,) = wheels.glob("oledsim-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def python(installed, directory, *arguments):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


def test_it_holds_every_shipped_file(installed):
    listed = subprocess.run(["git", "ls-files", "conf", "tracer/data"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the files to ship are listed by git, and this is no checkout")
    shipped = [name for name in listed.stdout.splitlines() if not name.endswith(".py")]
    assert len(shipped) > 10
    assert [name for name in shipped if not (installed / name).is_file()] == []
    assert not (installed / "tests").exists()


def test_it_simulates_from_another_directory(installed, tmp_path):
    where = python(installed, tmp_path, "-c", "import experiments; print(experiments.__file__)")
    assert where.stdout.startswith(str(installed)), where.stdout + where.stderr
    keys = ["trace=proxy-tiny", "policy=full", "shape=llada2.0-mini", "output.dir=out"]
    done = python(installed, tmp_path, "-m", "experiments.simulate_command", *keys)
    assert (done.returncode, done.stderr) == (0, "")
    assert "proxy:proxy-tiny" in done.stdout
    assert (tmp_path / "out" / "summary.json").is_file()
