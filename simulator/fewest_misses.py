"""The fewest experts that any policy must copy or compute on the CPU in the counted forwards of a run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from policies.log import Table


class FewestMisses:
    """Packs the stretches from one use of an expert to the next into a number of slots, as many as fit.

    A use needs no copy if its expert was held since the last one, in one slot from execution to execution. Of the
    stretches that end in counted forwards, those that end first are packed first, each if at no time all slots are
    taken; no set of stretches that fits is larger. With all forwards counted the rest are the misses of Belady's MIN
    with bypass in one pool of all layers, but nothing of the future is needed and memory is 4 bytes a layer execution.

    What is held when counted forwards follow others may be any experts, as prefetches can have brought them by then.

    Args:
        num_layers, num_experts: of the trace.
        slots: that may hold experts, at least 1; more than there are experts are as good as one for each.

    Source: Carlisle and Lloyd, On the k-coloring of intervals, 1995; Jain and Lin, Hawkeye, 2016, section 3.1.
    """

    def __init__(self, num_layers: int, num_experts: int, slots: int) -> None:
        self.num_misses = 0
        self._slots = min(slots, num_layers * num_experts)
        self._last = np.full((num_layers, num_experts), -1, np.int64)  # execution that used it last
        self._taken = np.zeros(1024, np.int32)  # slots, from each execution to the next
        self._num_executions = 0
        self._last_full = -1  # of these the last with no slot left
        self._was_counted = True

    def add(self, layers: Table, counted: NDArray[np.bool_]) -> None:
        """Add the next layer executions of the run, whole forwards, of which `counted`, [rows], are counted."""
        missing = self._num_executions + len(layers) - self._taken.size
        if missing > 0:
            self._taken = np.concatenate([self._taken, np.zeros(missing + self._taken.size, np.int32)])
        begins = counted & ~np.concatenate([[self._was_counted], counted[:-1]])
        lists = (layers.lists[name] for name in ("hits", "transfers", "on_cpu"))
        num_misses, self._last_full = _pack(
            layers.scalars["layer"],
            tuple((column.offsets, column.values) for column in lists),
            counted,
            begins,
            self._num_executions,
            self._last,
            self._taken,
            self._slots,
            self._last_full,
        )
        self.num_misses += num_misses
        self._num_executions += len(layers)
        self._was_counted = bool(counted[-1])


@jit
def _pack(layers, activated, counted, begins, first, last, taken, slots, last_full):
    num_misses = 0
    for row in range(layers.size):
        now = first + row
        if begins[row]:
            last[:] = now - 1
        of_layer = last[layers[row]]
        for offsets, values in activated:
            for expert in values[offsets[row] : offsets[row + 1]]:
                start = of_layer[expert]
                of_layer[expert] = now
                if not counted[row]:
                    continue
                if start <= last_full:  # no slot was left somewhere since, or it was never used
                    num_misses += 1
                    continue
                for place in range(start, now):
                    taken[place] += 1
                    if taken[place] == slots:
                        last_full = max(last_full, place)
    return num_misses, last_full
