"""Copy misses through the staging slots, and admit none of them."""

from __future__ import annotations

from policies.jit import jit
from policies.retention import ids_of, missed_of


@jit
def stream(step, view):
    """Copy every miss and leave the residents as they are; a miss whose prefetch is in progress has its slot and stays.

    Args:
        step: the layer's Step.
        view: View at its gate, each layer having its own pool.

    Returns:
        Transfers ascending, and what is retained, [E] bool.
    """
    resident, in_flight = view.resident[step.layer], view.in_flight[step.layer]
    transfers = ids_of(missed_of(step.load, resident))
    retained = resident.copy()
    for expert in transfers:
        retained[expert] = in_flight[expert]
    return transfers, retained
