"""What a stopped writer leaves: finished requests come back, and nothing half is taken for whole."""

import errno
import json
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import assert_same
from strategies import metadata_for, random_passes, traces

from tracer import doctor, store
from tracer.doctor import check
from tracer.files import read_footer
from tracer.journal import JOURNAL
from tracer.parquet_end import end_of
from tracer.recover import recover
from tracer.schema import GATE_DTYPES, TraceError, counted
from tracer.shipped import find_trace
from tracer.store import TraceReader, TraceWriter
from tracer.tables import TABLES
from tracer.thrift import dump, parse


def stopped(directory, shape, passes, gate_dtype="float32"):
    """What is left of a writer that was killed after these passes, and which of them it had stored."""
    writer = TraceWriter(directory / "work" / "x.trace", metadata_for(shape, gate_dtype))
    for pass_ in passes:
        writer.write(pass_)
    (partial,) = (directory / "work").iterdir()
    left = shutil.copytree(partial, directory / partial.name)
    num_stored = len(passes) - len(writer._pending)
    writer._discard()
    return left, passes[:num_stored]


def by_request(passes):
    """Passes that each request is in."""
    return {r: [p for p in passes if r in p.requests] for p in passes for r in p.requests.tolist()}


@given(traces(signals=None), st.sampled_from(GATE_DTYPES), st.sampled_from([1, 200, 1 << 20]), st.data())
@settings(max_examples=12, deadline=None)
def test_finished_requests_come_back_as_they_were(tmp_path_factory, drawn, gate_dtype, group_ids, data):
    shape, passes = drawn
    directory = tmp_path_factory.mktemp("t")
    written = passes[: data.draw(st.integers(1, len(passes)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MAX_GROUP_IDS", group_ids)
        left, stored = stopped(directory, shape, written, gate_dtype)
    ahead = written[len(stored)]
    finished = {r for r in by_request(stored) if r not in ahead.requests}
    if not finished:
        with pytest.raises(TraceError, match="no request was finished"):
            recover(left)
        assert left.is_dir()
        return
    found = recover(left)
    assert (found.path, found.num_requests, found.num_damaged) == (directory / "x.trace", len(finished), 0)
    assert not left.exists()
    reader = TraceReader(found.path)
    back = list(reader.passes(signals=reader.has_signals))
    whole = TraceWriter(directory / "all.trace", metadata_for(shape, gate_dtype))
    for pass_ in passes:
        whole.write(pass_)
    whole.close()
    expected = TraceReader(directory / "all.trace").passes(signals=reader.has_signals)
    kept = {p.pass_id: p for p in expected if finished.intersection(p.requests.tolist())}
    assert [p.pass_id for p in back] == list(kept)
    for pass_ in back:
        assert set(pass_.requests.tolist()) == finished.intersection(kept[pass_.pass_id].requests.tolist())
        if pass_.requests.size == kept[pass_.pass_id].requests.size:
            assert_same(pass_, kept[pass_.pass_id])
    report = check(found.path)
    assert report.ok
    assert [f.what for f in report.findings] == ["recovered from a recording that was stopped"]


@pytest.fixture
def left(tmp_path):
    """Four requests, the last of which had begun."""
    shape, passes = random_passes(np.random.default_rng(3), num_requests=4, block_length=8)
    last = next(i for i, p in enumerate(passes) if p.requests[0] == 3)
    return stopped(tmp_path, shape, passes[: last + 1])[0]


@pytest.mark.parametrize("table", ["forwards", "tokens", "routing"])
def test_a_file_that_ends_early_costs_what_is_behind(left, table):
    lines = (left / JOURNAL).read_text().splitlines()
    ends = [json.loads(line)["bytes"][table] for line in lines[1:]]
    path = left / f"{table}.parquet"
    path.write_bytes(path.read_bytes()[: ends[2] - 1])
    assert recover(left).num_requests == 2


def test_a_note_that_was_being_written_counts_for_nothing(left):
    text = (left / JOURNAL).read_text()
    (left / JOURNAL).write_text(text[:-5])
    assert recover(left).num_requests == 2


@pytest.mark.parametrize("where", ["header", "values"])
def test_damaged_bytes_end_what_is_recovered(left, where):
    lines = (left / JOURNAL).read_text().splitlines()
    end = json.loads(lines[1])["bytes"]["routing"]
    content = bytearray((left / "routing.parquet").read_bytes())
    place = end if where == "header" else (end + len(content)) // 2
    content[place] ^= 0xFF
    (left / "routing.parquet").write_bytes(content)
    found = recover(left)
    assert 1 <= found.num_requests < 3
    assert found.num_damaged == 3 - found.num_requests
    assert f"{counted(found.num_damaged, 'row group')} could not be read" in str(found)
    assert check(found.path).ok


def test_the_command_finds_what_was_left_by_the_name_of_the_trace(left, tmp_path, capsys):
    path = tmp_path / "x.trace"
    assert doctor.main([str(path)]) == 2
    assert f"`oled-doctor --recover {left}` may have requests of it" in capsys.readouterr().err
    assert doctor.main(["--recover", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{path}: recovered 3 finished requests" in out
    assert "warning: recovered from a recording that was stopped" in out
    assert doctor.main(["--recover", str(path)]) == 2
    assert "nothing to recover" in capsys.readouterr().err


def test_a_taken_name_is_not_replaced(left, tmp_path, capsys):
    (tmp_path / "x.trace").mkdir()
    (tmp_path / "x.trace" / "letter").write_text("dear")
    assert doctor.main(["--recover", str(left)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert doctor.main(["--recover", str(left), "--output", str(tmp_path / "y.trace")]) == 0
    assert TraceReader(tmp_path / "y.trace").num_requests == 3
    with pytest.raises(SystemExit):
        doctor.main(["--output", "y.trace", "x.trace"])


def test_of_several_one_must_be_named(left, tmp_path):
    shutil.copytree(left, tmp_path / ".x.trace.partial-00000000")
    with pytest.raises(TraceError, match="several writers were stopped; name one of"):
        recover(tmp_path / "x.trace")


def test_a_writer_at_work_is_left_alone(tmp_path):
    shape, passes = random_passes(np.random.default_rng(3))
    with TraceWriter(tmp_path / "x.trace", metadata_for(shape)) as writer:
        for pass_ in passes:
            writer.write(pass_)
        with pytest.raises(TraceError, match="its writer is at work"):
            recover(tmp_path / "x.trace")
    assert sorted(file.name for file in (tmp_path / "x.trace").iterdir()) == [
        "forwards.parquet", "routing.parquet", "tokens.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize("keep", [False, True])
def test_a_full_disk_leaves_what_was_finished_where_that_is_asked_for(tmp_path, monkeypatch, keep):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3)
    write_table, calls = pq.ParquetWriter.write_table, []

    def full(writer, rows, **options):
        calls.append(rows)
        if len(calls) == 8:  # the second table of the third row group
            raise OSError(errno.ENOSPC, "No space left on device")
        write_table(writer, rows, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)

    def record():
        with TraceWriter(tmp_path / "x.trace", metadata_for(shape), keep_finished=keep) as writer:
            for pass_ in passes:
                writer.write(pass_)

    with pytest.raises(TraceError, match=r"No space left") as caught:
        record()
    if not keep:
        assert "nothing is kept" in str(caught.value)
        assert list(tmp_path.iterdir()) == []
        return
    assert "x.trace: cannot be written, finished requests are kept" in str(caught.value)
    monkeypatch.undo()
    assert recover(tmp_path / "x.trace").num_requests == 2


@pytest.mark.parametrize("num_requests", [1, 2])
def test_an_exception_leaves_what_was_finished_only(tmp_path, num_requests):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=2)
    written = [p for p in passes if p.requests[0] < num_requests]
    writer = TraceWriter(tmp_path / "x.trace", metadata_for(shape), keep_finished=True)

    def interrupted():
        with writer:
            for pass_ in written:
                writer.write(pass_)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (writer.kept is not None) == (num_requests == 2)
    assert len(list(tmp_path.iterdir())) == num_requests - 1


KILLED = """
import os, resource, signal, sys
import numpy as np
from strategies import metadata_for, random_passes
from tracer.store import TraceWriter
path, how = sys.argv[1:]
if how == "full":  # no file may grow beyond this, as on a disk that is full
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))
shape, passes = random_passes(np.random.default_rng(2), num_requests=9, block_length=8)
with TraceWriter(path, metadata_for(shape), keep_finished=True) as writer:
    for pass_ in passes:
        if how == "killed" and pass_.requests[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        writer.write(pass_)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are those of POSIX")
@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_process_that_was_stopped_leaves_its_finished_requests(tmp_path, how):
    path = tmp_path / "x.trace"
    line = [sys.executable, "-c", KILLED, str(path), how]
    process = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    assert process.returncode == (-signal.SIGKILL if how == "killed" else 1)
    assert how == "killed" or "File too large" in process.stderr
    assert not path.exists()
    found = recover(path)
    passes = random_passes(np.random.default_rng(2), num_requests=9, block_length=8)[1]
    assert found.num_requests == 2 if how == "killed" else 1 <= found.num_requests < 9
    expected = [p.pass_id for p in passes if p.requests[0] < found.num_requests]
    assert [p.pass_id for p in TraceReader(path)] == expected


def without_its_end(path):
    """Bytes of a Parquet file up to its last page, and where its row groups end."""
    metadata = pq.read_metadata(path)
    (size,) = struct.unpack("<I", path.read_bytes()[-8:-4])
    ends = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        last = group.column(group.num_columns - 1)
        ends.append((last.dictionary_page_offset or last.data_page_offset) + last.total_compressed_size)
    assert ends[-1] == path.stat().st_size - size - 8
    return path.read_bytes()[: ends[-1]], ends


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["proxy-tiny", "proxy-19x256-signals"])
def test_the_end_of_a_shipped_table_is_made_anew(tmp_path, name, table):
    path = find_trace(name) / f"{table}.parquet"
    if not path.exists():
        pytest.skip(f"{name} has no signals")
    footer = read_footer(path.parent, table)
    content, ends = without_its_end(path)
    (tmp_path / path.name).write_bytes(content)
    end = end_of(tmp_path / path.name, table, footer.metadata, ends, footer.rows)
    (tmp_path / path.name).write_bytes(content + end)
    one, two = pq.ParquetFile(path), pq.ParquetFile(tmp_path / path.name)
    assert two.schema_arrow.equals(one.schema_arrow)
    for index in {0, len(ends) - 1}:
        assert two.read_row_group(index).equals(one.read_row_group(index))
        for column in range(one.metadata.num_columns):
            a, b = (file.metadata.row_group(index).column(column) for file in (one, two))
            for field in ("num_values", "total_compressed_size", "total_uncompressed_size", "data_page_offset",
                          "dictionary_page_offset", "compression", "path_in_schema"):  # fmt: skip
                assert getattr(a, field) == getattr(b, field), (index, column, field)


def test_the_protocol_gives_back_a_footer_byte_by_byte():
    data = (find_trace("proxy-tiny") / "routing.parquet").read_bytes()
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = data[-8 - size : -8]
    found, end = parse(footer)
    assert end == size
    assert dump(found) == footer
