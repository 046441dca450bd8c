"""Imports go downwards only, and what simulates does not need torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from policies.jit import _SOURCES

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "conf": set(),
    "tracer": {"tracer"},
    "policies": {"policies", "tracer.schema", "tracer.records"},
    "simulator": {"simulator", "policies", "tracer.schema"},
    "replay": {"replay", "policies", "tracer"},
    "experiments": {"experiments", "simulator", "replay", "policies", "tracer", "conf"},
}


def imported(source: str) -> list[str]:
    """Full names of what a module imports, function bodies included."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def violations(package: str, source: str) -> list[str]:
    ours = [name for name in imported(source) if name.split(".")[0] in ALLOWED]
    return [name for name in ours if not any(name == a or name.startswith(a + ".") for a in ALLOWED[package])]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_downwards(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    wrong = {str(path.relative_to(ROOT)): v for path in paths if (v := violations(package, path.read_text()))}
    assert not wrong


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("policies", "from simulator.des import simulate"),
        ("policies", "import tracer.store"),
        ("simulator", "from replay import executor"),
        ("tracer", "def f():\n    from policies import contract"),
    ],
)
def test_a_planted_import_is_found(package, line):
    assert violations(package, line)


def test_the_cache_of_compiled_code_is_named_by_all_that_is_compiled():
    named = {path for pattern in _SOURCES for path in ROOT.glob(pattern)}
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for name in ALLOWED for p in (ROOT / name).rglob("*.py")}  # fmt: skip
    texts = {path: path.read_text() for path in modules.values()}
    imports = {path: imported(text) for path, text in texts.items() if "from policies.jit import jit" in text}
    assert {modules[name] for name in ("policies.lru", "simulator.clock_link", "replay.core_plan")} <= imports.keys()
    assert not imports.keys() - named
    for path, names in imports.items():  # compiled code holds constants and functions of what its module imports
        ours = {name.rpartition(".")[0] for name in names} & modules.keys()
        assert {modules[name] for name in ours} <= named, path


def test_policies_and_simulation_import_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import policies.registry, simulator.des, experiments.simulate_command, experiments.run, tracer.store, tracer.doctor\n"
        "assert 'safetensors' not in sys.modules and 'tokenizers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
