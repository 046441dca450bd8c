"""Any Parquet or CSV table as a trace, by a mapping of its columns."""

import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import yaml
from commands import command

from experiments.import_command import main
from tracer import import_table
from tracer.doctor import check
from tracer.import_mapping import MAPPINGS, load_mapping
from tracer.import_table import read_table
from tracer.schema import ForwardKind, TraceError
from tracer.store import TraceReader

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_PROMPT = 3, 12, 2, 4
EXPERTS = ("--experts", str(NUM_EXPERTS))


@pytest.fixture
def oled_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: command(lambda: sys.exit(main(["table", *words])))


def rows_of(num_requests=2, num_tokens=9, seed=0):
    """What moe-policylang 1.15.0 records with token ids and phases, in the order of its hooks."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(num_requests):
        stretches = [range(NUM_PROMPT), *([token] for token in range(NUM_PROMPT, num_tokens))]
        for tokens in stretches:
            for layer in range(NUM_LAYERS):
                for token in tokens:
                    probabilities = np.sort(rng.dirichlet(np.ones(NUM_EXPERTS)))[::-1]
                    rows.append({
                        "prompt_id": prompt, "token_idx": token, "layer_idx": layer + 1,
                        "selected_experts": rng.permutation(NUM_EXPERTS)[:TOP_K].tolist(),
                        "router_scores": probabilities[:TOP_K].tolist(), "token_id": 100 * prompt + token,
                        "phase": "prefill" if token < NUM_PROMPT else "decode",
                    })  # fmt: skip
    return rows


_TYPES = {
    "prompt_id": pa.int32(), "token_idx": pa.int32(), "layer_idx": pa.int32(), "token_id": pa.int32(),
    "selected_experts": pa.list_(pa.int32()), "router_scores": pa.list_(pa.float32()), "phase": pa.string(),
}  # fmt: skip


def save(path, rows, **options):
    table = pa.table({name: pa.array([row[name] for row in rows], _TYPES[name]) for name in rows[0]})
    pq.write_table(table, path, **options)


def assert_holds(reader, rows, *, gates=True):
    """The trace has every row of the table, at its place."""
    found = {}
    for pass_ in reader:
        for token, position in enumerate(pass_.positions.tolist()):
            for layer, layer_id in enumerate(reader.metadata.shape.layer_ids):
                key = int(pass_.requests[0]), position, layer_id
                assert key not in found
                found[key] = pass_.expert_ids[layer, token].tolist(), pass_.gates[layer, token].tolist()
                kind = ForwardKind.PREFILL if position < NUM_PROMPT else ForwardKind.DENOISE
                assert (pass_.kind, pass_.num_tokens[0]) == (kind, NUM_PROMPT if position < NUM_PROMPT else 1)
    assert len(found) == len(rows)
    for row in rows:
        ids, stored = found[row["prompt_id"], row["token_idx"], row["layer_idx"]]
        order = np.argsort(row["selected_experts"])
        assert ids == sorted(row["selected_experts"])
        if gates:
            scores = np.array(row["router_scores"])[order]
            np.testing.assert_allclose(stored, scores / scores.sum(), atol=1e-3)


def test_a_table_of_moe_policylang(oled_import, tmp_path):
    rows = rows_of()
    save(tmp_path / "t.parquet", rows)
    finished = oled_import("t.parquet", "x.trace", "--map", "moe-policylang", *EXPERTS)
    assert (finished.code, finished.err) == (0, "")
    assert "source import:moe-policylang" in finished.out
    assert "null throughout: confidence\n" in finished.out
    reader = TraceReader(tmp_path / "x.trace")
    assert reader.metadata.decode == {"loop": "autoregressive", "block_length": 1}
    assert_holds(reader, rows)
    assert [p.token_ids_in.tolist() for p in reader][:2] == [[0, 1, 2, 3], [4]]
    assert check(tmp_path / "x.trace").findings == []


def test_what_its_recorder_was_not_asked_for_is_null(oled_import, tmp_path):
    rows = [{key: value for key, value in row.items() if key not in ("router_scores", "token_id", "phase")} for row in rows_of()]  # fmt: skip
    save(tmp_path / "t.parquet", rows)
    finished = oled_import("t.parquet", "x.trace", "--map", "moe-policylang", *EXPERTS)
    assert finished.code == 2
    assert "t.parquet: nothing says which tokens are of the prompt: needs a column for columns.kind, or --prompt-tokens" in finished.err  # fmt: skip
    finished = oled_import("t.parquet", "x.trace", "--map", "moe-policylang", "--prompt-tokens", "4", *EXPERTS)
    assert "null throughout: confidence, gates, token_ids\n" in finished.out
    assert_holds(TraceReader(tmp_path / "x.trace"), rows, gates=False)


MINE = {
    "columns": {"request": "prompt_id", "position": "token_idx", "layer": "layer_idx", "expert_ids": "selected_experts", "token_id": "token_id", "kind": "phase", "gates": "router_scores"},
    "kinds": {"prefill": "prefill", "decode": "decode"},
}  # fmt: skip


def mapping_file(tmp_path, **changes):
    columns = {**MINE["columns"], **changes.pop("columns", {})}
    columns = {key: value for key, value in columns.items() if value}
    (tmp_path / "map.yaml").write_text(yaml.safe_dump({**MINE, **changes, "columns": columns}))
    return "map.yaml"


@pytest.mark.parametrize("form", ["text", "columns", "long"])
def test_forms_of_lists_in_csv(oled_import, tmp_path, form):
    rows = rows_of()
    names = {}
    if form == "text":
        plain = [{**row, "selected_experts": str(row["selected_experts"]), "router_scores": ";".join(map(str, row["router_scores"]))} for row in rows]  # fmt: skip
    elif form == "columns":
        plain = [{**row, **{f"e{k}": row["selected_experts"][k] for k in range(2)}, **{f"s{k}": row["router_scores"][k] for k in range(2)}} for row in rows]  # fmt: skip
        names = {"expert_ids": ["e0", "e1"], "gates": ["s0", "s1"]}
    else:
        plain = [{**row, "selected_experts": e, "router_scores": s} for row in rows for e, s in zip(row["selected_experts"], row["router_scores"], strict=True)]  # fmt: skip
    plain = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in plain]
    csv.write_csv(pa.Table.from_pylist(plain), tmp_path / "t.csv")
    finished = oled_import("t.csv", "x.trace", "--map", mapping_file(tmp_path, columns=names), *EXPERTS)
    assert (finished.code, finished.err) == (0, "")
    assert "source import:table" in finished.out
    assert_holds(TraceReader(tmp_path / "x.trace"), rows)


def test_forwards_blocks_and_confidences_of_a_diffusion_model(oled_import, tmp_path):
    rng = np.random.default_rng(1)
    rows = []
    for forward, (kind, block, tokens) in enumerate(
        [("prompt", -1, range(4)), ("step", 0, range(4, 8)), ("step", 0, range(4, 8)), ("last", 0, range(4, 8))]
    ):
        for layer in range(NUM_LAYERS):
            for token in tokens:
                masked = kind == "step" and token >= 4 + 2 * (forward - 1)
                rows.append({
                    "f": forward, "k": kind, "b": block, "t": token, "l": layer,
                    "e": rng.permutation(NUM_EXPERTS)[:TOP_K].tolist(), "m": masked,
                    "a": masked and token < 4 + 2 * forward, "p": 0.5, "c": None if masked else 0.25,
                })  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    columns = {"forward": "f", "kind": "k", "block": "b", "position": "t", "layer": "l", "expert_ids": "e", "masked": "m", "accepted": "a", "p_argmax": "p", "p_current": "c"}  # fmt: skip
    kinds = {"prompt": "prefill", "step": "denoise", "last": "idle"}
    (tmp_path / "map.yaml").write_text(yaml.safe_dump({"columns": columns, "kinds": kinds}))
    finished = oled_import("t.parquet", "x.trace", "--map", "map.yaml", *EXPERTS)
    assert (finished.code, finished.err) == (0, "")
    assert "null throughout: gates, token_ids\n" in finished.out
    reader = TraceReader(tmp_path / "x.trace")
    assert reader.metadata.decode == {}
    prompt, one, two, last = reader
    assert [int(p.kind) for p in (prompt, one, two, last)] == [0, 1, 1, 2]
    assert [p.iterations[0] for p in (one, two, last)] == [0, 1, 2]
    assert [p.num_accepted[0] for p in (one, two, last)] == [2, 2, 0]
    assert two.is_masked_in.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(two.confidence, [0.25, 0.25, 0.5, 0.5])


def test_requests_are_read_across_batches_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(import_table, "_BATCH_ROWS", 100)
    rows = rows_of(num_requests=10, num_tokens=12)
    peaks = []
    for num_copies in (1, 8):
        path = tmp_path / "t.parquet"
        copies = [{**row, "prompt_id": row["prompt_id"] + 10 * copy} for copy in range(num_copies) for row in rows]
        save(path, copies, row_group_size=50)
        tracemalloc.start()
        requests = [len(request.forwards) for request in read_table([path], load_mapping("moe-policylang"))]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert requests == [1 + 12 - NUM_PROMPT] * 10 * num_copies
    assert peaks[1] < 1.5 * peaks[0]


def changed(row=0, **values):
    rows = rows_of(num_requests=1)
    rows[row] = {**rows[row], **values}
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(5, selected_experts=[3, 3]), "request 0: position 1, layer 2: an expert stands twice in one top-k: [3, 3]"),
        (changed(5, selected_experts=[0, 0]), "position 1, layer 2: all ids are zero, as in a buffer that was never filled"),
        (changed(5, selected_experts=[3, 12]), "position 1, layer 2: ids must be from 0 to 11: [3, 12]"),
        (changed(5, router_scores=[0.0, 0.0]), "position 1, layer 2: gates [0.0, 0.0], must be 0 or more, with a sum above 0"),
        (changed(5, router_scores=[float("nan"), 0.1]), "position 1, layer 2: gates [nan,"),
        (changed(5, selected_experts=[3]), "column selected_experts holds lists of [1, 2] numbers; all must be as long"),
        (changed(5, layer_idx=9), "request 0, prompt: tokens of layers {1: 4, 2: 3, 3: 4, 9: 1} differ"),
        (changed(5, token_idx=0), "several rows for position 0 in layer 2 of one forward"),
        (changed(5, phase="draft"), "column phase holds 'draft'; kinds has prefill, decode"),
        (changed(5, phase=None), "column phase holds nulls"),
        (changed(5, layer_idx=None), "column layer_idx holds nulls; each row needs a value"),
        (rows_of(1) + [{**row, "prompt_id": 5} for row in rows_of(1)] + rows_of(1), "rows of request 0 stand in several places; the table must be sorted by prompt_id"),
    ],
)  # fmt: skip
def test_what_is_not_sound_is_named_and_nothing_is_written(oled_import, tmp_path, rows, message):
    save(tmp_path / "t.parquet", rows)
    finished = oled_import("t.parquet", "x.trace", "--map", "moe-policylang", *EXPERTS)
    assert finished.code == 2
    assert finished.err.startswith("oled-import: error: t.parquet")
    assert message in finished.err
    assert finished.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": {"request": "prompt"}}, "t.parquet: no column 'prompt'; did you mean prompt_id?"),
        ({"columns": {"wrong": "x"}}, "map.yaml: columns: unknown key 'wrong'"),
        ({"kinds": {"prefill": "prefil"}}, "map.yaml: kinds.prefill is 'prefil', must be one of prefill, decode"),
        ({"columns": {"block": "b"}}, "columns.block needs columns.forward"),
        ({"columns": {"gates": ["a", "b"]}}, "columns.gates must name as many columns as columns.expert_ids"),
        ({"columns": {"kind": ""}}, "nothing says which tokens are of the prompt"),
        ({"columns": {"position": "phase"}}, "column phase: Failed to parse string"),
        ({"columns": {"expert_ids": "phase"}}, "column phase is string, must be of numbers, or lists of them"),
    ],
)
def test_mappings_that_do_not_fit_are_named(oled_import, tmp_path, changes, message):
    save(tmp_path / "t.parquet", rows_of(1))
    finished = oled_import("t.parquet", "x.trace", "--map", mapping_file(tmp_path, **changes), *EXPERTS)
    assert finished.code == 2
    assert message in finished.err
    assert finished.err.count("\n") == 1


def test_files_that_are_none(oled_import, tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    (tmp_path / "t.csv").write_text("a,b\n1\n")
    (tmp_path / "t.txt").write_text("")
    (tmp_path / "bad.yaml").write_text("columns: [")
    for file, mapping, message in (
        ("t.parquet", "moe-policylang", "t.parquet: cannot be read"),
        ("t.csv", "moe-policylang", "t.csv: cannot be read"),
        ("none.parquet", "moe-policylang", "none.parquet: cannot be read"),
        ("t.txt", "moe-policylang", "t.txt: must be a .parquet or .csv file"),
        (
            "t.csv",
            "nobody",
            "mapping 'nobody': cannot be read: No such file or directory; named ones are moe-policylang",
        ),
        ("t.csv", "bad.yaml", "bad.yaml: is not YAML"),
    ):
        finished = oled_import(file, "x.trace", "--map", mapping, *EXPERTS)
        assert finished.code == 2
        assert message in finished.err
        assert finished.err.count("\n") == 1


def test_the_layers_of_a_named_shape_must_be_those_of_the_table(oled_import, tmp_path):
    save(tmp_path / "t.parquet", rows_of(1))
    finished = oled_import("t.parquet", "x.trace", "--map", "moe-policylang", "--shape", "llada2.0-mini")
    assert "layers of the routing are [1, 2, 3], and [1, 2, 3, 4," in finished.err


def test_every_named_mapping_is_one():
    for name in MAPPINGS:
        assert load_mapping(name).columns.expert_ids


def test_the_documented_mapping_is_the_one_by_that_name():
    text = (Path(__file__).parent.parent / "docs" / "formats.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml.safe_load(block) == MAPPINGS["moe-policylang"]


def test_a_mapping_names_what_holds_the_experts(tmp_path):
    (tmp_path / "map.yaml").write_text("columns: {position: a, layer: b, expert_ids: []}")
    with pytest.raises(TraceError, match="expert_ids must name one column or more"):
        load_mapping(str(tmp_path / "map.yaml"))
