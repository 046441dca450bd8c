"""Traces as oracleGeneral: every access with its next use, as our own caches of single accesses see them."""

import errno
import os

import numpy as np
import pytest
from commands import command
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import random_passes, traces

from experiments.export_command import main
from simulator.stream import accesses, belady_hits, by_layer, lru_hits
from tracer import export_oracle
from tracer.export_oracle import NEVER, RECORD, write_oracle
from tracer.schema import TraceError
from tracer.shipped import find_trace
from tracer.store import TraceReader


@given(traces(), st.sampled_from([1, 3, 7, 1 << 18]))
@settings(max_examples=30, deadline=None)
def test_records_are_the_stream_of_accesses_with_their_next_uses(tmp_path_factory, drawn, chunk):
    shape, passes = drawn
    path = tmp_path_factory.mktemp("t") / "x.oracleGeneral"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_oracle, "_CHUNK", chunk)
        assert write_oracle(passes, shape, path, expert_bytes=5) == path.stat().st_size // 24
    records = np.fromfile(path, RECORD)
    ids = accesses(passes, shape)
    assert records["id"].tolist() == (ids + 1).tolist()
    expected, later = [], {}
    for index in range(ids.size - 1, -1, -1):
        expected.append(later.get(ids[index], NEVER))
        later[ids[index]] = index
    assert records["next"].tolist() == expected[::-1]
    assert set(records["size"].tolist()) == {5}
    assert (np.diff(records["time"].astype(int)) >= 0).all()
    assert set(records["time"].tolist()) == set(range(len(passes)))
    for layer, layer_id in enumerate(shape.layer_ids):
        write_oracle(passes, shape, path, layer=layer_id, overwrite=True)
        of_layer = np.fromfile(path, RECORD)
        assert (of_layer["id"] - 1 - layer * shape.num_experts).tolist() == by_layer(ids, shape)[layer].tolist()


def test_a_record_is_24_packed_little_endian_bytes(tmp_path):
    shape, passes = random_passes(np.random.default_rng(0), num_layers=1, num_requests=1)
    write_oracle(passes[:1], shape, tmp_path / "x", expert_bytes=0x01020304)
    first = min(passes[0].expert_ids.ravel().tolist())
    content = (tmp_path / "x").read_bytes()[:24]
    assert content == b"\0\0\0\0" + (first + 1).to_bytes(8, "little") + b"\4\3\2\1" + b"\xff" * 8


@pytest.mark.parametrize("capacity", [12, 48])
def test_libcachesim_counts_what_we_count(tmp_path, capacity):
    library = pytest.importorskip("libcachesim")  # not among what tests need: it brings a lot
    reader = TraceReader(find_trace("proxy-tiny"))
    shape = reader.metadata.shape
    write_oracle(reader, shape, tmp_path / "x.oracleGeneral")
    stream, num_ids = accesses(reader, shape), shape.num_layers * shape.num_experts
    for kind, ours in ((library.LRU, lru_hits), (library.Belady, belady_hits)):
        found = library.TraceReader(
            str(tmp_path / "x.oracleGeneral"),
            library.TraceType.ORACLE_GENERAL_TRACE,
            library.ReaderInitParam(ignore_obj_size=True),
        )
        missed, _ = kind(cache_size=capacity, hashpower=16).process_trace(found)
        assert stream.size - round(missed * stream.size) == ours(stream, num_ids, capacity)


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = TraceReader(find_trace("proxy-tiny")).metadata.shape
    finished = command(lambda: main(["oracle", "proxy-tiny", "x.oracleGeneral"]))
    records = np.fromfile("x.oracleGeneral", RECORD)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.startswith(f"x.oracleGeneral: {records.size} accesses of all layers, ")
    assert set(records["size"]) == {1}
    assert "exists already" in command(lambda: main(["oracle", "proxy-tiny", "x.oracleGeneral"])).err
    layer = shape.layer_ids[-1]
    words = ["oracle", "proxy-tiny", "x.oracleGeneral", "--overwrite", "--bytes", "--layer", str(layer)]
    assert f"accesses of layer {layer}" in command(lambda: main(words)).out
    assert set(np.fromfile("x.oracleGeneral", RECORD)["size"]) == {shape.expert_bytes()}
    assert os.listdir() == ["x.oracleGeneral"]  # noqa: PTH208 - names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("proxy-tiny", "x", "--layer", "0"), "layer 0: the trace has MoE layers 1 to 3"),
        (("nothing", "x"), "trace 'nothing': no such directory"),
        (("proxy-tiny", "none/x"), "none/x: cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_exported_is_named(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    finished = command(lambda: main(["oracle", *words]))
    assert finished.code == 2
    assert message in finished.err
    assert finished.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    shape, passes = random_passes(np.random.default_rng(0))
    path = tmp_path / "x.oracleGeneral"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_oracle.os, "fsync", full)
    with pytest.raises(TraceError, match=r"x.oracleGeneral: cannot be written: No space left on device"):
        write_oracle(passes, shape, path, overwrite=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
