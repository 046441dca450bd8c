"""`oled-check-policy`: hold a policy to what every policy must keep to, and explain the first rule that it breaks."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import yaml

from experiments.calibration import calibrated, context_of
from experiments.check_rules import RULES, Build, Tally, Violation, check, smallest
from experiments.check_traces import Case, cases, generated
from experiments.command import Parser, guarded
from experiments.errors import ConfigError
from experiments.policy import built
from experiments.terminal import mend_streams
from policies.contract import Context, PolicyError
from tracer.own_version import own_version
from tracer.schema import ForwardKind
from tracer.shipped import find_trace
from tracer.store import TraceReader

PROGRAM = "oled-check-policy"
MOST_PASSES = 48  # of a recorded trace: rules are tried many times over
MOST_SHOWN = 12  # experts and lines of a trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a policy; returns 1 when it breaks a rule, else 0; exits with 2 after another error of the user."""
    mend_streams()
    options = _parser().parse_args(arguments)
    return guarded(PROGRAM, lambda: run(options.policy, options.name, _knobs(options.knob), options.trace))


def run(policy: str, name: str | None, knobs: dict[str, Any], trace: str | None) -> int:
    """Check a policy on generated traces, and on the first passes of a recorded one; print what was found.

    Args:
        policy: a Python file, or a registered name.
        name: class in the file.
        knobs: those of the policy that differ from their defaults.
        trace: path or shipped name.
    """
    is_file = policy.endswith(".py")
    if name is not None and not is_file:
        raise ConfigError(f"--name {name}: chooses a class of a file, and {policy} is none")
    given = {"path": policy, "name": name, "knobs": knobs} if is_file else knobs
    what = "custom" if is_file else policy
    shown = built(what, given, _context(next(cases())))
    title = f"{shown.name} ({policy})" if is_file else policy

    def build(case: Case) -> Any:
        return built(what, given, _context(case))

    tally = Tally()
    reader = None if trace is None else TraceReader(find_trace(trace))
    for case in _all_cases(reader):
        if violation := check(build, case, tally):
            print(_explained(title, build, violation))
            return 1
    if not tally.num_cases:
        raise PolicyError(f"{title} takes none of the traces it was tried on: {tally.refusal}")
    print(_passed(title, tally))
    return 0


def _all_cases(reader: TraceReader | None) -> Iterator[Case]:
    yield from cases()
    if reader is not None:
        shape = reader.metadata.shape
        passes = list(islice(reader.passes(signals=reader.has_signals), MOST_PASSES))
        yield Case(shape, passes, max(shape.top_k, shape.num_experts // 4), context_of(reader, 1)[0])


def _context(case: Case) -> Context:
    """What a policy may be built from: calibration is of other requests than those of the case."""
    shape = case.shape
    if case.context is not None:
        return replace(case.context, passes=case.passes)
    other = generated(99, shape.num_layers, shape.num_experts, shape.top_k, 4, 3, 1, 1)
    return Context(
        shape,
        passes=case.passes,
        calibrate=lambda: calibrated(other.passes, shape, "generated requests"),
        calibration_passes=other.passes,
        has_signals=True,
    )


def _explained(title: str, build: Build, violation: Violation) -> str:
    """What was broken, in words, and the smallest trace that shows it."""
    found = smallest(build, violation)
    case = found.case
    shape = case.shape
    lines = [
        f"{title} breaks a rule",
        _wrapped("rule", f"{found.rule}: {RULES[found.rule]}"),
        _wrapped("found", found.text),
        _wrapped(
            "trace",
            f"the smallest that shows it: {_many(shape.num_layers, 'layer')} of {_many(shape.num_experts, 'expert')}, "
            f"top {shape.top_k}, {_many(case.slots_per_layer, 'slot')} a layer, {_many(len(case.passes), 'forward')}",
        ),
    ]
    for forward, pass_ in enumerate(case.passes[:MOST_SHOWN]):
        for layer in range(shape.num_layers):
            activated = np.unique(pass_.expert_ids[layer]).tolist()
            more = f" and {len(activated) - MOST_SHOWN} more" if len(activated) > MOST_SHOWN else ""
            ids = ", ".join(map(str, activated[:MOST_SHOWN])) + more
            kind = ForwardKind(int(pass_.kind)).name.lower()
            request = int(pass_.requests.min())
            lines.append(f"          request {request}, forward {forward} ({kind}), layer {layer}: activates {ids}")
    if len(case.passes) > MOST_SHOWN:
        lines.append(f"          and {len(case.passes) - MOST_SHOWN} more forwards")
    return "\n".join(lines)


def _passed(title: str, tally: Tally) -> str:
    lines = [f"{title} keeps to every rule on {_many(tally.num_cases, 'trace')}, {tally.num_gates:,} gates"]
    for rule, text in RULES.items():
        skipped = rule == "causality" and tally.is_clairvoyant
        lines.append(_wrapped("skipped" if skipped else "ok", f"{rule}: {text}"))
    lines.append(_wrapped("speed", f"decide takes {median(tally.decide_ns) / 1000:.0f} us (median) on this machine"))
    if tally.num_refused:
        lines.append(
            _wrapped("note", f"{_many(tally.num_refused, 'trace')} refused by the policy itself: {tally.refusal}")
        )
    if tally.prefetches and not tally.num_prefetches:
        lines.append(_wrapped("note", "it says that it prefetches, and never did"))
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(
        text,
        80,
        initial_indent=f"{head:<10}",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _knobs(texts: Sequence[str]) -> dict[str, Any]:
    """Knobs from KEY=VALUE, values as YAML has them.

    Raises:
        ConfigError: one is not of this form.
    """
    knobs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            knobs[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not (key and equals):
            raise ConfigError(f"--knob {text}: must be KEY=VALUE")
    return knobs


def _parser() -> argparse.ArgumentParser:
    text = "Hold a policy to the rules that every policy must keep to, and explain the first one that it breaks."
    parser = Parser(prog=PROGRAM, description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    parser.add_argument("policy", help="a Python file with a subclass of PlainPolicy, or the name of a policy")
    parser.add_argument("--name", help="the class, where the file has several")
    parser.add_argument("--knob", action="append", default=[], metavar="KEY=VALUE", help="a knob; may be repeated")
    parser.add_argument("--trace", help=f"check on the first {MOST_PASSES} forwards of this trace as well")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
