"""Writing and reading traces: what goes in comes out, and what is not whole is not taken for a trace."""

import errno
import json
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import drop_rows, edit_table, set_values
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from strategies import VOCAB, change, metadata_for, random_passes, traces

from tracer import shipped, store
from tracer.files import metadata_hash
from tracer.gates import quantise_gates, restore_gates
from tracer.rows import encode
from tracer.schema import GATE_DTYPES, ModelShape, Pass, Signals, TraceError
from tracer.shipped import find_trace
from tracer.store import TraceReader, TraceWriter
from tracer.tables import TABLES, ContentHash

GATE_ERROR = {"float32": 1e-6, "float16": 1e-3, "uint8": 1 / 255}
SCORE_ERROR = {"float32": 1e-7, "float16": 5e-4, "uint8": 0.5 / 255 + 1e-12}


def write(path, shape, passes, gate_dtype="float32", **options):
    with TraceWriter(path, metadata_for(shape, gate_dtype), **options) as writer:
        for pass_ in passes:
            writer.write(pass_)
    return path


def content_hash(path):
    return TraceReader(path).metadata.content_hash


def assert_same(found, expected, gate_dtype):
    for record in (Pass, Signals) if expected.signals is not None else (Pass,):
        a, b = (found, expected) if record is Pass else (found.signals, expected.signals)
        for name in (f.name for f in fields(record) if f.name != "signals"):
            value, wanted = getattr(a, name), getattr(b, name)
            if name in ("gates", "scores"):
                np.testing.assert_allclose(
                    value, wanted, rtol=0, atol=(GATE_ERROR if name == "gates" else SCORE_ERROR)[gate_dtype]
                )
            else:
                np.testing.assert_array_equal(value, wanted, err_msg=name)
            if isinstance(wanted, np.ndarray):
                assert value.dtype == wanted.dtype, name
                assert not value.flags.writeable, name
    np.testing.assert_allclose(found.gates.sum(axis=-1), 1, rtol=0, atol=1e-15)


@pytest.fixture
def trace(tmp_path):
    """A trace of three requests, one after the other, with signals."""
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3, signals=True)
    return write(tmp_path / "some.trace", shape, passes)


@given(traces(signals=None), st.sampled_from(GATE_DTYPES))
@settings(max_examples=20, deadline=None)
def test_what_is_written_is_read(tmp_path_factory, drawn, gate_dtype):
    shape, passes = drawn
    path = write(tmp_path_factory.mktemp("t") / "x.trace", shape, passes, gate_dtype)
    reader = TraceReader(path)
    has_signals = passes[0].signals is not None
    found = list(reader.passes(signals=has_signals))
    assert (reader.num_passes, reader.has_signals) == (len(passes), has_signals)
    assert reader.num_requests == len({r for p in passes for r in p.requests.tolist()})
    assert len(found) == len(passes)
    for a, b in zip(found, passes, strict=True):
        assert_same(a, b, gate_dtype)
    metadata = metadata_for(shape, gate_dtype)
    assert reader.metadata == replace(metadata, content_hash=reader.metadata.content_hash)


def test_each_call_starts_anew_and_signals_are_read_only_when_asked_for(trace):
    reader = TraceReader(trace)
    first = [p.pass_id for p in reader]
    assert first == [p.pass_id for p in reader.passes(signals=True)] == list(range(reader.num_passes))
    assert next(iter(reader)).signals is None
    assert next(reader.passes(signals=True)).signals is not None


def test_experts_of_a_token_are_stored_by_id_with_their_gates(tmp_path):
    shape, (pass_, *_) = random_passes(np.random.default_rng(0))
    order = np.random.default_rng(1).permuted(np.broadcast_to(np.arange(4), pass_.expert_ids.shape), axis=-1)
    mixed = change(
        pass_,
        expert_ids=np.take_along_axis(pass_.expert_ids, order, -1),
        gates=np.take_along_axis(pass_.gates, order, -1),
    )
    assert (np.diff(mixed.expert_ids) < 0).any()
    (found,) = TraceReader(write(tmp_path / "x.trace", shape, [mixed]))
    assert_same(found, pass_, "float32")


def test_a_written_pass_is_not_kept_by_reference(tmp_path):
    shape, (pass_, *_) = random_passes(np.random.default_rng(0))
    buffers = {
        f.name: np.array(getattr(pass_, f.name)) for f in fields(Pass) if isinstance(getattr(pass_, f.name), np.ndarray)
    }
    with TraceWriter(tmp_path / "x.trace", metadata_for(shape)) as writer:
        writer.write(replace(pass_, **buffers))
        for values in buffers.values():
            values[...] = 0
    (found,) = TraceReader(tmp_path / "x.trace")
    assert_same(found, pass_, "float32")


def row_groups(path, table="forwards"):
    with pq.ParquetFile(path / f"{table}.parquet") as file:
        return [sorted(set(file.read_row_group(i)["pass_id"].to_pylist())) for i in range(file.num_row_groups)]


def test_row_groups_end_where_no_request_goes_on(tmp_path):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=4, batch=1, signals=True)
    path = write(tmp_path / "x.trace", shape, passes)
    by_request = [[p.pass_id for p in passes if p.requests[0] == request] for request in range(4)]
    for table in ("forwards", "tokens", "routing", "signals"):
        assert row_groups(path, table) == by_request


def test_row_groups_end_between_passes_when_they_grow_large(tmp_path, monkeypatch):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=6, batch=3)
    whole = write(tmp_path / "x.trace", shape, passes)
    sizes = [p.expert_ids.size for p in passes]
    monkeypatch.setattr(store, "MAX_GROUP_IDS", 2 * max(sizes))
    cut = write(tmp_path / "y.trace", shape, passes)
    groups = row_groups(cut)
    assert len(groups) > len(row_groups(whole))
    assert [i for group in groups for i in group] == [p.pass_id for p in passes]
    assert all(sum(sizes[i] for i in group) <= 2 * max(sizes) for group in groups)
    assert content_hash(cut) == content_hash(whole)
    for a, b in zip(TraceReader(cut), TraceReader(whole), strict=True):
        assert_same(a, b, "float32")


@pytest.mark.parametrize("gate_dtype", GATE_DTYPES)
def test_equal_content_has_an_equal_hash(tmp_path, gate_dtype):
    made = [random_passes(np.random.default_rng(5), batch=2, signals=True) for _ in range(2)]
    a, b = (write(tmp_path / f"{i}.trace", *m, gate_dtype) for i, m in enumerate(made))
    assert content_hash(a) == content_hash(b)
    assert len(content_hash(a)) == 64


@pytest.mark.parametrize("table", TABLES)
def test_any_changed_value_changes_the_hash(table):
    rng = np.random.default_rng(2)
    shape, passes = random_passes(rng, num_experts=40, signals=True, timed=True)
    group = encode(passes[1:2], metadata_for(shape))._asdict()
    hashes = {hash_of(group)}
    for name, values in group[table].items():
        changed = values.copy()
        place = tuple(rng.integers(changed.shape))
        changed[place] = ~changed[place] if changed.dtype == bool else 1 if changed[place] != 1 else 0
        hashes.add(hash_of(group | {table: group[table] | {name: changed}}))
    assert len(hashes) == 1 + len(group[table])


def test_traces_of_equal_values_and_other_metadata_are_told_apart(tmp_path):
    shape, passes = random_passes(np.random.default_rng(2))
    one, other = (
        TraceReader(write(tmp_path / name, made, passes)).metadata
        for name, made in (("a.trace", shape), ("b.trace", replace(shape, hidden=4096)))
    )
    assert one.content_hash == other.content_hash
    assert metadata_hash(one) == metadata_hash(replace(one)) != metadata_hash(other)


def hash_of(group):
    content = ContentHash()
    for table, arrays in group.items():
        content.update(table, arrays)
    return content.hexdigest()


# gates


def test_uint8_gates_go_by_largest_remainder():
    # 0.5 * 255 = 127.5, 0.3 * 255 = 76.5, 0.2 * 255 = 51: one is left, and the first of the equal halves gets it
    assert quantise_gates(np.array([0.5, 0.3, 0.2]), "uint8").tolist() == [128, 76, 51]
    # 255 / 8 = 31.875 each: 7 are left, the last one goes without
    assert quantise_gates(np.full(8, 1 / 8), "uint8").tolist() == [32] * 7 + [31]
    assert quantise_gates(np.array([[1.0], [1.0]]), "uint8").tolist() == [[255], [255]]


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 16)), elements=st.floats(2**-20, 1)),
    st.sampled_from(GATE_DTYPES),
)
@settings(max_examples=100, deadline=None)
def test_quantised_gates_stay_near_and_sum_to_one(weights, gate_dtype):
    gates = weights / weights.sum(axis=-1, keepdims=True)
    stored = quantise_gates(gates, gate_dtype)
    assert stored.dtype == gate_dtype
    if gate_dtype == "uint8":
        assert (stored.sum(axis=-1, dtype=np.int64) == 255).all()
        assert (np.abs(stored - gates * 255) < 1 + 1e-9).all()
    np.testing.assert_allclose(restore_gates(stored), gates, rtol=0, atol=GATE_ERROR[gate_dtype])
    np.testing.assert_allclose(restore_gates(stored).sum(axis=-1), 1, rtol=0, atol=1e-15)


def test_unknown_gate_dtype_is_refused():
    with pytest.raises(TraceError, match="allowed are float32, float16, uint8"):
        quantise_gates(np.ones((1, 1)), "int4")


# what a writer refuses


def one_pass(**options):
    shape, passes = random_passes(np.random.default_rng(2), **options)
    return shape, passes[1]


def with_value(values, where, value):
    values = np.array(values)
    values[where] = value
    return values


@pytest.mark.parametrize(
    ("field", "where", "value", "message"),
    [
        (
            "expert_ids",
            (1, 2, 3),
            16,
            r"pass 1, request 0, layer 2, position \d+: expert ids .*16\]; allowed is 0 to 15",
        ),
        ("expert_ids", (1, 2, 0), -1, "layer 2, .*allowed is 0 to 15"),
        (
            "expert_ids",
            (0, 1),
            [1, 2, 2, 3],
            "pass 1, request 0, layer 1, .*expert twice in one top-k.*4 different experts",
        ),
        ("gates", (2, 0, 1), np.nan, "pass 1, request 0, layer 3, .*gates .*nan.*finite"),
        ("gates", (2, 0, 1), -0.1, "layer 3, .*finite ones, 0 or more"),
        ("gates", (2, 0), [0.1, 0.2, 0.3, 0.3], "layer 3, .*sum 0.9.*1 ± 1e-05"),
        ("kinds", 0, 5, r"pass 1: kind \[5\]; allowed is 0 to 4"),
        ("positions", 1, 0, "pass 1, request 0: positions .*ascending"),
        (
            "token_ids_in",
            0,
            2**31,
            r"pass 1, request 0, position \d+: token_id_in 2147483648; allowed is -2147483648 to 2147483647",
        ),
        ("argmax_ids", 0, -2, r"pass 1, request 0, position \d+: argmax_id -2; allowed is -1 to"),
        ("num_tokens", 0, 3, r"pass 1: num_tokens \[3\] for 4 positions"),
        ("requests", 0, -1, r"pass 1: requests \[-1\]"),
        ("num_accepted", 0, -1, "pass 1, request 0: num_accepted disagrees with tokens: found -1 for"),
        ("kv_lens", 0, -1, "pass 1, request 0: negative kv_len: found -1; allowed is 0 or more"),
        ("p_argmax", 0, 1.5, r"pass 1, request 0, position \d+: p_argmax is no probability: found 1.5"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(tmp_path, field, where, value, message):
    shape, pass_ = one_pass()
    wrong = change(pass_, **{field: with_value(getattr(pass_, field), where, value)})
    with pytest.raises(TraceError, match=message) as caught:
        write(tmp_path / "x.trace", shape, [wrong])
    assert "x.trace" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "where", "value", "message"),
    [
        ("score_ids", (0, 0), 99, "score_ids out of range.*allowed is 0 to 15"),
        ("scores", (0, 0, 0), 1.5, "score out of range"),
        ("ahead_ids", (0, 0, 0, 0), -1, "ahead1_ids missing"),
        ("ahead_ids", (2, 2, 0, 0), 1, "ahead3_ids missing, or more than there can be"),
        ("sketch", (0, 0), np.nan, "sketch missing or not finite"),
        ("input_norm", (0, 0), -1.0, "input_norm not a length"),
    ],
)
def test_a_wrong_signal_is_refused(tmp_path, field, where, value, message):
    shape, pass_ = one_pass(signals=True)
    signals = replace(pass_.signals, **{field: with_value(getattr(pass_.signals, field), where, value)})
    with pytest.raises(TraceError, match=rf"pass 1, request 0, layer [13], position \d+: {message}"):
        write(tmp_path / "x.trace", shape, [replace(pass_, signals=signals)])


def test_a_wrong_shape_is_refused(tmp_path):
    shape, pass_ = one_pass()
    with pytest.raises(TraceError, match=r"pass 1: gates has shape \[3, 4, 3\]; needs \[3, 4, 4\]"):
        write(tmp_path / "x.trace", shape, [change(pass_, gates=np.full((3, 4, 3), 1 / 3))])


def test_passes_must_come_in_order_and_agree_about_signals(tmp_path):
    shape, passes = random_passes(np.random.default_rng(2), signals=True)
    with pytest.raises(TraceError, match=r"pass 0 after pass 1; needs ascending"):
        write(tmp_path / "x.trace", shape, [passes[1], passes[0]])
    with pytest.raises(TraceError, match="pass 1 has no signals; the passes before have them"):
        write(tmp_path / "x.trace", shape, [passes[0], replace(passes[1], signals=None)])
    with pytest.raises(TraceError, match="pass 1 has signals; the passes before have none"):
        write(tmp_path / "x.trace", shape, [replace(passes[0], signals=None), passes[1]])
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_json_cannot_hold_is_refused_before_the_work(tmp_path):
    shape, _ = one_pass()
    for details in ({"path": Path("x")}, {"loss": float("nan")}):
        with pytest.raises(TraceError, match="metadata must be of values that JSON can hold"):
            TraceWriter(tmp_path / "x.trace", metadata_for(shape, details=details))
    assert list(tmp_path.iterdir()) == []


# whole or absent


def test_an_exception_leaves_nothing(tmp_path):
    shape, passes = random_passes(np.random.default_rng(2))

    def interrupted():
        with TraceWriter(tmp_path / "x.trace", metadata_for(shape)) as writer:
            for pass_ in passes[:-1]:
                writer.write(pass_)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_has_no_name_until_it_is_closed(tmp_path):
    shape, passes = random_passes(np.random.default_rng(2))
    writer = TraceWriter(tmp_path / "x.trace", metadata_for(shape))
    for pass_ in passes:
        writer.write(pass_)
    (partial,) = tmp_path.iterdir()
    assert partial.name.startswith(".x.trace.partial-")
    writer.close()
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["x.trace"]
    with pytest.raises(TraceError, match=f"pass {passes[-1].pass_id} after the trace was closed"):
        writer.write(passes[-1])


def test_a_trace_without_passes_is_refused(tmp_path):
    shape, _ = one_pass()
    with pytest.raises(TraceError, match="no pass was written"):
        write(tmp_path / "x.trace", shape, [])
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
import numpy as np
from strategies import metadata_for, random_passes
from tracer.store import TraceWriter
shape, passes = random_passes(np.random.default_rng(2), num_requests=3)
with TraceWriter(sys.argv[1], metadata_for(shape)) as writer:
    for pass_ in passes:
        writer.write(pass_)
    print("written", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_leaves_no_trace_of_that_name(tmp_path):
    path = tmp_path / "x.trace"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not path.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".x.trace.partial-")
    with pytest.raises(TraceError):
        TraceReader(left)
    shape, passes = random_passes(np.random.default_rng(2))
    assert TraceReader(write(path, shape, passes)).num_passes == len(passes)


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("when", ["rows", "footer", "name"])
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, monkeypatch, when):
    shape, passes = random_passes(np.random.default_rng(2))
    target = {"rows": (pq.ParquetWriter, "write_table"), "footer": (store.os, "fsync"), "name": (Path, "rename")}[when]
    monkeypatch.setattr(*target, full_disk)
    with pytest.raises(TraceError, match=r"x.trace: cannot be written, nothing is kept: .*No space left"):
        write(tmp_path / "x.trace", shape, passes)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_failed_takes_no_more_passes(tmp_path, monkeypatch):
    shape, passes = random_passes(np.random.default_rng(2))
    writer = TraceWriter(tmp_path / "x.trace", metadata_for(shape))
    writer.write(passes[0])
    monkeypatch.setattr(store, "MAX_GROUP_IDS", 1)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(TraceError, match="cannot be written"):
        writer.write(passes[1])
    with pytest.raises(TraceError, match="after the trace was closed"):
        writer.write(passes[-1])
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_is_refused_unless_overwritten(tmp_path):
    shape, passes = random_passes(np.random.default_rng(2))
    path = write(tmp_path / "x.trace", shape, passes)
    with pytest.raises(TraceError, match=r"x.trace: exists already"):
        TraceWriter(path, metadata_for(shape))
    with pytest.raises(TraceError, match="pass 0 after pass 0"):
        write(path, shape, [passes[0], passes[0]], overwrite=True)
    assert TraceReader(path).num_passes == len(passes)
    write(path, shape, passes[:1], overwrite=True)
    assert TraceReader(path).num_passes == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x.trace"]


def test_the_old_trace_stays_when_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    shape, passes = random_passes(np.random.default_rng(2))
    path = write(tmp_path / "x.trace", shape, passes)
    rename = Path.rename

    def refused(source, target):
        if ".partial-" in source.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(TraceError, match="Permission denied"):
        write(path, shape, passes[:1], overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.trace"]
    assert TraceReader(path).num_passes == len(passes)


def test_only_a_trace_is_overwritten(tmp_path):
    shape, _ = one_pass()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for name in ("home", "file"):
        with pytest.raises(TraceError, match=f"{name}: is not a trace"):
            TraceWriter(tmp_path / name, metadata_for(shape), overwrite=True)
    assert (tmp_path / "home" / "letters.txt").read_text() == "dear"


def test_what_only_bears_the_names_of_a_trace_is_not_overwritten(tmp_path):
    shape, passes = random_passes(np.random.default_rng(2))
    (tmp_path / "foreign").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign" / "tokens.parquet")
    (tmp_path / "folder" / "tokens.parquet").mkdir(parents=True)
    kept = write(tmp_path / "kept.trace", shape, passes)
    (kept / "routing.parquet").write_bytes(b"no table")
    for name in ("foreign", "folder", "kept.trace"):
        with pytest.raises(TraceError, match=f"{name}: is not a trace"):
            TraceWriter(tmp_path / name, metadata_for(shape), overwrite=True)
    (tmp_path / "empty").mkdir()
    assert TraceReader(write(tmp_path / "empty", shape, passes, overwrite=True)).num_passes == len(passes)


@pytest.mark.parametrize("target", ["real.trace", "nowhere", "link"])
def test_a_symbolic_link_is_refused_and_stays(tmp_path, target):
    shape, passes = random_passes(np.random.default_rng(2))
    write(tmp_path / "real.trace", shape, passes)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(TraceError, match="link: is a symbolic link; name the trace itself"):
        TraceWriter(link, metadata_for(shape), overwrite=True)
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"real.trace", "link"}


def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path):
    shape, passes = random_passes(np.random.default_rng(2))
    slow = TraceWriter(tmp_path / "x.trace", metadata_for(shape))
    slow.write(passes[0])
    write(tmp_path / "x.trace", shape, passes)
    with pytest.raises(TraceError, match="exists already"):
        slow.close()
    assert TraceReader(tmp_path / "x.trace").num_passes == len(passes)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    shape, _ = one_pass()
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot make the trace"):
        TraceWriter(tmp_path / "file" / "x.trace", metadata_for(shape))


@pytest.mark.parametrize("path", ["nope/../x.trace", "nope/deep/../../x.trace"])
def test_a_way_back_out_of_what_is_not_there_is_refused_and_makes_nothing(tmp_path, path):
    shape, passes = random_passes(np.random.default_rng(2))
    with pytest.raises(TraceError, match=r"x.trace: no directory .*\.\.; one named with \.\. must be there"):
        TraceWriter(tmp_path / path, metadata_for(shape))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "nope" / "deep").mkdir(parents=True)
    write(tmp_path / path, shape, passes)
    assert TraceReader(tmp_path / "x.trace").num_passes == len(passes)


# what a reader refuses


@pytest.mark.parametrize("table", ["forwards", "tokens", "routing", "signals"])
def test_a_file_cut_short_is_refused_when_opened(trace, table):
    path = trace / f"{table}.parquet"
    whole = path.read_bytes()
    for length in (0, 1, 4, 100, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=rf"{table}.parquet: not a whole Parquet file") as caught:
            TraceReader(trace)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    assert list(TraceReader(trace).passes(signals=True))


@pytest.mark.parametrize("table", ["forwards", "tokens", "routing"])
def test_a_missing_table_is_refused(trace, table):
    (trace / f"{table}.parquet").unlink()
    with pytest.raises(TraceError, match=rf"{table}.parquet: missing; a whole trace has"):
        TraceReader(trace)


def test_changed_bytes_are_found_while_streaming(trace):
    with pq.ParquetFile(trace / "routing.parquet") as file:
        chunk = file.metadata.row_group(1).column(5)
        middle = chunk.data_page_offset + chunk.total_compressed_size * 3 // 4
    content = bytearray((trace / "routing.parquet").read_bytes())
    content[middle] ^= 0xFF
    (trace / "routing.parquet").write_bytes(content)
    with pytest.raises(TraceError, match=r"routing.parquet, row group 1: cannot be read"):
        list(TraceReader(trace))


@pytest.mark.parametrize("table", TABLES)
def test_a_changed_byte_of_any_column_is_found_by_its_checksum(trace, table):
    path = trace / f"{table}.parquet"
    content = path.read_bytes()
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(2)
        chunks = [group.column(i) for i in range(group.num_columns)]
    for chunk in chunks:
        first = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        changed = bytearray(content)
        changed[first + chunk.total_compressed_size - 1] ^= 1
        path.write_bytes(changed)
        with pytest.raises(TraceError, match=rf"{table}.parquet, row group 2: cannot be read: .*CRC checksum"):
            list(TraceReader(trace).passes(signals=True))


def metadata_edit(**changes):
    def edit(text):
        return json.dumps(json.loads(text) | changes).encode()

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (metadata_edit(schema_version=2), "metadata: trace format 2; this version reads format 1"),
        (metadata_edit(source="hearsay"), "metadata: source 'hearsay'"),
        (metadata_edit(gate_dtype="int4"), "metadata: gate_dtype 'int4'"),
        (metadata_edit(colour="red"), "metadata: .*colour"),
        (metadata_edit(shape={"layer_ids": [1]}), "metadata: .*num_experts"),
        (lambda text: b"{", "metadata: "),
        (lambda text: b"[]", "metadata is list, must hold keys and values"),
        (
            lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "num_passes"}).encode(),
            "metadata: missing num_passes",
        ),
        (lambda text: b"", "no oledsim metadata"),
        (metadata_edit(source=5), "metadata: source '5'"),
        (metadata_edit(source=None), "metadata: source is None, must be text"),
        (metadata_edit(content_hash=[]), r"metadata: content_hash is \[\], must be text"),
        (metadata_edit(num_requests=float("inf")), "metadata: Infinity is no number of JSON"),
        (lambda text: text.replace(b'"num_requests": 3', b'"num_requests": 1e999'), "num_requests is inf, must be a"),
        (metadata_edit(details={"training": "x"}), "metadata: details.training is 'x', must be keys and values"),
        (metadata_edit(details={"training": [1]}), r"details.training is \[1\], must be keys and values"),
        (metadata_edit(details={"training": {"minutes": "long"}}), "details.training.minutes is 'long', must be a num"),
        (metadata_edit(details={"training": {"minutes": [1]}}), r"details.training.minutes is \[1\], must be a number"),
        (metadata_edit(details={"training": {"minutes": True}}), "details.training.minutes is True, must be a number"),
        (metadata_edit(details={"training": {"minutes": 10**400}}), "details.training.minutes is 1000.*, must be a nu"),
        (metadata_edit(details={"training": {"minutes": -1}}), "details.training.minutes is -1, must be a number from"),
        (metadata_edit(details={"training": {"minutes": float("nan")}}), "metadata: NaN is no number of JSON"),
        (metadata_edit(details={"checkpoint_hash": 5}), "details.checkpoint_hash is 5, must be text"),
        (metadata_edit(details={"merged": "x"}), "details.merged is 'x', must be keys and values"),
        (metadata_edit(details={"merged": {"content_hashes": "ab"}}), "content_hashes is 'ab', must be a list"),
        (metadata_edit(details={"merged": {"content_hashes": [1]}}), r"content_hashes is \[1\], must be a list of te"),
        (metadata_edit(decode={"block_length": "x"}), "decode.block_length is 'x', must be a whole number"),
        (metadata_edit(decode={"threshold": {}}), r"decode.threshold is \{\}, must be a number from 0 to 1e\+12"),
        (metadata_edit(details=3), "metadata: details is 3, must hold keys and values"),
        (metadata_edit(source="proxy:\ud800"), "metadata: .*surrogates not allowed"),
        (lambda text: b"[" * 100_000, "metadata: maximum recursion depth"),
        (metadata_edit(num_passes=3), "passes; its metadata says 3"),
        (lambda text: text.replace(b'"gate_scale": 2.5', b'"gate_scale": NaN'), "metadata: NaN is no number of JSON"),
        (lambda text: text.replace(b'"gate_scale": 2.5', b'"gate_scale": 1e999'), "shape: gate_scale is inf, must be"),
        (lambda text: text.replace(b'"gate_scale": 2.5', b'"gate_scale": 0'), "shape: gate_scale is 0, must be"),
        (lambda text: text.replace(b'"layer_ids": [1,', b'"layer_ids": [-1,'), "shape: layer_ids must be ascending"),
        (metadata_edit(num_requests=99), "3 requests; its metadata says 99"),
        (metadata_edit(seed=8), "metadata of tokens.parquet and forwards.parquet differ"),
    ],
)
def test_wrong_metadata_is_refused(trace, edit, message):
    edit_table(trace, "forwards", metadata=edit)
    with pytest.raises(TraceError, match=message):
        list(TraceReader(trace))


@pytest.mark.parametrize(
    ("table", "edit", "message"),
    [
        ("tokens", lambda t: t.drop_columns("accepted"), "tokens.parquet: column accepted is missing; needs bool"),
        (
            "routing",
            lambda t: t.set_column(4, "expert_ids", t["expert_ids"].cast(pa.list_(pa.int32(), 4))),
            "column expert_ids is fixed_size_list.*int32.*needs fixed_size_list.*uint16",
        ),
        (
            "forwards",
            lambda t: t.set_column(4, "kind", t["kind"].cast(pa.string())),
            "column kind is string; needs dictionary",
        ),
        (
            "routing",
            lambda t: pa.concat_tables([t, t]),
            "pass 0, request 0, layer 1: positions missing or too many in a layer",
        ),
        ("tokens", lambda t: t.slice(1), "pass 0, request 0: positions missing or too many in tokens: found 3 of 4"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, table, edit, message):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3, prompt_length=4)
    trace = write(tmp_path / "some.trace", shape, passes)
    edit_table(trace, table, edit)
    with pytest.raises(TraceError, match=message):
        list(TraceReader(trace))


def test_row_groups_that_do_not_match_are_refused(trace):
    groups = []
    edit_table(trace, "tokens", lambda t: groups.append(t) or t)
    with pq.ParquetFile(trace / "tokens.parquet") as file:
        text = file.metadata.metadata[b"oledsim"]
    with pq.ParquetWriter(trace / "tokens.parquet", groups[0].schema) as writer:
        writer.write_table(pa.concat_tables(groups))
        writer.add_key_value_metadata({b"oledsim": text})
    with pytest.raises(TraceError, match=r"1 row groups in tokens.parquet, 3 in forwards.parquet"):
        TraceReader(trace)


def first_row(value):
    return lambda rows: {0: value}


@pytest.mark.parametrize(
    ("table", "column", "change_rows", "message"),
    [
        (
            "routing",
            "expert_ids",
            first_row([0, 1, 2, 16]),
            r"pass 0, request 0, layer 1, position 0: expert id out of range: found 16; allowed is 0 to 15",
        ),
        (
            "routing",
            "expert_ids",
            first_row([1, 1, 2, 3]),
            "pass 0, request 0, layer 1, position 0: expert twice in one top-k",
        ),
        (
            "routing",
            "expert_ids",
            first_row([3, 2, 1, 0]),
            "pass 0, request 0, layer 1, position 0: expert ids unsorted",
        ),
        (
            "routing",
            "gates",
            first_row([np.nan, 0.5, 0.25, 0.25]),
            "pass 0, request 0, layer 1, position 0: gate not finite",
        ),
        (
            "routing",
            "gates",
            first_row([0.5, 0.5, 0.25, 0.25]),
            "pass 0, request 0, layer 1, position 0: gates with a wrong sum: found a sum of 1.5",
        ),
        (
            "routing",
            "layer",
            first_row(7),
            r"pass 0, request 0, layer 7, position 0: layer that the model does not have",
        ),
        (
            "routing",
            "request",
            first_row(9),
            "pass 0, request 9, layer 1, position 0: routing row without a forward and layer",
        ),
        ("tokens", "request", first_row(9), "pass 0, request 9, position 0: token without a forward"),
        ("forwards", "pass_id", first_row(1), "pass 1, request 0: forwards out of order"),
        ("forwards", "kind", first_row("dream"), "row group 0: column kind holds dream; allowed are prefill, denoise"),
        ("forwards", "block", first_row(None), "column block holds 1 nulls"),
        ("forwards", "cos_router_input", first_row([0.5]), "cos_router_input holds lists of other lengths than 3"),
        ("forwards", "cos_router_input", first_row([0.5, None, 0.5]), "cos_router_input holds lists with 1 nulls"),
        (
            "forwards",
            "num_masked_in",
            first_row(-1),
            "pass 0, request 0: num_masked_in disagrees with tokens: found -1",
        ),
        ("forwards", "num_accepted", lambda rows: {1: -1}, "pass 1, request 0: num_accepted disagrees with tokens"),
        ("forwards", "block", first_row(0), "pass 0, request 0: block and kind disagree"),
        ("forwards", "kind", lambda rows: {1: "idle"}, "pass 1, request 0: masks in a forward that has none by its"),
        ("forwards", "kv_len", first_row(-1), "pass 0, request 0: negative kv_len: found -1; allowed is 0 or more"),
        ("forwards", "iteration", first_row(-1), "pass 0, request 0: negative iteration"),
        ("forwards", "wall_ns", first_row(-5), "pass 0, request 0: negative wall_ns"),
        ("tokens", "p_argmax", lambda rows: {8: 1.5}, "pass 1, request 0, position 8: p_argmax is no probability"),
        ("tokens", "p_current", first_row(np.inf), "pass 0, request 0, position 0: p_current is no probability"),
        ("tokens", "token_id_in", first_row(VOCAB), f"position 0: token_id_in out of range: found {VOCAB}"),
        ("tokens", "token_id_in", first_row(-7), "position 0: token_id_in out of range: found -7"),
        ("tokens", "accepted", first_row(True), "pass 0, request 0"),
        ("tokens", "edited", lambda rows: {8: True}, "pass 1, request 0, position 8: edited, but masked"),
        ("signals", "layer", first_row(2), "pass 0, request 0, layer 1, position 0: signals do not match routing"),
        ("signals", "score_ids", first_row([16] * 16), "score_ids out of range"),
    ],
)
def test_wrong_rows_are_refused_with_their_place(trace, table, column, change_rows, message):
    set_values(trace, table, column, change_rows)
    with pytest.raises(TraceError, match=message):
        list(TraceReader(trace).passes(signals=True))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("kv_len", 0, r"pass \d+, request 0: kv_len falls: found 0 after \d+; allowed is never less within a request"),
        (
            "kv_len",
            2**31 - 1,
            r"request 0: kv_len beyond what was run: found 2147483647 where position \d+ is the last",
        ),
        ("iteration", 7, "request 0: iteration jumps: found 7 after 0; allowed is one more each time"),
        ("block", 0, "request 0: iteration jumps: found 1 first in block 0; allowed is 0 at the start of a block"),
        ("block", 2, "request 0: iteration jumps: found 1 first in block 2; allowed is 0 at the start of a block"),
    ],
)
@pytest.mark.parametrize("group_ids", [1, 1 << 20])
def test_a_forward_that_does_not_continue_its_request_is_refused(
    tmp_path, monkeypatch, group_ids, column, value, message
):
    monkeypatch.setattr(store, "MAX_GROUP_IDS", group_ids)
    trace = write(tmp_path / "x.trace", *random_passes(np.random.default_rng(4), num_requests=2, block_length=8))
    place = {"request": 0, "block": 1, "iteration": 1}

    def in_block_1(rows):
        return {next(i for i, row in enumerate(rows) if row | place == row): value}

    set_values(trace, "forwards", column, in_block_1)
    with pytest.raises(TraceError, match=message):
        list(TraceReader(trace))


def test_kv_len_is_bounded_in_the_last_forward_too(trace):
    set_values(trace, "forwards", "kv_len", lambda rows: {len(rows) - 1: rows[-1]["kv_len"] + 1000})
    with pytest.raises(TraceError, match="request 2: kv_len beyond what was run"):
        list(TraceReader(trace))


def test_a_negative_position_is_refused(trace):
    for table in ("tokens", "routing", "signals"):
        set_values(
            trace,
            table,
            "position",
            lambda rows: {i: -1 for i, row in enumerate(rows) if row["pass_id"] == row["position"] == 0},
        )
    with pytest.raises(TraceError, match="pass 0, request 0, position -1: negative position"):
        list(TraceReader(trace))


def test_a_missing_layer_is_refused_with_its_place(trace):
    drop_rows(trace, "routing", pass_id=1, layer=2)
    message = (
        r"pass 1, request 0, layer 2: missing layer: found routing of 2 layers; allowed is routing of all 3 MoE layers"
    )
    reader = TraceReader(trace)
    with pytest.raises(TraceError, match=message):
        list(reader)


def test_swapped_rows_are_refused(trace):
    edit_table(trace, "routing", lambda t: t.take([1, 0, *range(2, t.num_rows)]))
    with pytest.raises(TraceError, match="pass 0, request 0, layer 1, position 1: routing row out of place"):
        list(TraceReader(trace))


def test_a_directory_that_is_none_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no such directory"):
        TraceReader(tmp_path / "x.trace")


def test_signals_that_are_not_there_are_refused(tmp_path):
    path = write(tmp_path / "x.trace", *random_passes(np.random.default_rng(0)))
    with pytest.raises(TraceError, match="has no signals"):
        TraceReader(path).passes(signals=True)


def test_traces_are_found_by_shipped_name_and_by_path(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "DATA_DIRECTORY", tmp_path / "data")
    tiny = write(tmp_path / "data" / "tiny.trace", *random_passes(np.random.default_rng(0)))
    other = write(tmp_path / "mine.trace", *random_passes(np.random.default_rng(0)))
    monkeypatch.chdir(tmp_path)
    assert find_trace("tiny") == tiny
    assert find_trace(str(other)) == other
    assert find_trace("mine.trace") == Path("mine.trace")
    for name in ("mine", "", "../data/tiny", "nowhere/x.trace"):
        with pytest.raises(
            TraceError, match=f"^trace '{name}': no such directory, nor a shipped trace; allowed: tiny$"
        ):
            find_trace(name)
    with pytest.raises(TraceError, match=r"; did you mean tiny\? allowed: tiny$"):
        find_trace("tny")


def test_a_reader_needs_the_shape_only_from_the_trace(trace):
    shape = TraceReader(trace).metadata.shape
    assert isinstance(shape, ModelShape)
    assert shape.layer_ids == (1, 2, 3)
