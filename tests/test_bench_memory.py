import numpy as np
import pytest

from experiments.bench import main
from experiments.bench_memory import measure_memory, memory_as_text, repeated, write_repeated
from tracer.doctor import check
from tracer.shipped import find_trace
from tracer.store import TraceReader


def test_a_repeated_trace_is_sound_and_has_requests_of_its_own(tmp_path):
    num_bytes = write_repeated("proxy-tiny", tmp_path / "large.trace", 2_000_000)
    once, large = TraceReader(find_trace("proxy-tiny")), TraceReader(tmp_path / "large.trace")
    assert check(tmp_path / "large.trace").ok
    times = large.num_passes // once.num_passes
    assert times > 1
    assert large.num_passes == times * once.num_passes
    assert large.num_requests == times * once.num_requests
    assert 2_000_000 <= num_bytes < 3_000_000
    first, *_, last = repeated(once, 2)
    for pass_, of_once in ((first, next(once.passes())), (last, list(once.passes())[-1])):
        assert np.array_equal(pass_.expert_ids, of_once.expert_ids)
        assert np.allclose(pass_.gates.sum(axis=-1), 1)
    assert last.requests.min() >= once.num_requests


def test_memory_does_not_grow_with_the_trace():
    report = measure_memory(20_000_000, "proxy-19x256-code", "lru", 40)
    small, large = report["runs"]
    assert large["trace_bytes"] > 20_000_000 > 5 * small["trace_bytes"]
    assert large["num_forwards"] > 2 * small["num_forwards"]
    assert large["peak_bytes"] - small["peak_bytes"] < 15_000_000


def test_the_report_marks_what_is_above_the_budget():
    run = {"seconds": 2.0, "peak_bytes": 500_000_000, "num_forwards": 100, "trace_bytes": 3_000_000}
    report = {
        "trace": "t",
        "policy": "lru",
        "slots_per_layer": 8,
        "num_layers": 19,
        "budget_bytes": 600_000_000,
        "runs": [run, {**run, "peak_bytes": 700_000_000}],
    }
    lines = memory_as_text(report).splitlines()
    assert lines[-2] == "| 3 | 100 | 1900 | 2.0 | 950 | 500 |"
    assert lines[-1] == "| 3 | 100 | 1900 | 2.0 | 950 | 700 **missed** |"


def test_the_command_says_what_went_wrong(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["memory", "--megabytes", "1", "--trace", "proxy-tiny", "--slots", "65"])
    assert "slots_per_layer is 65" in capsys.readouterr().err
