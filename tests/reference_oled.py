"""OLED-MoE once more in plain Python, with sets, fractions and exhaustive loops: oracles for its tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from policies.contract import Estimates
from policies.steps import Steps, step_at
from tracer.schema import ForwardKind, ModelShape, Pass


def priorities(
    expert_ids: Sequence[Sequence[int]],
    gates: Sequence[Sequence[float]],
    confidence: Sequence[float],
    signal: str = "confidence",
) -> dict[int, float]:
    """p of every activated expert."""
    sums: dict[int, float] = {}
    for ids, shares, sure in zip(expert_ids, gates, confidence, strict=True):
        for expert, gate in zip(ids, shares, strict=True):
            value = {"load": 1.0, "gate": gate, "confidence": gate * sure}[signal]
            sums[expert] = sums.get(expert, 0.0) + value
    total = 0.0
    for ids, shares, sure in zip(expert_ids, gates, confidence, strict=True):
        for _, gate in zip(ids, shares, strict=True):
            total += {"load": 1.0, "gate": gate, "confidence": gate * sure}[signal]
    if total == 0:
        return priorities(expert_ids, gates, [1.0] * len(confidence), signal)
    return {expert: value / total for expert, value in sums.items()}


@dataclass
class Split:
    """One layer's misses, and how they may be shared."""

    p: Mapping[int, float]
    load: Mapping[int, int]
    estimates: Estimates
    worth: float  # lambda, ns
    tcomp: str = "max"
    t_gpu_ns: int = 0

    def time(self, on_gpu: set[int]) -> int:
        gpu = len(on_gpu) * self.estimates.h2d_ns + self.t_gpu_ns
        cpu = sum(
            self.estimates.cpu_b0_ns + self.estimates.cpu_b1_ns * self.load[e] for e in self.load if e not in on_gpu
        )
        return gpu + cpu if self.tcomp == "sum" else max(gpu, cpu)

    def start(self, nbar: float) -> set[int]:
        cpu = self.estimates.cpu_b0_ns + self.estimates.cpu_b1_ns * nbar
        count = math.floor(cpu / (cpu + self.estimates.h2d_ns) * len(self.load) + 0.5)
        return set(sorted(self.load, key=lambda e: (-self.p[e], e))[:count])

    def refine(self, on_gpu: set[int], max_swaps: int = 8, drift: int = 0) -> set[int]:
        """Try every single exchange, take the best, and again; with `drift`, an expert may also go alone (None)."""
        first = len(on_gpu)
        for _ in range(max_swaps):
            alone = [None] if drift else []
            ranked = []
            for enters in [*sorted(self.load.keys() - on_gpu), *alone]:
                for leaves in [*sorted(on_gpu), *alone]:
                    then = (on_gpu | {enters}) - {leaves} - {None}
                    if len(then) != len(on_gpu) and abs(len(then) - first) > drift:
                        continue
                    rise = self.p.get(enters, 0.0) - self.p.get(leaves, 0.0)
                    change = (self.time(then) - self.time(on_gpu)) - self.worth * rise
                    names = [-1 if e is None else e for e in (enters, leaves)]
                    ranked.append((change, -rise, names, then))
            if not ranked or min(ranked)[0] >= -0.5:
                break
            on_gpu = min(ranked)[3]
        return on_gpu

    def issue_order(self, on_gpu: Iterable[int]) -> list[int]:
        return sorted(on_gpu, key=lambda e: (-self.p[e], e))


def quotas(weights: Sequence[int], total: int, lowest: int, highest: int) -> list[Fraction]:
    """The water level in exact fractions, by looking between which two bounds it lies."""

    def clipped(level: Fraction) -> list[Fraction]:
        return [min(max(level * w, Fraction(lowest)), Fraction(highest)) for w in weights]

    levels = sorted({Fraction(0), *(Fraction(bound, w) for w in weights if w for bound in (lowest, highest))})
    if sum(clipped(levels[-1])) < total:
        unweighted = weights.count(0)
        share = Fraction(total - highest * (len(weights) - unweighted), unweighted)
        return [Fraction(highest) if w else share for w in weights]
    above = next(level for level in levels if sum(clipped(level)) >= total)
    below = max((level for level in levels if level < above), default=above)
    if sum(clipped(above)) == total or below == above:
        return clipped(above)
    step = (total - sum(clipped(below))) / (sum(clipped(above)) - sum(clipped(below)))
    return clipped(below + step * (above - below))


def shares(weights: Sequence[int], total: int, lowest: int, highest: int) -> list[int]:
    """Floors of the quotas; the largest remainders, lower layers first, get the rest."""
    exact = quotas(weights, total, lowest, highest)
    slots = [math.floor(q) for q in exact]
    order = sorted(range(len(exact)), key=lambda layer: (slots[layer] - exact[layer], layer))
    for layer in order[: total - sum(slots)]:
        slots[layer] += 1
    return slots


def whole(weights: Sequence[float]) -> list[int]:
    """Weights as whole multiples of 2**-30 of the power of two above the largest."""
    exponent = math.frexp(max(weights))[1]
    return [math.floor(Fraction(w) * Fraction(2) ** (30 - exponent) + Fraction(1, 2)) for w in weights]


@dataclass
class PlainOled:
    """All of OLED-MoE with the default of every knob that is not a field here."""

    shape: ModelShape
    slots_per_layer: int
    estimates: Estimates
    nbar: float
    signal: str = "confidence"
    layer_adapt: bool = True
    coop: bool = True
    resize_every: int = 5
    c_min: int | None = None
    tie: str = "recent"
    conf_mode: str = "lag1"
    online: str = ""  # activated or missed
    average: tuple[int, int] = (0, 0)  # tokens and experts behind nbar, for online
    lazy: bool = False
    prefill_updates: bool = False

    def __post_init__(self) -> None:
        layers = range(self.shape.num_layers)
        self.capacity = [self.slots_per_layer for _ in layers]
        self.target = list(self.capacity)
        self.resident: list[set[int]] = [set() for _ in layers]
        self.p: list[dict[int, float]] = [{} for _ in layers]
        self.last: list[dict[int, int]] = [{} for _ in layers]
        self.touched: list[dict[int, int]] = [{} for _ in layers]
        self.ratios: list[float] = []
        self.utils: list[float] = []
        self.time = self.num_decoded = 0

    def rank(self, layer: int, expert: int) -> tuple[float, float, int]:
        if self.signal == "order":
            return (0.0, -self.touched[layer].get(expert, 0), expert)
        last = self.last[layer].get(expert, 0) if self.tie == "recent" else 0
        return (-self.p[layer].get(expert, 0.0), -last, expert)

    def decide(self, step: Any) -> tuple[Any, ...]:
        layer = step.layer
        ids, gates, confidence = step.expert_ids.tolist(), step.gates.tolist(), step.confidence.tolist()
        load = {e: n for e, n in enumerate(step.load.tolist()) if n}
        resident = self.resident[layer]
        missed = {e: n for e, n in load.items() if e not in resident}
        reuse = priorities(ids, gates, confidence)
        self.p[layer] = {} if self.signal == "order" else priorities(ids, gates, confidence, self.signal)
        for expert in load:
            self.last[layer][expert] = step.forward + 1
        for expert in [*sorted(load.keys() & resident), *sorted(missed)]:
            self.time += 1
            self.touched[layer][expert] = self.time
        split = Split(reuse, missed, self.estimates, worth=0.0)
        on_gpu = set(missed)
        if self.coop and step.kind != ForwardKind.PREFILL:
            cpu = self.estimates.cpu_b0_ns + self.estimates.cpu_b1_ns * self.nbar
            split.worth = 1.0 * len(load) * min(float(self.estimates.h2d_ns), cpu)
            on_gpu = split.refine(split.start(self.nbar))
            if self.online:
                joining = missed if self.online == "missed" else load
                self.average = (self.average[0] + sum(joining.values()), self.average[1] + len(joining))
                self.nbar = self.average[0] / self.average[1]
        transfers = split.issue_order(on_gpu) if self.coop or self.signal != "order" else sorted(on_gpu)
        ranked = sorted(resident | on_gpu, key=lambda e: self.rank(layer, e))
        retained = ranked[: min(self.capacity[layer], self.target[layer])]
        answer = (
            step.forward,
            layer,
            self.capacity[layer],
            sorted(resident),
            transfers,
            sorted(missed.keys() - on_gpu),
            sorted(retained),
        )
        self.seen[layer] = (len(load), len(load) - len(missed))
        self.resident[layer] = set(retained)
        return answer

    def after(self, forward: Any) -> None:
        is_decode = forward.kind != ForwardKind.PREFILL
        if not self.layer_adapt:
            return
        if is_decode or self.prefill_updates:
            self.observe()
        utilized, self.capacity = self.capacity, list(self.target)
        self.num_decoded += is_decode
        weights = [a * u for a, u in zip(self.ratios, self.utils, strict=True)]
        if not is_decode or self.num_decoded % self.resize_every or not any(weights):
            return
        lowest = self.shape.top_k if self.c_min is None else self.c_min
        self.target = shares(whole(weights), sum(utilized), lowest, self.shape.num_experts)
        if self.lazy:
            return
        self.capacity = list(self.target)
        for layer, size in enumerate(self.capacity):
            if self.conf_mode == "end_iter":
                confidence = forward.own_confidence.tolist()
                ids, gates = forward.expert_ids[layer].tolist(), forward.gates[layer].tolist()
                self.p[layer] = priorities(ids, gates, confidence)
            ranked = sorted(self.resident[layer], key=lambda e: self.rank(layer, e))
            self.resident[layer] = set(ranked[:size])

    def observe(self) -> None:
        ratios = [seen[0] / self.shape.num_experts for seen in self.seen]
        utils = [seen[1] / size for seen, size in zip(self.seen, self.capacity, strict=True)]
        if self.ratios:
            ratios = [1 / 3 * new + (1 - 1 / 3) * old for new, old in zip(ratios, self.ratios, strict=True)]
            utils = [1 / 3 * new + (1 - 1 / 3) * old for new, old in zip(utils, self.utils, strict=True)]
        self.ratios, self.utils = ratios, utils

    def run(self, passes: Iterable[Pass]) -> Iterator[tuple[Any, ...]]:
        steps = Steps(self.shape)
        for pass_ in passes:
            forward = steps.read(pass_)
            self.seen: list[tuple[int, int]] = [(0, 0)] * self.shape.num_layers
            for layer in range(self.shape.num_layers):
                step = step_at(forward, layer)
                if self.conf_mode == "same_iter_oracle":
                    step = step._replace(confidence=forward.own_confidence)
                yield self.decide(step)
            self.after(forward)
