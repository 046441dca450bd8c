"""What a sound trace never shows, though its rows fit together: `Order` is for reader and doctor, the rest costs more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.checks import Finding, Layout, Place, found_at
from tracer.schema import ModelShape, TraceMetadata
from tracer.tables import Columns, Group

MIN_EVIDENCE = 64  # equal ids that a short forward of a small model shows by chance prove nothing
MIN_STALE = 4  # forwards in a row of equal ids: without gates, one pair may be a token that came twice


def check_repeated_rows(group: Group, layout: Layout, shape: ModelShape) -> Iterator[Finding]:
    """Find forwards in which each layer gives all tokens the same routing, as a buffer that never changed does."""
    forwards = group.forwards
    size = forwards["num_tokens"].astype(np.int64)
    first_token = np.cumsum(size) - size
    rows = np.arange(layout.routing_token.size)
    first_row = rows - (layout.routing_token - first_token[layout.routing_forward])
    ids, gates = group.routing["expert_ids"], _bits(group.routing["gates"])
    differs = (ids != ids[first_row]).any(axis=1) | (gates != gates[first_row]).any(axis=1)
    num_differing = np.bincount(layout.routing_forward[differs], minlength=size.size)
    enough = (size - 1) * shape.num_layers * shape.top_k >= MIN_EVIDENCE
    yield from found_at(
        (num_differing == 0) & enough & (shape.top_k < shape.num_experts),
        forwards,
        "repeated rows, as in a buffer that never changed",
        "tokens that differ in some layer",
        lambda row: f"the same routing for all {size[row]} tokens in every layer",
    )


def _bits(gates: NDArray[Any]) -> NDArray[Any]:
    """Gates to be compared: nulls, which are all the same NaN, are equal."""
    return gates.view(f"u{gates.itemsize}")


class Order:
    """Compares block, iteration and committed positions of each forward with those of the one before of its request."""

    def __init__(self) -> None:
        self._last: dict[int, _Progress] = {}

    def forget(self) -> None:
        """Start anew after rows that could not be read."""
        self._last.clear()

    def check(self, group: Group) -> Iterator[Finding]:
        """Check the next group, whose rows fit together."""
        names = ("pass_id", "request", "block", "iteration", "kv_len")
        columns = [group.forwards[name].tolist() for name in names]
        ends = group.tokens["position"][np.cumsum(group.forwards["num_tokens"], dtype=np.int64) - 1].tolist()
        for pass_id, request, block, iteration, kv_len, end in zip(*columns, ends, strict=True):
            before = self._last.get(request)
            now = _Progress(block, iteration, kv_len, end if before is None else max(end, before.position))
            yield from _check_order(before, now, pass_id, request)
            self._last[request] = now


class _Progress(NamedTuple):
    """Where a request is."""

    block: int
    iteration: int
    kv_len: int
    position: int  # the last that it has run


def _check_order(before: _Progress | None, now: _Progress, pass_id: int, request: int) -> Iterator[Finding]:
    def one(what: str, found: str, allowed: str, severity: str = "error") -> Finding:
        return Finding(severity, what, allowed, 1, (Place(found, pass_id, request),))

    if before is None or now.block != before.block:
        if now.iteration:
            yield one("iteration jumps", f"{now.iteration} first in block {now.block}", "0 at the start of a block")
    elif now.iteration != before.iteration + 1 and (now.block >= 0 or now.iteration):
        yield one("iteration jumps", f"{now.iteration} after {before.iteration}", "one more each time")
    if now.kv_len > now.position + 1:
        found = f"{now.kv_len} where position {now.position} is the last so far"
        yield one("kv_len beyond what was run", found, "as many positions as there were")
    if before is None:
        return
    if now.block < before.block:
        yield one("block goes back", f"{now.block} after {before.block}", "ascending blocks within a request")
    elif now.block > before.block + 1 and before.block >= 0:
        yield one("block skipped", f"{now.block} after {before.block}", "each block in turn", "warning")
    if now.kv_len < before.kv_len:
        yield one("kv_len falls", f"{now.kv_len} after {before.kv_len}", "never less within a request")


@dataclass(frozen=True, eq=False)
class _Forward:
    """What the next forward of the same request is compared with."""

    block: int
    tokens: Columns
    expert_ids: NDArray[Any]  # [L * T, K]
    gates: NDArray[Any]  # [L * T, K] as bits
    num_equal: int = 0  # forwards before it with the same routing, without a break


class Continuity:
    """Compares tokens and routing of each forward with those of the one before of its request, over groups in order.

    A request that was not in the group before is not compared: its arrays are no longer held.
    """

    def __init__(self, metadata: TraceMetadata) -> None:
        self._shape, self._lacks = metadata.shape, metadata.lacks
        self._last: dict[int, _Forward] = {}

    def forget(self) -> None:
        """Start anew after rows that could not be read."""
        self._last.clear()

    def check(self, group: Group) -> Iterator[Finding]:
        """Check the next group, whose rows fit together."""
        forwards = group.forwards
        ends = np.cumsum(forwards["num_tokens"], dtype=np.int64).tolist()
        num_layers = self._shape.num_layers
        seen = set()
        start = 0
        for row, stop in enumerate(ends):
            request = int(forwards["request"][row])
            rows = slice(start * num_layers, stop * num_layers)
            now = _Forward(
                block=int(forwards["block"][row]),
                tokens={name: values[start:stop] for name, values in group.tokens.items()},
                expert_ids=group.routing["expert_ids"][rows],
                gates=_bits(group.routing["gates"])[rows],
            )
            if request in self._last:
                before = self._last[request]
                yield from _check_tokens(before, now)
                if self._is_stale(before, now):
                    now = replace(now, num_equal=before.num_equal + 1)
                    yield self._stale(now, (int(forwards["pass_id"][row]), request))
            self._last[request] = now
            seen.add(request)
            start = stop
        self._last = {request: _copy(self._last[request]) for request in seen}

    def _is_stale(self, before: _Forward, now: _Forward) -> bool:
        comparable = before.expert_ids.shape == now.expert_ids.shape and now.expert_ids.size >= MIN_EVIDENCE
        if not comparable or self._shape.top_k == self._shape.num_experts:
            return False
        same_input = all(np.array_equal(before.tokens[name], now.tokens[name]) for name in ("position", "token_id_in"))
        same_ids = np.array_equal(before.expert_ids, now.expert_ids)
        return not same_input and same_ids and np.array_equal(before.gates, now.gates)

    def _stale(self, forward: _Forward, place: tuple[int, int]) -> Finding:
        found = Place("the routing of the request's previous forward in every layer", *place)
        allowed = "routing that differs in some layer"
        if "gates" in self._lacks and forward.num_equal + 1 < MIN_STALE:
            return Finding("warning", "equal routing of two inputs, one after the other", allowed, 1, (found,))
        return Finding("error", "stale routing, though the input changed", allowed, 1, (found,))


def _copy(forward: _Forward) -> _Forward:
    """The same without holding on to the arrays of the group."""
    tokens = {name: values.copy() for name, values in forward.tokens.items()}
    return replace(forward, tokens=tokens, expert_ids=forward.expert_ids.copy(), gates=forward.gates.copy())


def _check_tokens(before: _Forward, now: _Forward) -> Iterator[Finding]:
    """Masks of a block only go, each where a token was accepted; an edit alone may bring one back."""
    if before.block != now.block or now.block < 0:
        return
    _, old, new = np.intersect1d(
        before.tokens["position"], now.tokens["position"], assume_unique=True, return_indices=True
    )
    was_masked, is_masked = before.tokens["is_masked_in"][old], now.tokens["is_masked_in"][new]
    accepted, edited = before.tokens["accepted"][old], before.tokens["edited"][old]
    keys = {name: now.tokens[name][new] for name in ("pass_id", "request", "position")}
    grown = is_masked & ~was_masked & ~edited
    yield from found_at(grown, keys, "mask grows without an edit", "masks that only go", lambda row: "a mask again")
    yield from found_at(
        was_masked & is_masked & accepted,
        keys,
        "accepted, but still masked",
        "a token",
        lambda row: "a mask",
        "warning",
    )
    yield from found_at(
        was_masked & ~is_masked & ~accepted,
        keys,
        "mask gone without acceptance",
        "accepted tokens only",
        lambda row: "a token",
        "warning",
    )
