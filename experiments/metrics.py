"""Numbers from the table of forwards: one function for each metric, the same for simulated and replayed runs.

Every function takes the table that `experiments.results.ForwardTable` makes, looks only at forwards that are not
warm-up (TTFT: at requests that are not), and returns None where nothing was counted (0/0). Cache metrics look at decode
forwards only: denoise, idle, commit and edit. Ratios are sum over sum, not means of ratios, except where the docstring
says so. What needs no more than sums also takes these alone, as `sums` makes them of a table, so that many metrics
read it once; where each sum is an array, the metric is one, with NaN for 0/0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from polars import selectors

from policies.log import PREFETCH_COUNTS

Sums = Mapping[str, Any]  # by column: a number, or an array of many sums of the same column
Counted = pl.DataFrame | Sums  # a table of forwards, or sums over its counted decode forwards
_DECODE = ~pl.col("warmup") & (pl.col("kind") != "prefill")


def counted_requests(forwards: pl.DataFrame) -> pl.DataFrame:
    """One row for each forward and request that is not warm-up, those included that share it with one that is."""
    lists = ["requests", "accepted", "request_warmup"]
    return forwards.select("start_ns", "end_ns", *lists).explode(lists).filter(~pl.col("request_warmup"))


def decode(forwards: pl.DataFrame) -> pl.DataFrame:
    """Counted forwards that are not prefill."""
    return forwards.filter(_DECODE)


def sums(forwards: pl.DataFrame) -> dict[str, float]:
    """Sums over counted decode forwards of every column of numbers, and how many forwards there are."""
    # one column after another: a filtered table would be another one as large
    numbers = forwards.select(selectors.numeric().filter(_DECODE).sum(), _DECODE.sum().alias("num_decode_forwards"))
    return numbers.row(0, named=True)


def _ratio(numerator: Any, denominator: Any) -> Any:
    if isinstance(denominator, np.ndarray):
        return np.divide(numerator, denominator, out=np.full(denominator.shape, np.nan), where=denominator != 0)
    return numerator / denominator if denominator else None


def _sum(forwards: Counted, column: str) -> Any:
    return (sums(forwards) if isinstance(forwards, pl.DataFrame) else forwards)[column]


def tpot_ms(forwards: Counted) -> float | None:
    """Time per output token: decode time over accepted masked positions."""
    return _ratio(_sum(forwards, "time_ns") / 1e6, _sum(forwards, "num_accepted"))


def ttft_ms(forwards: pl.DataFrame) -> float | None:
    """Time to first token: from the start of a request's first forward to the end of its first that accepts.

    A mean over counted requests, whoever else is in these forwards; one that never accepts is left out.
    """
    rows = counted_requests(forwards)
    first_start = rows.group_by("requests").agg(pl.col("start_ns").min())
    first_end = rows.filter(pl.col("accepted") > 0).group_by("requests").agg(pl.col("end_ns").min())
    times = first_start.join(first_end, on="requests")
    return None if times.is_empty() else float((times["end_ns"] - times["start_ns"]).mean()) / 1e6  # type: ignore[arg-type]


def forward_ms(forwards: pl.DataFrame, quantile: float) -> float | None:
    """Quantile of the time of one decode forward."""
    value = decode(forwards.select("warmup", "kind", "time_ns"))["time_ns"].quantile(quantile, "linear")
    return None if value is None else value / 1e6


def tokens_per_forward(forwards: Counted) -> float | None:
    """Accepted masked positions over decode forwards."""
    return _ratio(_sum(forwards, "num_accepted"), num_decode_forwards(forwards))


def utilization(forwards: Counted) -> float | None:
    """Expert cache utilization: share of a layer's slots that hold activated experts at the gate.

    Unweighted mean over executions of layers that have slots; None for global pools, which have no slots of a layer.

    Source:
        OLED-MoE, section 5.1.
    """
    return _ratio(_sum(forwards, "utilization_sum"), _sum(forwards, "utilization_layers"))


def utilization_slot_weighted(forwards: Counted) -> float | None:
    """Hits over slots, sum over sum; of a global pool each layer execution is given its even share of the slots."""
    return _ratio(_sum(forwards, "num_hits"), _sum(forwards, "num_slots"))


def hit_ratio(forwards: Counted) -> float | None:
    """Activated experts that are resident at the gate, over activated experts."""
    return _ratio(_sum(forwards, "num_hits"), _sum(forwards, "num_activated"))


def token_hit_ratio(forwards: Counted) -> float | None:
    """Routed tokens whose expert is resident at the gate, over routed tokens."""
    return _ratio(_sum(forwards, "hit_tokens"), _sum(forwards, "routed_tokens"))


def effective_transfer_ratio(forwards: Counted) -> float | None:
    """Transferred experts that are retained and activated in their layer's next execution, over transferred experts.

    Source:
        OLED-MoE, section 5.3.
    """
    return _ratio(_sum(forwards, "transfers_effective"), _sum(forwards, "transfers_judged"))


def h2d_bytes(forwards: Counted, expert_bytes: int) -> int:
    """Bytes copied to the GPU during decode forwards; a promoted prefetch is copied once."""
    return _sum(forwards, "num_copies") * expert_bytes


def exposed_stall_ms(forwards: Counted) -> float:
    """Time of layers beyond non-expert part, gate synchronisation, decision and kernel over the hits; a sum."""
    return _sum(forwards, "exposed_stall_ns") / 1e6


def misses_copied_ratio(forwards: Counted) -> float | None:
    """Missed experts that are copied to the GPU, over missed experts."""
    return _ratio(_sum(forwards, "num_transfers"), _sum(forwards, "num_transfers") + _sum(forwards, "num_on_cpu"))


def misses_on_cpu_ratio(forwards: Counted) -> float | None:
    """Missed experts that run on the CPU, over missed experts."""
    return _ratio(_sum(forwards, "num_on_cpu"), _sum(forwards, "num_transfers") + _sum(forwards, "num_on_cpu"))


def num_prefetches(forwards: Counted, fate: str) -> int:
    """Prefetches of this fate, one of PREFETCH_COUNTS, each in the forward in which it came to that."""
    return _sum(forwards, fate)


def policy_ms(forwards: Counted) -> float:
    """Charged decision time; a sum."""
    return _sum(forwards, "policy_ns") / 1e6


def link_busy_ratio(forwards: Counted) -> float | None:
    """Share of decode time in which a copy is under way, each copy counted where it lands."""
    return _ratio(_sum(forwards, "link_busy_ns"), _sum(forwards, "time_ns"))


def cpu_busy_ratio(forwards: Counted) -> float | None:
    """Share of decode time in which CPU experts run or their results return."""
    return _ratio(_sum(forwards, "cpu_busy_ns"), _sum(forwards, "time_ns"))


def exposed_stall_ms_per_token(forwards: Counted) -> float | None:
    """The part of the time per output token that is exposed stall."""
    return _ratio(exposed_stall_ms(forwards), num_accepted(forwards))


def num_requests(forwards: pl.DataFrame) -> int:
    """Requests counted."""
    return counted_requests(forwards)["requests"].n_unique()


def num_decode_forwards(forwards: Counted) -> int:
    """Decode forwards counted."""
    return _sum(forwards, "num_decode_forwards")


def num_accepted(forwards: Counted) -> int:
    """Masked positions accepted."""
    return _sum(forwards, "num_accepted")


METRICS = (
    tpot_ms,
    utilization,
    utilization_slot_weighted,
    hit_ratio,
    token_hit_ratio,
    effective_transfer_ratio,
    misses_copied_ratio,
    misses_on_cpu_ratio,
    exposed_stall_ms,
    exposed_stall_ms_per_token,
    tokens_per_forward,
    num_decode_forwards,
    num_accepted,
    policy_ms,
    link_busy_ratio,
    cpu_busy_ratio,
)  # of sums alone


def measure(forwards: pl.DataFrame, expert_bytes: int) -> dict[str, Any]:
    """Every metric of a run, by name."""
    of_run = sums(forwards)
    return {
        **{metric.__name__: metric(of_run) for metric in METRICS},
        "ttft_ms": ttft_ms(forwards),
        "num_requests": num_requests(forwards),
        "h2d_bytes": h2d_bytes(of_run, expert_bytes),
        **{fate: num_prefetches(of_run, fate) for fate in PREFETCH_COUNTS},
        **{f"forward_ms_p{percent}": forward_ms(forwards, percent / 100) for percent in (50, 90, 99)},
    }
