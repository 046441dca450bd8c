"""Which record policies learn from, and that the manifest names it."""

from dataclasses import replace
from functools import partial
from hashlib import sha256

import numpy as np
import pytest
from commands import command
from strategies import metadata_for, random_passes

from experiments import calibration as choice
from experiments.calibration import calibrated, context_of, recorded
from experiments.collect import table_of
from experiments.run import simulate
from experiments.simulate_command import main
from experiments.table import format_table
from policies.contract import PolicyError
from tracer.calibration import Calibrator
from tracer.calibration_file import save
from tracer.merge import merge, merged_metadata
from tracer.schema import TraceError
from tracer.store import TraceReader, TraceWriter

SIZES = {"num_layers": 2, "num_experts": 8, "top_k": 2, "num_requests": 3}


def write(path, passes, shape, **fields):
    with TraceWriter(path, metadata_for(shape, **fields)) as writer:
        for pass_ in passes:
            writer.write(pass_)
    return TraceReader(path)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A trace of proxy:toy, and the record that ships with it: of its last two requests, for want of others."""
    monkeypatch.setattr(choice, "DATA_DIRECTORY", tmp_path)
    shape, passes = random_passes(np.random.default_rng(3), signals=True, **SIZES)
    calibrator = Calibrator(shape, "proxy:toy", "abc")
    for pass_ in passes:
        if pass_.requests[0] > 0:
            calibrator.add(pass_)
    save(tmp_path / "toy.calibration.npz", calibrator.finish())
    details = {"checkpoint_hash": "abc"}
    return write(tmp_path / "toy.trace", passes, shape, source="proxy:toy", details=details), passes, shape


def test_the_warm_up_requests_calibrate_with_their_signals(shipped):
    reader, passes, shape = shipped
    context, name = context_of(reader, 2, "warmup")
    assert name == "first 2 of 3 requests of the trace"
    first = [pass_ for pass_ in passes if pass_.requests[0] < 2]
    assert [pass_.pass_id for pass_ in context.calibration_passes] == [pass_.pass_id for pass_ in first]
    expected = calibrated(first, shape, "first")
    assert context.calibration.num_requests == 2
    assert (context.calibration.load == expected.load).all()
    assert (context.calibration.map_ids == expected.map_ids).all()
    assert not np.isnan(context.calibration.map_sketches).any()
    assert context.has_signals
    assert context.calibration is context.calibration


def test_the_shipped_record_of_the_model_comes_first(shipped):
    reader, passes, shape = shipped
    for warmup_requests in (0, 1):
        context, name = context_of(reader, warmup_requests)
        assert name.startswith("toy.calibration.npz: 2 requests of proxy:toy, sha256 ")
        others = calibrated([pass_ for pass_ in passes if pass_.requests[0] > 0], shape, "others")
        assert (context.calibration.load == others.load).all()
        assert list(context.calibration_passes) == []
    assert context_of(reader, 1, "warmup")[1] == "first 1 of 3 requests of the trace"


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "proxy:toy", "details": {"checkpoint_hash": "other"}},
        {"source": "proxy:toy"},
        {"source": "model:toy", "details": {"checkpoint_hash": "abc"}},
        {"source": "proxy:other", "details": {"checkpoint_hash": "abc"}},
    ],
)
def test_a_record_of_another_model_is_left_alone(shipped, tmp_path, fields):
    _, passes, shape = shipped
    reader = write(tmp_path / "mine.trace", passes, shape, **fields)
    assert context_of(reader, 1)[1] == "first 1 of 3 requests of the trace"


def test_a_record_can_be_named(shipped, tmp_path):
    _, passes, shape = shipped
    reader = write(tmp_path / "mine.trace", passes, shape)
    path = tmp_path / "own.npz"
    own = calibrated(passes[:4], shape, "my own")
    save(path, replace(own, load=1000 * own.load))  # experts so busy that none is left to the CPU
    split = partial(simulate, reader, "lru", 3, knobs={"misses": "oled"}, shape="llada2.0-mini")
    result = split(calibration=str(path))
    assert result.manifest["calibration"].startswith("own.npz: 1 request of my own, sha256 ")
    usual = split()
    assert result.summary["cpu_busy_ratio"] < usual.summary["cpu_busy_ratio"]
    with pytest.raises(TraceError, match=r"absent\.npz"):
        context_of(reader, 1, str(tmp_path / "absent.npz"))
    other, more = random_passes(np.random.default_rng(0), num_layers=3)
    save(path, calibrated(more, other, "wider"))
    with pytest.raises(TraceError, match=r"own\.npz: is of 3 layers of 16 experts, the trace has 2 of 8"):
        context_of(reader, 1, str(path))


def test_a_record_of_another_model_is_taken_with_a_warning(shipped, tmp_path):
    _, passes, shape = shipped
    reader = write(tmp_path / "mine.trace", passes, shape, source="proxy:mine", details={"checkpoint_hash": "abcdef"})
    path = tmp_path / "own.npz"
    own = calibrated(passes[:4], shape, "proxy:mine")
    for name, checkpoint in (("proxy:mine", "abcdef"), ("proxy:mine", "0123456789"), ("proxy:toy", "")):
        save(path, replace(own, name=name, checkpoint_hash=checkpoint))
        summary = simulate(reader, "oled", 3, calibration=str(path)).summary
        assert summary["calibration"].startswith(f"own.npz: 1 request of {name}, sha256 ")
        found = [text for text in summary["warnings"] if "another model" in text]
        shown = checkpoint[:8] or "unknown"
        assert (
            found == []
            if (name, checkpoint) == ("proxy:mine", "abcdef")
            else [
                f"calibration own.npz is of another model ({name}, checkpoint {shown}) than the trace (proxy:mine, checkpoint abcdef)"
            ]
        )


def test_the_caption_names_a_record_that_was_chosen(shipped, tmp_path):
    _, passes, shape = shipped
    reader = write(tmp_path / "mine.trace", passes, shape)
    save(tmp_path / "own.npz", calibrated(passes[:4], shape, "my own"))
    chosen, usual = (simulate(reader, "lru", 3, calibration=c).summary for c in (str(tmp_path / "own.npz"), "auto"))
    assert usual["calibration"] == "first 1 of 3 requests of the trace"
    digest = sha256((tmp_path / "own.npz").read_bytes()).hexdigest()[:8]
    first, second = (" ".join(text.split()) for text in format_table(table_of([chosen, usual])).split("\n\ntrace "))
    assert f"; calibration own.npz: 1 request of my own, sha256 {digest}; pool" in first + second
    assert (first + second).count("; calibration") == 1


def test_a_record_of_the_very_requests_is_refused(tmp_path):
    shape, passes = random_passes(np.random.default_rng(3), **SIZES | {"num_requests": 4})
    reader = write(tmp_path / "one.trace", passes, shape)
    other = write(tmp_path / "other.trace", random_passes(np.random.default_rng(4), **SIZES)[1], shape)
    batch = write_batch(tmp_path / "batch.trace", [reader], 2)
    both = write_batch(tmp_path / "both.trace", [reader, other], 2)
    twice = write_batch(tmp_path / "twice.trace", [write_batch(tmp_path / "again.trace", [reader], 1)], 2)
    path = tmp_path / "x.npz"
    for readers in ([reader], [batch], [twice]):
        save(path, recorded(readers, 2))
        for trace in (reader, batch, twice):
            context_of(trace, 2, str(path))
            with pytest.raises(TraceError, match=r"x\.npz: is of requests that .* needs warmup_requests of 2 or more"):
                context_of(trace, 1, str(path))
        with pytest.raises(
            TraceError, match=r"x\.npz: is of requests that this run evaluates; needs a record of others"
        ):
            context_of(both, 2, str(path))
        context_of(other, 1, str(path))
    save(path, recorded([reader]))
    with pytest.raises(TraceError, match="needs a record of others"):
        context_of(batch, 3, str(path))
    save(path, recorded([other, reader], 4))
    with pytest.raises(TraceError, match="needs a record of others"):
        context_of(reader, 1, str(path))
    save(path, recorded([other, reader], 3))  # all of the other's
    context_of(reader, 1, str(path))


def test_of_a_batch_the_parts_of_the_first_requests_count(tmp_path):
    shape, passes = random_passes(np.random.default_rng(3), **SIZES)
    reader = write(tmp_path / "one.trace", passes, shape)
    for batch in (2, 3):
        together = write_batch(tmp_path / f"{batch}.trace", [reader], batch)
        for warmup_requests in (1, 2):
            alone, shared = (context_of(each, warmup_requests, "warmup")[0].calibration for each in (reader, together))
            np.testing.assert_array_equal(shared.load, alone.load)
            np.testing.assert_array_equal(shared.request_loads, alone.request_loads)
            assert (
                simulate(together, "oled", 3, warmup_requests=warmup_requests).summary["num_requests"]
                == 3 - warmup_requests
            )


def write_batch(path, readers, batch):
    with TraceWriter(path, merged_metadata([reader.metadata for reader in readers], batch)) as writer:
        for pass_ in merge(readers, batch):
            writer.write(pass_)
    return TraceReader(path)


def test_without_any_only_policies_that_learn_are_refused(shipped, tmp_path):
    _, passes, shape = shipped
    reader = write(tmp_path / "mine.trace", passes, shape)
    simulate(reader, "lru", 3, warmup_requests=0)
    with pytest.raises(PolicyError, match="oled needs calibration, and there is none: warmup_requests must be 1"):
        simulate(reader, "oled", 3, warmup_requests=0)


def test_the_command_has_the_key(shipped, tmp_path, monkeypatch):
    reader, *_ = shipped
    monkeypatch.chdir(tmp_path)
    arguments = [f"trace={reader.path}", "cache.slots_per_layer=3"]
    assert command(main, *arguments, "calibration=warmup", "output.dir=out").code == 0
    assert '"calibration": "first 1 of 3 requests of the trace"' in (tmp_path / "out" / "manifest.json").read_text()
    refused = command(main, *arguments, "calibration=nowhere.npz", "output.dir=other")
    assert refused.code == 2
    assert "nowhere.npz: cannot be read as a calibration" in refused.err
