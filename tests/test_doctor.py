"""The doctor passes sound traces and names what is wrong with the others, several faults at once."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from damage import drop_rows, edit_table, set_values
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import MASK_ID, VOCAB, change, metadata_for, random_passes, traces

from tracer import store
from tracer.doctor import check, main
from tracer.schema import GATE_DTYPES, ForwardKind
from tracer.store import TraceWriter


def write(path, shape, passes, gate_dtype="float32"):
    with TraceWriter(path, metadata_for(shape, gate_dtype)) as writer:
        for pass_ in passes:
            writer.write(pass_)
    return path


@pytest.fixture
def made():
    """A shape and passes, one request after the other; blocks of 8, so that a forward has enough tokens to judge."""
    return random_passes(np.random.default_rng(4), num_requests=3, block_length=8, prompt_length=8, accept_ratio=0.1)


@pytest.fixture
def trace(tmp_path, made):
    return write(tmp_path / "some.trace", *made)


def found(report, severity="error"):
    return [finding.what for finding in report.findings if finding.severity == severity]


def denoising(passes):
    """Index of a pass with masks that follows another of its block, and is followed by one."""
    kinds = [int(p.kinds[0]) for p in passes]
    return next(
        i for i in range(1, len(passes) - 1) if kinds[i - 1] == kinds[i] == kinds[i + 1] == ForwardKind.DENOISE
        and passes[i - 1].blocks[0] == passes[i].blocks[0] == passes[i + 1].blocks[0]
    )  # fmt: skip


@given(traces(max_block=8, max_experts=20, signals=None), st.sampled_from(GATE_DTYPES), st.sampled_from([1, 1 << 20]))
@settings(max_examples=20, deadline=None)
def test_every_generated_trace_is_sound(tmp_path_factory, drawn, gate_dtype, group_ids):
    shape, passes = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MAX_GROUP_IDS", group_ids)
        path = write(tmp_path_factory.mktemp("t") / "x.trace", shape, passes, gate_dtype)
    report = check(path)
    assert report.findings == []
    assert report.ok
    assert (report.num_passes, report.num_tokens) == (len(passes), sum(p.positions.size for p in passes))
    assert report.num_pairs == sum(p.expert_ids.size for p in passes)
    kinds = [ForwardKind(kind).name.lower() for p in passes for kind in p.kinds.tolist()]
    assert {name: count for name, count in report.num_forwards.items() if count} == {
        k: kinds.count(k) for k in set(kinds)
    }


def test_the_summary_says_what_the_trace_holds(trace, capsys):
    assert main([str(trace)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{trace}: ")
    for line in (
        "trace format 1, source synthetic:tests",
        "3 requests, ",
        "3 MoE layers (1 to 3) of 16 experts, top 4",
        "forwards: prefill 3, denoise ",
        "gates in float32, ",
        "bytes per (id, gate) pair",
    ):
        assert line in text
    assert text.endswith("\nSOUND\n")


def test_bytes_per_pair_is_of_the_routing_table(trace):
    report = check(trace)
    assert report.bytes_per_pair == (trace / "routing.parquet").stat().st_size / report.num_pairs


@pytest.mark.parametrize("correlated", [False, True])
def test_a_pair_of_uint8_takes_few_bytes(tmp_path, correlated):
    # 8 of 256 ids take at least 6.1 bits each when nothing is known of them, and gates of this form about 6
    rng = np.random.default_rng(0)
    options = {"num_layers": 19, "num_experts": 256, "top_k": 8, "block_length": 16, "num_requests": 1}
    shape, passes = random_passes(rng, num_blocks=6, prompt_length=64, drift=0.02, **options)
    if not correlated:
        ids = [np.argsort(rng.random((*p.expert_ids.shape[:2], 256)), axis=-1)[..., :8] for p in passes]
        gates = [rng.dirichlet(np.full(8, 2.0), p.expert_ids.shape[:2]) for p in passes]
        passes = [change(p, expert_ids=i, gates=g) for p, i, g in zip(passes, ids, gates, strict=True)]
    report = check(write(tmp_path / "x.trace", shape, passes, "uint8"))
    assert report.ok
    assert report.bytes_per_pair < (1.6 if correlated else 2.0)


# rows


@pytest.mark.parametrize(
    ("table", "column", "rows", "what"),
    [
        ("routing", "expert_ids", {5: [0, 1, 2, 16]}, "expert id out of range"),
        ("routing", "expert_ids", {5: [1, 2, 2, 3]}, "expert twice in one top-k"),
        ("routing", "expert_ids", {5: [3, 2, 1, 0]}, "expert ids unsorted"),
        ("routing", "expert_ids", {5: [0, 0, 0, 0]}, "all expert ids are zero, as in a buffer that was never filled"),
        ("routing", "gates", {5: [np.inf, 0, 0, 0]}, "gate not finite"),
        ("routing", "gates", {5: [-0.5, 0.5, 0.5, 0.5]}, "gate negative"),
        ("routing", "gates", {5: [0.25, 0.25, 0.25, 0.2]}, "gates with a wrong sum"),
        ("tokens", "p_argmax", {8: 1.5}, "p_argmax is no probability"),
        ("tokens", "p_current", {0: -0.5}, "p_current is no probability"),
        ("tokens", "token_id_in", {0: VOCAB}, "token_id_in out of range"),
        ("forwards", "num_masked_in", {0: 1}, "num_masked_in disagrees with tokens"),
        ("forwards", "num_accepted", {1: 0}, "num_accepted disagrees with tokens"),
        ("forwards", "block", {0: 0}, "block and kind disagree"),
        ("forwards", "kind", {1: "idle"}, "masks in a forward that has none by its kind"),
        ("forwards", "kv_len", {0: -1}, "negative kv_len"),
        ("forwards", "iteration", {2: 5}, "iteration jumps"),
        ("forwards", "num_tokens", {1: 9}, "positions missing or too many in tokens"),
        ("forwards", "pass_id", {0: 1}, "forwards out of order"),
        ("forwards", "kind", {0: "dream"}, "row group that cannot be read"),
        ("tokens", "accepted", {0: True}, "accepted, but not masked"),
        ("tokens", "edited", {8: True}, "edited, but masked"),
        ("tokens", "position", {1: 9}, "tokens out of order"),
    ],
)
def test_a_wrong_value_is_found_beside_the_broken_hash(trace, table, column, rows, what):
    set_values(trace, table, column, lambda _: rows)
    report = check(trace)
    assert what in found(report)
    assert not report.ok
    if what != "row group that cannot be read":
        assert "content hash does not match: values were changed after writing" in found(report)


def test_places_and_allowed_values_are_named(trace):
    set_values(trace, "routing", "expert_ids", lambda rows: {5: [0, 1, 2, 16], 30: [0, 1, 2, 17]})
    (finding,) = [f for f in check(trace).findings if f.what == "expert id out of range"]
    assert (finding.count, finding.allowed) == (2, "0 to 15")
    assert [str(place) for place in finding.places] == [
        "pass 0, request 0, layer 1, position 5: found 16",
        "pass 1, request 0, layer 1, position 14: found 17",
    ]


def test_uint8_gates_must_sum_to_255_exactly(tmp_path, made):
    trace = write(tmp_path / "x.trace", *made, "uint8")
    set_values(trace, "routing", "gates", lambda rows: {5: [100, 100, 50, 4]})
    assert "gates with a wrong sum" in found(check(trace))


def test_several_faults_are_reported_at_once(trace, capsys):
    set_values(trace, "routing", "expert_ids", lambda rows: {5: [0, 1, 2, 16]})
    set_values(trace, "tokens", "p_argmax", lambda rows: {8: 1.5})
    drop_rows(trace, "routing", pass_id=check(trace).num_passes - 1, layer=2)
    assert {"expert id out of range", "p_argmax is no probability", "missing layer"} <= set(found(check(trace)))
    assert main([str(trace)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "error: missing layer; allowed is routing of all 3 MoE layers" in lines
    assert lines[-1].startswith("NOT SOUND: 4 kinds of error")


def test_places_beyond_the_first_few_are_counted(tmp_path, made, capsys):
    shape, passes = made
    trace = write(tmp_path / "x.trace", shape, passes)
    set_values(trace, "tokens", "p_argmax", lambda rows: dict.fromkeys(range(20), 2.0))
    assert main([str(trace)]) == 1
    text = capsys.readouterr().out
    assert "error: p_argmax is no probability, 20 times; allowed is 0 to 1, or null" in text
    assert "  and 17 more" in text


def test_missing_positions_are_found(trace):
    drop_rows(trace, "routing", pass_id=1, layer=2, position=10)
    (finding,) = [f for f in check(trace).findings if f.what == "positions missing or too many in a layer"]
    assert str(finding.places[0]) == "pass 1, request 0, layer 2: found 7 rows for 8 tokens"


def test_swapped_passes_are_found(trace):
    edit_table(trace, "forwards", lambda t: t.take([1, 0, *range(2, t.num_rows)]))
    assert "forwards out of order" in found(check(trace))


# what whole rows can hide: written by the writer, so the hash is right


def check_passes(tmp_path, shape, passes):
    report = check(write(tmp_path / "changed.trace", shape, passes))
    assert not any("hash" in what for what in found(report))
    return report


def test_a_buffer_that_never_changed_is_found(tmp_path, made):
    shape, passes = made
    first = passes[1].expert_ids[:, :1], passes[1].gates[:, :1]
    ids, gates = (np.broadcast_to(values, passes[1].expert_ids.shape) for values in first)
    report = check_passes(tmp_path, shape, [passes[0], change(passes[1], expert_ids=ids, gates=gates), *passes[2:]])
    assert found(report) == ["repeated rows, as in a buffer that never changed"]
    assert "pass 1, request 0: found the same routing for all 8 tokens in every layer" in str(report)


def test_routing_of_the_previous_forward_is_found(tmp_path, made):
    shape, passes = made
    at = denoising(passes)
    stale = change(passes[at], expert_ids=passes[at - 1].expert_ids, gates=passes[at - 1].gates)
    report = check_passes(tmp_path, shape, [*passes[:at], stale, *passes[at + 1 :]])
    assert found(report) == ["stale routing, though the input changed"]


def test_equal_routing_of_an_equal_input_is_sound(tmp_path, made):
    shape, passes = made
    at = denoising(passes)
    again = change(passes[at], pass_id=at + 1, iterations=passes[at].iterations + 1)
    assert found(check_passes(tmp_path, shape, [*passes[: at + 1], again])) == []


def test_stale_routing_is_found_across_row_groups(tmp_path, made, monkeypatch):
    monkeypatch.setattr(store, "MAX_GROUP_IDS", 1)
    test_routing_of_the_previous_forward_is_found(tmp_path, made)


def masks(pass_, where):
    """The pass with masks at these tokens alone, consistent in itself."""
    masked = np.zeros(pass_.positions.size, bool)
    masked[where] = True
    accepted = pass_.accepted & masked
    return change(
        pass_,
        is_masked_in=masked,
        token_ids_in=np.where(masked, MASK_ID, 1),
        p_current=np.where(masked, np.nan, 0.5),
        accepted=accepted,
        num_masked_in=np.array([masked.sum()]),
        num_accepted=np.array([accepted.sum()]),
    )


def test_masks_that_grow_without_an_edit_are_found(tmp_path, made):
    shape, passes = made
    at = denoising(passes)
    gone = int(np.flatnonzero(~passes[at].is_masked_in)[0])
    back = masks(passes[at + 1], [*np.flatnonzero(passes[at + 1].is_masked_in), gone])
    report = check_passes(tmp_path, shape, [*passes[: at + 1], back, *passes[at + 2 :]])
    assert found(report) == ["mask grows without an edit"]
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert finding.places[0].position == int(passes[at].positions[gone])
    edit = passes[at].edited.copy()
    edit[gone] = True
    shutil.rmtree(tmp_path / "changed.trace")
    edited = [*passes[:at], change(passes[at], edited=edit), back, *passes[at + 2 :]]
    assert found(check_passes(tmp_path, shape, edited)) == []


def test_masks_that_do_not_follow_acceptance_are_looked_at(tmp_path, made):
    shape, passes = made
    at = denoising(passes)
    before, now = passes[at], passes[at + 1]
    kept = masks(now, [*np.flatnonzero(now.is_masked_in), int(np.flatnonzero(before.accepted)[0])])
    report = check_passes(tmp_path, shape, [*passes[: at + 1], kept, *passes[at + 2 :]])
    assert found(report) == []
    assert "accepted, but still masked" in found(report, "warning")
    shutil.rmtree(tmp_path / "changed.trace")
    fewer = masks(now, np.flatnonzero(now.is_masked_in)[1:])
    report = check_passes(tmp_path, shape, [*passes[: at + 1], fewer])
    assert "mask gone without acceptance" in found(report, "warning")
    assert report.ok


@pytest.mark.parametrize(
    ("field", "shift", "what", "severity"),
    [
        ("iterations", 1, "iteration jumps", "error"),
        ("kv_lens", -1, "kv_len falls", "error"),
        ("blocks", -1, "block goes back", "error"),
        ("blocks", 2, "block skipped", "warning"),
    ],
)
def test_forwards_out_of_order_are_found(tmp_path, made, field, shift, what, severity):
    shape, passes = made
    at = next(i for i, p in enumerate(passes) if p.blocks[0] == 1 and p.iterations[0] == 1)
    wrong = change(passes[at], **{field: getattr(passes[at], field) + shift})
    assert what in found(check_passes(tmp_path, shape, [*passes[:at], wrong, *passes[at + 1 :]]), severity)


# files


@pytest.mark.parametrize("table", ["forwards", "tokens", "routing"])
@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_file_cut_short_is_a_finding(trace, capsys, table, length):
    path = trace / f"{table}.parquet"
    path.write_bytes(path.read_bytes()[:length])
    assert main([str(trace)]) == 1
    output = capsys.readouterr()
    assert f"{table}.parquet: not a whole Parquet file" in output.out
    assert output.err == ""


def test_missing_tables_are_findings(trace):
    (trace / "tokens.parquet").unlink()
    (trace / "routing.parquet").unlink()
    report = check(trace)
    (finding,) = report.findings
    assert (finding.what, finding.count) == ("table that cannot be read", 2)


def test_a_row_group_that_cannot_be_read_hides_no_other(trace):
    with pq.ParquetFile(trace / "routing.parquet") as file:
        chunk = file.metadata.row_group(0).column(5)
        middle = chunk.data_page_offset + chunk.total_compressed_size * 3 // 4
    set_values(trace, "tokens", "p_argmax", lambda rows: {len(rows) - 1: 1.5})
    content = bytearray((trace / "routing.parquet").read_bytes())
    content[middle] ^= 0xFF
    (trace / "routing.parquet").write_bytes(content)
    report = check(trace)
    assert set(found(report)) == {"row group that cannot be read", "p_argmax is no probability"}


def test_metadata_that_differs_between_files_is_found(trace):
    edit_table(trace, "tokens", metadata=lambda text: json.dumps(json.loads(text) | {"seed": 8}).encode())
    report = check(trace)
    assert found(report) == ["metadata differs between tables"]
    assert "tokens.parquet" in str(report)


def test_counts_and_hash_of_the_metadata_are_checked(trace):
    changes = {"num_passes": 1, "num_requests": 9, "content_hash": "0" * 64}
    for table in ("forwards", "tokens", "routing"):
        edit_table(trace, table, metadata=lambda text: json.dumps(json.loads(text) | changes).encode())
    assert found(check(trace)) == [
        "number of passes",
        "number of requests",
        "content hash does not match: values were changed after writing",
    ]


def test_row_groups_that_do_not_match_are_found(trace):
    drop_rows(trace, "tokens", request=1)
    assert "positions missing or too many in tokens" in found(check(trace))
    drop_rows(trace, "forwards", request=1)
    assert "row group without forwards" in found(check(trace))


def test_leftovers_are_mentioned_but_do_not_condemn(trace, capsys):
    (trace.parent / ".some.trace.partial-0123abcd").mkdir()
    (trace.parent / ".other.trace.partial-0123abcd").mkdir()
    assert main([str(trace)]) == 0
    text = capsys.readouterr().out
    assert ".some.trace.partial-0123abcd, of an interrupted writer" in text
    assert ".other" not in text
    assert text.endswith("SOUND, with 1 kind of warning to look at\n")


def test_several_traces_and_unknown_names(tmp_path, made, capsys):
    good = write(tmp_path / "good.trace", *made)
    assert main([str(tmp_path / "none.trace"), str(good)]) == 2
    out, err = capsys.readouterr()
    assert out.endswith("SOUND\n")
    assert err.startswith("oled-doctor: error: trace ")
    assert "no such directory" in err
    assert err.count("\n") == 1
    assert not check(tmp_path / "none.trace").ok


def test_a_wrong_signal_is_found(tmp_path):
    trace = write(tmp_path / "x.trace", *random_passes(np.random.default_rng(0), num_requests=1, signals=True))
    assert check(trace).has_signals
    set_values(trace, "signals", "score_ids", lambda rows: {0: [16] * 16})
    assert {"score_ids out of range", "chosen expert without a score"} <= set(found(check(trace)))
    (trace / "signals.parquet").write_bytes(b"PAR1")
    report = check(trace)
    assert found(report) == ["table that cannot be read"]
    assert report.num_passes


@pytest.mark.parametrize("table", ["tokens", "signals"])
def test_a_link_to_nothing_is_a_finding(trace, tmp_path, table):
    (trace / f"{table}.parquet").unlink(missing_ok=True)
    (trace / f"{table}.parquet").symlink_to(tmp_path / "nowhere")
    assert found(check(trace)) == ["table that cannot be read"]


def test_a_trace_that_is_a_link_to_nothing(tmp_path, capsys):
    (tmp_path / "x.trace").symlink_to(tmp_path / "nowhere")
    assert main([str(tmp_path / "x.trace")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_the_module_is_the_command(tmp_path, made):
    trace = write(tmp_path / "größe.trace", *made)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    line = [sys.executable, "-m", "tracer.doctor", str(trace)]
    finished = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout.endswith("SOUND\n")
    assert "gr\\xf6\\xdfe.trace" in finished.stdout
