"""OLED-MoE: retain the experts that confident tokens chose, size layers by use, and share misses with the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from policies import lru, oled_rules
from policies.confidence import CONF_DECODED, read_all
from policies.contract import Context, Estimates, Policy, PolicyError
from policies.dispatch import DispatchKnobs, dispatch_params, pooled_load
from policies.driver import drive
from policies.end_iter import boundary_ranked_anew, decide_and_keep, keeping
from policies.knobs import limit_of, require_choice, require_limit
from policies.priority import CONFIDENCE, ORDER, SIGNALS
from tracer.schema import ForwardKind, ModelShape, Pass

CONF_MODES = ("lag1", "end_iter", "same_iter_oracle")
MOST_TOKENS = 65536  # of a forward, for which room is made beforehand


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
    """Order in which the experts of one forward are touched where LRU order counts; see the knob of `lru`. No source."""
    tie: str = "recent"
    """Equal priorities: `recent`, the last activated stays, then the lower id; `id`, the lower id. No source."""

    conf_mode: str = "lag1"
    """Whose confidence counts at a gate, as that of a forward exists only after its last layer (section 4.3 uses it
    before): `lag1`, the previous forward's; `end_iter`, the same, but a layer that shrinks after the forward is ranked
    anew by the forward's own; `same_iter_oracle`, the forward's own, which no running system has."""
    conf_decoded: str = "prob"
    """Confidence of positions decoded before: `prob`, the probability of the token that stands there; `one`; or
    `at_accept`, the probability with which it was accepted. The last two are read from the trace of the run.
    Ours: section 4.3 does not say."""
    conf_flip_scale: float = 1.0
    """Factor on the confidence of positions accepted in the forward that it is of: their input changes next. Other
    values than 1 are read from the trace of the run. Ours: section 4.3 makes no exception."""
    end_iter_tokens: int = 4096
    """Most tokens of a decode forward that `conf_mode=end_iter` keeps the routing of. Ours."""
    gate_kind: str = "normalised"
    """Gates: `normalised`, as the model weighs experts by, or `raw`, the sigmoid before that, which is in the table
    `signals`. Section 4.3 has "gate scores", which may be either."""
    max_admit: int | None = None
    """How many of a layer's transfers may stay, those of highest priority first; null for all. Ours, as in `lru`."""

    nbar: str = "calibration"
    """Tokens of an average expert: of those activated in the `calibration` split, or of those `missed` by `lru` there
    with the same slots, which needs its passes and so `calibration=warmup` where a record ships (section 4.4 has
    missed experts, "profiled")."""
    nbar_online: bool = False
    """Go on averaging over the run: its own activated, or missed, experts join those of the calibration split.
    Ours: section 4.4 has a "profiled" average."""

    ema: float = 1 / 3
    """Weight of the newest decode forward in the smoothed statistics: a span of five. Section 4.3: "smoothed"."""
    smooth: str = "ema"
    """`ema`, or `window5`: the mean of the last five decode forwards. Section 4.3: "smoothed", without a way."""
    c_min: int | None = None
    """Fewest slots of a layer under `layer_adapt`; None: what one token activates. No source."""
    resize_every: int = 5
    """Decode forwards between two divisions of the slots (section 4.3: "every five denoising iterations")."""
    resize: str = "boundary"
    """When a layer shrinks: `boundary`, at once after the forward; `lazy`, when it next retains, with the priorities
    of that moment, and others grow a forward later. Section 4.3 shrinks by retention "after layer execution"."""
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
        require_choice("gate_kind", self.gate_kind, ("normalised", "raw"))
        require_limit("max_admit", self.max_admit)
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
        if self.resize_every < 1:
            raise PolicyError(f"resize_every is {self.resize_every}: must be at least 1")
        if not 1 <= self.end_iter_tokens <= MOST_TOKENS:
            raise PolicyError(f"end_iter_tokens is {self.end_iter_tokens}: must be 1 to {MOST_TOKENS}")

    @property
    def reads_trace(self) -> bool:
        """Whether confidences come from the trace of the run and not from the Step."""
        return self.conf_mode == "same_iter_oracle" or self.conf_decoded != "prob" or self.conf_flip_scale != 1


def missed_load(calibration: Iterable[Pass], shape: ModelShape, slots: int) -> tuple[int, int]:
    """Tokens and experts that `lru` misses with these slots in the decode forwards of a calibration split.

    Raises:
        PolicyError: it misses nothing there, or there are no passes.
    """
    num_tokens = num_missed = num_decisions = 0
    reference = lru.build(lru.Knobs(), Context(shape))
    for decision in drive(reference, calibration, shape, slots, Estimates(0, 0, 0)):
        num_decisions += 1
        if decision.step.kind != ForwardKind.PREFILL:
            missed = (decision.step.load > 0) & ~decision.resident
            num_tokens += int(decision.step.load[missed].sum())
            num_missed += int(missed.sum())
    if num_decisions == 0:
        raise PolicyError(
            "oled: nbar=missed needs the passes that it calibrates from, which a record of them does not hold: "
            "calibration=warmup with one warm-up request or more has them"
        )
    if num_missed == 0:
        raise PolicyError(f"oled: nbar=missed: lru misses nothing in the calibration passes with {slots} slots")
    return num_tokens, num_missed


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: `coop` without calibration that decodes, a reading of confidence without the trace of the
            run, raw gates without signals, no gates at all, or `c_min` above the number of experts.
    """
    if knobs.coop or (knobs.priority and knobs.priority_signal != "order"):
        context.require("gates", instead="policy.priority=false policy.coop=false")
    lru.require_order(knobs.lru_order, context)
    if knobs.gate_kind == "raw" and not context.has_signals:
        raise PolicyError(
            "oled: gate_kind=raw needs scores of the table signals, which this trace lacks: proxy-19x256-signals has them"
        )
    c_min = context.shape.top_k if knobs.c_min is None else knobs.c_min
    if not 1 <= c_min <= context.shape.num_experts:
        raise PolicyError(f"c_min is {c_min}: allowed are 1 to {context.shape.num_experts}")
    signal = SIGNALS.index(knobs.priority_signal) if knobs.priority else ORDER
    load = pooled_load(context.calibration) if knobs.coop and knobs.nbar == "calibration" else (1, 1)
    joining = ("missed" if knobs.nbar == "missed" else "activated") if knobs.nbar_online else "fixed"
    readings = None
    if knobs.reads_trace:
        readings = read_all(
            context.passes,
            context.shape,
            same_iter=knobs.conf_mode == "same_iter_oracle",
            decoded=knobs.conf_decoded,
            flip_scale=knobs.conf_flip_scale,
        )
    params = oled_rules.Params(
        signal=signal,
        lru_order=lru.ORDERS.index(knobs.lru_order),
        recent_ties=knobs.tie == "recent",
        coop=knobs.coop,
        dispatch=dispatch_params(knobs),
        joining=oled_rules.JOINING.index(joining),
        readings=readings,
        ema=float(knobs.ema) if knobs.smooth == "ema" else 0.0,
        c_min=c_min,
        resize_every=knobs.resize_every,
        lazy=knobs.resize == "lazy",
        prefill_updates=knobs.prefill_updates,
        max_admit=limit_of(knobs.max_admit),
    )
    warnings = []
    if knobs.conf_mode == "same_iter_oracle":
        warnings.append("conf_mode=same_iter_oracle ranks by confidences that no running system has at its gates")
    # a layer that shrinks at once is all that confidences can still change after a forward
    keeps = knobs.conf_mode == "end_iter"
    if keeps and not (knobs.layer_adapt and knobs.resize == "boundary" and signal == CONFIDENCE):
        warnings.append("conf_mode=end_iter decides as lag1: nothing is ranked by confidence after a forward")
        keeps = False

    def init(params: oled_rules.Params, shape: ModelShape, slots: int) -> Any:
        average = load
        if knobs.coop and knobs.nbar == "missed":
            average = missed_load(context.calibration_passes, shape, slots)
        state, resident, capacity = oled_rules.begin(shape, slots, c_min if knobs.layer_adapt else 1, average)
        return (keeping(state, shape, knobs.end_iter_tokens) if keeps else state), resident, capacity

    boundary = boundary_ranked_anew if keeps else oled_rules.boundary
    return Policy(
        "oled",
        params,
        init,
        decide_and_keep if keeps else oled_rules.decide,
        boundary if knobs.layer_adapt else None,
        misses="oled" if knobs.coop else "h2d",
        reads_estimates=knobs.coop,
        reads_signals=knobs.gate_kind == "raw",
        resizes=knobs.layer_adapt,
        clairvoyant=knobs.reads_trace,
        warnings=tuple(warnings),
    )
