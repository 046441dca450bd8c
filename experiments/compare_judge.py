"""The verdict: what a comparison finds, held to what it must reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.compare_cells import FEWEST_FOR_P99, Cell, cells_of_pairs
from experiments.compare_pairs import Pair, Unpaired, pairs_of
from experiments.compare_ranks import FEWEST_PAIRS, Group, groups_of
from experiments.compare_runs import Ran

SCOPE = "fidelity to this executor, not to the cited systems as shipped"
MOST_TPOT_MAPE, MOST_TAIL_MAPE, LEAST_TAU, MOST_REGRET, MOST_POINTS = 0.03, 0.08, 0.9, 0.02, 2.0


@dataclass(frozen=True)
class Target:
    """One thing that must be reached.

    Args:
        name: what is measured.
        limit: what it must be, in words.
        found: what it is, in words.
        is_met: None where it cannot be judged.
        remarks: what was left out, and every case beyond the limit by name.
    """

    name: str
    limit: str
    found: str
    is_met: bool | None
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "met", False: "MISSED", None: "not judged"}[self.is_met]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Simulated runs held against their replays."""

    pairs: list[Pair]
    cells: list[Cell]  # of the pairs
    groups: list[Group]
    targets: list[Target]
    unpaired: list[Unpaired]

    @property
    def is_met(self) -> bool:
        """Whether no target was missed; one that cannot be judged is not."""
        return all(target.is_met is not False for target in self.targets)

    @property
    def runs(self) -> list[Ran]:
        """All runs that were paired, each once."""
        return list(dict.fromkeys(run for pair in self.pairs for run in (pair.simulated, *pair.repeats)))

    def as_plain(self) -> dict[str, Any]:
        """Everything but the runs, as plain data."""
        return {
            "scope": SCOPE,
            "targets": [asdict(target) for target in self.targets],
            "cells": [asdict(cell) for cell in self.cells],
            "groups": [asdict(group) | {"is_judged": group.is_judged} for group in self.groups],
            "unpaired": [one._asdict() for one in self.unpaired],
        }


def compare(runs: Iterable[Ran], fitted: Sequence[str] = ()) -> Comparison:
    """Hold simulated runs against their replays.

    Args:
        runs: of both kinds, in any order.
        fitted: patterns of names of the cells that the profile was fitted to.

    Raises:
        ConfigError: nothing can be paired, runs of one cell are of different forwards, or a pattern fits no cell.
    """
    pairs, unpaired = pairs_of(runs)
    cells = cells_of_pairs(pairs, fitted)
    groups = groups_of(pairs, cells)
    return Comparison(pairs, cells, groups, judge(cells, groups), unpaired)


def judge(cells: Sequence[Cell], groups: Sequence[Group]) -> list[Target]:
    """Hold what was measured to the targets; fitted cells count for decisions alone."""
    judged = [cell for cell in cells if not cell.is_fitted]
    return [_decisions(cells), _shares(cells), _tpot(judged), _tail(judged), _ranking(groups), _regret(groups)]


def _decisions(cells: Sequence[Cell]) -> Target:
    plain = [cell for cell in cells if not cell.has_prefetches]
    known = [cell for cell in plain if cell.same_decisions is not None]
    num_same = sum(cell.same_decisions is True for cell in known)
    remarks = [f"{cell.name}: {cell.first_difference or 'differs'}" for cell in known if not cell.same_decisions]
    remarks += [f"{cell.name}: not judged, cut and no log at hand" for cell in plain if cell.same_decisions is None]
    is_met = num_same == len(known) if known else None
    return Target("decisions without prefetch", "equal", f"{num_same} of {len(known)} cells", is_met, tuple(remarks))


def _shares(cells: Sequence[Cell]) -> Target:
    name, limit = "hits, late, unserved", f"within {MOST_POINTS:g} points"
    prefetching = [cell for cell in cells if cell.has_prefetches]
    if not prefetching:
        return Target(name, limit, "no policy that prefetches", None)
    worst = max(cell.worst_points for cell in prefetching)
    beyond = [
        f"{cell.name}: hits {cell.hit_points:+.2f}, late {cell.late_points:+.2f}, unserved {cell.unserved_points:+.2f}"
        for cell in prefetching
        if cell.worst_points > MOST_POINTS
    ]
    return Target(name, limit, f"{worst:.2f} in the worst of {len(prefetching)}", worst <= MOST_POINTS, tuple(beyond))


def _tpot(judged: Sequence[Cell]) -> Target:
    mape, bias = _mean(abs(cell.tpot_error) for cell in judged), _mean(cell.tpot_error for cell in judged)
    single, single_bias = (_mean(getattr(cell, name) for cell in judged) for name in ("forward_mape", "forward_error"))
    beyond = [f"{c.name}: {100 * c.tpot_error:+.1f} %" for c in judged if abs(c.tpot_error) > MOST_TPOT_MAPE]
    found = (
        f"{100 * mape:.2f} % over {len(judged)} cells, signed {100 * bias:+.2f} %; "
        f"of single forwards {100 * single:.2f} %, signed {100 * single_bias:+.2f} %"
    )
    return Target("MAPE of TPOT", f"<= {100 * MOST_TPOT_MAPE:g} %", found, mape <= MOST_TPOT_MAPE, tuple(beyond))


def _tail(judged: Sequence[Cell]) -> Target:
    mape = _mean(abs(cell.tail_error) for cell in judged)
    num_p99 = sum(cell.p99_error is not None for cell in judged)
    of = f"P99 of {num_p99} cells, P90 of {len(judged) - num_p99} with less than {FEWEST_FOR_P99} forwards"
    beyond = [f"{c.name}: {100 * c.tail_error:+.1f} %" for c in judged if abs(c.tail_error) > MOST_TAIL_MAPE]
    found = f"{100 * mape:.2f} %: {of}"
    return Target("MAPE of the tail", f"<= {100 * MOST_TAIL_MAPE:g} %", found, mape <= MOST_TAIL_MAPE, tuple(beyond))


def _ranking(groups: Sequence[Group]) -> Target:
    name, limit = "tau-b, worst group", f">= {LEAST_TAU:g}"
    remarks = [
        f"{group.name}: {fast} measured faster than {slow}, simulated slower"
        for group in groups
        for fast, slow in group.inversions
        if group.has_spread
    ]
    remarks += [f"{group.name}: not judged, {why}" for group in groups if (why := _why_not(group))]
    values = {group.name: group.tau_b for group in groups if group.is_judged and group.tau_b is not None}
    if not values:
        return Target(name, limit, "no group that can be judged", None, tuple(remarks))
    worst = min(values, key=lambda group: values[group])
    kept = next(group for group in groups if group.name == worst)
    found = f"{values[worst]:.3f} ({worst}, {kept.num_kept} of {kept.num_pairs} pairs; {len(values)} groups)"
    return Target(name, limit, found, values[worst] >= LEAST_TAU, tuple(remarks))


def _why_not(group: Group) -> str:
    """Why a group is not judged; empty where it is."""
    if group.is_judged:
        return ""
    if not group.has_spread:
        return "a cell has no repeats, so that the spread is unknown"
    if group.num_kept < FEWEST_PAIRS:
        return f"{group.num_kept} of {group.num_pairs} pairs are further apart than repeats, {FEWEST_PAIRS} are needed"
    return "all are tied"


def _regret(groups: Sequence[Group]) -> Target:
    name, limit = "regret of the pick", f"<= {100 * MOST_REGRET:g} %"
    if not groups:
        return Target(name, limit, "no group of several policies", None)
    worst = max(groups, key=lambda group: group.regret)
    beyond = [
        f"{group.name}: picked {group.picked}, best {group.best}, {100 * group.regret:+.1f} %"
        for group in groups
        if group.regret > MOST_REGRET
    ]
    found = f"{100 * worst.regret:.2f} % in the worst of {len(groups)} groups"
    return Target(name, limit, found, worst.regret <= MOST_REGRET, tuple(beyond))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
