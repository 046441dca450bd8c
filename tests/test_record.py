import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from tracer import calibration_file, checkpoint, record_jobs, record_pack, record_proxy, record_workers
from tracer.corpus import prompts
from tracer.doctor import check
from tracer.record_jobs import Job, Setup, plan, prompts_path, run_job, trace_path
from tracer.record_pack import pack
from tracer.record_workers import Outcome
from tracer.schema import TraceError
from tracer.shipped import find_model
from tracer.store import TraceReader
from tracer.tokenizer import load_tokenizer

SHIPPED = find_model("proxy-tiny")
PROVENANCE = checkpoint.Provenance("abc", None, {}, None)


@pytest.fixture(scope="module")
def model():
    import torch

    return checkpoint.load(SHIPPED, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


@pytest.fixture
def setup(tmp_path):
    return Setup("proxy-tiny", SHIPPED, tmp_path, "cpu", PROVENANCE)


def questions(n):
    return tuple(document.prompt for document in prompts("arithmetic", n))


def test_the_plan_is_in_order_of_importance():
    evaluated = {"code": ["a"] * 40, "arithmetic": ["b"] * 40}
    jobs = plan("proxy-x", evaluated, {"code": ["c"] * 10, "arithmetic": ["d"] * 9}, only_block_16=False)
    assert [job.name for job in jobs] == [
        "proxy-x-code",
        "proxy-x-arithmetic",
        "proxy-x-code-signals",
        "proxy-x-arithmetic-signals",
        "calibration-code-0",
        "calibration-arithmetic-0",
        "calibration-code-1",
        "calibration-arithmetic-1",
        "proxy-x-code-float32",
        "proxy-x-code-float16",
        *(f"proxy-x-{workload}-b{length}" for length in (1, 4, 8, 32, 64) for workload in ("code", "arithmetic")),
    ]
    by_name = {job.name: job for job in jobs}
    assert len(by_name) == len(jobs)
    assert [by_name[f"calibration-{part}"].first_request for part in ("code-0", "code-1")] == [0, 7]
    assert [by_name[f"calibration-{part}"].first_request for part in ("arithmetic-0", "arithmetic-1")] == [10, 17]
    assert [len(by_name[f"calibration-{part}"].prompts) for part in ("code-1", "arithmetic-1")] == [3, 2]
    assert by_name["proxy-x-code"].min_tokens == by_name["proxy-x-code"].gen_length == 128
    assert {job.after for job in jobs if "-b" in job.name} == {"proxy-x-code", "proxy-x-arithmetic"}
    assert by_name["proxy-x-code-b64"].gen_length == 128
    assert by_name["proxy-x-code-b8"].gen_length == 64
    only = plan("proxy-x", evaluated, {}, only_block_16=True)
    assert only == jobs[:2]


def test_a_trace_is_sound_and_its_prompts_stand_beside_it(model, tokenizer, setup):
    job = Job("proxy-tiny-arithmetic", "trace", "arithmetic", 2, questions(2))
    made = run_job(job, setup, model, tokenizer)
    path = trace_path(setup.directory, job)
    assert path == setup.directory / "traces" / "proxy-tiny-arithmetic.trace"
    assert check(path).ok
    reader = TraceReader(path)
    assert reader.num_requests == 2
    assert not reader.has_signals
    assert reader.metadata.source == "proxy:proxy-tiny"
    assert reader.metadata.gate_dtype == "uint8"
    assert reader.metadata.details["checkpoint_hash"] == "abc"
    passes = list(reader)
    assert made.facts["num_forwards"] == len(passes)
    decode = [p for p in passes if not p.is_prefill]
    num_accepted = sum(int(p.num_accepted.sum()) for p in decode)
    assert made.facts["tokens_per_forward"] == pytest.approx(num_accepted / len(decode), abs=1e-3)
    num_pairs = sum(p.expert_ids.size for p in passes)
    num_bytes = (path / "routing.parquet").stat().st_size
    assert made.facts["bytes_per_pair"] == pytest.approx(num_bytes / num_pairs, abs=1e-4)
    lines = [json.loads(line) for line in prompts_path(setup.directory, "arithmetic").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == list(job.prompts)
    assert all("The answer is" in line["answer"] for line in lines)
    assert [line["num_tokens"] for line in lines] == made.facts["num_tokens"]


def test_long_answers_are_kept_and_the_longest_of_the_short_ones_fill_up(model, tokenizer, setup):
    each = run_job(Job("a", "trace", "arithmetic", 6, questions(6)), setup, model, tokenizer).facts["num_tokens"]
    longest = max(each)
    index = each.index(longest)
    job = Job("b", "trace", "arithmetic", 1, questions(6), min_tokens=longest)
    assert run_job(job, setup, model, tokenizer).facts["num_tokens"] == [longest]
    job = Job("c", "trace", "arithmetic", 3, questions(6), min_tokens=longest + 1)
    facts = run_job(job, setup, model, tokenizer).facts
    assert sorted(facts["num_tokens"]) == sorted(each)[-3:]
    assert facts["num_short"] == 3
    kept = [json.loads(line)["prompt"] for line in prompts_path(setup.directory, "arithmetic").read_text().splitlines()]
    assert kept == sorted(kept, key=questions(6).index)
    assert questions(6)[index] in kept


def test_jobs_after_a_trace_take_its_first_prompts(model, tokenizer, setup):
    run_job(Job("a", "trace", "arithmetic", 3, questions(3)), setup, model, tokenizer)
    before = prompts_path(setup.directory, "arithmetic").read_bytes()
    job = Job("a-signals", "trace", "arithmetic", 2, after="a", signals=True)
    run_job(job, setup, model, tokenizer)
    wide = Job("a-float16", "trace", "arithmetic", 2, after="a", gate_dtype="float16")
    run_job(wide, setup, model, tokenizer)
    assert trace_path(setup.directory, wide).parent.name == "sizes"
    assert prompts_path(setup.directory, "arithmetic").read_bytes() == before
    first = [p for p in TraceReader(setup.directory / "traces" / "a.trace") if p.requests[0] < 2]
    signalled = TraceReader(trace_path(setup.directory, job))
    assert signalled.has_signals
    for other in (signalled, TraceReader(trace_path(setup.directory, wide))):
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a.token_ids_in, b.token_ids_in)
            np.testing.assert_array_equal(a.expert_ids, b.expert_ids)


def test_parts_of_the_calibration_add_up(model, tokenizer, setup):
    def part(first, texts):
        job = Job("p", "calibration", "arithmetic", len(texts), texts, first_request=first, signals=True)
        return run_job(job, setup, model, tokenizer).calibrator

    whole = part(5, questions(3))
    split = part(7, questions(3)[2:])
    split.merge(part(5, questions(2)))
    a, b = whole.finish(), split.finish()
    assert (a.name, a.checkpoint_hash, a.num_requests) == ("proxy:proxy-tiny", "abc", 3)
    np.testing.assert_array_equal(a.request_loads, b.request_loads)
    np.testing.assert_array_equal(a.map_ids, b.map_ids)
    np.testing.assert_array_equal(a.token_experts, b.token_experts)
    assert not (setup.directory / "traces").exists()


def test_prompts_that_cannot_be_decoded_are_named(model, tokenizer, setup, monkeypatch):
    mask = tokenizer.decode([])  # special tokens have no text, so the mask is put in by hand
    assert mask == ""

    class Masking:
        mask_id, eos_id, decode = tokenizer.mask_id, tokenizer.eos_id, staticmethod(tokenizer.decode)

        @staticmethod
        def encode(text):
            return [tokenizer.mask_id] if text == "bad" else tokenizer.encode(text)

    good = questions(1)[0]
    made = run_job(Job("a", "trace", "arithmetic", 1, ("bad", good)), setup, model, Masking)
    assert made.facts["num_requests"] == 1
    [failure] = made.facts["failures"]
    assert failure.startswith("prompt 0: request 0: the prompt holds the mask token")
    with pytest.raises(TraceError, match="b: no prompt can be decoded: prompt 0"):
        run_job(Job("b", "trace", "arithmetic", 1, ("bad",)), setup, model, Masking)
    assert not (setup.directory / "traces" / "b.trace").exists()


def outcomes():
    slow = Job("a", "trace", "code", 10)
    return [
        Outcome(slow),
        Outcome(Job("a-signals", "trace", "code", 3, after="a")),
        Outcome(Job("b", "trace", "code", 1)),
    ]


def test_a_job_waits_for_the_one_it_names_and_for_time_enough():
    found = outcomes()
    assert record_workers._next(found, 1.0) is found[0]
    found[0].state = "running"
    assert record_workers._next(found, 1.0) is found[2]
    found[0].state, found[0].seconds = "done", 100.0
    assert record_workers._next(found, 1.3 * 30 + 1) is found[1]
    assert record_workers._next(found, 1.3 * 30 - 1) is found[2]
    assert record_workers._next(found, 1.3 * 10 - 1) is None
    found[0].state = "failed"
    found[2].state = "running"
    assert record_workers._next(found, 1e9) is None
    record_workers._close(found)
    assert [outcome.state for outcome in found] == ["failed", "not begun", "stopped"]
    assert found[1].error == "a is not there"


def test_packing_takes_whole_results_in_tars_of_limited_size(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    sizes = {
        "report.json": 100,
        "training/checkpoint/config.json": 100,
        "training/checkpoint/model-00001-of-00001.safetensors": 100,
        "traces/a.trace/routing.parquet": 60_000,
        "traces/b.trace/routing.parquet": 60_000,
        "traces/b.trace/tokens.parquet": 20_000,
        "traces/.c.trace.partial-00/tokens.parquet": 100,
        "traces/d.trace/routing.parquet": 200_000,
        "sizes/a.trace/routing.parquet": 100,
        ".report.json.partial": 100,
    }
    for name, size in sizes.items():
        path = tmp_path / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(size))
    monkeypatch.setattr(record_pack, "MAX_TAR_BYTES", 100_000)
    out = tmp_path / "out"
    out.mkdir()
    (out / "part-7.tar").write_bytes(b"old")
    found = pack(tmp_path / "made", out)
    assert found["left_out"] == ["traces/d.trace/routing.parquet"]
    assert sorted(path.name for path in out.iterdir()) == ["part-1.tar", "part-2.tar"]
    packed = {}
    for path in out.iterdir():
        assert path.stat().st_size == found["tars"][path.name] <= 100_000
        with tarfile.open(path) as tar:
            for member in tar:
                packed[member.name] = tar.extractfile(member).read()
    assert sorted(packed) == [
        "report.json",
        "traces/a.trace/routing.parquet",
        "traces/b.trace/routing.parquet",
        "traces/b.trace/tokens.parquet",
        "training/checkpoint/config.json",
    ]
    assert all((tmp_path / "made" / name).read_bytes() == content for name, content in packed.items())
    first = (out / "part-1.tar").read_bytes()
    os.utime(tmp_path / "made" / "report.json", (1, 1))
    pack(tmp_path / "made", out)
    assert (out / "part-1.tar").read_bytes() == first
    monkeypatch.setattr(record_pack, "MAX_TARS", 1)
    left_out = ["traces/b.trace/routing.parquet", "traces/d.trace/routing.parquet"]
    assert pack(tmp_path / "made", out)["left_out"] == left_out


def trained(directory):
    shutil.copytree(SHIPPED, directory / "training" / "checkpoint")
    return directory


def test_a_run_records_scores_and_packs(tmp_path, monkeypatch, capsys):
    for name, value in (("NUM_WITH_SIGNALS", 1), ("OTHER_BLOCKS", {8: 1})):
        monkeypatch.setattr(record_jobs, name, value)
    monkeypatch.setattr(record_jobs, "NUM_EVALUATED", 2)
    monkeypatch.setattr(record_jobs, "NUM_TOKENS", 1)
    for name, value in (("NUM_CANDIDATES", 2), ("NUM_CALIBRATION", 2), ("_NUM_PROBLEMS", 2), ("_NUM_TEXTS", 3)):
        monkeypatch.setattr(record_proxy, name, value)
    monkeypatch.setattr(record_proxy, "heldout_loss", lambda *settings: 1.5)
    monkeypatch.setattr(record_proxy, "text_summary", lambda *settings: {"workload": settings[3]})
    out, packed = trained(tmp_path / "out"), tmp_path / "packed"
    arguments = ["--config", "proxy-tiny", "--record-minutes", "20", "--workers", "1", "--device", "cpu"]
    assert record_proxy.main([*arguments, "--out", str(out), "--pack", str(packed)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_done"] == {}
    assert len(report["jobs"]) == 2 + 2 + 2 + 2 + 2
    assert [found["workload"] for found in report["scores"]] == ["arithmetic", "code"]
    assert report["scores"][0]["num_problems"] == 2
    assert report["calibration"]["num_requests"] == 4
    found = calibration_file.load(out / "proxy-tiny.calibration.npz")
    assert found.num_requests == 4
    reader = TraceReader(out / "traces" / "proxy-tiny-code.trace")
    assert reader.metadata.details["checkpoint_hash"] == found.checkpoint_hash == checkpoint.checkpoint_hash(SHIPPED)
    assert reader.metadata.details["training"]["config"] == "proxy-tiny"
    assert sorted(path.name for path in (out / "traces").iterdir()) == sorted(
        f"proxy-tiny-{workload}{kind}.trace" for workload in ("arithmetic", "code") for kind in ("", "-signals", "-b8")
    )
    with tarfile.open(packed / "part-1.tar") as tar:
        names = tar.getnames()
    assert {"report.json", "scores.jsonl", "prompts-code.jsonl", "proxy-tiny.calibration.npz"} < set(names)
    assert sum(name.startswith("traces/") for name in names) == 6 * 3 + 2
    assert not any(name.endswith(".safetensors") for name in names)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL"])
def test_workers_die_with_the_script(tmp_path, signal_name):
    out = trained(tmp_path / "out")
    arguments = ["--config", "proxy-tiny", "--record-minutes", "5", "--workers", "1", "--device", "cpu"]
    lines = (
        "from tracer import record_jobs, record_proxy",
        "record_jobs.NUM_EVALUATED = record_jobs.NUM_TOKENS = 1",
        "record_proxy.NUM_CANDIDATES, record_proxy.NUM_CALIBRATION = 2, 20",
        "record_proxy.Recording._score = lambda *_: None",
        "record_proxy.script()",
    )
    command = [sys.executable, "-c", "\n".join(lines), *arguments, "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list((out / "traces").glob("*.trace")) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(getattr(signal, signal_name))
        process.wait(60)
        while any(is_running(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(is_running(pid) for pid in children)
    finally:
        process.kill()
        process.wait()
    for path in (out / "traces").iterdir():
        if not path.name.startswith("."):
            assert check(path).ok
    if signal_name == "SIGTERM":
        report = json.loads((out / "report.json").read_text())
        assert report["interrupted"] == "SystemExit: 143"
        traced = {name for name in report["jobs"] if name.startswith("proxy-tiny-")}
        assert traced <= {path.stem for path in (out / "traces").iterdir()}  # the last may not have been reported
        assert len(report["not_done"]) > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --config to train and record, or --pack to pack what there is"),
        (["--config", "proxy-tiny"], "give --record-minutes with --config"),
        (["--config", "proxy-tiny", "--record-minutes", "1", "--workers", "0"], "--workers 0: must be at least 1"),
    ],
)
def test_wrong_options_are_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        record_proxy.main([*arguments, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_a_missing_checkpoint_is_one_line(tmp_path, capsys):
    arguments = ["--config", "proxy-tiny", "--record-minutes", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert record_proxy.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/training/checkpoint: no ")
