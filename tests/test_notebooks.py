"""The notebooks run on the shipped traces, and what is committed with them is what they give."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
MAX_BYTES = 600_000
MAX_DEFINITION = 4  # lines: notebooks call the packages

# in a process of its own, since the client's threads and sockets warn of what is not ours
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
notebook.cells.append(nbformat.v4.new_code_cell("import sys; print(sys.executable)"))
NotebookClient(notebook, kernel_name="python3", timeout=300, record_timing=False).execute()
nbformat.write(notebook, sys.argv[2])
"""


def texts(notebook):
    """What the cells print and show, pictures aside."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.get("text") or output["data"].get("text/markdown") for output in outputs]


def num_pictures(notebook):
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_what_is_committed_with_it(path, tmp_path):
    environment = {
        **os.environ,
        "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel of this environment, not one of the user's
        **{name: str(tmp_path) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")},
    }
    executed = tmp_path / "executed.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(path), str(executed)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert finished.returncode == 0, finished.stderr
    again, committed = nbformat.read(executed, as_version=4), nbformat.read(path, as_version=4)
    assert again.cells.pop().outputs[0].text.strip() == sys.executable
    assert texts(again) == texts(committed)
    assert num_pictures(again) == num_pictures(committed) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_valid_and_defines_next_to_nothing(path):
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
            for node in ast.walk(ast.parse("\n".join(lines))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    assert node.end_lineno - node.lineno < MAX_DEFINITION, f"{path.name}: {node.name}"


def test_there_are_notebooks():
    assert NOTEBOOKS
