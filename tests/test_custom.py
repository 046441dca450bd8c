"""A policy of the user's own: found in a file or a package, run like any other, its errors told with their line."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from commands import command
from hydra.core.config_store import ConfigStore
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import write
from reference import ESTIMATES, answers, context_of, shape_of
from scripted import layer_rows, make_costs
from strategies import random_passes, traces
from watched import WatchedSlots, check_laws

from experiments.errors import ConfigError
from experiments.policy import built
from experiments.run import simulate
from experiments.simulate_command import main
from policies.contract import Context, PlanError, PolicyError
from policies.custom import installed, load
from policies.driver import drive
from policies.plain import PlainPolicy, keep_best, plan
from policies.registry import build_policy
from simulator import des

RECENT = """
import numpy as np
from policies.plain import PlainPolicy, keep_best, plan

class Recent(PlainPolicy):
    def __init__(self, decay=1, every: int = 2, mode: str = "a", limit: float | None = None):
        self.decay, self.every, self.mode, self.limit = decay, every, mode, limit

    def start(self, shape, slots):
        self.last = np.full((shape.num_layers, shape.num_experts), -1.0)

    def decide(self, step, view):
        self.last[step.layer] *= self.decay
        self.last[step.layer, step.load > 0] = step.forward
        return plan(step, view, keep_best(step, view, self.last))
"""


class Recent(PlainPolicy):
    """The same, in a module."""

    def __init__(self, decay=1):
        self.decay = decay

    def start(self, shape, slots):
        self.last = np.full((shape.num_layers, shape.num_experts), -1.0)

    def decide(self, step, view):
        self.last[step.layer] *= self.decay
        self.last[step.layer, step.load > 0] = step.forward
        return plan(step, view, keep_best(step, view, self.last))


class Ahead(PlainPolicy):
    """Prefetches for the next layer whatever it activated last, over all that is there."""

    prefetches = True

    def start(self, shape, slots):
        self.score = np.zeros((shape.num_layers, shape.num_experts))

    def decide(self, step, view):
        self.score[step.layer] = step.load
        following = (step.layer + 1) % len(view.resident)
        wanted = (self.score[following] > 0) & ~view.resident[following] & ~view.in_flight[following]
        self.score[following, wanted] = 1e9
        pairs = [(following, expert, 0) for expert in np.flatnonzero(wanted)]
        return plan(step, view, keep_best(step, view, self.score), prefetches=pairs, clear_prefetches=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Simulates from an empty working directory that holds a trace; returns code, out and err."""
    monkeypatch.chdir(tmp_path)
    shape, passes = random_passes(np.random.default_rng(3), num_requests=2)
    write(Path("small.trace"), shape, passes)
    Path("mine.py").write_text(RECENT)

    def run(*arguments):
        settings = ["trace=small.trace", "shape=llada2.0-mini", "cache.slots_per_layer=6", *arguments]
        return command(main, *settings)

    return run


def decided(knobs, shape, passes, slots=18, name="custom"):
    return answers(drive(build_policy(name, knobs, context_of(shape, passes)), passes, shape, slots, ESTIMATES))


def build_policy_of(policy, shape, passes, **knobs):
    return built(policy, knobs, context_of(shape, passes))


def file(tmp_path, text, name="mine.py"):
    path = tmp_path / name
    path.write_text(text)
    return path


# Finding it


def test_the_only_class_of_a_file_is_taken(tmp_path):
    path = file(tmp_path, RECENT)
    assert load(path).__name__ == "Recent"
    assert load(path, "Recent").__name__ == "Recent"
    assert list(tmp_path.iterdir()) == [path]  # nothing compiled lies beside it


def test_a_file_runs_anew_each_time(tmp_path):
    path = file(tmp_path, RECENT)
    first = load(path)
    first.marked = True
    assert not hasattr(load(path), "marked")
    path.write_text(RECENT.replace("class Recent", "class Second"))
    assert load(path).__name__ == "Second"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1", None, "mine.py: must define a subclass of PlainPolicy; found none"),
        ("from policies.plain import PlainPolicy", None, "found none"),
        (f"{RECENT}\nclass Other(Recent): pass", None, "found 2: Recent, Other; policy.name says which"),
        (RECENT, "Recnt", "no subclass 'Recnt' of PlainPolicy; did you mean Recent?"),
        ("x = 1\nif x\n", None, r"mine.py, line 2: expected ':': if x"),
        ("import numpy\n\nimport nothing_of_that_name\n", None, "mine.py, line 3: ModuleNotFoundError: No module"),
        ("x = '\ud800'".encode("utf-8", "surrogatepass"), None, "mine.py"),
    ],
)
def test_a_file_without_a_policy_is_refused_in_one_line(tmp_path, text, name, message):
    path = tmp_path / "mine.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PolicyError, match=message):
        load(path, name)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PolicyError, match=r"none.py: cannot be read: No such file"):
        load(tmp_path / "none.py")


@pytest.fixture
def packages(monkeypatch):
    """Packages that bring policies, as long as the test runs."""
    store = ConfigStore.instance().repo.setdefault("policy", {})
    monkeypatch.setattr(ConfigStore.instance(), "repo", {**ConfigStore.instance().repo, "policy": dict(store)})
    points = {
        "theirs": "test_custom:Recent",
        "compiled": "policies.lru",
        "gone": "no_such_module:X",
        "other": "json:loads",
    }
    found = [EntryPoint(name, value, "oledsim.policies") for name, value in points.items()]
    monkeypatch.setattr("policies.custom.entry_points", lambda group: found if group == "oledsim.policies" else [])
    installed.cache_clear()
    yield
    installed.cache_clear()


def test_policies_of_packages_are_known_by_their_names(packages):
    shape, passes = random_passes(np.random.default_rng(1))
    context = context_of(shape, passes)
    built = build_policy("theirs", {"decay": 0.5}, context)
    assert (built.name, built.variant) == ("theirs", "decay=0.5")
    assert decided({}, shape, passes, name="compiled") == decided({}, shape, passes, name="lru")
    for name, message in (
        ("gone", "policy gone of no_such_module:X: ModuleNotFoundError"),
        ("other", "policy other of json:loads: must be a subclass of PlainPolicy, or a module with Knobs and build"),
        ("theirss", r"no policy 'theirss'; did you mean theirs\?"),
    ):
        with pytest.raises(PolicyError, match=message):
            build_policy(name, {}, context)


def test_policies_of_packages_are_on_the_command_line(packages, run):
    finished = run("-m", "hydra/launcher=basic", "policy=lru,theirs", "output.dir=grid")
    assert finished.code == 0, finished.err
    assert pl.read_parquet("grid/sweep.parquet")["policy"].to_list() == ["lru", "theirs"]
    finished = run("policy=theirs", "policy.knobs.decay=0.5")
    assert "[1] decay=0.5" in finished.out
    assert "theirs has no knob 'dec'" in run("policy=theirs", "policy.knobs.dec=0.5").err
    assert "gone" in run("policy=gone").err


# Knobs


@pytest.mark.parametrize(
    ("knobs", "variant"),
    [
        ({}, ""),
        ({"decay": 1, "every": 2.0}, ""),
        ({"decay": 0.5, "limit": None}, "decay=0.5"),
        ({"limit": 3, "mode": "b"}, "mode=b, limit=3"),
    ],
)
def test_arguments_of_the_class_are_knobs(tmp_path, knobs, variant):
    values = {"path": str(file(tmp_path, RECENT)), "knobs": knobs}
    assert build_policy("custom", values, Context(shape_of(1, 4))).variant == variant


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"evry": 1}, r"Recent has no knob 'evry'; did you mean every\? allowed: decay, every, mode, limit"),
        ({"every": 1.5}, "Recent: every is 1.5, must be a whole number"),
        ({"decay": "x"}, "Recent: decay is 'x', must be a number"),
        ({"limit": [1]}, r"Recent: limit is \[1\], must be a number"),
    ],
)
def test_knobs_are_held_to_their_types(tmp_path, knobs, message):
    with pytest.raises(PolicyError, match=message):
        build_policy("custom", {"path": str(file(tmp_path, RECENT)), "knobs": knobs}, Context(shape_of(1, 4)))


def test_fields_of_a_dataclass_are_knobs_and_its_own_refusals_are_told(tmp_path):
    text = RECENT.replace(
        "import numpy as np",
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport numpy as np",
    )
    head, _, tail = text.partition("class Recent(PlainPolicy):")
    own = "@dataclass\nclass Recent(PlainPolicy):\n    share: float\n    decay: int = 1\n\n    def __post_init__(self):\n        if self.share > 1:\n            raise ValueError('share must be at most 1')\n"
    path = str(file(tmp_path, head + own + tail[tail.index("\n    def start") :]))
    context = Context(shape_of(1, 4))
    assert (
        build_policy("custom", {"path": path, "knobs": {"share": 0.5, "decay": 2}}, context).variant
        == "share=0.5, decay=2"
    )
    with pytest.raises(PolicyError, match=r"Recent: missing share"):
        build_policy("custom", {"path": path}, context)
    with pytest.raises(PolicyError, match=r"mine.py, line 14: ValueError: share must be at most 1"):
        build_policy("custom", {"path": path, "knobs": {"share": 2}}, context)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("*these", r"mine.py, line 8: Mine takes \*these; must be knobs with names of their own"),
        ("these={}", "knob these of Mine is dict by default; must be a number"),
    ],
)
def test_arguments_that_no_command_line_can_give_are_refused(tmp_path, arguments, message):
    text = f"from policies.plain import PlainPolicy, plan\n\nclass Mine(PlainPolicy):\n    def __init__(self, {arguments}):\n        pass\n\n\n    def decide(self, step, view):\n        return plan(step, view, [])\n"
    with pytest.raises(PolicyError, match=message):
        build_policy("custom", {"path": str(file(tmp_path, text))}, Context(shape_of(1, 4)))


# Running it


def test_it_decides_as_the_same_class_in_a_module_and_each_run_begins_anew(tmp_path):
    shape, passes = random_passes(np.random.default_rng(5), batch=2)
    path = str(file(tmp_path, RECENT))
    policy = build_policy("custom", {"path": path}, context_of(shape, passes))
    runs = [answers(drive(policy, passes, shape, 18, ESTIMATES)) for _ in range(2)]
    assert runs[0] == runs[1]
    # what was activated last stays: the hits are those of a plain restatement
    last, resident = np.full((shape.num_layers, shape.num_experts), -1), set()
    for forward, pass_ in enumerate(passes):
        activated = set(pass_.expert_ids[0].ravel().tolist())
        assert set(np.flatnonzero(runs[0][forward * shape.num_layers][3])) == resident
        last[0, sorted(activated)] = forward
        resident = set(sorted(resident | activated, key=lambda expert: (-last[0, expert], expert))[:6])


def test_a_prefetching_one_prefetches():
    shape, passes = random_passes(np.random.default_rng(5))
    policy = build_policy_of(Ahead, shape, passes)
    costs = make_costs(h2d_latency_ns=20.0)
    rows = layer_rows(des.simulate(passes, policy, shape, 18, costs, ESTIMATES))
    assert sum(row["prefetch_landed"] for row in rows) > 0
    assert policy.prefetches


@settings(max_examples=6)
@given(traces(max_experts=10, max_requests=2, max_block=4), st.integers(1, 10), st.sampled_from(["layer", "global"]))
def test_what_keep_best_and_plan_make_keeps_to_the_laws(trace, capacity, pool):
    class Pooled(Ahead):
        pass

    Pooled.pool = pool
    shape, passes = trace
    slots = min(capacity, shape.num_experts) * shape.num_layers
    copies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(des, "Slots", WatchedSlots)
        costs = make_costs(h2d_latency_ns=30.0, policy_ns=3)
        policy = build_policy_of(Pooled, shape, passes)
        rows = layer_rows(des.simulate(passes, policy, shape, slots, costs, ESTIMATES, on_copy=copies.append))
    check_laws(rows, copies, costs.policy_ns)


def test_slots_move_and_residents_at_the_start_count():
    class Moves(Recent):
        resizes = True

        def start(self, shape, slots):
            super().start(shape, slots)
            resident = np.zeros(self.last.shape, bool)
            resident[:, :2] = True
            capacity = np.full(shape.num_layers, slots // shape.num_layers)
            return resident, capacity

        def after_forward(self, end, view):
            if end.forward != 1:
                return None
            capacity = view.capacity.copy()
            capacity[:2] += (-1, 1)
            evictions = np.zeros(view.resident.shape, bool)
            evictions[0, np.flatnonzero(view.resident[0])[-1]] = view.resident[0].sum() == view.capacity[0]
            return capacity, evictions

    shape, passes = random_passes(np.random.default_rng(5))
    policy = build_policy_of(Moves, shape, passes)
    decisions = list(drive(policy, passes, shape, 18, ESTIMATES))
    assert np.flatnonzero(decisions[0].resident).tolist() == [0, 1]
    assert [decision.capacity for decision in decisions[3:9]] == [6, 6, 6, 5, 7, 6]
    assert policy.resizes

    class Silently(Moves):
        resizes = False

    with pytest.raises(
        PlanError, match=r"forward 1, after the last layer: test_custom.py, line \d+: slots move between"
    ):
        list(drive(build_policy_of(Silently, shape, passes), passes, shape, 18, ESTIMATES))


def test_only_what_is_clairvoyant_sees_the_run():
    class Learns(Recent):
        def learn(self, context):
            self.seen = len(list(context.passes)), context.calibration.num_requests, context.seed
            Learns.told = self.seen

    class Foresees(Learns):
        clairvoyant = True

    shape, passes = random_passes(np.random.default_rng(5))
    for kind, seen in ((Learns, (0, 2, 0)), (Foresees, (len(passes), 2, 0))):
        next(drive(build_policy_of(kind, shape, passes), passes, shape, 18, ESTIMATES))
        assert Learns.told == seen


def test_signals_are_shown_to_who_reads_them_and_a_trace_without_is_refused():
    class Reads(Recent):
        reads_signals = True

        def decide(self, step, view):
            assert step.signals.scores.shape[0] == len(step.request)
            return super().decide(step, view)

    for signals in (True, False):
        shape, passes = random_passes(np.random.default_rng(5), signals=signals)
        if signals:
            assert list(drive(build_policy_of(Reads, shape, passes), passes, shape, 18, ESTIMATES))
        else:
            with pytest.raises(PolicyError, match="Reads reads signals, which this trace lacks"):
                build_policy_of(Reads, shape, passes)


# What is wrong with it


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("return plan(step, view, [step.load[99]])", PolicyError, "request 0, forward 0, layer 0: mine.py, line 6: IndexError: index 99"),
        ("step.load[0] = 1", PolicyError, "layer 0: mine.py, line 6: ValueError: assignment destination is read-only"),
        ("return None", PlanError, "layer 0: the plan is NoneType, must be Plan; planned by decide in mine.py, line 5"),
        ("return plan(step, view, range(9))", PlanError, "request 0, forward 0, layer 0: mine.py, line 6: retained is"),
        ("return plan(step, view, [], transfers=[])", PlanError, "layer 0: expert 0 was missed and is not served.* planned by decide in mine.py, line 5"),
        ("return plan(step, view, [0, 1])", PlanError, "layer 0: retained and copies in flight need 2 slots, the capacity is 1"),
        ("return plan(step, view, [], on_cpu=[0])", PlanError, r'layer 0: mine.py, line 5: experts \[0\] are served on the CPU, and the class says misses = "h2d"'),
        ("return plan(step, view, [], prefetches=[(0, 3)])", PlanError, "layer 0: mine.py, line 5: the plan prefetches; the class must say prefetches = True"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_the_place_in_run_and_file(tmp_path, body, error, message):
    text = f"from policies.plain import PlainPolicy, plan\n\nclass Mine(PlainPolicy):\n\n    def decide(self, step, view):\n        {body}\n"
    shape, passes = random_passes(np.random.default_rng(0), num_layers=1, num_experts=4, top_k=2)
    passes[0].expert_ids.flags.writeable = True
    passes[0].expert_ids[:] = [0, 1]
    with pytest.raises(error, match=message) as caught:
        decided({"path": str(file(tmp_path, text))}, shape, passes, slots=1)
    assert "\n" not in str(caught.value)


def test_a_policy_must_decide_and_score_what_it_prefetches(tmp_path):
    class Empty(PlainPolicy):
        pass

    class Scoreless(Recent):
        prefetches = True

    shape, passes = random_passes(np.random.default_rng(0))
    with pytest.raises(PolicyError, match=r"test_custom.py: Empty has no decide\(self, step, view\)"):
        build_policy_of(Empty, shape, passes)
    with pytest.raises(PlanError, match=r"prefetches = True needs self.score, an array of \(3, 16\)"):
        list(drive(build_policy_of(Scoreless, shape, passes), passes, shape, 18, ESTIMATES))


def test_a_name_of_ours_is_refused(tmp_path):
    path = str(file(tmp_path, RECENT.replace("class Recent", "class lru")))
    with pytest.raises(PolicyError, match="a class lru would pass for the policy of that name"):
        build_policy("custom", {"path": path}, Context(shape_of(1, 4)))


# On the command line


def test_a_run_and_its_manifest(run):
    finished = run("policy=custom", "policy.path=mine.py", "policy.knobs.decay=0.5", "output.dir=out")
    assert finished.code == 0, finished.err
    assert "Recent [1]" in finished.out
    assert "[1] decay=0.5" in finished.out
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["config"]["policy"] == {"name": None, "path": "mine.py", "knobs": {"decay": 0.5}}
    assert manifest["policy"]["file"]["path"] == str(Path("mine.py").absolute())
    assert len(manifest["policy"]["file"]["sha256"]) == 64


def test_a_grid_with_others_and_with_knobs(run):
    grid = ["-m", "hydra/launcher=basic", "policy=lru,custom", "policy.path=mine.py", "output.dir=grid"]
    finished = run(*grid, "policy.knobs.decay=0.5,1")
    assert finished.code == 0, finished.err
    rows = pl.read_parquet("grid/sweep.parquet")
    assert rows.select("policy", "variant").rows() == [("lru", ""), ("Recent", ""), ("Recent", "decay=0.5")]
    # when the file has changed, its runs are made anew, and those of before that are not leave the table
    Path("mine.py").write_text(RECENT.replace("step.forward", "step.forward + 1"))
    finished = run(*grid)
    assert "made by other code than this: 2" in finished.err
    assert pl.read_parquet("grid/sweep.parquet").select("policy", "variant").rows() == [("lru", ""), ("Recent", "")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy=custom"], "policy.path: must be given as policy.path=VALUE"),
        (["policy=custom", "policy.path=none.py"], "none.py: cannot be read"),
        (["policy=custom", "policy.path=mine.py", "policy.knobs.evry=1"], "did you mean every?"),
        (["policy=custom", "policy.path=mine.py", "policy.evry=1"], "policy.evry: no such key"),
        (["policy=lru", "policy.path=mine.py"], "policy.path: no such key"),
    ],
)
def test_bad_keys_are_one_line(run, arguments, message):
    finished = run(*arguments)
    assert finished.code == 2
    assert message in finished.err
    assert finished.err.count("\n") == 1


def test_its_own_errors_keep_their_traceback_on_request(run, monkeypatch):
    Path("mine.py").write_text(RECENT.replace("step.forward\n", "step.forwards\n"))
    finished = run("policy=custom", "policy.path=mine.py")
    assert finished.code == 2
    assert "layer 0: mine.py, line 14: AttributeError: 'Step' object has no attribute 'forwards'" in finished.err
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(PolicyError) as caught:
        run("policy=custom", "policy.path=mine.py")
    assert isinstance(caught.value.__cause__.__cause__, AttributeError)


# In Python


def test_simulate_takes_classes_and_objects(run):
    one = simulate("small.trace", Recent, 6, shape="llada2.0-mini", knobs={"decay": 0.5}).summary
    own = Recent(decay=0.5)
    two = simulate("small.trace", own, 6, shape="llada2.0-mini").summary
    assert one == two
    assert (one["policy"], one["variant"]) == ("Recent", "decay=0.5")
    assert not hasattr(own, "last")  # runs work on copies
    manifest = simulate("small.trace", own, 6, shape="llada2.0-mini").manifest
    assert manifest["config"]["policy"] == {"name": "Recent", "knobs": {}, "variant": "decay=0.5"}
    assert manifest["policy"]["file"]["path"] == __file__
    file = simulate(
        "small.trace", "custom", 6, shape="llada2.0-mini", knobs={"path": "mine.py", "knobs": {"decay": 0.5}}
    ).summary
    assert file["decision_hash"] == one["decision_hash"]
    with pytest.raises(ConfigError, match="knobs beside an object of Recent"):
        simulate("small.trace", own, 6, shape="llada2.0-mini", knobs={"decay": 1})
    for wrong in (PlainPolicy, dict, 5):
        with pytest.raises(ConfigError, match=r"policy is .*, must be text, or a subclass of PlainPolicy"):
            simulate("small.trace", wrong, 6, shape="llada2.0-mini")
