"""Metrics against numbers counted by hand, on logs written by hand."""

import hashlib
import struct

import numpy as np
import pytest

from experiments import metrics
from experiments.results import ForwardTable
from policies.log import PREFETCH_COUNTS, DecisionHash, LogChunk, forward_builder, layer_builder
from tracer.schema import ForwardKind

E = 16


def layer_row(
    forward,
    layer=0,
    *,
    request=0,
    kind=ForwardKind.DENOISE,
    capacity=4,
    hits=(),
    transfers=(),
    on_cpu=(),
    retained=(),
    load=1,
    start=0,
    **values,
):
    row = {
        "forward": forward,
        "pass_id": forward,
        "request": request,
        "layer": layer,
        "kind": kind,
        "num_tokens": 4,
        "kv_len": 0,
        "capacity": capacity,
        "num_resident": capacity,
        "num_activated": len(hits) + len(transfers) + len(on_cpu),
        "hit_tokens": load * len(hits),
        "num_promoted": 0,
        "start_ns": start,
        "plan_ns": start + 100,
        "hits_end_ns": start + 150,
        "cpu_end_ns": start + 100 + 70 * bool(on_cpu),
        "end_ns": start + 200,
        "link_busy_ns": 10 * len(transfers),
        "hits": list(hits),
        "transfers": list(transfers),
        "transfer_loads": [load] * len(transfers),
        "transfer_start_ns": [start + 100 + 10 * i for i in range(len(transfers))],
        "transfer_end_ns": [start + 110 + 10 * i for i in range(len(transfers))],
        "on_cpu": list(on_cpu),
        "cpu_loads": [load] * len(on_cpu),
        "retained": list(retained),
        "prefetch_layers": [],
        "prefetch_experts": [],
        **dict.fromkeys(("prefetch_issued", "prefetch_started", "prefetch_landed", "prefetch_late"), 0),
        **dict.fromkeys(("prefetch_unserved", "prefetch_unused", "prefetch_dropped_begin"), 0),
        **dict.fromkeys(("prefetch_dropped_flag", "prefetch_dropped_victim"), 0),
    }
    return {**row, **values}


def forward_row(forward, *, requests=(0,), accepted=(1,), kind=ForwardKind.DENOISE, start=0, end=1000):
    return {
        "forward": forward,
        "pass_id": forward,
        "kind": kind,
        "start_ns": start,
        "end_ns": end,
        "requests": list(requests),
        "blocks": [0] * len(requests),
        "iterations": [0] * len(requests),
        "accepted": list(accepted),
    }


def chunk(layer_rows, forward_rows):
    layers, forwards = layer_builder(), forward_builder()
    for row in layer_rows:
        layers.append(row)
    for row in forward_rows:
        forwards.append(row)
    return LogChunk(layers.build(), forwards.build())


def table(layer_rows, forward_rows, *, num_layers=1, warmup=0, is_global=False, num_experts=E):
    made = ForwardTable(num_layers, num_experts, warmup, 15, is_global)
    made.add(chunk(layer_rows, forward_rows))
    return made


def test_utilization_and_hit_ratio_of_one_execution():
    made = table([layer_row(0, hits=[2, 4], transfers=[5, 6, 7, 8])], [forward_row(0)]).frame()
    assert metrics.utilization(made) == 0.5
    assert metrics.hit_ratio(made) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("capacity", "hits", "utilization", "hit_ratio"), [(40, 36, 0.90, 0.60), (100, 54, 0.54, 0.90)]
)
def test_utilization_and_hit_ratio_rank_oppositely(capacity, hits, utilization, hit_ratio):
    row = layer_row(0, capacity=capacity, hits=range(hits), transfers=range(hits, 60))
    made = table([row], [forward_row(0)], num_experts=256).frame()
    assert metrics.utilization(made) == pytest.approx(utilization)
    assert metrics.hit_ratio(made) == pytest.approx(hit_ratio)
    # hit = utilization x slots / activated
    assert metrics.hit_ratio(made) == pytest.approx(metrics.utilization(made) * capacity / 60)


def test_layers_without_slots_have_no_utilization_and_unequal_layers_are_weighted_both_ways():
    rows = [layer_row(0, 0, capacity=1, hits=[1]), layer_row(0, 1, capacity=9, hits=[], transfers=[3])]
    made = table(rows, [forward_row(0)], num_layers=2).frame()
    assert metrics.utilization(made) == 0.5
    assert metrics.utilization_slot_weighted(made) == 0.1
    empty = table([layer_row(0, capacity=0, transfers=[1, 2])], [forward_row(0)]).frame()
    assert metrics.utilization(empty) is None
    assert metrics.utilization_slot_weighted(empty) is None
    assert metrics.hit_ratio(empty) == 0


def test_a_global_pool_has_only_the_slot_weighted_form():
    rows = [layer_row(0, layer, capacity=8, hits=[1, 2, 3]) for layer in range(2)]
    made = table(rows, [forward_row(0)], num_layers=2, is_global=True).frame()
    assert metrics.utilization(made) is None
    assert metrics.utilization_slot_weighted(made) == 6 / 8


def test_token_hit_ratio_weighs_by_load():
    row = layer_row(0, hits=[1], transfers=[2], on_cpu=[3], hit_tokens=6, transfer_loads=[1], cpu_loads=[5])
    assert metrics.token_hit_ratio(table([row], [forward_row(0)]).frame()) == 0.5


def test_effective_transfers_are_kept_and_used_in_the_next_execution_of_the_layer():
    rows = [
        layer_row(0, transfers=[1, 2, 3], retained=[1, 2]),
        layer_row(1, hits=[1], transfers=[3], retained=[1, 3]),  # of 1, 2, 3: 1 kept and used; 3 was not kept
        layer_row(2, transfers=[9], retained=[9]),  # 3 kept, not used
    ]
    forwards = [forward_row(i) for i in range(3)]
    assert metrics.effective_transfer_ratio(table(rows, forwards).frame()) == 1 / 4
    split = ForwardTable(1, E, 0, 15, False)
    for row, forward in zip(rows, forwards, strict=True):
        split.add(chunk([row], [forward]))
    assert metrics.effective_transfer_ratio(split.frame()) == 1 / 4
    assert metrics.effective_transfer_ratio(table(rows[:1], forwards[:1]).frame()) is None


def test_effective_transfers_belong_to_the_forward_that_made_them():
    rows = [
        layer_row(0, transfers=[1, 2], retained=[1, 2]),
        layer_row(1, kind=ForwardKind.PREFILL, hits=[1, 2], transfers=[4], retained=[4]),
        layer_row(2, hits=[4], retained=[4]),
    ]
    forwards = [forward_row(0), forward_row(1, kind=ForwardKind.PREFILL, accepted=(0,)), forward_row(2)]
    assert metrics.effective_transfer_ratio(table(rows, forwards).frame()) == 1.0
    made = table(rows, forwards).frame()
    assert made["transfers_judged"].to_list() == [2, 1, 0]


def test_effective_transfers_in_a_global_pool_are_named_by_layer():
    rows = [
        layer_row(0, 0, transfers=[1], retained=[E + 1]),  # layer 1's expert 1, not this layer's
        layer_row(0, 1, transfers=[1], retained=[E + 1]),
        layer_row(1, 0, hits=[1]),
        layer_row(1, 1, hits=[1]),
    ]
    made = table(rows, [forward_row(0), forward_row(1)], num_layers=2, is_global=True).frame()
    assert metrics.effective_transfer_ratio(made) == 0.5


def test_time_per_token_counts_decode_forwards_and_accepted_positions_only():
    forwards = [
        forward_row(0, kind=ForwardKind.PREFILL, accepted=(0,), start=0, end=5_000_000),
        forward_row(1, accepted=(3,), start=5_000_000, end=7_000_000),
        forward_row(2, kind=ForwardKind.IDLE, accepted=(0,), start=7_000_000, end=8_000_000),
        forward_row(3, kind=ForwardKind.COMMIT, accepted=(0,), start=8_000_000, end=9_000_000),
        forward_row(4, kind=ForwardKind.EDIT, accepted=(0,), start=9_000_000, end=9_500_000),
    ]
    kinds = [row["kind"] for row in forwards]
    made = table([layer_row(i, kind=kind) for i, kind in enumerate(kinds)], forwards).frame()
    assert metrics.tpot_ms(made) == 4.5 / 3
    assert metrics.ttft_ms(made) == 7.0
    assert metrics.tokens_per_forward(made) == 3 / 4
    assert metrics.forward_ms(made, 0.5) == 1.0


def test_a_shared_forward_counts_its_time_once_and_each_request_has_its_own_first_token():
    forwards = [
        forward_row(0, requests=(0, 1), accepted=(1, 0), start=0, end=2_000_000),
        forward_row(1, requests=(0, 1), accepted=(1, 2), start=2_000_000, end=4_000_000),
    ]
    made = table([layer_row(0), layer_row(1)], forwards).frame()
    assert metrics.tpot_ms(made) == 1.0
    assert metrics.ttft_ms(made) == 3.0


def test_warm_up_requests_are_left_out():
    rows = [
        layer_row(0, request=7, hits=[1]),
        layer_row(1, request=8, transfers=[1]),
        layer_row(2, request=9, hits=[2]),
    ]
    forwards = [forward_row(i, requests=(7 + i,), end=(i + 1) * 1_000_000) for i in range(3)]
    made = table(rows, forwards, warmup=1).frame()
    assert made["warmup"].to_list() == [True, False, False]
    assert metrics.hit_ratio(made) == 0.5
    assert metrics.tpot_ms(made) == 2.5
    assert metrics.ttft_ms(table(rows, forwards, warmup=2).frame()) == 3.0
    mixed = table(
        [layer_row(0), layer_row(1)],
        [forward_row(0, requests=(0, 1), accepted=(1, 1)), forward_row(1, requests=(1,))],
        warmup=1,
    )
    assert mixed.frame()["warmup"].to_list() == [True, False]


def test_the_first_token_counts_from_a_forward_that_was_shared_with_a_warm_up_request():
    forwards = [
        forward_row(0, requests=(0, 1), kind=ForwardKind.PREFILL, accepted=(0, 0), start=0, end=2_000_000),
        forward_row(1, requests=(0, 1), accepted=(1, 0), start=2_000_000, end=3_000_000),
        forward_row(2, requests=(1, 2), accepted=(1, 1), start=3_000_000, end=5_000_000),
        forward_row(3, requests=(0, 3), accepted=(0, 4), start=5_000_000, end=9_000_000),
    ]
    made = table([layer_row(i, kind=row["kind"]) for i, row in enumerate(forwards)], forwards, warmup=1).frame()
    assert made["request_warmup"].to_list() == [[True, False], [True, False], [False, False], [True, False]]
    assert made["warmup"].to_list() == [True, True, False, True]
    # request 1: 0 to 5 ms; 2: 3 to 5 ms; 3, which no counted forward holds: 5 to 9 ms
    assert metrics.ttft_ms(made) == pytest.approx((5 + 2 + 4) / 3)
    assert metrics.num_requests(made) == 3
    assert metrics.num_decode_forwards(made) == 1


def test_bytes_stall_and_busy_shares():
    rows = [layer_row(0, hits=[1], transfers=[2, 3, 4], on_cpu=[5], num_promoted=1, prefetch_started=2)]
    made = table(rows, [forward_row(0, end=200)]).frame()
    assert metrics.h2d_bytes(made, 100) == 400  # 3 demand - 1 promoted + 2 prefetches
    assert metrics.exposed_stall_ms(made) == 50 / 1e6
    assert metrics.link_busy_ratio(made) == 30 / 200
    assert metrics.cpu_busy_ratio(made) == 70 / 200
    assert metrics.policy_ms(made) == 15 / 1e6


def test_misses_are_copied_or_run_on_the_cpu():
    rows = [
        layer_row(0, kind=ForwardKind.PREFILL, transfers=[1, 2, 3]),
        layer_row(1, hits=[1], transfers=[2, 3, 4], on_cpu=[5]),
        layer_row(2, on_cpu=[5, 6, 7, 8]),
    ]
    forwards = [forward_row(0, kind=ForwardKind.PREFILL), forward_row(1), forward_row(2)]
    made = table(rows, forwards).frame()
    assert (metrics.misses_copied_ratio(made), metrics.misses_on_cpu_ratio(made)) == (3 / 8, 5 / 8)


def test_prefetches_are_counted_by_fate_in_counted_decode_forwards():
    def fates(forward):
        return {name: 10**forward * (place + 1) for place, name in enumerate(PREFETCH_COUNTS)}

    rows = [layer_row(i, request=min(i, 1), **fates(i)) for i in range(4)]
    rows[1]["kind"] = ForwardKind.PREFILL
    forwards = [forward_row(i, requests=(min(i, 1),), kind=rows[i]["kind"]) for i in range(4)]
    measured = metrics.measure(table(rows, forwards, warmup=1).frame(), 100)
    assert [measured[name] for name in PREFETCH_COUNTS] == [1100 * (i + 1) for i in range(9)]


def test_nothing_counted_is_null_not_nan():
    made = table(
        [layer_row(0, kind=ForwardKind.PREFILL)], [forward_row(0, kind=ForwardKind.PREFILL, accepted=(0,))]
    ).frame()
    for metric in (
        metrics.tpot_ms,
        metrics.ttft_ms,
        metrics.utilization,
        metrics.hit_ratio,
        metrics.token_hit_ratio,
        metrics.misses_copied_ratio,
        metrics.misses_on_cpu_ratio,
        metrics.link_busy_ratio,
    ):
        assert metric(made) is None
    assert metrics.forward_ms(made, 0.5) is None


def test_decision_hash_is_over_little_endian_int32_of_the_counted_requests():
    rows = [
        layer_row(0, request=0),
        layer_row(
            1,
            0,
            request=3,
            hits=[1, 2],
            transfers=[9, 4],
            on_cpu=[7],
            retained=[1, 4],
            prefetch_layers=[2, 1],
            prefetch_experts=[5, 6],
        ),
    ]
    forwards = [forward_row(0), forward_row(1, requests=(3,))]
    expected = struct.pack("<17i", 3, 1, 0, 2, 2, 4, 9, 1, 7, 2, 1, 4, 2, 2, 5, 1, 6)
    made = table(rows, forwards, warmup=1)
    assert made.decision_hash == hashlib.sha256(expected).hexdigest()
    direct = DecisionHash()
    direct.update(chunk(rows, forwards).layers, np.array([False, True]))
    assert direct.hexdigest() == made.decision_hash


def random_rows(rng, num_forwards, num_layers, is_global):
    """Executions with lists of any length, transfers out of order, and retained experts of one layer or of all."""
    rows = []
    for forward, layer in ((f, n) for f in range(num_forwards) for n in range(num_layers)):
        hits, transfers, on_cpu = np.split(rng.permutation(E)[: rng.integers(8, E)], [1, rng.integers(4, 8)])
        pool = E * num_layers if is_global else E
        retained = np.flatnonzero(rng.random(pool) < rng.choice([0.0, 0.5, 1.0]))
        num_prefetches = rng.integers(0, 3)
        rows.append(
            layer_row(
                forward,
                layer,
                request=forward // 2,
                hits=np.sort(hits).tolist(),
                transfers=transfers.tolist(),
                on_cpu=np.sort(on_cpu).tolist(),
                retained=retained.tolist(),
                prefetch_layers=rng.integers(0, num_layers, num_prefetches).tolist(),
                prefetch_experts=rng.integers(0, E, num_prefetches).tolist(),
            )
        )
    return rows


@pytest.mark.parametrize("is_global", [False, True])
def test_compiled_loops_do_what_their_definitions_say(is_global):
    num_forwards, num_layers = 9, 3
    rows = random_rows(np.random.default_rng(is_global), num_forwards, num_layers, is_global)
    made = ForwardTable(num_layers, E, 1, 15, is_global)
    for first in range(0, num_forwards, 4):  # in three chunks
        forwards = range(first, min(first + 4, num_forwards))
        made.add(
            chunk(
                rows[first * num_layers : (first + 4) * num_layers],
                [forward_row(i, requests=(i // 2,)) for i in forwards],
            )
        )

    words = []
    for row in rows[2 * num_layers :]:  # without the warm-up request
        words += [row["request"], row["forward"], row["layer"], len(row["hits"])]
        for name in ("transfers", "on_cpu", "retained"):
            words += [len(row[name]), *sorted(row[name])]
        words.append(len(row["prefetch_layers"]))
        for pair in zip(row["prefetch_layers"], row["prefetch_experts"], strict=True):
            words += pair
    assert made.decision_hash == hashlib.sha256(struct.pack(f"<{len(words)}i", *words)).hexdigest()

    def kept(row):
        first = row["layer"] * E if is_global else 0
        return {expert for expert in row["transfers"] if first + expert in row["retained"]}

    judged, effective, admitted = (np.zeros((num_forwards, num_layers), int) for _ in range(3))
    for row, following in zip(rows, [*rows[num_layers:], *[None] * num_layers], strict=True):
        place = row["forward"], row["layer"]
        admitted[place] = len(kept(row))
        if following is not None:
            judged[place] = len(row["transfers"])
            effective[place] = len(kept(row) & {*following["hits"], *following["transfers"], *following["on_cpu"]})
    frame = made.frame()
    assert frame["transfers_judged"].to_list() == judged.sum(axis=1).tolist()
    assert frame["transfers_effective"].to_list() == effective.sum(axis=1).tolist()
    assert frame["num_admitted"].to_list() == admitted.sum(axis=1).tolist()
    assert effective.sum() > 10


def test_metrics_of_many_sums_at_once_are_those_of_each():
    made = table(
        [layer_row(i, hits=[1] * bool(i), transfers=[2, 3], capacity=4 * bool(i)) for i in range(3)],
        [forward_row(i, accepted=(i,), end=1000 + i) for i in range(3)],
    ).frame()
    each = [metrics.sums(made[i : i + 1]) for i in range(3)]
    many = {column: np.array([one[column] for one in each], float) for column in each[0]}
    for metric in metrics.METRICS:
        found = metric(many).tolist()
        expected = [np.nan if metric(one) is None else metric(one) for one in each]
        assert found == pytest.approx(expected, nan_ok=True), metric.__name__
    assert metrics.utilization(many).tolist() == pytest.approx([np.nan, 0.25, 0.25], nan_ok=True)
