"""Compiled code is found again by another process, and never after its sources have changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import policies
from policies.jit import cache_dir

# two modules among the policies: a function, its helper in another file, and an enum, whose values become constants
HELPER = """
from policies.jit import jit
@jit
def keeps(number):
    return number != 1
"""
CALLER = """
from policies.helper import keeps
from policies.jit import jit
from tracer.schema import ForwardKind
@jit
def first_kept(size):
    for number in range(size):
        if keeps(number):
            return number, ForwardKind.DENOISE
    return -1, ForwardKind.DENOISE
"""
PROGRAM = """
from policies.caller import first_kept
found = first_kept(3)[0]
stats = first_kept.stats
print(found, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), stats.cache_path)
"""
# the same function, called by a loop that is given it
LOOP = """
from policies.jit import jit
from simulator.pointers import function_at
@jit
def ask(kind, addresses, size):
    return function_at(kind, addresses[0])(size)
"""
LOOP_PROGRAM = """
from policies.caller import first_kept
from simulator.asking import ask
from simulator.pointers import entry_of, pointer_to
found = entry_of(ask, (pointer_to(first_kept, 3),), 3)(3)[0]
stats = ask.stats
print(found, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), stats.cache_path)
"""


def ran(root, setup="", program=PROGRAM, **environment):
    """What is found, compilations that were found and that were made, and the place of the cache."""
    environment = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    finished = subprocess.run(
        [sys.executable, "-c", setup + program], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    number, found, made, path = finished.stdout.split()
    return int(number), int(found), int(made), path


def change_helper(root):
    (root / "policies" / "helper.py").write_text(HELPER.replace("!= 1", "!= 0"))


def files_in(*directories):
    return {path for directory in directories for path in directory.rglob("*")}


@pytest.fixture
def sources(tmp_path):
    """Sources of something compiled, by what compiles it here."""
    root = Path(policies.__file__).parent.parent
    copy = tmp_path / "sources"
    for package, module in (("policies", "jit.py"), ("tracer", "schema.py"), ("simulator", "pointers.py")):
        (copy / package).mkdir(parents=True)
        for name in ("__init__.py", module):
            shutil.copy(root / package / name, copy / package)
    (copy / "policies" / "helper.py").write_text(HELPER)
    (copy / "policies" / "caller.py").write_text(CALLER)
    (copy / "simulator" / "asking.py").write_text(LOOP)
    return copy


def test_machine_code_is_that_of_the_sources(sources, tmp_path):
    place = {"OLEDSIM_CACHE_DIR": str(tmp_path / "cache")}
    first = ran(sources, **place)
    assert first[:3] == (0, 0, 1)
    assert ran(sources, **place) == (0, 1, 0, first[3])

    change_helper(sources)
    second = ran(sources, **place)
    assert second[:3] == (1, 0, 1)

    # values of enums are constants in compiled code
    schema = sources / "tracer" / "schema.py"
    schema.write_text(schema.read_text().replace("DENOISE = 1", "DENOISE = 7"))
    third = ran(sources, **place)
    assert third[:3] == (1, 0, 1)
    assert len({first[3], second[3], third[3]}) == 3


def test_machine_code_is_found_by_another_installation_of_the_same_sources(sources, tmp_path):
    place = {"OLEDSIM_CACHE_DIR": str(tmp_path / "cache")}
    other = shutil.copytree(sources, tmp_path / "elsewhere")
    first = ran(sources, **place)
    assert ran(other, **place) == (0, 1, 0, first[3])
    change_helper(other)
    assert ran(other, **place)[:3] == (1, 0, 1)
    assert ran(sources, **place) == (0, 1, 0, first[3])


def test_what_a_loop_is_given_is_that_of_the_sources(sources, tmp_path):
    place = {"OLEDSIM_CACHE_DIR": str(tmp_path / "cache"), "program": LOOP_PROGRAM}
    assert ran(sources, **place)[:3] == (0, 0, 1)
    assert ran(sources, **place)[:3] == (0, 1, 0)
    change_helper(sources)
    assert ran(sources, **place)[:3] == (1, 0, 1)


def test_a_cache_can_be_moved(monkeypatch, tmp_path):
    name = cache_dir().name
    monkeypatch.setenv("OLEDSIM_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLEDSIM_CACHE_DIR", "here")
    assert cache_dir() == tmp_path / "here" / name  # wherever the process goes later


def test_a_cache_has_no_place_without_a_home(monkeypatch):
    for name in ("OLEDSIM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry
    assert cache_dir() is None


@pytest.mark.parametrize("place", ["OLEDSIM_CACHE_DIR", "HOME"])
def test_where_no_cache_can_be_written_nothing_is_kept(sources, tmp_path, place):
    (tmp_path / "file").write_text("")
    (sources / "policies" / "__pycache__").mkdir()  # where numba would go next
    before = files_in(sources)
    environment = {place: str(tmp_path / "file")}
    assert ran(sources, **environment) == (0, 0, 1, "None")
    change_helper(sources)
    assert ran(sources, **environment) == (1, 0, 1, "None")
    assert files_in(sources) == before


def test_nothing_need_be_writable(sources, tmp_path):
    # as on a read-only file system; permissions alone do not bind root
    setup = "import tempfile\ndef refuse(*a, **k): raise PermissionError\ntempfile.TemporaryFile = refuse\n"
    assert ran(sources, setup, HOME=str(tmp_path / "home")) == (0, 0, 1, "None")


def test_a_cache_that_numba_would_choose_is_not_used(sources, tmp_path):
    environment = {
        "OLEDSIM_CACHE_DIR": str(tmp_path / "cache"),
        "NUMBA_CACHE_LOCATOR_CLASSES": "InTreeCacheLocator",
        "NUMBA_CACHE_DIR": str(tmp_path / "other"),
    }
    ran(sources, **environment)
    change_helper(sources)
    assert ran(sources, **environment)[0] == 1
    assert not list(sources.rglob("*.nbi"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".nbi", lambda data: b""),
        (".nbi", lambda data: b"\xff" * len(data)),
        (".nbc", lambda data: data[: len(data) // 2]),
    ],
    ids=["empty", "other", "cut"],
)
def test_damaged_machine_code_is_made_again(sources, tmp_path, suffix, damage):
    place = {"OLEDSIM_CACHE_DIR": str(tmp_path / "cache")}
    ran(sources, **place)
    files = list((tmp_path / "cache").rglob(f"*{suffix}"))
    assert files
    for path in files:
        path.write_bytes(damage(path.read_bytes()))
    assert ran(sources, **place)[:3] == (0, 0, 1)
    assert ran(sources, **place)[:3] == (0, 1, 0)


def test_a_full_disk_stops_no_run(sources, tmp_path):
    setup = "import os\ndef refuse(*a): raise OSError(28, 'No space left on device')\nos.replace = refuse\n"
    place = {"OLEDSIM_CACHE_DIR": str(tmp_path / "cache")}
    assert ran(sources, setup, **place)[:3] == (0, 0, 1)
    assert ran(sources, **place)[:3] == (0, 0, 1)
