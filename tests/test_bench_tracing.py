"""The benchmark of reading and tracing a checkpoint, at a tiny shape: what it says, not how quick anything is."""

import json
import re

import pytest
import torch

from tracer import bench
from tracer.bench import MINI, main
from tracer.bench_decode import Workload
from tracer.random_checkpoint import write_random

TINY = ["--device", "cpu", "--dtype", "float32", "--block-length", "8", "--gen-length", "8", "--prompt-length", "9"]


def test_a_random_checkpoint_is_written_loaded_and_traced(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main([*TINY, "--shape", "tiny", "--pairs", "2", "--directory", str(tmp_path), "--json", str(out)]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    assert "3 MoE layers, block 8, " in text
    assert "pairs of decodes: 2, without signals" in text
    assert re.search(r"\| tracing \| [+-]\d+\.\d% \(median of pairs; [+-]\d+\.\d% to [+-]\d+\.\d%\) \|", text)
    report = json.loads(out.read_text())
    assert report["written"]["num_bytes"] > 100_000
    assert len(report["decoded"]["pairs"]) == 2
    for pair in report["decoded"]["pairs"]:
        assert pair["num_forwards"] >= 10  # a prefill, two blocks
        assert pair["plain_s"] > 0
        assert 0 < pair["writing_s"] < pair["traced_s"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]  # nothing else is left


def test_a_checkpoint_that_is_there_with_mapped_experts_and_signals(tmp_path, capsys):
    write_random(bench.SHAPES["tiny"], tmp_path / "model")
    assert (
        main([*TINY, "--checkpoint", str(tmp_path / "model"), "--pairs", "1", "--signals", "--experts", "mapped"]) == 0
    )
    text = capsys.readouterr().out
    assert "| load it, experts mapped | " in text
    assert "pairs of decodes: 1, with signals" in text
    assert "write a random checkpoint" not in text


def test_ids_of_the_released_vocabulary():
    with torch.device("meta"):
        settings = Workload(32, 64, 8, 1, False).settings(type("Model", (), {"config": MINI})())
    assert (settings.mask_id, settings.eos_id) == (156895, 156892)


def test_the_shape_is_that_of_the_model():
    from llada2_models import MINI as VALUES
    from llada2_models import config

    assert config(VALUES) == MINI


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere"], "nowhere: no config.json"),
        (["--shape", "tiny", "--directory", "nowhere"], "No such file or directory"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main([*TINY, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("tracer.bench: error: ")
    assert err.count("\n") == 1


def test_no_room_for_the_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    assert main([*TINY, "--directory", str(tmp_path)]) == 2
    assert "needs 32.5 GB for the checkpoint, 1.0 GB are free" in capsys.readouterr().err
