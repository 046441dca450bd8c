"""The documentation names what there is, and its Python runs."""

import re
from pathlib import Path

import polars as pl
import pytest

from experiments.run import simulate
from experiments.summary import COLUMNS
from policies.log import LAYER_COLUMNS, LAYER_LISTS
from policies.registry import POLICIES

ROOT = Path(__file__).resolve().parent.parent


def test_every_column_is_defined(tmp_path):
    result = simulate("proxy-tiny", "lru", 16, shape="llada2.0-mini", output=tmp_path)
    named = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert pl.read_parquet(tmp_path / "decisions.parquet").columns == [*LAYER_COLUMNS, *LAYER_LISTS]
    assert {*COLUMNS} - {"policy", "slots_per_layer", "hardware", "trace", "source"} <= named
    for columns in ({*LAYER_COLUMNS, *LAYER_LISTS}, {*result.forwards.columns}, {*result.summary} - {*COLUMNS}):
        assert columns - named == set()


def test_the_readme_names_every_policy_and_its_python_runs(capsys):
    text = (ROOT / "README.md").read_text()
    assert [name for name in POLICIES if f"`{name}`" not in text] == []
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "tpot" not in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_python_of_the_api_runs(capsys):
    text = (ROOT / "docs" / "python-api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "python-api.md", "exec"), {})
    assert "h2d_bytes_per_s" in capsys.readouterr().out
