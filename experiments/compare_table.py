"""A comparison in words: for a terminal, and as Markdown for documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from experiments.columns import WIDTH, Column, laid_out, markdown, numbers, wrap
from experiments.compare_cells import Cell
from experiments.compare_judge import MOST_POINTS, MOST_TAIL_MAPE, MOST_TPOT_MAPE, SCOPE, Comparison, Target
from experiments.compare_pairs import Pair, Unpaired
from experiments.compare_ranks import Group
from experiments.table import describe

_FITTED, _BEYOND = "†", "!"
_NOTES = (
    "TPOT of a simulated run, and mean over the replay's repeats; spread: largest less smallest repeat, of that mean. "
    "Errors are simulated over measured less 1; fwd: of single forwards, mean of absolute values, and beside it that of "
    "each repeat against their mean.",
    f"{_BEYOND} beyond the limit of its target ({100 * MOST_TPOT_MAPE:g} % TPOT, {100 * MOST_TAIL_MAPE:g} % tail, "
    f"{MOST_POINTS:g} points), which is on the mean over cells but for the points",
)
_FITTED_NOTE = f"{_FITTED} the profile was fitted to it: not judged"


def as_text(comparison: Comparison, width: int = WIDTH) -> str:
    """Everything, in lines of this width."""
    parts = []
    for caption, cells in _sections(comparison):
        parts.append("\n".join([wrap(caption, width), "", *laid_out(_cell_columns(cells), width)]))
    parts.append("\n".join(wrap(note, width) for note in _notes(comparison)))
    if comparison.groups:
        parts.append("\n".join(laid_out(_group_columns(comparison.groups), width)))
    parts.append("\n".join(line for target in comparison.targets for line in _target_lines(target, width)))
    if comparison.unpaired:
        lines = (wrap(text, width, "    ") for text in _unpaired(comparison.unpaired))
        parts.append("\n".join(["Not paired:", *lines]))
    parts.append(wrap(_scope(), width))
    return "\n\n".join(parts)


def as_markdown(comparison: Comparison) -> str:
    """The same, as tables of Markdown."""
    targets = comparison.targets
    parts = [
        _scope(),
        markdown(
            Column(("target", ""), [target.name for target in targets], is_text=True),
            Column(("must be", ""), [target.limit for target in targets], is_text=True),
            Column(("found", ""), [target.found for target in targets], is_text=True),
            Column(("", ""), [target.verdict for target in targets], is_text=True),
        ),
    ]
    remarks = [f"- {target.name}: {remark}" for target in targets for remark in target.remarks]
    if remarks:
        parts.append("\n".join(remarks))
    for caption, cells in _sections(comparison):
        parts += [caption, markdown(*_cell_columns(cells))]
    parts += _notes(comparison)
    if comparison.groups:
        parts.append(markdown(*_group_columns(comparison.groups)))
    if comparison.unpaired:
        parts.append("\n".join(["Not paired:", "", *(f"- {text}" for text in _unpaired(comparison.unpaired))]))
    return "\n\n".join(parts) + "\n"


def describe_pair(pair: Pair) -> str:
    """What a cell's numbers come from: trace, profile, sizes, and the machine that measured."""
    return "; ".join(caption_of(pair))


def caption_of(pair: Pair) -> list[str]:
    """The same in parts."""
    facts = pair.facts
    ran_on = facts["machine"] or "a machine it does not name"
    known = describe(facts, across="hardware.h2d_bytes_per_s")  # a slower link stands in the rows
    return [*known, f"costs {facts['provenance']}", f"replayed on {ran_on}", *_conditions(facts)]


def _sections(comparison: Comparison) -> Iterable[tuple[str, list[Cell]]]:
    """Cells that differ in policy, size and bandwidth alone, below what they have in common."""
    both = list(zip(comparison.pairs, comparison.cells, strict=True))
    for _, members in groupby(both, key=lambda one: one[0].section):
        listed = list(members)
        yield describe_pair(listed[0][0]), [cell for _, cell in listed]


def _conditions(facts: Mapping[str, Any]) -> list[str]:
    parts = [f"{key} {facts[key]}" for key in ("mode", "device") if facts[key] is not None]
    if facts["is_pinned"] is False and facts["device"] != "cpu":  # there, nothing is pinned
        parts.append("PAGEABLE host memory")
    if facts["num_distinct_experts"] is not None:
        parts.append(f"{facts['num_distinct_experts']} distinct experts in host memory")
    if facts["weights"]:
        parts.append(f"weights {facts['weights']}")
    if facts["cpu_kernel"]:
        parts.append(f"CPU kernel {facts['cpu_kernel']}")
    return parts


def _cell_columns(cells: Sequence[Cell]) -> list[Column]:
    names = [cell.label + f" {_FITTED}" * cell.is_fitted for cell in cells]
    has_p99 = any(cell.p99_error is not None for cell in cells)
    times = numbers([value for cell in cells for value in (cell.simulated_ms, cell.measured_ms)])
    return [
        Column(("policy", ""), names, is_text=True),
        Column(("slots", "/layer"), ["" if c.slots_per_layer is None else str(c.slots_per_layer) for c in cells]),
        Column(("copies", ""), [f"x{cell.h2d_bytes_factor:g}" for cell in cells]),
        Column(("runs", ""), [str(cell.num_repeats) for cell in cells], 5),
        Column(("forwards", ""), [str(cell.num_forwards) for cell in cells], 8),
        Column(("simul.", "ms"), times[::2]),
        Column(("meas.", "ms"), times[1::2]),
        Column(("spread", "%"), [_percent(cell.spread_ratio) for cell in cells]),
        Column(("error", "%"), [_signed(cell.tpot_error, MOST_TPOT_MAPE) for cell in cells]),
        Column(("fwd", "%"), [_percent(cell.forward_mape) for cell in cells], 3),
        Column(("noise", "%"), [_percent(cell.forward_noise) for cell in cells], 7),
        Column(("P50", "%"), [_signed(cell.p50_error) for cell in cells], 6),
        Column(("P90", "%"), [_signed(cell.p90_error, _tail_limit(cell, is_p99=False)) for cell in cells], 1 + has_p99),
        Column(("P99", "%"), [_signed(cell.p99_error, _tail_limit(cell, is_p99=True)) for cell in cells], 2 - has_p99),
        Column(("decisions", ""), [_decisions(cell) for cell in cells]),
    ]


def _tail_limit(cell: Cell, is_p99: bool) -> float:
    """Of the quantile that is judged; no limit on the other."""
    return MOST_TAIL_MAPE if is_p99 == (cell.p99_error is not None) else float("inf")


def _decisions(cell: Cell) -> str:
    if cell.has_prefetches:
        return f"{cell.worst_points:.2f} pt{_BEYOND * (cell.worst_points > MOST_POINTS)}"
    return {True: "same", False: f"DIFFER{_BEYOND}", None: "-"}[cell.same_decisions]


def _group_columns(groups: Sequence[Group]) -> list[Column]:
    taus = ["-" if group.tau_b is None else f"{group.tau_b:.3f}" for group in groups]
    return [
        Column(("ranked", ""), [group.name for group in groups], is_text=True),
        Column(("policies", ""), [str(len(group.policies)) for group in groups]),
        Column(("pairs", "kept"), [f"{group.num_kept}/{group.num_pairs}" for group in groups]),
        Column(("tau-b", ""), [tau if g.is_judged else f"({tau})" for tau, g in zip(taus, groups, strict=True)]),
        Column(("inver-", "sions"), [str(len(group.inversions)) for group in groups], 1),
        Column(("picked", ""), [group.picked for group in groups], is_text=True),
        Column(("regret", "%"), [_percent(group.regret) for group in groups]),
    ]


def _target_lines(target: Target, width: int) -> list[str]:
    lines = [wrap(f"{target.verdict:<10}  {target.name} ({target.limit}): {target.found}", width, " " * 12)]
    return lines + [wrap(f"{'':<12}- {remark}", width, " " * 14) for remark in target.remarks]


def _notes(comparison: Comparison) -> list[str]:
    notes = list(_NOTES)
    if any(cell.is_fitted for cell in comparison.cells):
        notes.append(_FITTED_NOTE)
    if any(cell.num_repeats < 2 for cell in comparison.cells):
        notes.append("spread -: a replay without repeats, whose spread is unknown")
    return notes


def _unpaired(unpaired: Sequence[Unpaired]) -> list[str]:
    """Each reason once, with the runs that it is about."""
    names: dict[str, list[str]] = {}
    for name, why in unpaired:
        names.setdefault(why, []).append(name)
    return [f"{why}: {', '.join(about)}" for why, about in names.items()]


def _scope() -> str:
    return f"This is {SCOPE}."


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.2f}"


def _signed(ratio: float | None, limit: float = float("inf")) -> str:
    return "-" if ratio is None else f"{100 * ratio:+.2f}{_BEYOND * (abs(ratio) > limit)}"
