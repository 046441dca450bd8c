"""Compiled code is found again by another process, and never after its sources have changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import policies
from policies.jit import cache_dir

# a function that calls a helper in another file
PROGRAM = """
import numpy as np
from policies.dispatch import by_priority
from policies.jit import cache_dir
ids = by_priority(np.array([True, False, True]), np.zeros(3)).tolist()
print(ids, sum(by_priority.stats.cache_hits.values()), sum(by_priority.stats.cache_misses.values()), cache_dir().name)
"""


def ran(root):
    """Ids, compilations that were found and that were made, and the name of the cache."""
    environment = {"PYTHONPATH": str(root), "OLEDSIM_CACHE_DIR": str(root / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    *ids, found, made, name = finished.stdout.rsplit(maxsplit=3)
    return ids[0], int(found), int(made), name


def test_machine_code_is_that_of_the_sources(tmp_path):
    root = Path(policies.__file__).parent.parent
    shutil.copytree(root / "policies", tmp_path / "policies", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tracer").mkdir()
    for name in ("__init__.py", "schema.py"):
        shutil.copy(root / "tracer" / name, tmp_path / "tracer")

    first = ran(tmp_path)
    assert first[:3] == ("[0, 2]", 0, 1)
    assert ran(tmp_path) == ("[0, 2]", 1, 0, first[3])

    helper = tmp_path / "policies" / "retention.py"
    source = helper.read_text()
    assert source.count("if mask[index]:") == 2
    helper.write_text(source.replace("if mask[index]:", "if not mask[index]:"))
    second = ran(tmp_path)
    assert second[:3] == ("[1]", 0, 1)

    # values of enums are constants in compiled code
    schema = tmp_path / "tracer" / "schema.py"
    schema.write_text(schema.read_text().replace("DENOISE = 1", "DENOISE = 7"))
    third = ran(tmp_path)
    assert third[:3] == ("[1]", 0, 1)
    assert len({first[3], second[3], third[3]}) == 3


def test_a_cache_can_be_moved(monkeypatch, tmp_path):
    name = cache_dir().name
    monkeypatch.setenv("OLEDSIM_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path / name
