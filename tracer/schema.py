"""The records that tracer, policies, simulator and replay share, and the names and types of trace format 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import IntEnum
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1
GATE_DTYPES = ("float32", "float16", "uint8")
NO_GATES = "none"  # gate_dtype of a trace whose gates are null, as of one that was imported without them
WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
NUM_SCORES = 32  # router scores that `signals` keeps for each token
NUM_AHEAD = 16  # experts that `signals` keeps for each layer ahead
MAX_AHEAD_DEPTH = 3
SKETCH_SIZE = 16


class TraceError(ValueError):
    """A trace, or the model or prompts to be traced, is not what it must be; the message says where."""


def choices(word: str, allowed: Iterable[str]) -> str:
    """What a message says after a name that is not known: the closest one, if any is close, and all allowed."""
    names = list(allowed)
    close = get_close_matches(word, names, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}allowed: {', '.join(names) or 'none'}"


def counted(count: int, noun: str) -> str:
    """A number of things in words: `1 request`, `2 requests`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class ForwardKind(IntEnum):
    """What one forward pass did for one request; the Parquet column holds the lower-case name."""

    PREFILL = 0
    DENOISE = 1
    IDLE = 2  # ran on a block that was already fully decoded
    COMMIT = 3  # ran once more on the final tokens, to store their keys and values
    EDIT = 4  # had no masks, but could still edit; decode time, but not overlap


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a mixture-of-experts model, as far as caching and its cost depend on them.

    `layer_ids` are the true layer numbers of the MoE layers (LLaDA2.0-mini: 1 to 19); everywhere else a layer is
    the 0-based index into it. `gate_scale` is what the model multiplies normalised gates by (2.5 for LLaDA2.0).
    Sizes from `hidden` on are 0 where an imported trace does not know them; costs at that shape are then refused.
    """

    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden: int
    expert_intermediate: int
    weight_dtype: str = "bfloat16"
    gate_scale: float = 1.0
    num_shared_experts: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    dense_intermediate: int = 0
    num_dense_layers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(int(i) for i in self.layer_ids))
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)) or self.layer_ids[0] < 0:
            raise TraceError(f"layer_ids must be ascending from 0 or more and not empty, found {list(self.layer_ids)}")
        if not 0 < self.gate_scale < inf:
            raise TraceError(f"gate_scale is {self.gate_scale}, must be a number above 0")
        if not 1 <= self.top_k <= self.num_experts <= 65536:
            raise TraceError(
                f"top_k {self.top_k} and num_experts {self.num_experts}: need 1 <= top_k <= num_experts <= 65536"
            )
        for size in (
            "hidden",
            "expert_intermediate",
            "num_shared_experts",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab",
            "dense_intermediate",
            "num_dense_layers",
        ):
            if getattr(self, size) < 0:
                raise TraceError(f"{size} is {getattr(self, size)}: must be at least 0")
        if self.weight_dtype not in WEIGHT_BITS:
            raise TraceError(f"weight_dtype {self.weight_dtype!r}: allowed are {', '.join(WEIGHT_BITS)}")

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return len(self.layer_ids)

    def expert_bytes(self, weight_dtype: str | None = None) -> int:
        """Bytes of one routed expert: three matrices of hidden x expert_intermediate."""
        return 3 * self.hidden * self.expert_intermediate * WEIGHT_BITS[weight_dtype or self.weight_dtype] // 8


_NUMBER = (int, float)
_WORDS = {
    (int,): "a whole number from 0 to 1e+12",
    _NUMBER: "a number from 0 to 1e+12",
    (str,): "text",
    (dict,): "keys and values",
    (list,): "a list",
}
# What is read again of `decode` and `details`, outer values first; each may be missing.
_READ_AGAIN: dict[str, tuple[type, ...]] = {
    "decode.block_length": (int,),
    "decode.threshold": _NUMBER,
    "details.checkpoint_hash": (str,),
    "details.lacks": (list,),
    "details.training": (dict,),
    "details.training.minutes": _NUMBER,
    "details.merged": (dict,),
    "details.merged.content_hashes": (list,),
}


def _is_one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    is_number = isinstance(value, _NUMBER)
    return isinstance(value, kinds) and not isinstance(value, bool) and (not is_number or 0 <= value <= 1e12)


@dataclass(frozen=True)
class TraceMetadata:
    """Key-value metadata that every file of a trace carries.

    `source` is `model:<name>`, `proxy:<name>`, `synthetic:<generator>` or `import:<format>`. `content_hash` is a
    SHA-256 over the recorded values, filled in by the writer; what tells traces apart is `files.metadata_hash`, as the
    same values mean another thing under another shape. `details` holds what else is worth keeping: engine
    and library versions, checkpoint hash, mask and eos ids, mask mode, device; what is read again is checked.
    """

    shape: ModelShape
    source: str
    gate_dtype: str = "float32"
    decode: dict[str, Any] = field(default_factory=dict)  # loop, block_length, threshold, temperature, ...
    seed: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    content_hash: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.source.split(":", 1)[0] not in ("model", "proxy", "synthetic", "import") or ":" not in self.source:
            raise TraceError(f"source {self.source!r}: must be model:, proxy:, synthetic: or import: and a name")
        if self.gate_dtype not in (*GATE_DTYPES, NO_GATES):
            raise TraceError(f"gate_dtype {self.gate_dtype!r}: allowed are {', '.join((*GATE_DTYPES, NO_GATES))}")
        if self.schema_version != SCHEMA_VERSION:
            raise TraceError(f"trace format {self.schema_version}: this version reads format {SCHEMA_VERSION}")
        for path, kinds in _READ_AGAIN.items():
            value = self._at(path)
            if value is not None and not _is_one_of(value, kinds):
                raise TraceError(f"{path} is {value!r}, must be {_WORDS[kinds]}")
        for path in ("details.merged.content_hashes", "details.lacks"):
            texts = self._at(path) or []
            if not all(isinstance(text, str) for text in texts):
                raise TraceError(f"{path} is {texts!r}, must be a list of texts")

    @property
    def lacks(self) -> frozenset[str]:
        """What is null in the whole trace though a traced model would give it: `gates`, `token_ids`, `confidence`."""
        named = self.details.get("lacks") or ()
        return frozenset([*named, "gates"] if self.gate_dtype == NO_GATES else named)

    def _at(self, path: str) -> Any:
        """The value at a dotted path, None where there is none."""
        group, *keys = path.split(".")
        value = getattr(self, group)
        for key in keys:
            value = None if value is None else value.get(key)
        return value


@dataclass(frozen=True, eq=False)
class Signals:
    """What some policies need beyond ids and gates; all arrays of one pass. S = min(32, E)."""

    score_ids: NDArray[np.int64]  # [L, T, S] best by biased score, the k chosen always among them
    scores: NDArray[np.float64]  # [L, T, S] unbiased sigmoid
    input_norm: NDArray[np.float64]  # [L, T] Euclidean norm of the router input
    sketch: NDArray[np.float64]  # [T, 16] random projection of the input embedding
    ahead_ids: NDArray[
        np.int64
    ]  # [L, 3, T, 16] top experts by layer l+1, l+2, l+3's gate on layer l's router input; -1 where there is no such layer


@dataclass(frozen=True, eq=False)
class Pass:
    """One execution of the model. Tokens stand request by request, positions ascending. R requests, T tokens."""

    pass_id: int
    # one entry for each request in the pass, ascending
    requests: NDArray[np.int64]  # [R]
    blocks: NDArray[np.int64]  # [R] -1 in prefill
    iterations: NDArray[np.int64]  # [R] within the block, from 0
    kinds: NDArray[np.int64]  # [R] ForwardKind
    num_tokens: NDArray[np.int64]  # [R]
    kv_lens: NDArray[np.int64]  # [R] committed positions
    num_masked_in: NDArray[np.int64]  # [R]
    num_accepted: NDArray[np.int64]  # [R]
    wall_ns: int  # -1 where unknown
    cos_router_input: NDArray[np.float32]  # [R, L] NaN where there is no previous forward
    cos_layer_output: NDArray[np.float32]  # [R, L]
    # one entry for each token
    positions: NDArray[np.int64]  # [T] absolute
    token_ids_in: NDArray[np.int64]  # [T] -1 where unknown, in a trace that lacks `token_ids`
    is_masked_in: NDArray[np.bool_]  # [T]
    argmax_ids: NDArray[np.int64]  # [T] -1 where unknown
    p_argmax: NDArray[np.float64]  # [T] NaN where unknown
    p_current: NDArray[np.float64]  # [T] NaN for a mask
    accepted: NDArray[np.bool_]  # [T]
    edited: NDArray[np.bool_]  # [T]
    # one entry for each MoE layer and token
    expert_ids: NDArray[np.int64]  # [L, T, K]
    gates: NDArray[np.float64]  # [L, T, K] each row sums to 1; NaN in a trace that lacks `gates`
    signals: Signals | None = None

    @property
    def is_prefill(self) -> bool:
        """A pass is prefill only if it is so for each of its requests."""
        return bool((self.kinds == ForwardKind.PREFILL).all())

    @property
    def kind(self) -> ForwardKind:
        """Kind of the pass: of its requests' kinds that are not prefill, the first in the order of ForwardKind."""
        if self.kinds.size == 1:  # the rule below takes ten times as long
            return ForwardKind(int(self.kinds[0]))
        decode = self.kinds[self.kinds != ForwardKind.PREFILL]
        return ForwardKind(int(decode.min())) if decode.size else ForwardKind.PREFILL

    @property
    def confidence(self) -> NDArray[np.float64]:
        """Confidence that the pass leaves at each of its positions, [T]; NaN where it is unknown.

        It is the probability of the best token where the position was masked or was edited, else that of the token
        which stands there.

        Differs: OLED-MoE, section 4.3, does not say what the confidence of a decoded position is.
        """
        return np.where(self.is_masked_in | self.edited, self.p_argmax, self.p_current)

    def token_requests(self, values: NDArray[Any]) -> NDArray[Any]:
        """Spread one value for each request, [R], over the tokens, [T]."""
        return np.repeat(values, self.num_tokens)


@dataclass(frozen=True, eq=False)
class Calibration:
    """What policies may learn beforehand, from requests that are not evaluated.

    Everything but `prefill_load` is over decode forwards. N requests, M expert maps, V tokens; S as in Signals, or K
    where the passes had no signals. A map is what the gates of all layers made of one token in one forward.
    """

    name: str  # where it is from
    num_requests: int
    num_activated: int  # activated experts, summed over forwards and layers
    load: NDArray[np.int64]  # [L, E] tokens routed
    prefill_load: NDArray[np.int64]  # [L, E]
    importance: NDArray[np.float64]  # [L, E] sum of gate times norm of the router input, 1 where that is unknown
    request_loads: NDArray[np.int64]  # [N, L, E] tokens routed of some of the requests, each by itself
    map_ids: NDArray[np.int64]  # [M, L, S]
    map_scores: NDArray[np.float64]  # [M, L, S] unbiased sigmoid; gates where the passes had no signals
    map_sketches: NDArray[np.float64]  # [M, 16] of the token's input embedding, NaN where unknown
    token_ids: NDArray[np.int64]  # [V] ascending
    token_experts: NDArray[np.int64]  # [V, L, W] the most frequent experts of each input token, -1 behind the last
    token_shares: NDArray[np.float64]  # [V, L, W] of the token's occurrences; 0 behind the last
    checkpoint_hash: str = ""  # of the model, as in a trace's details; empty where unknown
    content_hashes: tuple[str, ...] = ()  # of the traces whose first requests these are, where they are of traces
