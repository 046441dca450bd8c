"""What a policy was to do and never did: enabled is not yet effective."""

from __future__ import annotations

import polars as pl

from policies.contract import Policy

_UNSPLIT = ("h2d", "cpu", "log")  # paths of misses with one side, or that of whoever made the log


def idle_mechanisms(policy: Policy, forwards: pl.DataFrame) -> list[str]:
    """One line for each mechanism of a policy that did nothing in a whole run, warm-up included.

    Prefetching is idle if nothing was issued or nothing landed; a split of misses, if all misses of decode forwards
    were served on one side; sizing by layer, if no slot ever moved; what lets transfers stay, if none ever did.

    Args:
        policy: that ran.
        forwards: its table, as `ForwardTable` makes it.
    """
    idle = []
    issued, landed = (int(forwards[name].sum()) for name in ("prefetch_issued", "prefetch_landed"))
    if policy.prefetches and not landed:
        idle.append(
            f"of {issued} prefetches none landed" if issued else "prefetching is on, and nothing was prefetched"
        )
    served = pl.col("num_transfers", "num_on_cpu").filter(pl.col("kind") != "prefill")
    copied, on_cpu = map(int, forwards.select(served.sum()).row(0))
    if policy.misses not in _UNSPLIT and copied + on_cpu and not (copied and on_cpu):
        side = "were copied" if copied else "ran on the CPU"
        idle.append(f"misses={policy.misses} never split: all {copied + on_cpu} misses of decode forwards {side}")
    if policy.resizes and not forwards["slots_moved"].sum():
        idle.append("slots follow use, and none ever moved between layers")
    if policy.admits_by and not forwards["num_admitted"].sum():
        idle.append(f"{policy.admits_by} never changed what is resident")
    return idle
