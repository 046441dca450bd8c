"""Policies on traces that lack something: refused with the reason, or as right as if nothing had been lacking."""

from dataclasses import replace

import numpy as np
import pytest
from commands import command
from engines import routed, vllm_answer, write_lines
from recorded import assert_same
from strategies import metadata_for, random_passes

from experiments.calibration import context_of, recorded
from experiments.curves import _known
from experiments.curves import main as curves_command
from experiments.generate import main as generate
from experiments.import_command import main as import_command
from experiments.run import simulate
from policies.contract import PolicyError
from policies.registry import POLICIES, build_policy
from simulator.curves import CURVES, curves
from tracer.doctor import check
from tracer.schema import NO_GATES, TraceError
from tracer.store import TraceReader, TraceWriter

SHAPE, PASSES = random_passes(np.random.default_rng(5), num_requests=3, block_length=4)
H2D = {"misses": "h2d"}
WITHOUT = "which are null in this trace"
# of each policy knobs with which it needs neither gates nor token ids nor signals; None: there are none
PLAIN = {
    "full": {}, "ondemand": {}, "lru": {}, "lfu": {}, "prev_set": {}, "moe_infinity": {}, "ktransformers": {},
    "fiddler": {}, "oled": {"priority": False, "coop": False}, "sida": {"oracle_noise": 0.0},
    "gate_ahead": {"depth": 0}, "ideal_free": H2D, "ideal_min": H2D, "ideal_min_global": H2D, "ideal_prefetch": H2D,
    "hybrimoe": None, "swapmoe": None, "finemoe": None,
}  # fmt: skip


def write(path, passes, **fields):
    with TraceWriter(path, metadata_for(SHAPE, **fields)) as writer:
        for pass_ in passes:
            writer.write(pass_)
    return TraceReader(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("whole") / "x.trace", PASSES)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The same without gates, token ids and confidences."""
    passes = [
        replace(
            pass_,
            gates=np.full_like(pass_.gates, np.nan),
            token_ids_in=np.full_like(pass_.token_ids_in, -1),
            argmax_ids=np.full_like(pass_.argmax_ids, -1),
            p_argmax=np.full_like(pass_.p_argmax, np.nan),
            p_current=np.full_like(pass_.p_current, np.nan),
        )
        for pass_ in PASSES
    ]
    path = tmp_path_factory.mktemp("bare") / "x.trace"
    reader = write(path, passes, gate_dtype=NO_GATES, details={"lacks": ["token_ids", "confidence"]})
    for found, pass_ in zip(reader, passes, strict=True):
        assert_same(found, pass_)
    assert reader.metadata.lacks == {"gates", "token_ids", "confidence"}
    assert check(path).findings == []
    return reader


def test_every_policy_is_listed_here():
    assert POLICIES.keys() == PLAIN.keys()


def test_every_policy_can_do_without_or_says_why_not(bare):
    for name, knobs in PLAIN.items():
        if knobs is not None:
            assert build_policy(name, knobs, context_of(bare, 1)[0]).name == name


@pytest.mark.parametrize("name", ["lru", "oled", "moe_infinity", "ktransformers", "ideal_min"])
def test_what_needs_nothing_decides_as_ever(whole, bare, name):
    options = {"knobs": PLAIN[name], "hardware": "rtx5090", "shape": "llada2.0-mini", "engine": "des"}
    one, two = (simulate(reader, name, 4, **options).summary for reader in (whole, bare))
    assert one["decision_hash"] == two["decision_hash"]
    assert one["tpot_ms"] == two["tpot_ms"]


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("oled", {}, f"oled needs gates, {WITHOUT}; policy.priority=false policy.coop=false does without"),
        ("oled", {"coop": False}, "oled needs gates"),
        ("oled", {"coop": False, "priority_signal": "load"}, "oled needs gates"),
        ("oled", {"coop": False, "priority": False, "lru_order": "gate"}, "oled lru_order=gate needs gates"),
        ("lru", {"lru_order": "gate"}, f"lru lru_order=gate needs gates, {WITHOUT}; policy.lru_order=hits_first does without"),
        ("lru", {"misses": "oled"}, f"lru misses=oled needs gates, {WITHOUT}; policy.misses=h2d does without"),
        ("lfu", {"lru_order": "gate"}, "lfu lru_order=gate needs gates"),
        ("lfu", {"misses": "oled"}, "lfu misses=oled needs gates"),
        ("prev_set", {"lru_order": "gate"}, "prev_set lru_order=gate needs gates"),
        ("hybrimoe", {}, "hybrimoe needs gates"),
        ("swapmoe", {}, "swapmoe needs gates"),
        ("finemoe", {}, "needs scores and sketch of the table signals, which this trace lacks"),
        ("finemoe", {"gate_dist": "topk_norm", "depth": 1, "fm_store": "offline"}, "finemoe gate_dist=topk_norm needs gates"),
        ("sida", {}, f"sida needs token ids, {WITHOUT}; policy.oracle_noise=0 does without"),
        ("gate_ahead", {}, "gate_ahead needs ahead_ids of the table signals, which this trace lacks"),
        *((name, {}, f"{name} misses=oled needs gates") for name in ("ideal_free", "ideal_min", "ideal_min_global", "ideal_prefetch")),
    ],
)  # fmt: skip
def test_what_needs_more_says_so_before_the_run(bare, name, knobs, message):
    with pytest.raises(PolicyError, match=f"^{message.replace('.', '[.]')}" if message.startswith(name) else message):
        build_policy(name, knobs, context_of(bare, 1)[0])


def test_curves_of_a_trace_without_gates(bare, whole):
    names = ["lru_id", "load"]
    one, two = (curves(reader, SHAPE, names, 1) for reader in (whole, bare))
    for name in names:
        np.testing.assert_array_equal(one[name].hits, two[name].hits)
    with pytest.raises(PolicyError, match="curve gate: pass 0: the trace does not know"):
        curves(bare, SHAPE, ["gate"], 1)


def test_the_curves_command_leaves_out_what_the_trace_cannot_give(bare, tmp_path):
    def run(names):
        return command(lambda: curves_command([f"trace={bare.path}", f"output.dir={tmp_path}", *names]))

    asked = run(["curves=gate,lru_id"])
    assert (asked.code, asked.out) == (2, "")
    assert asked.err == "oled-curves: error: curves=gate: gates are null in this trace, and these rank by them\n"
    assert _known([*CURVES], bare, is_asked=False) == [name for name in CURVES if name not in ("gate", "confidence")]


def test_no_record_is_made_without_gates(bare):
    with pytest.raises(TraceError, match="gates are null in this trace; a record is made of them too"):
        recorded([bare])


def test_gates_and_their_absence_are_not_mixed(tmp_path):
    with pytest.raises(TraceError, match="allowed is NaN, as the trace has none"):
        write(tmp_path / "x.trace", PASSES, gate_dtype=NO_GATES)
    for fields in ({"token_ids_in": np.full_like(PASSES[0].token_ids_in, -1)}, {"gates": PASSES[0].gates * np.nan}):
        with pytest.raises(TraceError, match=r"token_id_in out of range: found -1|gates .*nan"):
            write(tmp_path / "x.trace", [replace(PASSES[0], **fields)])


def test_controls_and_batches_of_a_bare_trace_are_sound(bare, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["uniform"], ["shuffled"], ["merge", "--batch", "2"]):
        generate([*words, str(bare.path), f"{words[0]}.trace"])
        report = check(tmp_path / f"{words[0]}.trace")
        assert report.findings == []
        assert "null throughout: confidence, gates, token_ids" in str(report)
    with pytest.raises(SystemExit):
        generate(["merge", "--batch", "2", str(bare.path), "proxy-tiny", "other.trace"])
    assert "differ in source" in capsys.readouterr().err


def test_an_imported_trace_is_simulated_at_the_sizes_of_a_model(tmp_path):
    answers = [vllm_answer(routed(20, seed), 8) for seed in range(3)]
    write_lines(tmp_path / "a.jsonl", answers)
    assert import_command(["vllm", str(tmp_path / "a.jsonl"), str(tmp_path / "x.trace"), "--experts", "24"]) == 0
    summary = simulate(tmp_path / "x.trace", "lru", 8, shape="llada2.0-mini", engine="des").summary
    assert summary["source"] == "import:vllm"
    assert summary["tokens_per_forward"] == 1
    with pytest.raises(ValueError, match="hidden"):
        simulate(tmp_path / "x.trace", "lru", 8)
