"""OLED-MoE: retain the experts that confident tokens chose, size layers by use, and share misses with the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies import lru
from policies.capacity import apportion, smooth
from policies.confidence import CONF_DECODED, NO_READINGS, Readings, confidence_at, read_all
from policies.contract import Context, Estimates, Policy, PolicyError, plain_plan
from policies.dispatch import DispatchKnobs, DispatchParams, by_priority, dispatch_params, pooled_load, split_at
from policies.driver import drive
from policies.jit import jit
from policies.knobs import require_choice
from policies.lru import touch
from policies.priority import CONFIDENCE, ORDER, SIGNALS, priority
from policies.retention import best, equal_capacity, ids_of, missed_of, nobody_resident, with_transfers
from tracer.schema import ForwardKind, ModelShape, Pass

CONF_MODES = ("lag1", "end_iter", "same_iter_oracle")
WINDOW = 5  # decode forwards, of smooth=window5
_PREFILL = int(ForwardKind.PREFILL)


@dataclass
class Knobs(DispatchKnobs):
    """What can be chosen: the three parts, and what the paper leaves open in each."""

    priority: bool = True
    """Part 1: retain by `priority_signal`; without it by LRU order (section 4.3)."""
    layer_adapt: bool = True
    """Part 2: every layer's slots follow its activation ratio times its utilization (section 4.3)."""
    coop: bool = True
    """Part 3: split misses between copies and the CPU (section 4.4); without it every miss is copied."""
    misses: str | None = None
    """The miss path under the name it has in other policies: `oled` is `coop`, `h2d` switches `coop` off."""

    priority_signal: str = "confidence"
    """What retention ranks by: `order`, the LRU order; `load`, tokens; `gate`, sums of gates; or `confidence`, sums of
    gate times confidence, which is the paper's. The steps in between show what each signal adds."""
    lru_order: str = "hits_first"
    """Order in which the experts of one forward are touched where LRU order counts; see the knob of `lru`."""
    tie: str = "recent"
    """Equal priorities: `recent`, the last activated stays, then the lower id; `id`, the lower id. No source."""

    conf_mode: str = "lag1"
    """Whose confidence counts at a gate, as that of a forward exists only after its last layer (section 4.3 uses it
    before): `lag1`, the previous forward's; `end_iter`, the same, but a layer that shrinks after the forward is ranked
    anew by the forward's own; `same_iter_oracle`, the forward's own, which no running system has."""
    conf_decoded: str = "prob"
    """Confidence of positions decoded before: `prob`, the probability of the token that stands there; `one`; or
    `at_accept`, the probability with which it was accepted. The last two are read from the trace of the run."""
    conf_flip_scale: float = 1.0
    """Factor on the confidence of positions accepted in the forward that it is of: their input changes next. Other
    values than 1 are read from the trace of the run."""
    end_iter_tokens: int = 4096
    """Most tokens of a decode forward that `conf_mode=end_iter` keeps the routing of."""
    gate_kind: str = "normalised"
    """Gates as the model weighs experts by: `normalised`. `raw`, the sigmoid before that, is not in a Step."""

    nbar: str = "calibration"
    """Tokens of an average expert: of those activated in the `calibration` split, or of those `missed` by `lru` there
    with the same slots (section 4.4 has missed experts, "profiled")."""
    nbar_online: bool = False
    """Go on averaging over the run: its own activated, or missed, experts join those of the calibration split."""

    ema: float = 1 / 3
    """Weight of the newest decode forward in the smoothed statistics: a span of five. Section 4.3: "smoothed"."""
    smooth: str = "ema"
    """`ema`, or `window5`: the mean of the last five decode forwards."""
    c_min: int | None = None
    """Fewest slots of a layer under `layer_adapt`; None: what one token activates. No source."""
    resize_every: int = 5
    """Decode forwards between two divisions of the slots (section 4.3: "every five denoising iterations")."""
    resize: str = "boundary"
    """When a layer shrinks: `boundary`, at once after the forward; `lazy`, when it next retains, with the priorities
    of that moment, and others grow a forward later."""
    prefill_updates: bool = False
    """Let prefill forwards join the smoothed statistics. No source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.misses == "cpu":
            raise PolicyError("misses=cpu needs residents at the start, and oled starts empty: allowed are oled, h2d")
        if self.misses is not None:
            require_choice("misses", self.misses, ("oled", "h2d"))
            if self.misses == "oled" and not self.coop:
                raise PolicyError("misses=oled contradicts coop=false: leave one of them out")
            self.coop = self.misses == "oled"
        require_choice("priority_signal", self.priority_signal, SIGNALS)
        require_choice("lru_order", self.lru_order, lru.ORDERS)
        require_choice("tie", self.tie, ("recent", "id"))
        require_choice("conf_mode", self.conf_mode, CONF_MODES)
        require_choice("conf_decoded", self.conf_decoded, CONF_DECODED)
        if self.gate_kind == "raw":
            raise PolicyError(
                "gate_kind=raw needs the table signals, which a Step does not carry: allowed is normalised"
            )
        require_choice("gate_kind", self.gate_kind, ("normalised",))
        require_choice("nbar", self.nbar, ("calibration", "missed"))
        require_choice("smooth", self.smooth, ("ema", "window5"))
        require_choice("resize", self.resize, ("boundary", "lazy"))
        if self.conf_mode == "end_iter" and self.reads_trace:
            raise PolicyError(
                "conf_mode=end_iter has the Step's confidence only: it needs conf_decoded=prob, conf_flip_scale=1"
            )
        if not 0 <= self.conf_flip_scale < float("inf"):
            raise PolicyError(f"conf_flip_scale is {self.conf_flip_scale}: must be a number of at least 0")
        if not 0 < self.ema <= 1:
            raise PolicyError(f"ema is {self.ema}: must be above 0 and at most 1")
        for name in ("resize_every", "end_iter_tokens"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} is {getattr(self, name)}: must be at least 1")

    @property
    def reads_trace(self) -> bool:
        """Whether confidences come from the trace of the run and not from the Step."""
        return self.conf_mode == "same_iter_oracle" or self.conf_decoded != "prob" or self.conf_flip_scale != 1


class Params(NamedTuple):
    """What never changes."""

    signal: int  # of priority.SIGNALS
    lru_order: int  # index into lru.ORDERS
    recent_ties: bool
    layer_adapt: bool
    coop: bool
    dispatch: DispatchParams
    average_tokens: float  # n bar = tokens over experts
    average_experts: float
    average_online: bool
    average_missed: bool
    readings: Readings
    kept_tokens: int  # of conf_mode=end_iter, else 0
    ema: float  # 0: the mean of the last forwards
    c_min: int
    resize_every: int
    lazy: bool
    prefill_updates: bool


class State(NamedTuple):
    """What is remembered between gates."""

    keys: NDArray[np.float64]  # [L, E] priority at the layer's last execution; 0 under LRU order
    recency: NDArray[np.int64]  # [L, E] breaks ties of keys; under LRU order the time of last touch
    clock: NDArray[np.int64]  # [1] of touches
    average: NDArray[np.float64]  # [2] tokens, experts
    seen: NDArray[np.int64]  # [2, L] activated experts and hits of this forward
    smoothed: NDArray[np.float64]  # [2, L] activation ratio and utilization
    history: NDArray[np.float64]  # [5, 2, L] the same, of the last forwards
    counts: NDArray[np.int64]  # [2] forwards in the statistics, decode forwards
    target: NDArray[np.int64]  # [L] slots that each layer is to have
    kept_ids: NDArray[np.int64]  # [L, N, K] routing of this forward, for conf_mode=end_iter
    kept_gates: NDArray[np.float64]  # [L, N, K]


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities.

    Raises:
        PolicyError: fewer slots than `c_min` for each layer.
    """
    capacity = equal_capacity(shape, slots)
    num_layers, num_experts = shape.num_layers, shape.num_experts
    if params.layer_adapt and slots < num_layers * params.c_min:
        raise PolicyError(
            f"{slots} slots for {num_layers} layers: layer_adapt needs c_min = {params.c_min} a layer, "
            f"{num_layers * params.c_min} in all"
        )
    state = State(
        keys=np.zeros((num_layers, num_experts)),
        recency=np.zeros((num_layers, num_experts), np.int64),
        clock=np.zeros(1, np.int64),
        average=np.array([params.average_tokens, params.average_experts]),
        seen=np.zeros((2, num_layers), np.int64),
        smoothed=np.zeros((2, num_layers)),
        history=np.zeros((WINDOW, 2, num_layers)),
        counts=np.zeros(2, np.int64),
        target=capacity.copy(),
        kept_ids=np.zeros((num_layers, params.kept_tokens, shape.top_k), np.int64),
        kept_gates=np.zeros((num_layers, params.kept_tokens, shape.top_k)),
    )
    return state, nobody_resident(shape), capacity


@jit
def decide(params, state, step, view):
    """Split the misses, and retain the best of residents and transfers by the priorities of this very gate.

    In prefill every miss is copied.

    Source: OLED-MoE, sections 4.2 (retained set), 4.3 and 4.4.
    """
    layer, load = step.layer, step.load
    resident = view.resident[layer]
    missed = missed_of(load, resident)
    num_activated, num_missed = _count(load, missed)
    state.seen[0, layer], state.seen[1, layer] = num_activated, num_activated - num_missed
    keys, recency = state.keys[layer], state.recency[layer]
    if params.signal == ORDER:
        touch(params.lru_order, state.recency, state.clock, step, resident)
    elif params.recent_ties:
        for expert in range(load.size):
            if load[expert] > 0:
                recency[expert] = step.forward + 1

    if params.signal == ORDER and not params.coop:
        transfers, on_cpu = ids_of(missed), np.empty(0, np.int64)
    else:
        confidence = confidence_at(params.readings, step)
        reuse = priority(step.expert_ids, step.gates, confidence, CONFIDENCE, load.size)
        if params.signal != ORDER:
            ranked = reuse
            if params.signal != CONFIDENCE:
                ranked = priority(step.expert_ids, step.gates, confidence, params.signal, load.size)
            for expert in range(load.size):
                keys[expert] = ranked[expert]
        if params.coop and step.kind != _PREFILL:
            nbar = state.average[0] / state.average[1]
            transfers, on_cpu = split_at(params.dispatch, nbar, reuse, load, missed, num_activated, view.estimates)
            if params.average_online:
                for expert in range(load.size):
                    if missed[expert] or (load[expert] > 0 and not params.average_missed):
                        state.average[0] += load[expert]
                        state.average[1] += 1.0
        else:
            transfers, on_cpu = by_priority(missed, reuse), np.empty(0, np.int64)
    capacity = min(view.capacity[layer], state.target[layer])
    return plain_plan(transfers, on_cpu, best(with_transfers(resident, transfers), capacity, keys, recency))


@jit
def _count(load, missed):
    num_activated = num_missed = 0
    for expert in range(load.size):
        num_activated += load[expert] > 0
        num_missed += missed[expert]
    return num_activated, num_missed


@jit
def boundary(params, state, end, view):
    """Divide the slots anew after every `resize_every` decode forwards; layers that shrink lose their last by priority.

    Slots that a layer gains stay empty until it transfers something.

    Source: OLED-MoE, section 4.3.
    """
    num_layers, num_experts = view.resident.shape
    capacity = state.target.copy()
    evictions = np.zeros((num_layers, num_experts), np.bool_)
    is_decode = end.kind != _PREFILL
    if params.layer_adapt and (is_decode or params.prefill_updates):
        newest = np.empty((2, num_layers), np.float64)
        for layer in range(num_layers):
            newest[0, layer] = state.seen[0, layer] / num_experts
            newest[1, layer] = state.seen[1, layer] / view.capacity[layer]
        smooth(newest, state.history, state.smoothed, state.counts[0], params.ema)
        state.counts[0] += 1
        state.counts[1] += is_decode
    if not (params.layer_adapt and is_decode and state.counts[1] % params.resize_every == 0):
        return capacity, evictions

    weights = np.empty(num_layers, np.float64)
    weighted = False
    for layer in range(num_layers):
        weights[layer] = state.smoothed[0, layer] * state.smoothed[1, layer]
        weighted |= weights[layer] > 0.0
    if weighted:
        target = apportion(weights, capacity.sum(), params.c_min, num_experts)
        for layer in range(num_layers):
            state.target[layer] = target[layer]
    if params.lazy:
        return capacity, evictions
    for layer in range(num_layers):
        if state.target[layer] < capacity[layer]:
            resident = view.resident[layer].copy()
            stays = best(resident, state.target[layer], state.keys[layer], state.recency[layer])
            for expert in range(num_experts):
                evictions[layer, expert] = resident[expert] and not stays[expert]
    return state.target.copy(), evictions


@jit
def decide_and_keep(params, state, step, view):
    """`decide`, and keep the layer's routing until the end of the forward."""
    num_tokens, top_k = step.expert_ids.shape
    if num_tokens > state.kept_ids.shape[1] and step.kind != _PREFILL:
        raise PolicyError("a forward has more tokens than end_iter_tokens allows")
    for token in range(min(num_tokens, state.kept_ids.shape[1])):
        for k in range(top_k):
            state.kept_ids[step.layer, token, k] = step.expert_ids[token, k]
            state.kept_gates[step.layer, token, k] = step.gates[token, k]
    return decide(params, state, step, view)


@jit
def boundary_anew(params, state, end, view):
    """`boundary`, with what is resident ranked anew by the confidences that the forward has left."""
    if params.signal == CONFIDENCE and end.kind != _PREFILL:
        num_tokens = end.confidence.size
        for layer in range(state.keys.shape[0]):
            ids, gates = state.kept_ids[layer, :num_tokens], state.kept_gates[layer, :num_tokens]
            ranked = priority(ids, gates, end.confidence, CONFIDENCE, state.keys.shape[1])
            for expert in range(ranked.size):
                state.keys[layer, expert] = ranked[expert]
    return boundary(params, state, end, view)


def missed_load(calibration: Iterable[Pass], shape: ModelShape, slots: int) -> tuple[int, int]:
    """Tokens and experts that `lru` misses with these slots in the decode forwards of a calibration split.

    Raises:
        PolicyError: it misses nothing there, or there is nothing.
    """
    num_tokens = num_missed = 0
    reference = lru.build(lru.Knobs(), Context(shape))
    for decision in drive(reference, calibration, shape, slots, Estimates(0, 0, 0)):
        if decision.step.kind != ForwardKind.PREFILL:
            missed = (decision.step.load > 0) & ~decision.resident
            num_tokens += int(decision.step.load[missed].sum())
            num_missed += int(missed.sum())
    if num_missed == 0:
        raise PolicyError(f"nbar=missed: lru misses nothing in the calibration passes with {slots} slots")
    return num_tokens, num_missed


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: `coop` without calibration passes that decode, a reading of confidence without the trace of the
            run, or `c_min` above the number of experts.
    """
    shape = context.shape
    c_min = shape.top_k if knobs.c_min is None else knobs.c_min
    if not 1 <= c_min <= shape.num_experts:
        raise PolicyError(f"c_min is {c_min}: allowed are 1 to {shape.num_experts}")
    load = pooled_load(context.calibration) if knobs.coop and knobs.nbar == "calibration" else (1, 1)
    readings = NO_READINGS
    if knobs.reads_trace:
        readings = read_all(
            context.passes,
            shape,
            same_iter=knobs.conf_mode == "same_iter_oracle",
            decoded=knobs.conf_decoded,
            flip_scale=knobs.conf_flip_scale,
        )
    keeps = knobs.conf_mode == "end_iter"
    params = Params(
        signal=SIGNALS.index(knobs.priority_signal) if knobs.priority else ORDER,
        lru_order=lru.ORDERS.index(knobs.lru_order),
        recent_ties=knobs.tie == "recent",
        layer_adapt=knobs.layer_adapt,
        coop=knobs.coop,
        dispatch=dispatch_params(knobs, load[0] / load[1]),
        average_tokens=float(load[0]),
        average_experts=float(load[1]),
        average_online=knobs.nbar_online,
        average_missed=knobs.nbar == "missed",
        readings=readings,
        kept_tokens=knobs.end_iter_tokens if keeps else 0,
        ema=float(knobs.ema) if knobs.smooth == "ema" else 0.0,
        c_min=c_min,
        resize_every=knobs.resize_every,
        lazy=knobs.resize == "lazy",
        prefill_updates=knobs.prefill_updates,
    )

    def init_missed(params: Params, shape: ModelShape, slots: int) -> Any:
        num_tokens, num_missed = missed_load(context.calibration, shape, slots)
        return init(params._replace(average_tokens=float(num_tokens), average_experts=float(num_missed)), shape, slots)

    warnings = []
    if knobs.conf_mode == "same_iter_oracle":
        warnings.append("conf_mode=same_iter_oracle ranks by confidences that no running system has at its gates")
    if keeps and not (knobs.layer_adapt and knobs.resize == "boundary"):
        warnings.append("conf_mode=end_iter decides as lag1 does: no layer shrinks after a forward")
    return Policy(
        "oled",
        params,
        init_missed if knobs.coop and knobs.nbar == "missed" else init,
        decide_and_keep if keeps else decide,
        boundary_anew if keeps else boundary,
        misses="oled" if knobs.coop else "h2d",
        reads_estimates=knobs.coop,
        clairvoyant=knobs.reads_trace,
        warnings=tuple(warnings),
    )
