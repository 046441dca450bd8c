"""Costs by the timing rules, from what designed layers took in the executor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from replay.calibrate_log import Observed
from replay.calibrate_plans import Design, PassSize
from replay.fits import Rate, rate_of
from replay.repeats import Repeated

_MANY = 4  # experts of a batch that copies run beside


class Slowdowns(NamedTuple):
    """How much longer copies and CPU batches take while both run."""

    h2d: float
    cpu: float


class LayerCosts(NamedTuple):
    """What a layer and a forward are charged; together they give each design's time again, up to `errors`.

    The rules begin copies, kernels and the CPU's batch at one moment, t2. Here that is the start of the first copy,
    and what comes before it beyond the layer's own part and the decision is `gate_sync_ns`.
    """

    layer_ns: Mapping[PassSize, float]  # measured, where designs are
    gate_sync_ns: float  # from the end of the layer's own part to t2, without the decision
    first_copy_ns: float  # part of it: from the plan to the first copy
    kernel: Rate  # by experts and rows, over hits and over chunks: launch, kernel and the sum over experts
    hits: Rate  # of hits alone, from the plan to the kernel's end: what an expert more takes the GPU is its first rate
    copy: Repeated  # one of a plan's copies, with what lies between them
    cpu: Rate  # by experts and rows
    roundtrip_ns: float  # from the CPU's results until the layer has ended and the host is as far ahead as elsewhere
    after_cpu_ns: float  # part of it: what the next layer's plan comes later
    slowdowns: Slowdowns
    tail: Repeated
    decide_ns: float  # of the designs' own policy
    errors: Mapping[Design, float]  # of each, (charged - measured) / measured

    @property
    def mean_error(self) -> float:
        """Mean of the errors, whatever their sign."""
        return _mean(abs(error) for error in self.errors.values())

    @property
    def max_error(self) -> float:
        """Largest of them."""
        return max(abs(error) for error in self.errors.values())


def layer_costs(
    observed: Mapping[Design, Observed],
    tail: Repeated,
    layer_ns: Mapping[PassSize, float],
    decide_ns: float,
    top_k: int,
    transfer_chunk: int,
) -> LayerCosts:
    """Costs that add up to what was observed.

    Args:
        observed: of layers with hits alone, with more transfers than a chunk, with CPU experts, and with both.
        tail: of a forward beside its layers.
        layer_ns: of the layer's part without routed experts, by tokens and committed positions.
        decide_ns: of the decisions that were observed.
        top_k: experts of a token.
        transfer_chunk: experts of a chunk.

    Raises:
        ProfileError: too few designs of one kind.
    """
    only_hits = {d: o for d, o in observed.items() if not d.num_transfers and not d.num_on_cpu}
    copied = {d: o for d, o in observed.items() if d.num_transfers and not d.num_on_cpu}
    computed = {d: o for d, o in observed.items() if d.num_on_cpu and not d.num_transfers}
    first_copy_ns = max(0.0, _mean(o.first_copy.mean_ns for o in copied.values() if o.first_copy))
    # the host is ahead of the GPU in layers with copies: where it is not, kernels and roundtrip carry that
    waits = [_wait(o, layer_ns[d.pass_size], decide_ns) for d, o in copied.items()]
    gate_sync_ns = max(0.0, _mean(waits) + first_copy_ns)

    def after_t2(design: Design) -> float:
        return observed[design].total.mean_ns - layer_ns[design.pass_size] - gate_sync_ns - decide_ns

    kernels = {d.last_chunk(top_k, transfer_chunk): o.after_copies for d, o in copied.items() if o.after_copies}
    kernels |= {(d.num_hits, d.hit_rows(top_k)): _at(after_t2(d), o.total) for d, o in only_hits.items()}
    cpu_times = {
        (d.num_on_cpu, d.num_on_cpu * d.cpu_load): _at(o.cpu.mean_ns - first_copy_ns, o.cpu)
        for d, o in computed.items()
        if o.cpu
    }
    last = [d for d, o in computed.items() if o.ends_by_cpu]
    cpu = rate_of(cpu_times)
    costs = LayerCosts(
        layer_ns=layer_ns,
        gate_sync_ns=gate_sync_ns,
        first_copy_ns=first_copy_ns,
        kernel=rate_of(kernels),
        hits=rate_of({(d.num_hits, d.hit_rows(top_k)): o.hits for d, o in only_hits.items()}),
        copy=demand_copy(observed),
        cpu=cpu,
        roundtrip_ns=max(0.0, _mean(after_t2(d) - cpu_times[_cpu_size(d)].mean_ns for d in last)),
        after_cpu_ns=max(0.0, _mean(_wait(observed[d], layer_ns[d.pass_size], decide_ns) for d in last) - _mean(waits)),
        slowdowns=_slowdowns(observed, cpu, first_copy_ns),
        tail=tail,
        decide_ns=decide_ns,
        errors={},
    )
    costs = _without_bias(costs, observed, top_k, transfer_chunk)
    return costs._replace(errors=_errors(costs, observed, top_k, transfer_chunk))


def _errors(
    costs: LayerCosts, observed: Mapping[Design, Observed], top_k: int, transfer_chunk: int
) -> dict[Design, float]:
    return {d: charged_ns(costs, d, top_k, transfer_chunk) / o.total.mean_ns - 1 for d, o in observed.items()}


def _without_bias(
    costs: LayerCosts, observed: Mapping[Design, Observed], top_k: int, transfer_chunk: int
) -> LayerCosts:
    """The same with that slowdown of the CPU by which layers with copies and CPU experts are right on average.

    It stays within a tenth of what batches took: it is not to make up for what else may be off.
    """
    both = _large(_with_both(observed))
    if not both:
        return costs
    found = max(1.0, costs.slowdowns.cpu)
    low, high = max(1.0, 0.9 * found), 1.1 * found
    for _ in range(50):
        middle = (low + high) / 2
        tried = costs._replace(slowdowns=costs.slowdowns._replace(cpu=middle))
        too_much = _mean(_errors(tried, both, top_k, transfer_chunk).values()) > 0
        low, high = (low, middle) if too_much else (middle, high)
    return costs._replace(slowdowns=costs.slowdowns._replace(cpu=low))


def demand_copy(observed: Mapping[Design, Observed]) -> Repeated:
    """One of a plan's copies with what lies between them, over all designs without CPU experts."""
    found = [(o.copies, d.num_transfers) for d, o in observed.items() if o.copies and not d.num_on_cpu]
    shares = [(copies.median_ns / count, copies.spread, copies.mean_ns / count) for copies, count in found]
    return Repeated(*(_mean(values) for values in zip(*shares, strict=True)))


def charged_ns(costs: LayerCosts, design: Design, top_k: int, transfer_chunk: int) -> float:
    """Time of a designed layer by the rules."""
    h2d, slower = (max(1.0, factor) for factor in costs.slowdowns)
    batch_ns = 0.0
    if design.num_on_cpu:
        batch_ns = costs.cpu.ns(*_cpu_size(design)) * (slower if design.num_transfers else 1)
    gpu_ns = costs.kernel.ns(design.num_hits, design.hit_rows(top_k)) if design.num_hits else 0.0
    landed_ns = 0.0
    for _ in range(design.num_transfers):
        landed_ns += costs.copy.mean_ns * (h2d if landed_ns < batch_ns else 1)
    if design.num_transfers:  # earlier chunks run while copies go on
        gpu_ns = max(gpu_ns, landed_ns) + costs.kernel.ns(*design.last_chunk(top_k, transfer_chunk))
    cpu_ns = batch_ns + costs.roundtrip_ns if design.num_on_cpu else 0.0
    return costs.layer_ns[design.pass_size] + costs.gate_sync_ns + costs.decide_ns + max(gpu_ns, cpu_ns)


def _slowdowns(observed: Mapping[Design, Observed], cpu: Rate, first_copy_ns: float) -> Slowdowns:
    """What copies and batches cost each other: means over the designs that have both, each against it alone."""
    both = _with_both(observed)
    alone_ns = _mean(o.copy.mean_ns for d, o in observed.items() if o.copy and not d.num_on_cpu)
    beside_ns = _mean(o.copy.mean_ns for o in both.values() if o.copy)
    h2d = beside_ns / alone_ns if alone_ns > 0 and beside_ns > 0 else 1.0
    ratios = [
        (o.cpu.mean_ns - first_copy_ns) / max(1.0, cpu.ns(*_cpu_size(d))) for d, o in _large(both).items() if o.cpu
    ]
    return Slowdowns(h2d, _mean(ratios) if ratios else 1.0)


def _with_both(observed: Mapping[Design, Observed]) -> dict[Design, Observed]:
    return {d: o for d, o in observed.items() if d.num_on_cpu and d.num_transfers}


def _large(both: Mapping[Design, Observed]) -> dict[Design, Observed]:
    """Without batches of few experts where there are larger ones: they end before many copies have begun."""
    least = min(_MANY, max((d.num_on_cpu for d in both), default=0))
    return {d: o for d, o in both.items() if d.num_on_cpu >= least}


def _cpu_size(design: Design) -> tuple[int, int]:
    return design.num_on_cpu, design.num_on_cpu * design.cpu_load


def _wait(observed: Observed, layer_ns: float, decide_ns: float) -> float:
    return observed.before.median_ns - layer_ns - decide_ns


def _at(time_ns: float, like: Repeated) -> Repeated:
    """A time that was computed from another one; above 0, as noise on an idle part could take it there."""
    time_ns = max(1.0, time_ns)
    return Repeated(time_ns, like.spread, time_ns)


def _mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0
