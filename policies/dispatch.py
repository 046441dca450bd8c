"""Split the misses of one layer between copies to the GPU and execution on the CPU, by load and expected reuse."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

import numpy as np

from policies.contract import PolicyError
from policies.jit import jit
from policies.knobs import require_choice
from policies.retention import by_priority, ids_of
from tracer.schema import Calibration

RHO_ROUNDS = ("half_up", "floor", "ceil")
_FLOOR, _CEIL = RHO_ROUNDS.index("floor"), RHO_ROUNDS.index("ceil")
TCOMPS = ("max", "sum")
MIN_GAIN_NS = 0.5


@dataclass
class DispatchKnobs:
    """What OLED-MoE's dispatch leaves to choose."""

    kappa: float = 1.0
    """What reuse is worth: lambda = kappa * activated experts * min(H2D time, CPU time of an average expert).

    It reads p * activated as the probability of reuse, and reuse as one cheaper miss saved; 0 looks at load only.
    Source: OLED-MoE, section 4.2, where lambda is "not a runtime parameter" and has no value.
    """
    lambda_ms: float | None = None
    """Worth of the whole priority of a layer, in ms, in place of what `kappa` gives. Ours: section 4.2 has no value."""
    max_swaps: int = 8
    """How often experts may change sides after the first split (section 4.4: "bounded swaps", without the bound)."""
    tcomp: str = "max"
    """Time of a split: `max` where copies and CPU run side by side, `sum` where they wait for each other.

    Ours: section 4.4 names what T_comp depends on, and has no formula.
    """
    t_gpu_ns: int = 0
    """Time of the kernel over the copied experts, added to the copies. Ours: section 4.4 does not name it."""
    allow_move: bool = False
    """Let one expert change sides alone, so that the number of copies leaves its share by up to `drift`.

    Section 4.4 has swaps "without moving the partition far from the hardware-aware split".
    """
    drift: int = 1
    """How many copies more or less than its share `allow_move` permits; without it, none. Ours: "far" has no value."""
    rho_round: str = "half_up"
    """Rounding of the share of copies to whole experts: `half_up`, `floor` or `ceil`. Ours: section 4.4 has
    "approximately"."""

    def __post_init__(self) -> None:
        for name in ("kappa", "lambda_ms", "max_swaps", "t_gpu_ns", "drift"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise PolicyError(f"{name} is {value}: must be a number of at least 0")
        require_choice("tcomp", self.tcomp, TCOMPS)
        require_choice("rho_round", self.rho_round, RHO_ROUNDS)


class DispatchParams(NamedTuple):
    """What a split depends on beyond the layer itself."""

    kappa: float
    lambda_ns: float  # negative: from kappa
    max_swaps: int
    tcomp_sum: bool
    t_gpu_ns: int
    drift: int  # 0: only one for one
    rho_round: int  # index into RHO_ROUNDS


def dispatch_params(knobs: DispatchKnobs) -> DispatchParams:
    """Parameters of the split for these knobs."""
    return DispatchParams(
        kappa=float(knobs.kappa),
        lambda_ns=-1.0 if knobs.lambda_ms is None else knobs.lambda_ms * 1e6,
        max_swaps=int(knobs.max_swaps),
        tcomp_sum=knobs.tcomp == "sum",
        t_gpu_ns=int(knobs.t_gpu_ns),
        drift=int(knobs.drift) if knobs.allow_move else 0,
        rho_round=RHO_ROUNDS.index(knobs.rho_round),
    )


def pooled_load(calibration: Calibration) -> tuple[int, int]:
    """Tokens and activated experts, each summed over the decode forwards, layers and requests of a calibration split.

    Raises:
        PolicyError: the split has no decode forward.
    """
    if calibration.num_activated == 0:
        raise PolicyError(
            f"calibration {calibration.name} has no decode forward, so the tokens of an average expert are unknown"
        )
    return int(calibration.load.sum()), calibration.num_activated


def tokens_per_expert(calibration: Calibration) -> float:
    """Tokens of an average activated expert in the decode forwards of a calibration split.

    Source: OLED-MoE, section 4.4.

    Differs: the paper's average is over missed experts, which depend on the policy and the cache size.

    Raises:
        PolicyError: the split has no decode forward.
    """
    num_tokens, num_activated = pooled_load(calibration)
    return num_tokens / num_activated


@jit
def gpu_ratio(nbar, estimates):
    """Rho, the share of the misses that goes to the GPU: cpu / (cpu + h2d) for an expert of `nbar` tokens.

    1 where neither way costs anything.

    Source: OLED-MoE, section 4.4; cpu = b0 + b1 * nbar stands for its nbar * tau, which is b0 = 0.
    """
    cpu_ns = estimates.cpu_b0_ns + estimates.cpu_b1_ns * nbar
    if cpu_ns + estimates.h2d_ns == 0:
        return 1.0
    return cpu_ns / (cpu_ns + estimates.h2d_ns)


@jit
def gpu_share(rho_round, nbar, num_missed, estimates):
    """How many of the misses go to the GPU: rho of them, to a whole number."""
    share = gpu_ratio(nbar, estimates) * num_missed
    if rho_round == _FLOOR:
        count = floor(share)
    elif rho_round == _CEIL:
        count = ceil(share)
    else:
        count = floor(share + 0.5)
    return min(max(count, 0), num_missed)


@jit
def reuse_worth(params, nbar, num_activated, estimates):
    """Lambda, ns: what sending the whole priority of a layer to the GPU is worth."""
    if params.lambda_ns >= 0:
        return params.lambda_ns
    cpu_ns = estimates.cpu_b0_ns + estimates.cpu_b1_ns * nbar
    return params.kappa * num_activated * min(float(estimates.h2d_ns), cpu_ns)


@jit
def split_at(params, nbar, priority, load, missed, num_activated, estimates):
    """Split the misses of one layer between copies to the GPU and execution on the CPU.

    The share rho of the misses that promise most reuse goes to the GPU; then experts change sides, two at a time,
    the best exchange first, while that lowers J = time - lambda * sum of the copied priorities by more than half a
    ns. Equal changes of J: the higher priority sum, then the lower id that enters, then the lower id that leaves.

    Source: OLED-MoE, section 4.4.

    Args:
        params: DispatchParams.
        nbar: tokens of an average expert.
        priority: [E] float64, expected reuse.
        load: [E] int64, tokens routed to each expert.
        missed: [E] bool.
        num_activated: experts activated in this layer.
        estimates: Estimates, whole ns.

    Returns:
        Transfers in issue order (priority descending, then id) and CPU experts ascending: int64.
    """
    ids = by_priority(missed, priority)
    num_missed = ids.size
    num_gpu = gpu_share(params.rho_round, nbar, num_missed, estimates)
    on_gpu = np.zeros(num_missed + 1, np.bool_)  # the last entry is for nobody
    for entry in range(num_gpu):
        on_gpu[entry] = True
    if params.max_swaps > 0:
        worth = reuse_worth(params, nbar, num_activated, estimates)
        _refine(params, worth, ids, on_gpu, num_gpu, priority, load, estimates)
    return _sides(ids, on_gpu, missed)


@jit
def _refine(params, worth, ids, on_gpu, num_gpu, priority, load, estimates):
    # Entry `nobody` stands in where an expert changes sides alone. Copied experts of one load differ in priority only,
    # so for each load the one of lowest priority stands for all in the search, and ids are compared afterwards.
    nobody = ids.size
    names = np.empty(nobody + 1, np.int64)
    value = np.zeros(nobody + 1, np.float64)
    cost_ns = np.zeros(nobody + 1, np.int64)
    names[nobody] = -1
    cpu_ns = cost_ns[nobody]
    most = 0
    for entry in range(nobody):
        expert = ids[entry]
        names[entry], value[entry] = expert, priority[expert]
        cost_ns[entry] = estimates.cpu_b0_ns + estimates.cpu_b1_ns * load[expert]
        most = max(most, load[expert])
        if not on_gpu[entry]:
            cpu_ns += cost_ns[entry]
    num_copies = num_gpu
    alone = 1 if params.drift > 0 else 0
    lowest = np.empty(most + 1, np.int64)
    leaving = np.empty(most + 2, np.int64)
    for _ in range(params.max_swaps):
        split = (num_copies - num_gpu, num_copies, cpu_ns, split_ns(params, num_copies, cpu_ns, estimates))
        num_leaving = _lowest_of_each_load(ids, on_gpu, load, lowest, leaving)
        if alone:
            leaving[num_leaving] = nobody
            num_leaving += 1
        best_change, best_rise = -MIN_GAIN_NS, 0.0
        enters = leaves = -1
        for entry in range(nobody + alone):
            if on_gpu[entry]:
                continue
            for index in range(num_leaving):
                other = leaving[index]
                rise, change = _exchange(params, worth, entry, other, split, value, cost_ns, estimates)
                if change < best_change or (
                    enters >= 0
                    and change == best_change
                    and (rise > best_rise or (rise == best_rise and names[entry] < names[enters]))
                ):
                    best_change, best_rise, enters, leaves = change, rise, entry, other
        if enters < 0:
            return
        for other in range(nobody + alone):
            if other < nobody and not on_gpu[other]:
                continue
            rise, change = _exchange(params, worth, enters, other, split, value, cost_ns, estimates)
            if rise == best_rise and change == best_change and names[other] < names[leaves]:
                leaves = other
        num_copies += (enters < nobody) - (leaves < nobody)
        cpu_ns += cost_ns[leaves] - cost_ns[enters]
        if enters < nobody:
            on_gpu[enters] = True
        if leaves < nobody:
            on_gpu[leaves] = False


@jit
def _exchange(params, worth, enters, leaves, split, value, cost_ns, estimates):
    # By how much the sum of copied priorities, and J, rise when two entries change sides; J endlessly beyond the drift.
    drifted, num_copies, cpu_ns, now_ns = split
    nobody = value.size - 1
    more = int(enters < nobody) - int(leaves < nobody)
    rise = value[enters] - value[leaves]
    if more != 0 and abs(drifted + more) > params.drift:
        return rise, np.inf
    then_ns = split_ns(params, num_copies + more, cpu_ns - cost_ns[enters] + cost_ns[leaves], estimates)
    return rise, (then_ns - now_ns) - worth * rise


@jit
def split_ns(params, num_copies, cpu_ns, estimates):
    """What a split takes, whole ns: so many copies and what the CPU experts take together.

    Source: OLED-MoE, section 4.4 (compensation cost), which has no formula for it.
    """
    gpu_ns = num_copies * estimates.h2d_ns + params.t_gpu_ns
    return gpu_ns + cpu_ns if params.tcomp_sum else max(gpu_ns, cpu_ns)


@jit
def _lowest_of_each_load(ids, on_gpu, load, lowest, leaving):
    for index in range(lowest.size):
        lowest[index] = -1
    for entry in range(ids.size):
        if on_gpu[entry]:
            lowest[load[ids[entry]]] = entry
    count = 0
    for entry in lowest:
        if entry >= 0:
            leaving[count] = entry
            count += 1
    return count


@jit
def _sides(ids, on_gpu, missed):
    num_copies = 0
    for entry in range(ids.size):
        num_copies += on_gpu[entry]
    transfers = np.empty(num_copies, np.int64)
    left = missed.copy()
    count = 0
    for entry in range(ids.size):
        if on_gpu[entry]:
            transfers[count] = ids[entry]
            left[ids[entry]] = False
            count += 1
    return transfers, ids_of(left)
