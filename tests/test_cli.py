"""The command layer by itself: a small command of its own, run in this process."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from commands import command, interruptible
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, OmegaConf

from experiments.cli import hydra_command
from experiments.messages import explain
from policies.contract import PlanError, PolicyError
from policies.profile import ProfileError
from tracer.schema import TraceError


@dataclass
class Red:
    name: str = "red"
    depth: int = 1


@dataclass
class Blue:
    name: str = "blue"


@dataclass
class Output:
    dir: str = MISSING


@dataclass
class Schema:
    defaults: list[Any] = field(default_factory=lambda: ["command", {"colour": "red"}, "_self_"])
    number: int = 3
    needed: str = MISSING
    fast: bool = False
    colour: Any = MISSING
    output: Output = field(default_factory=Output)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ConfigStore.instance()
    store.store(name="command_under_test", node=Schema)
    store.store(group="colour", name="red", node=Red)
    store.store(group="colour", name="blue", node=Blue)
    yield
    for name in ("command_under_test.yaml", "colour"):  # launchers send the store to processes without these classes
        del store.repo[name]


def paint(config):
    """What the command does: number 7 is the user's mistake, 8 ours, 9 an interrupt."""
    if config.number == 7:
        raise TraceError("number is 7, must not be")
    if config.number == 8:
        raise RuntimeError("a bug\nin two lines")
    if config.number == 9:
        raise KeyboardInterrupt
    directory = Path(HydraConfig.get().runtime.output_dir)
    (directory / "result.txt").write_text(f"{config.number} {config.colour.name} {config.needed}")


def run(*arguments, work=paint, finish=None):
    return command(lambda: hydra_command("oled-paint", "command_under_test", work, finish), *arguments)


def files():
    return sorted(str(path.relative_to(Path.cwd())) for path in Path.cwd().rglob("*") if path.is_file())


def test_a_run_writes_to_a_dated_directory_and_no_log():
    assert run("needed=x", "number=4") == (0, "", "")
    assert [Path(name).parts[3:] for name in files()] == [("result.txt",)]
    assert next(Path().glob("outputs/*/*/result.txt")).read_text() == "4 red x"


def test_runs_of_one_second_have_directories_of_their_own():
    for number in range(3):
        assert run("needed=x", f"number={number}").code == 0
    assert len(files()) == 3


def test_output_dir_names_the_directory():
    assert run("needed=x", "output.dir=here/it").code == 0
    assert Path("here/it/result.txt").exists()
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nedeed=x"], ["nedeed", "did you mean needed?", "allowed: colour, number, needed, fast, output"]),
        (["needed=x", "colour.dept=2"], ["colour.dept", "did you mean depth?", "allowed: name, depth"]),
        (["needed=x", "colour=blue", "colour.depth=2"], ["colour.depth", "allowed: name"]),
        (["needed=x", "colour=rde"], ["colour=rde", "did you mean red?", "allowed: blue, red"]),
        (["needed=x", "number=many"], ["number", "many", "Integer"]),
        (["needed=x", "number=1.5"], ["number", "1.5", "Integer"]),
        (["needed=x", "number=null"], ["number", "not Optional"]),
        (["needed=x", "fast=perhaps"], ["fast", "perhaps", "bool"]),
        ([], ["needed=VALUE"]),
        (["needed=(", "number=1"], ["needed=(", "key=value"]),
        (["needed"], ["needed", "key=value"]),
        (["needed=x", "number=1,2"], ["number=1,2", "-m"]),
        (["needed=x", "colour=null"], ["group"]),
        (["needed=x", "hydra.runn.dir=x"], ["hydra.runn", "did you mean run?"]),
        (["needed=x", "--multirunn"], ["--multirunn", "--hydra-help"]),
        (["--experimental-rerun", "x.pickle"], ["--experimental-rerun", "pickle"]),
        (["needed=x", "--run", "--multirun"], ["--run", "--multirun"]),
        (["needed=x", "--config-dir", "nowhere"], ["nowhere", "not found"]),
        (["needed=x", "number=7"], ["number is 7, must not be"]),
        (["-m", "needed=x", "colour=red,rde"], ["colour=rde", "did you mean red?"]),
        (["-m", "needed=x", "number=1,many"], ["number", "many", "Integer"]),
        (["-m", "needed=x", "output.dir=a,b"], ["output.dir=a,b", "one directory"]),
        (["-m", "needed=x", "number=1,2", "output.dir=a${number}"], ["output.dir=a${number}", "one directory"]),
        (["needed=é"], ["needed=é", "key=value", "letters beyond ASCII"]),
    ],
)
def test_a_users_error_is_one_line_and_leaves_nothing(arguments, words):
    def needs(config):
        assert config.needed
        paint(config)

    code, out, err = run(*arguments, work=needs)
    assert (code, out) == (2, "")
    assert err.startswith("oled-paint: error: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("kind", [TraceError, PlanError, PolicyError, ProfileError])
def test_our_own_errors_are_the_users(kind):
    def work(config):
        raise kind("layer 3: found 1,\nallowed 2")

    assert run("needed=x", work=work) == (2, "", "oled-paint: error: layer 3: found 1, allowed 2\n")


def test_errors_of_the_file_system_name_the_path():
    def work(config):
        Path("missing/file.txt").read_text()

    assert run("needed=x", work=work) == (2, "", "oled-paint: error: missing/file.txt: No such file or directory\n")
    assert explain(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"


def test_a_failed_run_keeps_what_was_there():
    Path("mine/empty").mkdir(parents=True)
    Path("mine/old.txt").write_text("old")
    assert run("needed=x", "number=7", "output.dir=mine").code == 2
    assert run("needed=x", "number=7", "output.dir=mine/empty").code == 2
    assert files() == ["mine/old.txt"]
    assert Path("mine/empty").is_dir()


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"):
        run("needed=x", "number=8")
    assert list(Path.cwd().iterdir()) == []


def test_full_errors_on_request(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(TraceError):
        run("needed=x", "number=7")


def test_an_interrupt_is_one_line():
    assert run("needed=x", "number=9") == (130, "", "oled-paint: interrupted\n")
    code, _, err = run("-m", "needed=x", "number=1,9,2", "output.dir=grid")
    assert code == 130
    assert err.splitlines()[-1] == f"oled-paint: interrupted; finished cells are kept in {Path.cwd() / 'grid'}"
    assert Path("grid/0/result.txt").exists()
    assert not Path("grid/2").exists()


def test_an_interrupt_before_any_cell_is_done_leaves_nothing_and_says_of_nothing_that_it_is_kept():
    assert run("-m", "needed=x", "number=9,1", "output.dir=grid") == (130, "", "oled-paint: interrupted\n")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_again_disturb_no_tidying(number):
    def ends(config):
        Path(HydraConfig.get().runtime.output_dir, "half").touch()
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            Path(HydraConfig.get().runtime.output_dir, "half").unlink()
            os.kill(os.getpid(), signal.SIGINT)

    with interruptible():
        assert run("-m", "needed=x", "number=1,2", "output.dir=grid", work=ends).code == 128 + number
    assert list(Path.cwd().iterdir()) == []


def test_a_failed_cell_does_not_hide_nor_stop_the_others():
    seen = []
    finish = lambda *arguments: seen.append(arguments)  # noqa: E731
    code, _, err = run("-m", "needed=x", "number=1,7,8,2", "output.dir=grid", finish=finish)
    assert code == 1
    ((sweep, grid),) = seen
    assert sweep == Path.cwd() / "grid"
    assert [path.parent.name for path in sorted(Path("grid").glob("*/result.txt"))] == ["0", "3"]
    assert json.loads(Path("grid/0/cell.json").read_text())["error"] is None
    assert json.loads(Path("grid/1/cell.json").read_text()) == {
        "grid": grid,
        "overrides": ["needed=x", "number=7", "output.dir=grid"],
        "error": "number is 7, must not be",
    }
    assert "RuntimeError: a bug" in err  # with its traceback
    assert "in paint" in err
    assert [line for line in err.splitlines() if line.startswith("oled-paint: error")] == [
        "oled-paint: error: needed=x number=7 output.dir=grid: number is 7, must not be",
        "oled-paint: error: needed=x number=8 output.dir=grid: RuntimeError: a bug in two lines",
    ]


def test_a_cell_that_succeeds_later_is_no_failure():
    def mends(config):
        if not Path("mended").exists():
            raise TraceError("not yet")

    assert run("-m", "needed=x", "number=1,2", "output.dir=grid", work=mends).code == 1
    Path("mended").touch()
    assert run("-m", "needed=x", "number=1,2", "output.dir=grid", work=mends).code == 0


def test_errors_of_other_grids_and_programs_are_not_ours():
    assert run("-m", "needed=x", "number=1,2,7", "output.dir=grid").code == 1
    for name, text in {
        "3": "[]",
        "4": '{"error": "no"}',
        "5": "{",
        ".6": '{"grid": "", "overrides": 1, "error": 2}',
    }.items():
        Path("grid", name).mkdir()
        Path("grid", name, "cell.json").write_text(text)
    assert run("-m", "needed=x", "number=1,2", "output.dir=grid").code == 0


def test_a_signal_to_end_leaves_nothing():
    def ends(config):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert run("needed=x", work=ends) == (143, "", "oled-paint: ended by SIGTERM\n")
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(Path.cwd().iterdir()) == []


def test_a_signal_that_is_ignored_stays_so():
    def survives(config):
        os.kill(os.getpid(), signal.SIGHUP)
        paint(config)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("needed=x", work=survives).code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_went_away_ends_the_command_quietly(monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", ["oled-paint", "needed=x"])
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as end:
            hydra_command("oled-paint", "command_under_test", lambda config: print("much"))
        stream.flush()  # as Python does at its exit
    assert end.value.code == 141
    assert capfd.readouterr().err == ""


def test_a_full_disk_behind_stdout_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["oled-paint", "needed=x"])
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as end:
            hydra_command("oled-paint", "command_under_test", lambda config: print("much"))
    assert end.value.code == 2
    assert capfd.readouterr().err == "oled-paint: error: No space left on device\n"


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("{python} >&-", ""),
        ("{python} 2>&-", "\\u2248 \\xe9\n"),
        ("{python} >&- 2>&- <&-", ""),
        ("PYTHONIOENCODING=ascii {python}", "\\u2248 \\xe9\n"),
    ],
)
def test_streams_are_mended(shell, words):
    code = "from experiments.terminal import mend_streams; mend_streams(); import sys; "
    code += "print('\u2248 \u00e9'); sys.stderr.isatty(); sys.stderr.write(''); assert sys.stdin is not None"
    python = f'PYTHONIOENCODING=${{PYTHONIOENCODING:-ascii}} {sys.executable} -c "{code}"'
    done = subprocess.run(["sh", "-c", shell.format(python=python)], capture_output=True, text=True, check=True)
    assert done.stdout == words


def test_flags_may_stand_anywhere():
    assert run("needed=x", "-m", "number=1,2", "output.dir=grid").code == 0
    assert len(list(Path("grid").glob("*/result.txt"))) == 2


def test_version():
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("oled-paint ")


def test_hydras_own_ways_work(monkeypatch):
    code, out, err = run("--cfg", "job", "number=5")
    assert (code, err) == (0, "")
    assert OmegaConf.create(out).number == 5
    code, out, _ = run("--help")
    assert code == 0
    assert "colour: blue, red" in out
    monkeypatch.setenv("COMP_LINE", "oled-paint colour=")
    code, out, _ = run("-sc", "query=bash")
    assert (code, out.split()) == (0, ["colour=blue", "colour=red"])
    assert list(Path.cwd().iterdir()) == []
