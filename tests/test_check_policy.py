"""`oled-check-policy` passes what keeps to the rules, and explains the first that is broken on a small trace."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from commands import command
from recorded import write
from reference import context_of
from strategies import random_passes

from experiments import check_policy
from experiments.check_rules import RULES, Tally, check
from experiments.check_traces import cases, generated, other_future
from policies.registry import build_policy
from tracer import doctor

HEAD = """
import numpy as np
from policies.contract import PolicyError
from policies.plain import PlainPolicy, keep_best, missed, plan

class Good(PlainPolicy):
    def start(self, shape, slots):
        self.last = np.full((shape.num_layers, shape.num_experts), -1)

    def decide(self, step, view):
        self.last[step.layer, step.load > 0] = step.forward
        return plan(step, view, keep_best(step, view, self.last))
"""
# what breaks each rule: lines of a subclass of Good, and what must be said of it
BROKEN = {
    "raises": ("decide", "return plan(step, view, [step.load[99]])", "runs", "line 16: IndexError: index 99 is out of"),
    "greedy": ("decide", "return plan(step, view, (step.load > 0) | view.resident[step.layer])", "contract", "the capacity is"),
    "forgets": ("decide", "return plan(step, view, [], transfers=missed(step, view)[1:])", "contract", "is not served"),
    "writes": ("decide", "view.resident.base[step.layer, 0] = True; return super().decide(step, view)", "views", "layer 0: decide changed an array"),
    "shares": ("decide", "self.seen.append(1); self.last[step.layer, len(self.seen) % step.load.size] += 3; return super().decide(step, view)", "state", "state is kept outside of the object"),
    "draws": ("decide", "stay = keep_best(step, view, self.last); return plan(step, view, stay & (np.random.default_rng().random(stay.shape) < 0.5))", "state", "numbers are drawn that"),
    "peeks": ("decide", "self.last[step.layer, step.expert_ids.base[-1].ravel()] += 5; return super().decide(step, view)", "causality", "with another future after forward"),
    "uses the CPU": ("decide", "on_cpu = missed(step, view)[:1]; return plan(step, view, [], on_cpu=on_cpu)", "contract", 'says misses = "h2d"'),
    "loses slots": ("after_forward", "return view.capacity - 1, view.resident", "contract", "after the last layer: capacity [0]"),
}  # fmt: skip


@pytest.fixture
def checked(tmp_path):
    """Checks a class of this text; returns code, out and err."""

    def checked(text, *arguments):
        path = tmp_path / "mine.py"
        path.write_text(HEAD + text)
        return command(lambda: exit_with(check_policy.main([str(path), *arguments])))

    return checked


@pytest.fixture
def few(monkeypatch):
    """Every third size of the traces, with one of each, for what the others would show again."""
    monkeypatch.setattr(check_policy, "cases", lambda: islice(cases(1), 0, None, 3))


def exit_with(code):
    raise SystemExit(code)


def test_what_keeps_to_the_rules_passes(checked):
    finished = checked("")
    assert finished.code == 0, finished.out
    head, *lines = finished.out.splitlines()
    assert "Good" in head
    assert "keeps to every rule on 20 traces" in head
    assert [line.split()[1].rstrip(":") for line in lines if line.startswith("ok ")] == list(RULES)
    assert any(line.startswith("speed") and "us" in line for line in lines)


@pytest.mark.parametrize("what", BROKEN)
def test_the_first_broken_rule_is_explained_on_a_small_trace(checked, what):
    method, body, rule, text = BROKEN[what]
    arguments = "step" if method == "decide" else "end"
    finished = checked(
        f"class Bad(Good):\n    seen = []\n    def {method}(self, {arguments}, view):\n        {body}\n",
        "--name",
        "Bad",
    )
    assert finished.code == 1
    head, *lines = finished.out.splitlines()
    assert head.startswith("Bad (")
    assert lines[0].startswith(f"rule      {rule}: ")
    assert text in " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if "activates" in line]
    assert 1 <= len(shown) <= 8
    assert "forward 0" in shown[0]


def test_a_declared_thing_that_is_not_so_is_found():
    def mislabelled(case):
        policy = build_policy("oled", {"layer_adapt": False}, context_of(case.shape, case.passes))
        return replace(policy, misses="h2d")

    found = next(filter(None, (check(mislabelled, case, Tally()) for case in cases(1))))
    assert found.rule == "declared"
    assert 'with misses = "h2d" all are copied' in found.text


def test_what_it_does_not_want_and_never_does_is_noted(checked, few):
    finished = checked(
        """
class Picky(Good):
    prefetches = True

    def start(self, shape, slots):
        super().start(shape, slots)
        self.score = self.last.astype(float)
        if shape.num_layers < 3:
            raise PolicyError("needs three layers")
""",
        "--name",
        "Picky",
    )
    assert finished.code == 0
    text = " ".join(finished.out.split())
    assert "2 traces refused by the policy itself: mine.py, line 21: needs three layers" in text
    assert "it says that it prefetches, and never did" in text


def test_what_wants_no_trace_is_an_error(checked):
    finished = checked("\n    def learn(self, context):\n        raise PolicyError('no')\n")
    assert finished.code == 2
    assert "takes none of the traces it was tried on: mine.py, line 15: no" in finished.err


@pytest.mark.parametrize("name", ["gate_ahead", "ideal_min", "oled"])
def test_our_own_pass(name, few):
    finished = command(lambda: exit_with(check_policy.main([name])))
    assert finished.code == 0, finished.out
    assert ("skipped   causality" in finished.out) == (name == "ideal_min")
    assert "never did" not in finished.out


def test_knobs_and_a_recorded_trace(checked, few, tmp_path):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=1, num_blocks=1)
    write(tmp_path / "small.trace", shape, passes)
    text = """
class Knobbed(Good):
    def __init__(self, add=0):
        self.add = add

    def decide(self, step, view):
        return plan(step, view, range(int(self.add + view.capacity[step.layer] * 0)))
"""
    trace = str(tmp_path / "small.trace")
    finished = checked(text, "--name", "Knobbed", "--trace", trace)
    assert finished.code == 0
    assert "on 5 traces" in finished.out
    finished = checked(text, "--name", "Knobbed", "--knob", "add=3")
    assert finished.code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "Nobody"], "no subclass 'Nobody' of PlainPolicy"),
        (["--knob", "add"], "--knob add: must be KEY=VALUE"),
        (["--knob", "add=1"], "Good has no knob 'add'"),
        (["--trace", "none.trace"], "none.trace"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_bad_arguments_are_one_line(checked, arguments, message):
    finished = checked("", *arguments)
    assert finished.code == 2
    assert message in finished.err
    assert finished.err.count("\n") == 1


def test_a_name_that_is_not_known_is_refused():
    finished = command(lambda: exit_with(check_policy.main(["lruu"])))
    assert (finished.code, finished.err.count("\n")) == (2, 1)
    assert "did you mean lru?" in finished.err
    assert "--name X: chooses a class of a file" in command(lambda: check_policy.main(["lru", "--name", "X"])).err


# The traces that it tries


def test_generated_traces_are_sound(tmp_path):
    for number, case in enumerate(cases(1)):
        path = tmp_path / f"{number}.trace"
        write(path, case.shape, case.passes)
        report = doctor.check(path)
        assert report.ok, str(report)


def test_another_future_leaves_what_is_known_at_the_gate():
    case = generated(0, 3, 8, 2, 4, 2, 1, 3)
    other = other_future(np.random.default_rng(0), case.passes, 8, 4, 1)
    for before, after in zip(case.passes[:4], other[:4], strict=True):
        assert before is after
    known, changed = case.passes[4], other[4]
    assert np.array_equal(known.expert_ids[:2], changed.expert_ids[:2])
    assert np.array_equal(known.signals.ahead_ids[:2], changed.signals.ahead_ids[:2])
    assert np.array_equal(known.token_ids_in, changed.token_ids_in)
    assert not np.array_equal(known.expert_ids[2], changed.expert_ids[2])
    assert not np.array_equal(known.p_argmax, changed.p_argmax)
    assert not np.array_equal(case.passes[5].expert_ids[0], other[5].expert_ids[0])
