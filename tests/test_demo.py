"""The demonstration as a program: what it says when it cannot go on."""

import pytest

from experiments import demo
from tracer.schema import TraceError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(KeyboardInterrupt(), 130, "demo: interrupted"), (TraceError("x: is wrong"), 2, "demo: error: x: is wrong")],
)
def test_it_stops_with_one_line(monkeypatch, capsys, tmp_path, error, code, line):
    def stop(out):
        raise error

    monkeypatch.setattr(demo, "run", stop)
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--out", str(tmp_path)])
    assert stopped.value.code == code
    assert capsys.readouterr().err == line + "\n"
