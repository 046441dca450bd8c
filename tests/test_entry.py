"""The entry points: thin, and one line for an interrupt at any time."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import entry

SCRIPTS = tomllib.loads((Path(entry.__file__).parent.parent / "pyproject.toml").read_text())["project"]["scripts"]
OURS = {name: target for name, target in SCRIPTS.items() if target.startswith("experiments.")}


def test_entry_points_load_nothing_slow():
    code = "import sys, experiments.entry; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "experiments.terminal" in modules
    assert {"numpy", "hydra", "numba", "polars", "torch"}.isdisjoint(modules)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("when", ["while loading", "before work begins"])
def test_an_interrupt_is_one_line(name, when, monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    def load(module):
        assert Path(entry.__file__).with_name(f"{module.removeprefix('experiments.')}.py").is_file()
        return interrupted() if when == "while loading" else SimpleNamespace(main=interrupted)

    monkeypatch.setattr(entry, "import_module", load)
    module, _, function = OURS[name].partition(":")
    assert module == "experiments.entry"
    with pytest.raises(SystemExit) as end:
        getattr(entry, function)()
    assert end.value.code == 130
    assert capsys.readouterr() == ("", f"{name}: interrupted\n")


@pytest.mark.parametrize("command", ["trace", "replay", "calibrate"])
def test_torch_that_is_not_installed_is_one_line(command):
    code = f"import sys; sys.modules['torch'] = None; from experiments import entry; entry.{command}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    remedy = "in a checkout, pip install '.[trace,replay]' brings it"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"oled-{command}: error: torch is not installed; {remedy}\n"


def test_other_modules_that_are_missing_are_bugs(monkeypatch):
    def load(module):
        raise ModuleNotFoundError("No module named 'experiments.gone'", name="experiments.gone")

    monkeypatch.setattr(entry, "import_module", load)
    with pytest.raises(ModuleNotFoundError, match="gone"):
        entry.curves()


@pytest.mark.parametrize("name", OURS)
def test_an_exit_code_is_passed_on(name, monkeypatch):
    monkeypatch.setattr(entry, "import_module", lambda module: SimpleNamespace(main=lambda: 2))
    assert getattr(entry, OURS[name].partition(":")[2])() == 2
