"""Traces without a model, calibrated to the numbers that the OLED-MoE paper prints and to nothing else."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tracer.own_version import own_version
from tracer.schema import ForwardKind, ModelShape, Pass, TraceError, TraceMetadata
from tracer.synthetic_decode import DecodeScript, Forward, script_request
from tracer.synthetic_router import Knobs, Router, RouterShape, choose, mixed, popularity, solve_router, stir

GENERATOR = "drifting-router"
PRINTED_ACTIVATED = {19: 60.0, 31: 90.0}  # by MoE layers: LLaDA2.0-mini and -flash, both of 256 experts, top 8
PRINTED = {
    "activated": "OLED-MoE, section 5.2: mini and flash activate about 60 and 90 experts per layer on average",
    "overlap": "OLED-MoE, section 3.3: adjacent iterations share 85%-90% of activated experts",
    "boundary_overlap": "OLED-MoE, section 3.3: block-boundary transitions retain more than 65% overlap",
}
PRINTED_BLOCK_LENGTH = 16
MAX_REQUESTS = 1 << 20  # whose forwards are scripted before the first is written


@dataclass(frozen=True, kw_only=True)
class SyntheticSettings:
    """What a synthetic trace is to be like.

    `activated`, `overlap` and `boundary_overlap` are averages over layers and denoise forwards, as `tracer.locality`
    measures them. Their defaults are what the paper prints for LLaDA2.0 at block length 16, or a point within the
    range that it prints; any other value, shape or block length is an assumption, and so is all the rest.

    Args:
        shape: layers, experts and top_k; its other sizes are for costs.
        num_groups: groups of experts, of which each token chooses from the best `top_groups`; 1 is no groups.
        activated: mean activated experts of a layer; None is the printed number, where there is one.
        layer_heterogeneity: layers differ in how much their tokens agree; 0 is not at all, at 1 the weights of the
            first and last layer in this order differ by a factor of e squared. Activated experts follow, their mean
            stays.
        confidence_coupling: routing of a token of confidence 1 drifts exp(coupling) times slower than at 0.
        request_share: part of the variance of experts' popularity that each request has to itself; 0 makes unrelated
            requests share as much as one request's blocks would without memory, 1 leaves them chance.
        num_requests: one after the other.

    Raises:
        TraceError: a value is out of range.
    """

    shape: ModelShape
    num_groups: int = 8
    top_groups: int = 4
    activated: float | None = None
    overlap: float = 0.875
    boundary_overlap: float = 0.67
    layer_heterogeneity: float = 0.0
    confidence_coupling: float = 0.0
    request_share: float = 0.0
    num_requests: int = 8
    script: DecodeScript = field(default_factory=DecodeScript)
    gate_dtype: str = "float16"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise TraceError(f"num_requests {self.num_requests}: must be 1 to {MAX_REQUESTS}")
        if self.seed < 0:
            raise TraceError(f"seed {self.seed}: must be at least 0")
        if self.activated is None and self._printed_activated is None:
            raise TraceError(
                "activated: must be given; the paper prints a number for 19 and 31 MoE layers of 256 experts, top 8, at block length 16"
            )
        self.script.check()
        self.router_shape.check()

    @property
    def router_shape(self) -> RouterShape:
        """Sizes of the router."""
        shape = self.shape
        return RouterShape(shape.num_layers, shape.num_experts, shape.top_k, self.num_groups, self.top_groups)

    @property
    def knobs(self) -> Knobs:
        """What the router is to show."""
        return Knobs(
            PRINTED_ACTIVATED[self.shape.num_layers] if self.activated is None else self.activated,
            self.overlap,
            self.boundary_overlap,
            self.layer_heterogeneity,
            self.confidence_coupling,
            self.request_share,
        )

    @property
    def _printed_activated(self) -> float | None:
        if (self.shape.num_experts, self.shape.top_k, self.script.block_length) != (256, 8, PRINTED_BLOCK_LENGTH):
            return None
        return PRINTED_ACTIVATED.get(self.shape.num_layers)

    def is_printed(self, name: str) -> bool:
        """Whether a target is a number of the paper, for this shape and block length."""
        if self._printed_activated is None:
            return False
        return {
            "activated": self.knobs.activated == self._printed_activated,
            "overlap": 0.85 <= self.overlap <= 0.9,
            "boundary_overlap": self.boundary_overlap > 0.65,
        }[name]


class SyntheticTrace:
    """A trace that is made as it is read, the same at every reading and from the seed alone.

    The forwards are those of a threshold loop with a commit for each block (`synthetic_decode`); the routing is that
    of `synthetic_router`. With 4 requests of 128 tokens or more at LLaDA2.0's shapes, activated experts come out
    within 2 % of their target, adjacent overlap within 0.01, boundary overlap within 0.02. Tokens and routing are
    unrelated, cosines and wall time unknown, and there are no signals, since nothing was computed.

    Raises:
        TraceError: no router shows the targets together.
    """

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings
        decode_rng, solve_rng, self._rng = np.random.default_rng(settings.seed).spawn(3)
        self._forwards = [
            forward
            for request in range(settings.num_requests)
            for forward in script_request(decode_rng, request, settings.script)
        ]
        self._router = solve_router(solve_rng, settings.knobs, settings.router_shape, self._followed())
        self.num_passes = len(self._forwards)
        self.metadata = _metadata(settings, self._router)

    def __iter__(self) -> Iterator[Pass]:
        return self.passes()

    def passes(self) -> Iterator[Pass]:
        """Passes in order, from the start at each call."""
        shape = self._settings.router_shape
        rng = np.random.default_rng(cast(np.random.SeedSequence, self._rng.bit_generator.seed_seq))
        common = popularity(rng, shape.num_layers, shape.num_experts)
        for _, of_request in groupby(enumerate(self._forwards), lambda numbered: numbered[1].request):
            logits = _Logits(rng, self._router, common)
            for number, forward in of_request:
                values = logits.next(forward)
                ids = choose(values.copy(), shape)
                yield _pass(number, forward, ids, logits.gates(values, ids))

    def _followed(self) -> NDArray[np.float64]:
        """Confidences, [N, T], of denoise forwards that another of their block follows; of all, where there is none."""
        denoise = [forward for forward in self._forwards if forward.kind == ForwardKind.DENOISE]
        followed = [
            a for a, b in zip(denoise, denoise[1:], strict=False) if (a.request, a.block) == (b.request, b.block)
        ]
        return np.stack([forward.p_argmax for forward in followed or denoise])


class _Logits:
    """Router logits of one request, forward by forward."""

    def __init__(self, rng: np.random.Generator, router: Router, common: NDArray[np.float32]) -> None:
        self._rng, self._router = rng, router
        weight = router.weight.astype(np.float32)[:, None, None]
        own = popularity(rng, *common.shape)
        self._popularity = weight * mixed(router.request_share, common, own)[:, None]  # [L, 1, E]
        self._center = 2 * np.sqrt(1 + router.weight**2)[:, None, None]  # about the least logit that is chosen
        self._taste = np.empty(0, np.float32)  # [L, T, E]
        self._denoised = self._taste  # in the block's last denoise forward
        self._last: Forward | None = None

    def next(self, forward: Forward) -> NDArray[np.float32]:
        """Logits of the next forward, [L, T, E]."""
        last, self._last = self._last, forward
        if last is None or last.kind == ForwardKind.PREFILL:
            size = (len(self._popularity), forward.positions.size, self._popularity.shape[-1])
            self._taste = self._rng.standard_normal(size, np.float32)
        elif forward.block != last.block:
            self._taste = stir(self._rng, self._denoised, self._router.carry)
        elif last.accepted.any():  # an input that did not change is routed as it was
            self._taste = stir(self._rng, self._taste, self._router.kept(last.p_argmax)[:, None])
        if forward.kind == ForwardKind.DENOISE:
            self._denoised = self._taste
        return self._popularity + self._taste

    def gates(self, logits: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Gates of the chosen experts, [L, T, K]: sigmoids, as LLaDA2.0 has them, whose offset is assumed."""
        scores = 1 / (1 + np.exp(self._center - np.take_along_axis(logits, ids, -1).astype(np.float64)))
        return scores / scores.sum(axis=-1, keepdims=True)


def _pass(number: int, forward: Forward, ids: NDArray[np.int64], gates: NDArray[np.float64]) -> Pass:
    unknown = np.full((1, len(ids)), np.nan, np.float32)
    return Pass(
        pass_id=number,
        requests=np.array([forward.request]),
        blocks=np.array([forward.block]),
        iterations=np.array([forward.iteration]),
        kinds=np.array([int(forward.kind)]),
        num_tokens=np.array([forward.positions.size]),
        kv_lens=np.array([forward.kv_len]),
        num_masked_in=np.array([np.count_nonzero(forward.is_masked_in)]),
        num_accepted=np.array([np.count_nonzero(forward.accepted)]),
        wall_ns=-1,
        cos_router_input=unknown,
        cos_layer_output=unknown,
        positions=forward.positions,
        token_ids_in=forward.token_ids_in,
        is_masked_in=forward.is_masked_in,
        argmax_ids=forward.argmax_ids,
        p_argmax=forward.p_argmax,
        p_current=forward.p_current,
        accepted=forward.accepted,
        edited=np.zeros_like(forward.accepted),
        expert_ids=ids,
        gates=gates,
    )


def _metadata(settings: SyntheticSettings, router: Router) -> TraceMetadata:
    """What the trace says of its making: which values the paper prints, which are assumed, and what was solved for."""
    script, knobs = settings.script, settings.knobs._asdict()
    printed = {name: {"value": knobs[name], "source": PRINTED[name]} for name in PRINTED if settings.is_printed(name)}
    assumed = {name: value for name, value in knobs.items() if name not in printed}
    assumed |= {name: getattr(script, name) for name in ("threshold", "gen_length", "prompt_length", "accept_ratio")}
    assumed["gates"] = "sigmoids of logits, two of their standard deviations below the mean"
    details: dict[str, Any] = {
        "engine": "oledsim",
        "versions": {
            "oledsim": own_version(),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "from_paper": printed,
        "assumed": assumed,
        "solved": {"weight": router.weight.tolist(), "drift": router.drift, "carry": router.carry},
        "num_groups": settings.num_groups,
        "top_groups": settings.top_groups,
        "mask_id": script.mask_id,
    }
    decode = {
        "loop": "dinfer",
        "block_length": script.block_length,
        "threshold": script.threshold,
        "gen_length": script.gen_length,
        "early_stop": False,
    }
    return TraceMetadata(
        shape=settings.shape,
        source=f"synthetic:{GENERATOR}",
        gate_dtype=settings.gate_dtype,
        decode=decode,
        seed=settings.seed,
        details=details,
    )
