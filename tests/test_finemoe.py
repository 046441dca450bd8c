from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, context_of, pass_of, shown
from scripted import layer_rows, make_costs, make_shape
from strategies import change, random_passes

from policies.contract import Context, PolicyError
from policies.expert_maps import DISTRIBUTIONS
from policies.finemoe import Knobs
from policies.map_prediction import num_selected, priority_to_stay
from policies.map_search import MOST_TOKENS, highest
from policies.pool_retention import retain
from policies.registry import build_policy
from policies.steps import Steps, step_at
from simulator.des import simulate
from tracer.schema import Calibration, Signals

NUM_EXPERTS = 4
SKETCH = np.eye(16)


def calibration_of(maps, sketches=None):
    """One of these maps, each [L, E] of scores."""
    maps = np.array(maps, float)
    num_maps, num_layers, num_experts = maps.shape
    zeros = np.zeros((num_layers, num_experts), np.int64)
    return Calibration(
        **dict.fromkeys(("load", "prefill_load", "importance", "token_ids", "token_experts", "token_shares"), zeros),
        name="tests",
        checkpoint_hash="",
        num_requests=1,
        num_activated=1,
        request_loads=zeros[None],
        map_ids=np.tile(np.arange(num_experts), (num_maps, num_layers, 1)),
        map_scores=maps,
        map_sketches=SKETCH[:num_maps] if sketches is None else sketches,
    )


class Gates:
    """Asks the policy at one gate after the other, with nothing resident."""

    def __init__(self, maps, num_layers, **knobs):
        self.shape = make_shape(num_layers, NUM_EXPERTS)
        calibration = calibration_of(maps)
        context = Context(self.shape, calibrate=lambda: calibration, has_signals=True)
        self.policy = build_policy("finemoe", knobs, context)
        self.state, self.resident, self.capacity = self.policy.init(self.policy.params, self.shape, 2 * num_layers)
        self.steps = Steps(self.shape, reads_signals=True)

    def ask(self, scores, sketches=SKETCH[:1], **columns):
        """Plans for a forward of tokens with these scores, [T, L, E]."""
        scores = np.array(scores, float).transpose(1, 0, 2)
        ids = np.tile(np.arange(NUM_EXPERTS), (*scores.shape[:2], 1))
        signals = Signals(ids, scores, np.ones(scores.shape[:2]), sketches, ids[:, None])
        pass_ = change(pass_of(scores.argmax(-1)[..., None], **columns), signals=signals)
        forward = self.steps.read(pass_)
        for layer in range(self.shape.num_layers):
            free = int(self.capacity.sum())
            view = shown(self.resident, self.resident ^ self.resident, self.capacity, free)
            yield self.policy.decide(self.policy.params, self.state, step_at(forward, layer), view)


# Worked numbers


@pytest.mark.parametrize(("similarity", "count"), [(0.45, 2), (0.20, 3), (0.95, 1), (1.0, 1), (-0.5, 4)])
def test_as_many_experts_as_make_up_for_what_is_not_similar(similarity, count):
    assert num_selected(np.array([0.4, 0.3, 0.2, 0.1]), similarity, 1) == count
    assert num_selected(np.array([0.4, 0.3, 0.2, 0.1]), similarity, 2) == max(count, 2)


def test_near_layers_come_before_likely_ones():
    scores = [[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.2, 0.6]]
    plan = next(Gates([scores], 4).ask([scores]))
    assert plan.prefetches.tolist() == [[2, 2], [1, 0], [3, 3]]
    assert plan.prefetch_priority.round(9).tolist() == [[-0.35, 0], [-0.25, 0], [-0.2, 0]]


def test_the_lowest_product_of_share_and_uses_leaves():
    gates = Gates([[[0.4, 0.3, 0.2, 0.1]]], 1)
    resident = np.array([[True, True, True, False]])
    score, uses = np.array([[0.5 * 2, 0.9 * 1, 0.2 * 6, 0]]), np.array([[2, 1, 6, 1]])
    pass_ = pass_of(np.array([[[3]]]))
    view = shown(resident, np.zeros_like(resident), np.array([3]))
    step = step_at(Steps(gates.shape).read(pass_), 0)
    assert retain(step, view, np.array([3]), score, uses, 9).tolist() == [True, False, True, True]


@given(st.integers(1, 255), st.integers(1, 8160), st.integers(1, 255), st.integers(1, 8160), st.integers(1, 500))
def test_equal_products_are_equal_numbers_and_others_are_not(level, total, other, other_total, uses):
    found = priority_to_stay(level / total, other * uses)
    assert found == priority_to_stay(other / total, level * uses)
    assert found == priority_to_stay((level / 255) / (total / 255), other * uses)
    assert found == pytest.approx(level * other * uses / total, rel=1e-9)
    one, two = level * other_total, other * total
    numbers = priority_to_stay(level / total, uses), priority_to_stay(other / other_total, uses)
    assert (numbers[0] < numbers[1], numbers[0] == numbers[1]) == (one < two, one == two)


def test_no_rounding_decides_who_leaves():
    maps, scores = [[1, 0, 0, 0], [0.1, 0.3, 0.6, 0]], [[0, 0, 0, 1], [0, 0, 0, 1]]
    gates = Gates([maps], 2, depth=1)
    gates.state.uses[1] = [6, 2, 1, 0]
    next(gates.ask([scores]))
    assert gates.state.shares[1].round(9).tolist() == [0.1, 0.3, 0.6, 0]
    assert np.unique(gates.state.shares[1, :3] * gates.state.uses[1, :3]).size > 1
    assert np.unique(gates.state.score[1, :3]).size == 1


@pytest.mark.parametrize(
    ("knobs", "targets"),
    [
        ({}, [{1, 2, 3}, {4}, {5}, set(), set(), set()]),
        ({"depth": 1}, [{1}, {2}, {3}, {4}, {5}, set()]),
        ({"depth": 6}, [{1, 2, 3, 4, 5}, *[set()] * 5]),
        ({"depth": 9}, [{1, 2, 3, 4, 5}, *[set()] * 5]),
        ({"fm_target": "code_all_later"}, [{1, 2, 3, 4, 5}, {4, 5}, {5}, set(), set(), set()]),
    ],
)
def test_each_layer_but_the_first_is_predicted_once(knobs, targets):
    scores = [[0.4, 0.3, 0.2, 0.1]] * 6
    plans = list(Gates([scores], 6, **knobs).ask([scores]))
    assert [set(plan.prefetches[:, 0].tolist()) for plan in plans] == targets
    assert [plan.clear_prefetches for plan in plans] == [bool(target) for target in targets]


def test_masks_resemble_each_other_wholly_and_bring_as_many_as_a_token_takes():
    maps = [[[0.4, 0.3, 0.2, 0.1]] * 3, [[0.1, 0.2, 0.3, 0.4]] * 3]
    plan = next(Gates(maps, 3, depth=3).ask([maps[0]] * 5, np.tile(SKETCH[1], (5, 1))))
    assert plan.prefetches.tolist() == [[1, 3], [2, 3]]  # one each, of the map of the same sketch


def test_the_semantic_search_may_compare_the_mean_of_a_block():
    maps = [[[0.4, 0.3, 0.2, 0.1]] * 2, [[0.1, 0.2, 0.3, 0.4]] * 2]
    sketches = np.stack([2 * SKETCH[0], SKETCH[1]])
    plans = [next(Gates(maps, 2, depth=2, fm_sem=sem).ask(maps, sketches)) for sem in ("token", "block_mean")]
    assert [plan.prefetches.tolist() for plan in plans] == [[[1, 0], [1, 3]], [[1, 0]]]


def test_prefetches_wait_for_the_search():
    scores = [[0.4, 0.3, 0.2, 0.1]] * 4
    plans = list(Gates([scores], 4, fm_search_ms=0.25).ask([scores]))
    assert [plan.prefetch_delay_ns for plan in plans] == [250_000, 0, 0, 0]


@pytest.mark.parametrize(("pool", "shares"), [("max", [0.4, 0.4, 0.3, 0]), ("sum", [0.4, 0.7, 0.3, 0])])
def test_tokens_share_one_list(pool, shares):
    # each is like another map by 1 / sqrt(5), for which two experts make up: 0 and 1 of the first, 1 and 2 of the second
    maps = [[[0.4, 0.3, 0.2, 0.1]] * 2, [[0.1, 0.4, 0.3, 0.2]] * 2]
    gates = Gates(maps, 2, depth=2, fm_pool=pool)
    plan = next(gates.ask(maps, np.stack([SKETCH[0] - 2 * SKETCH[1], SKETCH[1] - 2 * SKETCH[0]])))
    assert gates.state.shares[1].round(9).tolist() == shares
    assert plan.prefetches.tolist() == ([[1, 0], [1, 1], [1, 2]] if pool == "max" else [[1, 1], [1, 0], [1, 2]])


@pytest.mark.parametrize(("before", "count"), [(0, 1), (2.4, 2), (2.5, 3)])
def test_a_mean_of_all_tokens_brings_as_many_as_the_layer_activates(before, count):
    scores = [[0.4, 0.3, 0.2, 0.1]] * 2
    gates = Gates([scores], 2, depth=1, fm_pool="mean_map")
    gates.state.activity[1] = before
    assert len(next(gates.ask([scores, scores, scores], SKETCH[:3])).prefetches) == count


def test_maps_of_decode_tokens_enter_and_the_most_redundant_leaves():
    one, two, three = ([[a, b, c, 0.1]] * 2 for a, b, c in ((0.9, 0.1, 0.1), (0.1, 0.9, 0.1), (0.1, 0.2, 0.9)))
    gates = Gates([one], 2, fm_store="online", fm_entries=2, depth=1)
    store = gates.state.store
    assert all(plan.prefetches.size == 0 for plan in gates.ask([one], blocks=[-1]))
    assert store.size[0] == 0
    assert all(plan.prefetches.size == 0 for plan in gates.ask([one, two], SKETCH[:2]))
    assert (store.size[0], store.ids[:, 0, 0].tolist()) == (2, [0, 1])
    plans = list(gates.ask([three], SKETCH[2:3]))  # resembles the second most, by .2 against .1
    assert plans[0].prefetches[0].tolist() == [1, 1]
    assert store.ids[:, 0, 0].tolist() == [0, 2]
    list(
        gates.ask([two, three], SKETCH[3:5])
    )  # the first takes the place of the third, which then takes its place back
    assert store.ids[:, 0, 0].tolist() == [0, 2]
    assert store.columns[0, :, 1].tolist() == [26, 51, 230, 26]


# Against the policy in plain Python


class Plain:
    """What finemoe must do, in dense arrays and lists; checks every answer of the policy in the engine."""

    def __init__(self, policy, knobs, shape, calibration):
        self.policy, self.knobs, self.shape = policy, knobs, shape
        self.depth = min(knobs.depth, shape.num_layers)
        size = (shape.num_layers, shape.num_experts)
        self.shares, self.uses, self.activity = np.zeros(size), np.zeros(size, int), np.zeros(shape.num_layers)
        self.store = []
        if knobs.fm_store == "offline":
            for ids, scores, sketch in zip(
                calibration.map_ids, calibration.map_scores, calibration.map_sketches, strict=True
            ):
                if knobs.gate_dist == "topk_norm":
                    order = np.argsort(-scores, axis=-1)[:, : shape.top_k]
                    ids, scores = np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
                rows = [self.weigh(*layer) for layer in zip(ids, scores, strict=True)]
                self.store.append((np.array([r[0] for r in rows]), np.array([r[1] for r in rows]), unit(sketch)))
        self.store = self.store[: knobs.fm_entries]

    def weigh(self, ids, scores):
        """Shares, and shares in whole levels, [E] each; -1 where a share is not known."""
        weights = scores
        if self.knobs.gate_dist == "softmax":
            logits = np.log(scores / (1 - scores))
            weights = np.exp(logits - logits.max())
        levels = np.floor(255 * weights + 0.5)
        shares, rough = np.full(self.shape.num_experts, -1.0), np.zeros(self.shape.num_experts)
        shares[ids], rough[ids] = weights / weights.sum(), levels / levels.sum()
        return shares, rough

    def read(self, step):
        ids, scores = step.signals.score_ids, step.signals.scores
        if self.knobs.gate_dist == "topk_norm":
            ids, scores = step.expert_ids, step.gates
        if step.layer == 0:
            self.maps = [([], []) for _ in range(len(ids))]
        for seen, *layer in zip(self.maps, ids, scores, strict=True):
            for part, row in zip(seen, self.weigh(*layer), strict=True):
                part.append(row)

    def trajectories(self, layer):
        own = [np.array(rough) for _, rough in self.maps]
        return [np.mean(own, axis=0)] if self.knobs.fm_pool == "mean_map" else own

    def sketches(self, step, of_mean):
        sketch = step.signals.sketch
        if of_mean:
            return [unit(sketch.mean(axis=0))]
        if self.knobs.fm_sem == "block_mean":
            sketch = np.array([sketch[step.request == request].mean(axis=0) for request in step.request])
        return [unit(row) for row in sketch]

    def predict(self, target, similarities):
        """From the cosines of each query with all maps to {expert: share}."""
        found = {}
        for cosines in similarities:
            best = int(np.argmax(np.round(cosines, 11)))
            shares = self.store[best][0][target]
            delta = np.clip(1 - cosines[best], 0, 1)
            fewest = self.shape.top_k
            if self.knobs.fm_pool == "mean_map":
                fewest = max(fewest, int(self.activity[target] + 0.5))
            total = 0.0
            known = sorted((e for e in range(len(shares)) if shares[e] >= 0), key=lambda e: (-shares[e], e))
            for count, expert in enumerate(known):
                if count >= fewest and total >= delta:
                    break
                total += shares[expert]
                before = found.get(expert, 0)
                found[expert] = before + shares[expert] if self.knobs.fm_pool == "sum" else max(before, shares[expert])
        self.shares[target] = [found.get(expert, 0) for expert in range(self.shape.num_experts)]
        return found

    def learn(self, step):
        weight = self.depth / self.shape.num_layers
        sketches = self.sketches(step, False)
        for token in np.flatnonzero(step.block >= 0).tolist():
            shares, rough = (np.array(part) for part in self.maps[token])
            entry = (shares, rough, sketches[token])
            if len(self.store) < self.knobs.fm_entries:
                self.store.append(entry)
                continue
            redundancy = [
                weight * float(sketch @ sketches[token]) + (1 - weight) * cosine(rough, other)
                for _, other, sketch in self.store
            ]
            self.store[int(np.argmax(np.round(redundancy, 11)))] = entry

    def decide(self, params, state, step, view):
        layer, (num_layers, num_experts) = step.layer, view.resident.shape
        activated = np.flatnonzero(step.load).tolist()
        if self.knobs.fm_freq_reset == "evict":
            self.uses[~view.resident & ~view.in_flight] = 0
        self.uses[layer, activated] += 1
        if step.kind:
            before = self.activity[layer]
            self.activity[layer] = before + (len(activated) - before) / 3 if before else len(activated)
        self.read(step)
        of_mean = self.knobs.fm_pool == "mean_map"
        targets = {}
        if self.store:
            if layer == 0:
                similarities = [[sketch @ row for *_, row in self.store] for sketch in self.sketches(step, of_mean)]
                for target in range(1, self.depth):
                    targets[target] = self.predict(target, similarities)
            own = self.trajectories(layer)
            similarities = [[cosine(query, rough[: layer + 1]) for _, rough, _ in self.store] for query in own]
            last = num_layers if self.knobs.fm_target == "code_all_later" else layer + self.knobs.depth + 1
            for target in range(layer + self.knobs.depth, min(last, num_layers)):
                targets[target] = self.predict(target, similarities)
        expected = sorted(
            (-round(share / (target - layer), 11), target, expert)
            for target, found in targets.items()
            for expert, share in found.items()
            if not view.resident[target, expert] and not view.in_flight[target, expert]
        )
        if self.knobs.fm_store == "online" and layer == num_layers - 1:
            self.learn(step)

        def worth(cell):
            return round(self.shares[cell] * self.uses[cell], 11), self.uses[cell], -cell[0] * num_experts - cell[1]

        is_global = view.capacity.size == 1
        missed = [e for e in activated if not view.resident[layer, e]]
        entering = sorted(((layer, e) for e in missed if not view.in_flight[layer, e]), key=worth, reverse=True)
        entering = entering[: self.knobs.max_admit]
        pool = range(num_layers) if is_global else [layer]
        held = [(at, e) for at in pool for e in np.flatnonzero(view.resident[at]).tolist()] + entering
        room = int(view.capacity[0 if is_global else layer] - sum(view.in_flight[at].sum() for at in pool))
        held.sort(key=lambda cell: (cell[0] == layer and cell[1] in activated, *worth(cell)), reverse=True)
        retained = {*held[:room], *((layer, e) for e in missed if view.in_flight[layer, e])}

        plan = self.policy.decide(params, state, step, view)
        assert plan.transfers.tolist() == missed
        assert plan.on_cpu.size == 0
        assert [tuple(pair) for pair in plan.prefetches.tolist()] == [cell[1:] for cell in expected]
        assert np.allclose(plan.prefetch_priority[:, 0], [value for value, *_ in expected])
        assert not plan.prefetch_priority[:, 1].any()
        assert plan.clear_prefetches == bool(expected)
        assert np.allclose(state.score, self.shares * self.uses)
        start = 0 if is_global else layer * num_experts
        assert [divmod(n + start, num_experts) for n in np.flatnonzero(plan.retained)] == sorted(retained)
        return plan


def unit(vector):
    return vector / np.linalg.norm(vector)


def cosine(one, other):
    return float((one * other).sum() / np.sqrt((one * one).sum() * (other * other).sum()))


@given(
    seed=st.integers(0, 2**32 - 1),
    num_layers=st.integers(1, 5),
    batch=st.integers(1, 2),
    store=st.sampled_from(["offline", "online"]),
    depth=st.integers(1, 6),
    entries=st.sampled_from([1000, 70, 9, 1]),
    fm_pool=st.sampled_from(["max", "max", "sum", "mean_map"]),
    gate_dist=st.sampled_from(DISTRIBUTIONS),
    fm_sem=st.sampled_from(["token", "block_mean"]),
    fm_target=st.sampled_from(["paper_l+d", "code_all_later"]),
    reset=st.sampled_from(["never", "never", "evict"]),
    pool=st.sampled_from(["global", "layer"]),
    max_admit=st.sampled_from([None, None, 0, 2]),
    copy_ns=st.sampled_from([0.0, 3.0, 40.0, 170.0]),
    slots=st.integers(1, 16),
)
@settings(max_examples=50)
def test_equals_the_plain_policy(
    seed,
    num_layers,
    batch,
    store,
    depth,
    entries,
    fm_pool,
    gate_dist,
    fm_sem,
    fm_target,
    reset,
    pool,
    max_admit,
    copy_ns,
    slots,
):
    shape, passes = random_passes(
        np.random.default_rng(seed), num_layers=num_layers, num_blocks=1, batch=batch, signals=True
    )
    knobs = Knobs(
        fm_store=store,
        depth=depth,
        fm_entries=entries,
        fm_pool="max" if store == "online" and fm_pool == "mean_map" else fm_pool,
        gate_dist=gate_dist,
        fm_sem=fm_sem,
        fm_target=fm_target,
        fm_freq_reset=reset,
        pool=pool,
        max_admit=max_admit,
    )
    context = context_of(shape, passes)
    policy = build_policy("finemoe", knobs, context)
    plain = Plain(policy, knobs, shape, context.calibration)
    costs = make_costs(h2d_latency_ns=copy_ns)
    rows = layer_rows(
        simulate(passes, replace(policy, decide=plain.decide), shape, slots * num_layers, costs, ESTIMATES)
    )
    assert all(target > row["layer"] for row in rows for target in row["prefetch_layers"])
    assert len(policy.decide.signatures) == 1


# The rest


@pytest.mark.parametrize("knobs", [{}, {"fm_store": "online"}, {"pool": "layer"}, {"fm_search_ms": 1e-5}])
def test_prefetching_acts(knobs):
    shape, passes = random_passes(np.random.default_rng(2), num_layers=5, num_requests=4, signals=True)
    policy = built("finemoe", knobs, shape, passes)
    rows = layer_rows(simulate(passes, policy, shape, 40, make_costs(h2d_latency_ns=5.0), ESTIMATES))
    assert sum(row["prefetch_landed"] for row in rows) > 0
    assert policy.prefetches


@pytest.mark.parametrize("store", ["offline", "online"])
def test_nothing_is_known_of_what_comes_after_a_gate(store):
    shape, passes = random_passes(np.random.default_rng(4), num_layers=5, num_requests=3, signals=True)
    policy = built("finemoe", {"fm_store": store}, shape, passes, passes)
    forward, layer = 9, 1
    signals = passes[forward].signals
    scores = signals.scores.copy()
    scores[layer + 1 :] = 1 - scores[layer + 1 :]
    other = [*passes]
    other[forward] = change(passes[forward], signals=replace(signals, scores=scores))
    other[forward + 1 :] = other[forward + 1 :][::-1]
    known = forward * shape.num_layers + layer + 1
    rows = [
        layer_rows(simulate(trace, policy, shape, 24, make_costs(h2d_latency_ns=5.0), ESTIMATES))
        for trace in (passes, other)
    ]
    names = ("hits", "transfers", "retained", "prefetch_layers", "prefetch_experts")
    found, usual = ([[row[name] for name in names] for row in some] for some in rows)
    assert found[:known] == usual[:known]
    assert found[known:] != usual[known:]


def test_a_trace_without_signals_is_searched_by_gates():
    shape, passes = random_passes(np.random.default_rng(2), num_layers=4, num_requests=4)
    policy = built("finemoe", {"gate_dist": "topk_norm", "depth": 1}, shape, passes)
    rows = layer_rows(simulate(passes, policy, shape, 40, make_costs(h2d_latency_ns=5.0), ESTIMATES))
    assert sum(row["prefetch_landed"] for row in rows) > 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({}, "gate_dist=sigmoid_norm depth=3 fm_store=offline needs scores and sketch of"),
        ({"depth": 1}, "gate_dist=sigmoid_norm depth=1 fm_store=offline needs scores of"),
        ({"gate_dist": "topk_norm"}, "gate_dist=topk_norm depth=3 fm_store=offline needs sketch of"),
        (
            {"gate_dist": "topk_norm", "depth": 1, "fm_store": "online"},
            "gate_dist=topk_norm depth=1 fm_store=online needs sketch of",
        ),
    ],
)
def test_what_signals_lack_is_refused_with_all_that_does_without(knobs, message):
    shape, passes = random_passes(np.random.default_rng(0))
    with pytest.raises(PolicyError, match=f"^finemoe {message} the table signals, which this trace lacks: ") as error:
        build_policy("finemoe", knobs, context_of(shape, passes))
    without = "policy.gate_dist=topk_norm policy.depth=1 policy.fm_store=offline needs none"
    assert f"proxy-19x256-signals has them; {without}" in str(error.value)


@pytest.mark.parametrize(
    ("knobs", "lacking"),
    [({}, "scores and sketch"), ({"depth": 1}, "scores"), ({"gate_dist": "topk_norm"}, "sketch")],
)
def test_what_calibration_lacks_is_refused(knobs, lacking):
    shape, passes = random_passes(np.random.default_rng(0))
    context = replace(context_of(shape, passes), has_signals=True)
    with pytest.raises(PolicyError, match=f"needs {lacking} of the table signals, which tests lacks"):
        build_policy("finemoe", knobs, context)


def test_more_entries_than_calibration_holds_are_told():
    shape, passes = random_passes(np.random.default_rng(2), num_layers=4, num_requests=4, signals=True)
    num_maps = len(context_of(shape, passes).calibration.map_ids)
    assert built("finemoe", {"fm_entries": num_maps}, shape, passes).warnings == ()
    assert built("finemoe", {"fm_entries": num_maps + 1}, shape, passes).warnings == (
        f"fm_entries={num_maps + 1}: the record of calibration holds {num_maps} maps",
    )
    assert built("finemoe", {"fm_store": "online", "fm_entries": num_maps + 1}, shape, passes).warnings == ()


def test_more_tokens_than_there_is_room_for_are_refused():
    scores = [[[0.4, 0.3, 0.2, 0.1]] * 2] * (MOST_TOKENS + 1)
    with pytest.raises(PolicyError, match="up to 65536 tokens of a forward"):
        next(Gates(scores[:1], 2, depth=1).ask(scores, np.zeros((MOST_TOKENS + 1, 16))))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=400), st.integers(0, 2**32 - 1))
def test_the_highest_is_the_first_of_equal_ones(values, seed):
    values = np.array(values, float)
    factors = np.random.default_rng(seed).choice([0.5, 1.0, 2.0], values.size)
    assert highest(values, factors) == (np.argmax(values * factors), np.max(values * factors))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"fm_store": "none"}, "fm_store 'none': allowed are offline, online"),
        ({"fm_pool": "min"}, "fm_pool 'min': allowed are max, sum, mean_map"),
        ({"gate_dist": "relu"}, "gate_dist 'relu': allowed are sigmoid_norm, softmax, topk_norm"),
        ({"fm_sem": "word"}, "fm_sem 'word': allowed are token, block_mean"),
        ({"fm_target": "l"}, "fm_target 'l': allowed are"),
        ({"fm_freq_reset": "always"}, "fm_freq_reset 'always': allowed are never, evict"),
        ({"depth": 0}, "depth is 0: must be at least 1"),
        ({"fm_entries": 0}, "fm_entries is 0: allowed are 1 to 10000"),
        ({"fm_entries": 10**9}, "allowed are 1 to 10000"),
        ({"fm_search_ms": -1}, "fm_search_ms is -1"),
        ({"fm_search_ms": float("nan")}, "fm_search_ms is nan"),
        ({"pool": "expert"}, "pool 'expert': allowed are layer, global"),
        ({"max_admit": -1}, "max_admit is -1: must be at least 0"),
        ({"fm_store": "online", "fm_pool": "mean_map"}, "fm_pool=mean_map makes one map of many tokens"),
    ],
)
def test_knobs_are_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        Knobs(**knobs)
