"""Whether the simulator ranks policies as the hardware does, within cells that differ in nothing but the policy."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt

from experiments.compare_cells import Cell
from experiments.compare_pairs import Pair
from experiments.ranking import is_bound

FEWEST_PAIRS = 10  # kept ones; a group of fewer is not judged


@dataclass(frozen=True)
class Group:
    """The policies of one trace, size, bandwidth and machine.

    A pair of policies whose measured times are no further apart than the repeats of either spread is left out.
    """

    name: str
    policies: tuple[str, ...]  # with knobs, by measured time
    num_pairs: int
    num_kept: int
    has_spread: bool  # every cell has repeats; else no pair is left out, and none is judged
    tau_b: float | None  # None where a ranking is all ties, or no pair was kept
    inversions: tuple[tuple[str, str], ...]  # kept pairs, (measured faster, simulated faster)
    picked: str  # fastest simulated
    best: str  # fastest measured
    regret: float  # time measured of what was picked over that of the best, less 1

    @property
    def is_judged(self) -> bool:
        """Whether enough pairs are left to speak of a ranking."""
        return self.has_spread and self.num_kept >= FEWEST_PAIRS and self.tau_b is not None


def groups_of(pairs: Sequence[Pair], cells: Sequence[Cell]) -> list[Group]:
    """Rank the policies of each group of two or more; fitted cells and policies that know the trace are left out.

    A policy that ignores the cache size is in the groups of all sizes.

    Args:
        pairs: of a comparison.
        cells: what was measured of each.
    """
    sized: dict[tuple[Hashable, ...], list[Cell]] = {}
    unsized: dict[tuple[Hashable, ...], list[Cell]] = {}
    for pair, cell in zip(pairs, cells, strict=True):
        if cell.is_fitted or is_bound(pair.facts):
            continue
        if pair.slots is None:
            unsized.setdefault(pair.group, []).append(cell)
        else:
            sized.setdefault((*pair.group, pair.slots), []).append(cell)
    found = [[*unsized.get(key[:-1], ()), *members] for key, members in sized.items()]
    seen = {key[:-1] for key in sized}
    found += [members for key, members in unsized.items() if key not in seen]
    return [group_of(members) for members in found if len(members) > 1]


def group_of(cells: Sequence[Cell]) -> Group:
    """Rank the cells of one group."""
    ordered = sorted(cells, key=lambda cell: cell.measured_ms)
    has_spread = all(cell.spread_ms is not None for cell in ordered)
    kept = [(a, b) for a, b in combinations(ordered, 2) if not has_spread or _is_apart(a, b)]
    picked, best = min(ordered, key=lambda cell: cell.simulated_ms), ordered[0]
    return Group(
        name=_name(ordered),
        policies=tuple(cell.label for cell in ordered),
        num_pairs=len(ordered) * (len(ordered) - 1) // 2,
        num_kept=len(kept),
        has_spread=has_spread,
        tau_b=tau_b([(a.simulated_ms - b.simulated_ms, a.measured_ms - b.measured_ms) for a, b in kept]),
        inversions=tuple(
            (a.label, b.label)
            for a, b in kept
            if (a.simulated_ms - b.simulated_ms) * (a.measured_ms - b.measured_ms) < 0
        ),
        picked=picked.label,
        best=best.label,
        regret=picked.measured_ms / best.measured_ms - 1,
    )


def tau_b(differences: Iterable[tuple[float, float]]) -> float | None:
    """Kendall's tau-b over pairs: concordant less discordant ones, over the geometric mean of those untied in each.

    Args:
        differences: of each pair, by one ranking and by the other.

    Returns:
        -1 to 1; None where all pairs are tied in one ranking, or there is none.
    """
    balance = num_untied_x = num_untied_y = 0
    for x, y in differences:
        balance += (x * y > 0) - (x * y < 0)
        num_untied_x += x != 0
        num_untied_y += y != 0
    return balance / sqrt(num_untied_x * num_untied_y) if num_untied_x and num_untied_y else None


def _is_apart(a: Cell, b: Cell) -> bool:
    return abs(a.measured_ms - b.measured_ms) > max(a.spread_ms or 0.0, b.spread_ms or 0.0)


def _name(cells: Sequence[Cell]) -> str:
    """What the names of the cells have in common behind the policy: that of one that heeds the size says the most."""
    names = [cell.name for cell in cells if cell.slots_per_layer is not None] or [cells[0].name]
    return names[0].partition("/")[2]
