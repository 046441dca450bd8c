"""Turn passes, in the order of the run, into what policies are shown at each gate and after each forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numba.core.types.misc import NoneType
from numba.extending import overload, register_jitable
from numpy.typing import ArrayLike, NDArray

from policies.contract import End, Step, StepSignals
from tracer.schema import MAX_AHEAD_DEPTH, SKETCH_SIZE, ModelShape, Pass, Signals, TraceError


class ForwardSignals(NamedTuple):
    """The signals of one pass, as StepSignals are cut from them; widths are 0 where the trace lacks the table."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    score_ids: NDArray[np.int64]  # [L, T, S]
    scores: NDArray[np.float64]  # [L, T, S]
    input_norm: NDArray[np.float64]  # [L, T], or [L, 0]
    sketch: NDArray[np.float64]  # [T, 16]
    ahead_ids: NDArray[np.int64]  # [L, 3, T, 16]


class Forward(NamedTuple):
    """One pass as policies may see it: its Steps and its End are cut from these read-only arrays."""

    number: int  # of the pass in the run, from 0
    kind: int  # ForwardKind of the pass
    expert_ids: NDArray[np.int64]  # [L, T, K]
    gates: NDArray[np.float64]  # [L, T, K]
    load: NDArray[np.int64]  # [L, E]
    confidence: NDArray[np.float64]  # [T] of the previous forward, for the gates
    own_confidence: NDArray[np.float64]  # [T] of this forward, for its end
    request: NDArray[np.int64]  # [T]
    block: NDArray[np.int64]  # [T]
    iteration: NDArray[np.int64]  # [T]
    signals: ForwardSignals | None  # only for a policy that reads them


# what follows is called from Python and from compiled code; calls of compiled code from Python would take longer
@register_jitable
def _cut(signals: ForwardSignals, layer: int) -> StepSignals:
    return StepSignals(
        signals.token_ids,
        signals.positions,
        signals.score_ids[layer],
        signals.scores[layer],
        signals.input_norm[layer],
        signals.sketch,
        signals.ahead_ids[layer],
    )


def signals_at(signals: ForwardSignals | None, layer: int) -> StepSignals | None:
    """What the gate of one layer has of a pass's signals."""
    return None if signals is None else _cut(signals, layer)


@overload(signals_at)
def _signals_at(signals, layer):
    if isinstance(signals, NoneType):
        return lambda signals, layer: None
    return lambda signals, layer: _cut(signals, layer)  # without the choice, which would have a type of its own


@register_jitable
def step_at(forward: Forward, layer: int) -> Step:
    """What exists at the gate of one layer."""
    return Step(
        forward.number,
        layer,
        forward.kind,
        forward.expert_ids[layer],
        forward.gates[layer],
        forward.load[layer],
        forward.confidence,
        forward.request,
        forward.block,
        forward.iteration,
        signals_at(forward.signals, layer),
    )


@register_jitable
def end_of(forward: Forward) -> End:
    """What exists after the last layer."""
    return End(forward.number, forward.kind, forward.request, forward.block, forward.own_confidence)


def blank_forward(shape: ModelShape, reads_signals: bool) -> Forward:
    """A forward without tokens, whose arrays are of the types of every forward's."""
    num_layers, num_experts = shape.num_layers, shape.num_experts
    ids, gates = _frozen(np.empty((num_layers, 0, shape.top_k)), np.int64), np.empty((num_layers, 0, shape.top_k))
    nothing, unknown = _frozen(np.empty(0), np.int64), _frozen(np.empty(0), np.float64)
    signals = None
    if reads_signals:
        signals = ForwardSignals(
            token_ids=nothing,
            positions=nothing,
            score_ids=ids,
            scores=_frozen(gates, np.float64),
            input_norm=_frozen(np.empty((num_layers, 0)), np.float64),
            sketch=_frozen(np.empty((0, SKETCH_SIZE)), np.float64),
            ahead_ids=_frozen(np.empty((num_layers, MAX_AHEAD_DEPTH, 0, 0)), np.int64),
        )
    load = _frozen(np.zeros((num_layers, num_experts)), np.int64)
    return Forward(0, 0, ids, _frozen(gates, np.float64), load, unknown, unknown, nothing, nothing, nothing, signals)


def count_load(expert_ids: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """Tokens routed to each expert of each layer, [L, E], from ids [L, T, K] within range."""
    num_layers = expert_ids.shape[0]
    keys = expert_ids + (np.arange(num_layers) * num_experts)[:, None, None]
    return np.bincount(keys.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def read_confidence(pass_: Pass) -> NDArray[np.float64]:
    """Confidence that a forward leaves at each of its positions, [T]; 1 in prefill, NaN where the trace lacks it."""
    confidence = pass_.confidence
    confidence[pass_.token_requests(pass_.blocks) < 0] = 1.0
    return confidence


class Steps:
    """Reads the passes of one run in order, remembering the last forward of each request.

    Confidence of a forward exists only after its last layer, so what a gate is shown is that of the same position in
    the same request's previous forward of the same block. It is 1 where there is none: in a block's first forward
    and in prefill.

    Args:
        shape: of the passes.
        reads_signals: the policy reads signals, so that forwards carry them.
    """

    def __init__(self, shape: ModelShape, reads_signals: bool = False) -> None:
        self._shape = shape
        self._reads_signals = reads_signals
        self._number = 0
        self._last: dict[int, tuple[int, NDArray[np.int64], NDArray[np.float64]]] = {}  # block, positions, confidence

    def read(self, pass_: Pass) -> Forward:
        """The next pass of the run.

        Raises:
            TraceError: its routing is not of this shape, or names an expert that does not exist.
        """
        self._check(pass_)
        own = read_confidence(pass_)
        forward = Forward(
            self._number,
            int(pass_.kind),
            _frozen(pass_.expert_ids, np.int64),
            _frozen(pass_.gates, np.float64),
            _frozen(count_load(pass_.expert_ids, self._shape.num_experts), np.int64),
            _frozen(self._lagged(pass_, own), np.float64),
            _frozen(own, np.float64),
            _frozen(pass_.token_requests(pass_.requests), np.int64),
            _frozen(pass_.token_requests(pass_.blocks), np.int64),
            _frozen(pass_.token_requests(pass_.iterations), np.int64),
            _signals_of(pass_) if self._reads_signals else None,
        )
        self._number += 1
        return forward

    def _check(self, pass_: Pass) -> None:
        shape = self._shape
        wanted = (shape.num_layers, int(pass_.num_tokens.sum()), shape.top_k)
        for name, array in (("expert_ids", pass_.expert_ids), ("gates", pass_.gates)):
            if array.shape != wanted:
                raise TraceError(f"pass {pass_.pass_id}: {name} are {array.shape}, the trace's shape needs {wanted}")
        if pass_.expert_ids.size and not 0 <= pass_.expert_ids.min() <= pass_.expert_ids.max() < shape.num_experts:
            raise TraceError(
                f"pass {pass_.pass_id}: expert ids from {pass_.expert_ids.min()} to {pass_.expert_ids.max()}, "
                f"allowed are 0 to {shape.num_experts - 1}"
            )

    def _lagged(self, pass_: Pass, own: NDArray[np.float64]) -> NDArray[np.float64]:
        lagged = np.ones(own.size)
        start = 0
        for request, block, count in zip(
            pass_.requests.tolist(), pass_.blocks.tolist(), pass_.num_tokens.tolist(), strict=True
        ):
            here = slice(start, start + count)
            start += count
            last = self._last.pop(request, None)
            if block < 0:
                continue
            positions = pass_.positions[here]
            if last is not None and last[0] == block:
                lagged[here] = _at_positions(positions, last[1], last[2])
            self._last[request] = block, positions.copy(), own[here]
        return lagged


class ReadPasses:
    """Passes of a run that were read once and are kept, to be run many times.

    Args:
        passes: of the run, in order.
        shape: of the passes.
        reads_signals: read signals too, which policies that read them then find ready.

    Raises:
        TraceError: a pass is not of this shape.
    """

    def __init__(self, passes: Iterable[Pass], shape: ModelShape, reads_signals: bool = False) -> None:
        self.shape, self.has_signals = shape, reads_signals
        steps = Steps(shape, reads_signals)
        self._read = [(pass_, steps.read(pass_)) for pass_ in passes]

    def __iter__(self) -> Iterator[Pass]:
        return (pass_ for pass_, _ in self._read)

    def __len__(self) -> int:
        return len(self._read)

    def forwards(self, reads_signals: bool) -> Iterator[tuple[Pass, Forward]]:
        """Each pass with what policies see of it, with signals for those that read them."""
        for pass_, forward in self._read:
            if reads_signals and not self.has_signals:
                yield pass_, forward._replace(signals=_signals_of(pass_))
            elif self.has_signals and not reads_signals:
                yield pass_, forward._replace(signals=None)
            else:
                yield pass_, forward


def read_all(
    passes: Iterable[Pass] | ReadPasses, shape: ModelShape, reads_signals: bool
) -> Iterator[tuple[Pass, Forward]]:
    """Each pass with what policies see of it, read now unless it was read before.

    Raises:
        TraceError: a pass is not of this shape.
    """
    if isinstance(passes, ReadPasses):
        yield from passes.forwards(reads_signals)
        return
    steps = Steps(shape, reads_signals)
    for pass_ in passes:
        yield pass_, steps.read(pass_)


def _signals_of(pass_: Pass) -> ForwardSignals:
    num_layers, num_tokens, _ = pass_.expert_ids.shape
    kept = pass_.signals
    if kept is None:
        kept = Signals(
            score_ids=np.empty((num_layers, num_tokens, 0), np.int64),
            scores=np.empty((num_layers, num_tokens, 0)),
            input_norm=np.empty((num_layers, 0)),
            sketch=np.empty((num_tokens, 0)),
            ahead_ids=np.empty((num_layers, MAX_AHEAD_DEPTH, num_tokens, 0), np.int64),
        )
    return ForwardSignals(
        _frozen(pass_.token_ids_in, np.int64),
        _frozen(pass_.positions, np.int64),
        _frozen(kept.score_ids, np.int64),
        _frozen(kept.scores, np.float64),
        _frozen(kept.input_norm, np.float64),
        _frozen(kept.sketch, np.float64),
        _frozen(kept.ahead_ids, np.int64),
    )


def _at_positions(
    wanted: NDArray[np.int64], positions: NDArray[np.int64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    if np.array_equal(wanted, positions):
        return values
    found = np.ones(wanted.size)  # a position that the previous forward did not run is in its first
    _, here, there = np.intersect1d(wanted, positions, assume_unique=True, return_indices=True)
    found[here] = values[there]
    return found


def _frozen(array: ArrayLike, dtype: Any) -> NDArray[Any]:
    # always contiguous and read-only: numba compiles anew for any other kind of array
    kept = np.ascontiguousarray(array, dtype)
    if kept.flags.writeable:
        kept = kept.view()
        kept.flags.writeable = False
    return kept
