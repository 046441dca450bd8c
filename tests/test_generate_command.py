import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import interruptible

from experiments import generate
from experiments.generate import main
from tracer import doctor
from tracer.calibration_file import load
from tracer.shipped import find_trace
from tracer.store import TraceReader

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "--layers 3 --experts 64 --top-k 4 --activated 18 --block-length 8 --gen-length 32 --prompt-length 16 --requests 3"
)


@pytest.fixture
def oled_generate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(line):
        try:
            main(line.split())
        except SystemExit as stop:
            return stop.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_synthetic_then_controls_and_batches(oled_generate, tmp_path):
    code, out, err = oled_generate(f"synthetic made.trace {SMALL} --seed 4")
    assert (code, err) == (0, "")
    lines = dict(re.split(r"\s{2,}", line) for line in out.splitlines())
    assert lines["trace"] == "made.trace (synthetic:drifting-router)"
    assert re.match(r"1[78]\.\d of 64 \(by layer", lines["activated experts"])
    assert float(lines["adjacent overlap"]) == pytest.approx(0.875, abs=0.03)
    for line, source in (
        ("uniform made.trace uniform.trace --seed 2", "synthetic:uniform"),
        ("shuffled made.trace shuffled.trace", "synthetic:shuffled"),
        ("shuffled made.trace within.trace --within-requests", "synthetic:shuffled"),
        ("merge made.trace merged.trace --batch 3", "synthetic:drifting-router"),
        ("merge made.trace made.trace both.trace --batch 4", "synthetic:drifting-router"),
    ):
        code, out, err = oled_generate(line)
        assert (code, err) == (0, "")
        assert source in out
    for path in tmp_path.glob("*.trace"):
        assert not doctor.check(path).findings
    made = TraceReader(tmp_path / "made.trace").metadata
    assert made.seed == 4
    assert TraceReader(tmp_path / "merged.trace").metadata.details["merged"]["content_hashes"] == [made.content_hash]
    control_of = TraceReader(tmp_path / "uniform.trace").metadata.details["control_of"]
    assert control_of["content_hash"] == made.content_hash
    assert TraceReader(tmp_path / "within.trace").metadata.details["within_requests"] is True


def test_signals_go_along(oled_generate, tmp_path):
    assert oled_generate("merge proxy-tiny merged.trace --batch 8")[0] == 0
    assert oled_generate("shuffled proxy-tiny shuffled.trace")[0] == 0
    assert oled_generate("uniform proxy-tiny uniform.trace")[0] == 0
    signals = {name: TraceReader(tmp_path / f"{name}.trace").has_signals for name in ("merged", "shuffled", "uniform")}
    assert signals == {"merged": True, "shuffled": True, "uniform": False}
    assert TraceReader(tmp_path / "merged.trace").metadata.source == "proxy:proxy-tiny"


def test_more_than_the_memory_holds_is_one_line(oled_generate, tmp_path, monkeypatch):
    def too_large(*_):
        raise MemoryError("Unable to allocate 19 GiB")

    monkeypatch.setattr(generate, "uniform", too_large)
    message = "oled-generate: error: not enough memory: Unable to allocate 19 GiB\n"
    assert oled_generate("uniform proxy-tiny x.trace") == (2, "", message)
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_of_the_first_requests(oled_generate, tmp_path):
    made = f"synthetic one.trace {SMALL}", f"synthetic two.trace {SMALL} --seed 1", "merge one.trace b.trace --batch 2"
    for line in made:
        assert oled_generate(line)[0] == 0
    code, out, err = oled_generate("record one.trace two.trace x.npz --requests 4")
    assert (code, err) == (0, "")
    assert out.split() == ["record", "x.npz", "(synthetic:drifting-router)", "holds", "4", "requests"]
    one, two = (TraceReader(tmp_path / name) for name in ("one.trace", "two.trace"))
    found = load(tmp_path / "x.npz")
    assert (found.name, found.num_requests) == ("synthetic:drifting-router", 4)
    assert found.content_hashes == (one.metadata.content_hash, two.metadata.content_hash)
    routed = [
        np.bincount(p.expert_ids[0].ravel(), minlength=64)
        for reader, last in ((one, 2), (two, 0))
        for p in reader
        if p.requests[0] <= last and not p.is_prefill
    ]
    np.testing.assert_array_equal(found.load[0], np.sum(routed, axis=0))
    assert oled_generate("record b.trace b.npz")[0] == 0
    assert load(tmp_path / "b.npz").content_hashes == (one.metadata.content_hash,)
    code, _, err = oled_generate("record b.trace b.npz")
    assert (code, "b.npz: exists already" in err) == (2, True)
    assert oled_generate("record b.trace b.npz --overwrite")[0] == 0
    for line in ("record b.trace one.trace --overwrite", "record b.trace y.npz --requests 0"):
        code, _, err = oled_generate(line)
        assert (code, err.count("\n")) == (2, 1)
    assert "requests 0: must be 1 to" in err
    assert not (tmp_path / "y.npz").exists()


def test_overwriting_is_asked_for(oled_generate, tmp_path):
    assert oled_generate("shuffled proxy-tiny some.trace")[0] == 0
    before = TraceReader(tmp_path / "some.trace").metadata
    code, _, err = oled_generate("shuffled proxy-tiny some.trace --seed 1")
    assert (code, err) == (
        2,
        "oled-generate: error: some.trace: exists already; choose another name, or ask to overwrite it\n",
    )
    assert TraceReader(tmp_path / "some.trace").metadata == before
    assert oled_generate("shuffled proxy-tiny some.trace --seed 1 --overwrite")[0] == 0
    assert TraceReader(tmp_path / "some.trace").metadata != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "oled-generate: error: the following arguments are required: COMMAND"),
        ("synthetic", "oled-generate synthetic: error: the following arguments are required: output"),
        (
            "synthetic x --activated 500",
            "oled-generate: error: activated 500: out of reach with the other settings, which",
        ),
        ("synthetic x --layers 4", "oled-generate: error: activated: must be given"),
        ("synthetic x --layers 0", "oled-generate: error: layers 0: must be 1 to 1024"),
        *(
            (f"synthetic x --activated 9 --{flag} 99999999999999999999", f"oled-generate: error: {words}")
            for flag, words in (
                ("layers", "layers 99999999999999999999: must be 1 to 1024"),
                ("experts", "top_k 8 and num_experts 99999999999999999999: need"),
                ("top-k", "top_k 99999999999999999999 and num_experts 256: need"),
                ("groups", "num_groups 99999999999999999999: must divide"),
                ("top-groups", "top_groups 99999999999999999999: must be from"),
                ("prompt-length", "prompt_length 99999999999999999999: must be 1 to 1048576"),
                ("gen-length", "gen_length 99999999999999999999: must be 1 to 1048576"),
                ("block-length", "block_length 99999999999999999999: must be 1 to 1048576"),
                ("requests", "num_requests 99999999999999999999: must be 1 to 1048576"),
            )
        ),
        ("record proxy-tiny", "oled-generate record: error: the following arguments are required: output"),
        (
            "record proxy-tiny x --requests 25",
            "oled-generate: error: requests 25: must be 1 to 24, the requests of the",
        ),
        ("record proxy-tiny x --requests 0", "oled-generate: error: requests 0: must be 1 to 24, the requests of the"),
        ("record proxy-tiny proxy-19x256-code x", "oled-generate: error: "),
        ("synthetic x --shape llada2-mini", "oled-generate: error: shape 'llada2-mini': not known; did you mean"),
        ("synthetic x --overlap high", "oled-generate synthetic: error: argument --overlap: invalid float value"),
        ("uniform nowhere x", "oled-generate: error: trace 'nowhere': no such directory"),
        ("uniform proxy-tiny x --seed -1", "oled-generate: error: seed -1: must be at least 0"),
        ("merge proxy-tiny x", "oled-generate merge: error: the following arguments are required: --batch"),
        ("merge proxy-tiny x --batch 25", "oled-generate: error: batch 25: must be at most 24"),
    ],
)
def test_errors_are_one_line(oled_generate, tmp_path, line, message):
    code, out, err = oled_generate(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(oled_generate, tmp_path, monkeypatch):
    def stopped_by(number):
        def passes(*_):
            yield from itertools.islice(TraceReader(find_trace("proxy-tiny")), 3)
            signal.raise_signal(number)

        return passes

    with interruptible():
        for number, word in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")):
            monkeypatch.setattr(generate, "uniform", stopped_by(number))
            assert oled_generate("uniform proxy-tiny x.trace") == (128 + number, "", f"oled-generate: {word}\n")
            assert list(tmp_path.iterdir()) == []


def test_it_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import experiments.generate"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
