"""Decision logs played back: ours decide and time the same again, others' are timed, what does not fit is refused."""

import re

import numpy as np
import polars as pl
import pytest
from commands import command
from recorded import write
from strategies import random_passes

from experiments.run import simulate
from experiments.simulate_command import main
from policies.contract import PlanError, PolicyError

# what logs without prefetches and placements differ in: no cache, copies, the CPU, moving slots, a global pool
VARIANTS = [
    ("full", {}),
    ("ondemand", {}),
    ("lru", {}),
    ("lru", {"misses": "oled"}),
    ("oled", {"resize_every": 2}),
    ("oled", {"conf_mode": "end_iter", "resize_every": 2}),
    ("oled", {"resize": "lazy", "resize_every": 1}),
    ("lfu", {"pool": "global"}),
    ("ideal_min_global", {}),
]
NEEDED = ["forward", "layer", "capacity", "hits", "transfers", "on_cpu", "retained"]
KEPT = ("tpot_ms", "hit_ratio", "token_hit_ratio", "h2d_bytes", "exposed_stall_ms", "decision_hash", "pool")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("logs")
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3, signals=True, block_length=6)
    write(path / "small.trace", shape, passes)
    return path


def simulated(directory, policy, output=None, hardware="rtx5090", slots=6, **knobs):
    trace = directory / "small.trace"
    return simulate(trace, policy, slots, hardware, shape="llada2.0-mini", knobs=knobs, output=output, overwrite=True)


def logged(directory, name, policy, **knobs):
    """Path of a run's log, and its summary."""
    output = directory / name
    return output / "decisions.parquet", simulated(directory, policy, output, **knobs).summary


@pytest.mark.parametrize(("policy", "knobs"), VARIANTS, ids=[f"{name} {knobs}" for name, knobs in VARIANTS])
def test_a_log_is_decided_and_timed_the_same_again(directory, policy, knobs):
    path, summary = logged(directory, "run", policy, **knobs)
    again = simulated(directory, "log", path=str(path)).summary
    assert {name: again[name] for name in KEPT} == {name: summary[name] for name in KEPT}
    assert again["slots_per_layer"] == summary["slots_per_layer"]
    assert (again["policy"], again["variant"]) == ("log", f"path={path}")
    assert again["warnings"] == []


def test_what_is_needed_of_a_log_is_what_was_decided(directory):
    path, _ = logged(directory, "run", "lru")
    other = directory / "theirs.parquet"
    pl.read_parquet(path, columns=NEEDED).with_columns(pl.col("layer").cast(pl.UInt8)).write_parquet(other)
    # on another machine it takes what the same decisions take there
    expected = simulated(directory, "lru", hardware="rtx4090_pcie4").summary
    found = simulated(directory, "log", hardware="rtx4090_pcie4", path=str(other)).summary
    assert {name: found[name] for name in KEPT} == {name: expected[name] for name in KEPT}
    assert found["misses"] == "h2d"


def test_prefetching_logs_are_played_back(directory):
    path, summary = logged(directory, "run", "ideal_prefetch")
    again = simulated(directory, "log", path=str(path))
    assert again.forwards["prefetch_started"].sum() > 0
    assert {name: again.summary[name] for name in KEPT} == {name: summary[name] for name in KEPT}
    assert "queued as listed; at 0 of 81 gates other experts were resident" in again.summary["warnings"][0]


def test_where_prefetches_land_otherwise_plans_follow_and_it_is_told(directory):
    path, _ = logged(directory, "run", "gate_ahead", depth=2)
    slow = simulated(directory, "log", hardware="rtx4090_pcie4", path=str(path))
    assert slow.forwards["prefetch_started"].sum() > 0
    told = re.search(r"at (\d+) of 81 gates other experts were resident than in the log", slow.summary["warnings"][0])
    assert int(told[1]) > 0
    late = simulated(directory, "log", path=str(path), prefetch_delay_ns=10**9)
    assert late.forwards["prefetch_started"].sum() < slow.forwards["prefetch_started"].sum()


# What does not fit


@pytest.fixture(scope="module")
def log(directory):
    path, _ = logged(directory, "kept", "lru")
    return pl.read_parquet(path)


def played(directory, table):
    path = directory / "changed.parquet"
    table.write_parquet(path)
    return simulated(directory, "log", path=str(path))


def with_list(table, name, row, values):
    lists = table[name].to_list()
    lists[row] = values
    return table.with_columns(pl.Series(name, lists, dtype=pl.List(pl.Int32)))


def test_a_log_of_other_routing_is_refused_where_it_first_differs(directory, log):
    row = 3 * 3 + 1
    hits, transfers = log["hits"][row].to_list(), log["transfers"][row].to_list()
    unserved = with_list(log, "transfers", row, transfers[1:])
    with pytest.raises(
        PolicyError, match=r"request 0, forward 3, layer 1: the log is not of this trace: it serves experts"
    ):
        played(directory, unserved)
    with pytest.raises(
        PolicyError, match=rf"request 0, forward 3, layer 1: the log has experts \[{transfers[0]}\] as hits"
    ):
        played(directory, with_list(unserved, "hits", row, sorted([*hits, transfers[0]])))
    absent = set(range(16)) - {*hits, *transfers, *log["retained"][row - 3].to_list()}
    elsewhere = with_list(log, "retained", row, [min(absent)])
    with pytest.raises(
        PlanError, match=r"request 0, forward 3, layer 1: expert \d+ of layer 1 is retained but neither"
    ):
        played(directory, elsewhere)


def test_an_expert_that_is_there_is_not_copied_again(directory):
    path, _ = logged(directory, "run", "lfu", pool="global")
    log = pl.read_parquet(path)
    row = next(r for r in range(9, len(log)) if r % 3 and len(log["hits"][r]))
    hits, transfers = log["hits"][row].to_list(), log["transfers"][row].to_list()
    again = with_list(with_list(log, "hits", row, hits[1:]), "transfers", row, [*transfers, hits[0]])
    with pytest.raises(PolicyError, match=rf"layer {row % 3}: the log copies experts \[{hits[0]}\], which"):
        played(directory, again)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: log.drop("retained"), "has no column retained; a decision log needs forward, layer, capacity, hits"),
        (lambda log: log.head(0), "holds 0 rows, must be some whole forwards of 3 layers"),
        (lambda log: log.head(7), "holds 7 rows, must be some whole forwards of 3 layers"),
        (lambda log: log.slice(1), "row 2 is of forward 1, layer 0, must be of forward 0, layer 2: one row for each of 3"),
        (lambda log: log.head(9), "request 0, forward 3, layer 0: the log has no row for it: it ends before the trace"),
        (lambda log: pl.concat([log, log.tail(3).with_columns(pl.col("forward") + 1)]), "it is not of this trace"),
        (lambda log: log.with_columns(capacity=pl.lit(1.5)), "column capacity is of double, must be whole numbers"),
        (lambda log: log.with_columns(capacity=None), "column capacity has empty cells"),
        (lambda log: log.with_columns(hits=pl.col("layer")), "column hits is of int32, must be lists of whole numbers"),
        (lambda log: with_list(log, "hits", 4, [0, None]), "column hits has empty cells"),
        (lambda log: with_list(log, "hits", 4, [16]), "request 0, forward 1, layer 1: hits holds 16, allowed are 0 to 15"),
        (lambda log: with_list(log, "retained", 4, [48]), "forward 1, layer 1: retained holds 48, allowed are 0 to 47"),
        (lambda log: with_list(log, "prefetch_layers", 4, [1]), "layer 1: prefetch_layers and prefetch_experts are of dif"),
        (lambda log: log.drop("prefetch_layers"), "has no column prefetch_layers"),
    ],
)  # fmt: skip
def test_what_is_no_log_of_this_trace_is_one_line(directory, log, change, message):
    with pytest.raises(PolicyError, match=re.escape(message)) as caught:
        played(directory, change(log))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_parquet_is_refused(directory):
    (directory / "text.parquet").write_text("x" * 100)
    with pytest.raises(PolicyError, match=r"text.parquet: is not a Parquet file"):
        simulated(directory, "log", path=str(directory / "text.parquet"))
    with pytest.raises(PolicyError, match=r"none.parquet: cannot be read: No such file"):
        simulated(directory, "log", path=str(directory / "none.parquet"))
    with pytest.raises(PolicyError, match="prefetch_delay_ns is -1: must be at least 0"):
        simulated(directory, "log", path="x", prefetch_delay_ns=-1)
    with pytest.raises(PolicyError, match="log: missing path"):
        simulated(directory, "log")


def test_placements_that_cost_nothing_are_refused(directory):
    path, _ = logged(directory, "run", "ideal_free")
    with pytest.raises(PolicyError, match=r"as hits, which no earlier row copied and retained"):
        simulated(directory, "log", path=str(path))


# On the command line


def test_a_log_stands_beside_policies_in_a_grid(directory, monkeypatch):
    path, summary = logged(directory, "run", "oled")
    monkeypatch.chdir(directory)
    settings = ["trace=small.trace", "shape=llada2.0-mini", "cache.slots_per_layer=4,6", "output.dir=grid"]
    finished = command(main, "-m", "hydra/launcher=basic", "policy=lru,log", f"policy.path={path}", *settings)
    assert finished.code == 0, finished.err
    rows = pl.read_parquet("grid/sweep.parquet")
    assert rows.select("policy", "slots_per_layer").rows() == [("lru", 4), ("lru", 6), ("log", 6)]
    assert rows.filter(policy="log")["decision_hash"].to_list() == [summary["decision_hash"]]
