"""The tutorial on policies of one's own: its files are written, its commands run, and what it shows is what they print."""

import re
import shlex
from pathlib import Path

import pytest
from commands import command

from experiments import check_policy
from experiments.check_traces import cases
from experiments.simulate_command import main

TUTORIAL = Path(__file__).resolve().parent.parent / "docs" / "your-own-policy.md"
BLOCKS = re.findall(r"```(python|console|toml)\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)


def checked(*arguments):
    def run():
        raise SystemExit(check_policy.main(arguments))

    return command(run)


def ran(line):
    program, *arguments = shlex.split(line)
    if "-m" in arguments:
        arguments.append("hydra/launcher=basic")  # processes take seconds to start
    return {"oled-simulate": lambda *given: command(main, *given), "oled-check-policy": checked}[program](*arguments)


def test_the_tutorial_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_policy, "cases", lambda: cases(1))
    names = {"Nothing", "Recent", "Ahead"}
    shown = []
    for language, text in BLOCKS:
        head = text.splitlines()[0]
        if language == "python" and head.startswith("# "):
            Path(head.removeprefix("# ")).write_text(text)
        elif language == "python":
            exec(compile(text, TUTORIAL.name, "exec"), {})
        elif language == "console":
            commands = re.findall(r"^\$ (.*)\n((?:[^$\n].*\n)*)", text, re.MULTILINE)
            assert len(commands) == text.count("$ ")
            for line, expected in commands:
                finished = ran(line)
                assert finished.err == "" or " -m " in line, finished.err
                assert finished.code == int("greedy" in line), finished.out
                assert not expected or finished.out == expected
                shown.append(finished.out)
    tables = "".join(shown)
    assert {name for name in names if re.search(rf"^{name} ", tables, re.MULTILINE)} == names
    assert "weight=0" in tables
    assert "gates other experts" not in tables
    assert re.fullmatch(r"[\d.]+ [\d.]+\n", capsys.readouterr().out)


@pytest.mark.parametrize("language", ["python", "console", "toml"])
def test_the_tutorial_has_blocks_of_each_kind(language):
    assert language in {found for found, _ in BLOCKS}
