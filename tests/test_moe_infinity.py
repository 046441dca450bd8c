from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, context_of, pass_of, shown
from scripted import layer_rows, make_costs, make_shape
from strategies import random_passes, traces

from policies.contract import Context, PolicyError
from policies.counting_order import descending
from policies.exact import more_similar
from policies.moe_infinity import Knobs
from policies.registry import build_policy
from policies.request_matrices import nearest
from policies.steps import Steps, step_at
from simulator.des import simulate

A = [[1, 2], [0, 3], [0, 3], [0, 3]]
B = [[3, 0]] * 4
SHAPE = make_shape(4, 2)


def policy_for(stored, shape=SHAPE, **knobs):
    """The policy with these matrices in its memory."""
    _, passes = random_passes(np.random.default_rng(0), num_layers=shape.num_layers, num_experts=8)
    made = context_of(replace(shape, num_experts=8, top_k=4), passes).calibration
    loads = np.array(stored, np.int64).reshape(-1, shape.num_layers, shape.num_experts)
    return build_policy("moe_infinity", knobs, Context(shape, calibrate=lambda: replace(made, request_loads=loads)))


class Gates:
    """Asks the policy at one gate after the other, with the given residents at each."""

    def __init__(self, policy, shape=SHAPE, slots=8):
        self.policy, self.shape = policy, shape
        self.state, self.resident, self.capacity = policy.init(policy.params, shape, slots)
        self.steps = Steps(shape)

    def ask(self, routes, **columns):
        """Plans for a forward of top-1 tokens that take these experts, one of each layer or one for each token."""
        forward = self.steps.read(pass_of(np.array(routes).reshape(len(routes), -1, 1), **columns))
        for layer in range(len(routes)):
            free = int(self.capacity.sum() - self.resident.sum())
            view = shown(self.resident, self.resident ^ self.resident, self.capacity, free)
            yield self.policy.decide(self.policy.params, self.state, step_at(forward, layer), view)


# Worked numbers


@pytest.mark.parametrize(("match", "cosines"), [("full", (0.500, 0.354)), ("prefix", (0.756, 0.500))])
def test_similarity_to_stored_requests(match, cosines):
    gates = Gates(policy_for([A, B], mi_match=match))
    plans = gates.ask([0, 1, 1, 1])
    next(plans), next(plans)
    matrices = gates.state.matrices
    layer = 3 if match == "full" else 1
    found = matrices.dots[:2] / np.sqrt(matrices.norms[layer, :2] * 2)
    assert found.round(3).tolist() == list(cosines)
    assert nearest(matrices, layer) == 0


def test_prefetches_are_the_likeliest_and_nearest_first():
    plans = Gates(policy_for([A, B])).ask([0, 1, 1, 1])
    next(plans)
    plan = next(plans)
    assert plan.prefetches.tolist() == [[2, 1], [3, 1]]
    assert plan.prefetch_priority.tolist() == [[-0.75, 0], [-0.5, 0]]
    assert (plan.clear_prefetches, plan.prefetch_delay_ns) == (True, 0)


def test_the_lowest_of_the_pool_leaves():
    gates = Gates(policy_for([A, B]), slots=4)
    gates.resident[[0, 0, 1, 3], [0, 1, 1, 1]] = True
    plans = gates.ask([0, 1, 0, 1])
    next(plans), next(plans)
    assert gates.state.score[[0, 0, 1, 3], [0, 1, 1, 1]].round(3).tolist() == [0.333, 0.667, 0.75, 0.25]
    assert np.flatnonzero(next(plans).retained).tolist() == [0, 1, 3, 4]  # expert 0 of layer 2 for expert 1 of layer 3


def test_what_is_predicted_leaves_last_and_by_its_priority():
    gates = Gates(policy_for([[[1, 2], [0, 3], [1, 2], [1, 2]]], mi_protect_predicted=True), slots=5)
    gates.resident[[0, 0, 2, 3, 3], [0, 1, 1, 0, 1]] = True
    plans = gates.ask([[0, 1]] * 4, requests=[0, 1], blocks=[0, 0])
    next(plans)
    plan = next(plans)  # both of layer 1 enter, and those of layer 0, which nothing protects, make room
    assert np.isinf(gates.state.score).tolist() == [[False, False], [False, False], [True, True], [True, True]]
    assert np.flatnonzero(plan.retained).tolist() == [2, 3, 5, 6, 7]
    gates.resident[0] = False
    gates.resident[1] = [True, False]
    gates.resident[2, 0] = True
    plans = gates.ask([[0, 1]] * 4, requests=[0, 1], blocks=[0, 0])
    next(plans)
    # nothing but predicted ones: (1/3, 2/3) / 2 in layer 2, half of that in layer 3, where expert 0 is the lowest
    assert np.flatnonzero(next(plans).retained).tolist() == [2, 3, 4, 5, 7]


def test_scaling_a_stored_request_changes_nothing():
    plans = [
        [plan.prefetches.tolist() for plan in Gates(policy_for([np.array(A) * 3, B])).ask([0, 1, 1, 1])],
        [plan.prefetches.tolist() for plan in Gates(policy_for([A, B])).ask([0, 1, 1, 1])],
    ]
    assert plans[0] == plans[1]
    gates = Gates(policy_for([np.array(A) * 3, A]))
    assert [nearest(gates.state.matrices, plan) for plan, _ in enumerate(gates.ask([0, 1, 1, 1]))] == [0] * 4


def test_depth_bounds_the_layers():
    plans = list(Gates(policy_for([A, B], depth=1)).ask([0, 1, 1, 1]))
    assert [plan.prefetches.tolist() for plan in plans] == [[[1, 0]], [[2, 1]], [[3, 1]], []]


def test_a_request_is_predicted_once_after_its_first_forward():
    gates = Gates(policy_for([A, B], mi_mode="request_only"))
    plans = [*gates.ask([1, 1, 1, 1], blocks=[-1]), *gates.ask([0, 0, 0, 0]), *gates.ask([0, 0, 0, 0])]
    # nothing arrives for a whole forward
    assert [len(plan.prefetches) for plan in plans] == [0, 0, 0, 5, 5, 5, 5, 0, 0, 0, 0, 0]
    assert [plan.clear_prefetches for plan in plans] == [False] * 3 + [True] * 4 + [False] * 5
    # by what stays longest: A's shares (1/3, 2/3), 1, 1, 1 times 1, 3/4, 1/2, 1/4
    assert plans[3].prefetches.tolist() == [[1, 1], [0, 1], [2, 1], [0, 0], [3, 1]]


def test_what_lacks_is_asked_for_until_it_has_come_once():
    gates = Gates(policy_for([A, B], mi_mode="request_only"), slots=4)
    gates.resident[0, 1] = True
    *_, plan = gates.ask([1, 1, 1, 1], blocks=[-1])
    found = [plan.prefetches.tolist()]  # the pool holds four, of which one is there
    for layer, plan in enumerate(gates.ask([0, 0, 0, 0])):
        found.append(plan.prefetches.tolist())
        gates.resident[:] = False
        gates.resident[[[0], [1], [2], [3]][layer], [[0], [1], [1], [1]][layer]] = True
    assert found == [[[1, 1], [2, 1], [0, 0]], [[1, 1], [2, 1], [0, 0]], [[1, 1], [2, 1]], [[2, 1]], []]
    assert all(plan.prefetches.size == 0 for plan in gates.ask([0, 0, 0, 0]))


def test_each_pool_is_filled_with_what_it_holds():
    gates = Gates(policy_for([A, B], mi_mode="request_only", pool="layer"), slots=5)
    *_, plan = gates.ask([1, 1, 1, 1], blocks=[-1])
    assert plan.prefetches.tolist() == [[1, 1], [0, 1], [2, 1], [0, 0], [3, 1]]  # the first layer has two slots
    gates = Gates(policy_for([A, B], mi_mode="request_only", pool="layer"), slots=4)
    *_, plan = gates.ask([1, 1, 1, 1], blocks=[-1])
    assert plan.prefetches.tolist() == [[1, 1], [0, 1], [2, 1], [3, 1]]


def test_a_finished_request_is_stored_and_takes_the_place_of_the_closest():
    gates = Gates(policy_for([A, B], mi_entries=2))
    list(gates.ask([1, 1, 1, 1], requests=[7], blocks=[-1]))  # prefill is not of the matrix
    list(gates.ask([1, 1, 1, 0], requests=[7]))
    assert gates.state.matrices.entries[0].tolist() == A
    list(gates.ask([0, 0, 0, 0], requests=[8]))
    assert gates.state.matrices.entries.tolist() == [[[0, 1], [0, 1], [0, 1], [1, 0]], B]
    list(gates.ask([0, 0, 0, 0], requests=[9]))
    assert gates.state.matrices.entries[1].tolist() == [[1, 0]] * 4


def test_requests_that_end_together_are_stored_in_order():
    gates = Gates(policy_for([A], mi_entries=1))
    list(gates.ask([[0, 1]] * 4, requests=[4, 5], blocks=[0, 0]))
    list(gates.ask([0, 0, 0, 0], requests=[6]))
    assert gates.state.matrices.entries[0].tolist() == [[0, 1]] * 4  # that of 5
    assert gates.state.score[0].round(3).tolist() == [0, 1]


# Against the policy in plain Python


class Plain:
    """What moe_infinity must do, in lists and fractions; checks every answer of the policy in the engine."""

    def __init__(self, policy, knobs, stored, shape):
        self.policy, self.knobs, self.shape = policy, knobs, shape
        self.stored = [matrix.astype(int) for matrix in stored[: knobs.mi_entries]]
        self.matrices, self.awaiting, self.match = {}, False, None
        self.recency = np.zeros(stored.shape[1:], int)
        self.fill, self.gates_since_new = {}, 0
        self.now = 0

    def similarity(self, one, other, layers):
        """Square of the cosine, but for the length of `one`."""
        one, other = one[:layers].ravel().tolist(), other[:layers].ravel().tolist()
        dot, square = sum(a * b for a, b in zip(one, other, strict=True)), sum(b * b for b in other)
        return Fraction(dot * dot, square) if square else Fraction(0)

    def closest(self, matrix, layers):
        return max(range(len(self.stored)), key=lambda n: (self.similarity(matrix, self.stored[n], layers), -n))

    def end_requests(self, step):
        for request in sorted(r for r in self.matrices if r not in step.request):
            matrix = self.matrices.pop(request)
            if self.knobs.mi_update == "frozen" or not matrix.any():
                continue
            if len(self.stored) < self.knobs.mi_entries:
                self.stored.append(matrix)
            else:
                self.stored[self.closest(matrix, None)] = matrix

    def share(self, layer, expert):
        if self.match is None:
            return Fraction(0)
        return Fraction(int(self.match[layer, expert]), int(self.match[layer].sum()))

    def what_fills(self, capacity, score):
        """As much as each pool holds, by {(layer, expert): priority}."""
        chosen, num_layers = {}, len(self.match)
        for pool, slots in enumerate(capacity.tolist()):
            cells = [tuple(cell) for cell in np.argwhere(self.match).tolist()]
            cells = [cell for cell in cells if len(capacity) == 1 or cell[0] == pool]
            cells.sort(key=lambda cell: (-score(*cell), -self.recency[cell], cell))
            for at, expert in cells[:slots]:
                chosen[at, expert] = self.share(at, expert) * (1 - Fraction(at, num_layers))
        return chosen

    def decide(self, params, state, step, view):
        layer, (num_layers, num_experts) = step.layer, view.resident.shape
        if layer == 0:
            self.end_requests(step)
            self.forward = np.zeros((num_layers, num_experts), int)
        for token, request in enumerate(step.request.tolist()):
            if request not in self.matrices:
                self.matrices[request] = np.zeros((num_layers, num_experts), int)
                self.awaiting = True
            if step.block[token] >= 0:
                self.matrices[request][layer, step.expert_ids[token]] += 1
        self.forward[layer] = step.load
        self.now += 1
        self.recency[layer, step.load > 0] = self.now

        once = self.knobs.mi_mode == "request_only"
        predicts = bool(self.stored) and (not once or (self.awaiting and layer == num_layers - 1))
        issues = predicts
        expected = []
        protected = set()

        def score(at, expert):
            return (self.share(at, expert) + Fraction(1, 10**8)) * (1 - Fraction(at, num_layers))

        if predicts:
            self.awaiting = False
            layers = num_layers if self.knobs.mi_match == "full" else layer + 1
            self.match = self.stored[self.closest(self.forward, layers)].copy()
        if once:
            if predicts:
                self.fill, self.gates_since_new = self.what_fills(view.capacity, score), 0
            there = {cell for cell in self.fill if view.resident[cell] or view.in_flight[cell]}
            self.gates_since_new = 1 if there else self.gates_since_new + 1
            self.fill = {cell: value for cell, value in self.fill.items() if cell not in there}
            if self.gates_since_new > num_layers:
                self.fill = {}
            issues = bool(self.fill) and not self.awaiting
            expected = [(-value, *cell) for cell, value in self.fill.items()] if issues else []
        elif predicts:
            depth = num_layers if self.knobs.depth is None else self.knobs.depth
            for at in range(layer + 1, min(layer + 1 + depth, num_layers)):
                for expert in np.flatnonzero(self.match[at]).tolist():
                    protected.add((at, expert))
                    if not view.resident[at, expert] and not view.in_flight[at, expert]:
                        value = self.share(at, expert) * (1 - Fraction(at - layer, num_layers))
                        expected.append((-value, at, expert))
        expected.sort()

        def is_protected(at, expert):
            return self.knobs.mi_protect_predicted and (at, expert) in protected

        def worth(cell):
            return is_protected(*cell), score(*cell), self.recency[cell], -cell[0] * num_experts - cell[1]

        is_global = view.capacity.size == 1
        pool = range(num_layers) if is_global else [layer]
        activated = set(np.flatnonzero(step.load).tolist())
        missed = sorted(e for e in activated if not view.resident[layer, e])
        entering = sorted((layer, e) for e in missed if not view.in_flight[layer, e])
        limit = self.knobs.max_admit
        entering = sorted(entering, key=worth, reverse=True)[: len(entering) if limit is None else limit]
        held = [(at, e) for at in pool for e in np.flatnonzero(view.resident[at]).tolist()] + entering
        room = int(view.capacity[0 if is_global else layer] - sum(view.in_flight[at].sum() for at in pool))
        held.sort(key=lambda cell: (cell[0] == layer and cell[1] in activated, *worth(cell)), reverse=True)
        retained = {*held[:room], *((layer, e) for e in missed if view.in_flight[layer, e])}

        plan = self.policy.decide(params, state, step, view)
        assert plan.transfers.tolist() == missed
        assert plan.on_cpu.size == 0
        assert [tuple(pair) for pair in plan.prefetches.tolist()] == [(at, e) for _, at, e in expected]
        assert plan.prefetch_priority.tolist() == [[float(value), 0.0] for value, _, _ in expected]
        assert (plan.clear_prefetches, plan.prefetch_delay_ns) == (issues, 0)
        start = 0 if is_global else layer * num_experts
        assert [divmod(n + start, num_experts) for n in np.flatnonzero(plan.retained)] == sorted(retained)
        if predicts or self.match is None:
            assert state.score.tolist() == [
                [np.inf if is_protected(at, e) else float(score(at, e)) for e in range(num_experts)]
                for at in range(num_layers)
            ]
        return plan


@given(
    trace=traces(),
    mode=st.sampled_from(["prefetch", "request_only"]),
    match=st.sampled_from(["prefix", "full"]),
    update=st.sampled_from(["online", "frozen"]),
    entries=st.integers(1, 3),
    protect=st.booleans(),
    depth=st.sampled_from([None, 0, 1, 2]),
    pool=st.sampled_from(["global", "layer"]),
    max_admit=st.sampled_from([None, None, 0, 1, 3]),
    copy_ns=st.sampled_from([0.0, 3.0, 40.0, 170.0]),
    data=st.data(),
)
@settings(max_examples=100)
def test_equals_the_plain_policy(trace, mode, match, update, entries, protect, depth, pool, max_admit, copy_ns, data):
    shape, passes = trace
    knobs = Knobs(
        mi_mode=mode,
        mi_match=match,
        mi_update=update,
        mi_entries=entries,
        mi_protect_predicted=protect and mode == "prefetch",
        depth=depth if mode == "prefetch" else None,
        pool=pool,
        max_admit=max_admit,
    )
    context = context_of(shape, passes)
    policy = build_policy("moe_infinity", knobs, context)
    plain = Plain(policy, knobs, context.calibration.request_loads, shape)
    slots = data.draw(st.integers(1, shape.num_experts)) * shape.num_layers
    costs = make_costs(h2d_latency_ns=copy_ns)
    rows = layer_rows(simulate(passes, replace(policy, decide=plain.decide), shape, slots, costs, ESTIMATES))
    assert len(rows) == len(passes) * shape.num_layers
    assert all(target > row["layer"] or mode == "request_only" for row in rows for target in row["prefetch_layers"])


def test_prefetching_acts():
    shape, passes = random_passes(np.random.default_rng(2), num_requests=4)
    for knobs in ({}, {"mi_mode": "request_only"}, {"pool": "layer"}):
        policy = built("moe_infinity", knobs, shape, passes[len(passes) // 2 :], passes[: len(passes) // 2])
        rows = layer_rows(simulate(passes, policy, shape, 24, make_costs(h2d_latency_ns=5.0), ESTIMATES))
        assert sum(row["prefetch_landed"] for row in rows) > 0
        assert policy.prefetches


def test_nothing_is_known_of_what_comes_after_a_gate():
    shape, passes = random_passes(np.random.default_rng(4), num_requests=3)
    policy = built("moe_infinity", {}, shape, passes, passes)
    forward, layer = 9, 1
    other = [*passes]
    ids = passes[forward].expert_ids.copy()
    ids[layer + 1 :] = 15 - ids[layer + 1 :, :, ::-1]
    other[forward] = replace(passes[forward], expert_ids=ids)
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


# Parts


@given(st.lists(st.integers(0, 2**40), max_size=60), st.integers(1, 4))
def test_order_in_linear_time_is_a_stable_sort(keys, repeats):
    keys = np.array(keys * repeats, np.int64)
    assert descending(keys).tolist() == np.argsort(-keys, kind="stable").tolist()


@given(st.integers(0, 2**59), st.integers(0, 2**59), st.integers(1, 2**40), st.integers(1, 7))
def test_similarities_are_compared_exactly(dot, norm, other, scale):
    def exactly(a, b, c, d):
        return Fraction(a * a, b or 1) > Fraction(c * c, d or 1)

    norm += dot > 0 and norm == 0
    for a, b, c, d in [
        (dot, norm, other, 2**50),
        (dot // 8 * scale, norm // 64 * scale**2, dot // 8, norm // 64),
        (dot, 2**59, dot + 1, 2**59),
        (dot + 1, 2**59 + 1, dot, 2**59),
    ]:
        if (b == 0 and a > 0) or (d == 0 and c > 0):
            continue
        assert more_similar(a, b, c, d) == exactly(a, b, c, d)


def test_more_entries_than_calibration_holds_are_told():
    assert policy_for([A, B], mi_entries=2).warnings == ()
    assert policy_for([A, B]).warnings == ("mi_entries=120: the record of calibration holds 2 requests",)


def test_more_requests_than_there_is_room_for_are_refused():
    policy = policy_for([A])
    state, resident, capacity = policy.init(policy.params, SHAPE, 4)
    pass_ = pass_of(np.zeros((4, 257, 1), np.int64), requests=range(257), blocks=[0] * 257)
    step = step_at(Steps(SHAPE).read(replace(pass_, kinds=np.ones(257, int))), 0)
    with pytest.raises(PolicyError, match="up to 256 requests in a pass"):
        policy.decide(policy.params, state, step, shown(resident, resident, capacity, 4))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"mi_mode": "both"}, "mi_mode 'both': allowed are prefetch, request_only"),
        ({"mi_match": "last"}, "mi_match 'last': allowed are prefix, full"),
        ({"mi_update": "never"}, "mi_update 'never': allowed are online, frozen"),
        ({"pool": "expert"}, "pool 'expert': allowed are layer, global"),
        ({"mi_entries": 0}, "mi_entries is 0: allowed are 1 to 10000"),
        ({"mi_entries": 10**9}, "allowed are 1 to 10000"),
        ({"depth": -1}, "depth is -1: must be at least 0"),
        ({"max_admit": -1}, "max_admit is -1: must be at least 0"),
        ({"mi_mode": "request_only", "depth": 1}, "it has no depth"),
        ({"mi_mode": "request_only", "mi_protect_predicted": True}, "nor what to protect"),
    ],
)
def test_knobs_are_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        Knobs(**knobs)


def test_calibration_is_needed():
    with pytest.raises(PolicyError, match=r"^moe_infinity needs calibration"):
        build_policy("moe_infinity", {}, Context(SHAPE))
