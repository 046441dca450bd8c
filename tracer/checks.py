"""How the rows of a row group hang together, and what is found where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.schema import ModelShape, TraceError
from tracer.tables import Columns, Group

MAX_PLACES = 3

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]


class Place(NamedTuple):
    """Where something was found, and what; `layer` is the true layer id."""

    found: str
    pass_id: int | None = None
    request: int | None = None
    layer: int | None = None
    position: int | None = None

    @property
    def where(self) -> str:
        """The parts that are known, in words."""
        named = (("pass", self.pass_id), ("request", self.request), ("layer", self.layer), ("position", self.position))
        return ", ".join(f"{name} {value}" for name, value in named if value is not None)

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}" if self.where else self.found


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, however often; the first few places stand for all `count`."""

    severity: str  # error or warning
    what: str
    allowed: str
    count: int
    places: tuple[Place, ...]

    def __str__(self) -> str:
        place = self.places[0]
        where = f"{place.where}: " if place.where else ""
        return f"{where}{self.what}: found {place.found}; allowed is {self.allowed}"


class Layout(NamedTuple):
    """How the rows of a group hang together. F forwards (pass, request), N tokens, M routing rows."""

    token_forward: Index  # [N] row of forwards
    routing_forward: Index  # [M] row of forwards
    routing_token: Index  # [M] row of tokens
    routing_layer: Index  # [M] index of the MoE layer


def found_at(
    bad: Mask,
    keys: Columns,
    what: str,
    allowed: str,
    found: Callable[[int], Any],
    severity: str = "error",
) -> Iterator[Finding]:
    """A finding for the rows of a table that are bad; none when no row is."""
    rows = np.flatnonzero(bad)
    if rows.size:
        names = [name for name in ("pass_id", "request", "layer", "position") if name in keys]
        places = (
            Place(str(found(row)), **{name: int(keys[name][row]) for name in names})
            for row in rows[:MAX_PLACES].tolist()
        )
        yield Finding(severity, what, allowed, int(rows.size), tuple(places))


def refuse_errors(*findings: Iterable[Finding]) -> None:
    """Let warnings pass.

    Raises:
        TraceError: with the first error.
    """
    for finding in chain(*findings):
        if finding.severity == "error":
            raise TraceError(str(finding))


def lay_out(group: Group, shape: ModelShape, last_pass: int) -> tuple[Layout | None, list[Finding]]:
    """Fit the rows of a group together; findings instead of a layout when they do not fit.

    `last_pass` is the pass id at the end of the row group before, -1 at the start.
    """
    if not group.forwards["pass_id"].size:
        return None, [Finding("error", "row group without forwards", "one pass or more", 1, (Place("none"),))]
    findings = list(_check_forwards(group.forwards, last_pass))
    if findings:
        return None, findings
    keys = _key(group.forwards)
    token_forward, known = _find(keys, group.tokens)
    findings += _check_tokens(group, token_forward, known)
    routing_forward, known = _find(keys, group.routing)
    layer_ids = np.array(shape.layer_ids)
    layer = np.minimum(np.searchsorted(layer_ids, group.routing["layer"]), shape.num_layers - 1)
    in_shape = layer_ids[layer] == group.routing["layer"]
    findings += found_at(
        ~in_shape,
        group.routing,
        "layer that the model does not have",
        f"{shape.num_layers} MoE layers, {shape.layer_ids[0]} to {shape.layer_ids[-1]}",
        lambda row: int(group.routing["layer"][row]),
    )
    findings += _check_routing_counts(group, shape, routing_forward, layer, known & in_shape)
    if findings:
        return None, findings
    size = group.forwards["num_tokens"].astype(np.int64)
    expected_forward = np.repeat(np.arange(size.size), size * shape.num_layers)
    starts = np.cumsum(size * shape.num_layers) - size * shape.num_layers
    within = np.arange(expected_forward.size) - starts[expected_forward]
    row_size = size[expected_forward]
    token = (np.cumsum(size) - size)[expected_forward] + within % row_size
    expected_layer = within // row_size
    misplaced = (
        (routing_forward != expected_forward)
        | (layer != expected_layer)
        | (group.routing["position"] != group.tokens["position"][token])
    )
    findings += found_at(
        misplaced,
        group.routing,
        "routing row out of place",
        "rows sorted by pass, request, layer and position, with the positions of tokens",
        lambda row: (
            f"this row where position {group.tokens['position'][token[row]]} of layer "
            f"{shape.layer_ids[expected_layer[row]]} belongs"
        ),
    )
    if group.signals is not None:
        findings += _check_signal_keys(group.routing, group.signals)
    return (None if findings else Layout(token_forward, routing_forward, token, layer)), findings


def _key(columns: Columns) -> Index:
    return (columns["pass_id"].astype(np.int64) << 32) | columns["request"]


def _find(keys: Index, columns: Columns) -> tuple[Index, Mask]:
    """For each row the forward that it belongs to, and whether there is one."""
    wanted = _key(columns)
    index = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return index, keys[index] == wanted


def _check_forwards(forwards: Columns, last_pass: int) -> Iterator[Finding]:
    pass_id, request = forwards["pass_id"], forwards["request"]
    bad = (pass_id < 0) | (request < 0)
    yield from found_at(bad, forwards, "negative id", "0 or more", lambda row: f"{pass_id[row]}, {request[row]}")
    key = _key(forwards)
    before = np.concatenate([[((last_pass + 1) << 32) - 1], key[:-1]])
    yield from found_at(
        key <= before,
        forwards,
        "forwards out of order",
        "ascending pass, and ascending request within a pass",
        lambda row: f"this row after pass {before[row] >> 32}",
    )
    size = forwards["num_tokens"]
    yield from found_at(size < 1, forwards, "forward without tokens", "1 token or more", lambda row: size[row])
    wall = forwards["wall_ns"]
    differs = np.concatenate([[False], (pass_id[1:] == pass_id[:-1]) & (wall[1:] != wall[:-1])])
    yield from found_at(differs, forwards, "wall_ns differs within a pass", "one value", lambda row: wall[row])


def _check_tokens(group: Group, forward: Index, known: Mask) -> Iterator[Finding]:
    tokens, forwards = group.tokens, group.forwards
    yield from found_at(~known, tokens, "token without a forward", "a row of forwards for each", lambda row: "none")
    counts = np.bincount(forward[known], minlength=forwards["num_tokens"].size)
    wrong = counts != forwards["num_tokens"]
    yield from found_at(
        wrong,
        forwards,
        "positions missing or too many in tokens",
        "num_tokens of them",
        lambda row: f"{counts[row]} of {forwards['num_tokens'][row]}",
    )
    if known.all() and not wrong.any():
        position = tokens["position"]
        step = np.diff(position)
        unsorted = (np.diff(forward) < 0) | ((np.diff(forward) == 0) & (step <= 0))
        yield from found_at(
            np.concatenate([[False], unsorted]),
            tokens,
            "tokens out of order",
            "ascending positions within a forward, in the order of forwards",
            lambda row: f"this row after position {position[row - 1]}",
        )


def _check_routing_counts(
    group: Group, shape: ModelShape, forward: Index, layer: Index, known: Mask
) -> Iterator[Finding]:
    forwards = group.forwards
    yield from found_at(
        ~known, group.routing, "routing row without a forward and layer", "one of each", lambda row: "none"
    )
    size = forwards["num_tokens"].astype(np.int64)
    cells = np.bincount((forward * shape.num_layers + layer)[known], minlength=size.size * shape.num_layers)
    expected = np.repeat(size, shape.num_layers)
    keys = {name: np.repeat(forwards[name], shape.num_layers) for name in ("pass_id", "request")}
    keys["layer"] = np.tile(shape.layer_ids, size.size)
    yield from found_at(
        cells == 0,
        keys,
        "missing layer",
        f"routing of all {shape.num_layers} MoE layers",
        lambda row: f"routing of {np.count_nonzero(cells.reshape(size.size, -1)[row // shape.num_layers])} layers",
    )
    yield from found_at(
        (cells > 0) & (cells != expected),
        keys,
        "positions missing or too many in a layer",
        "one routing row for each token",
        lambda row: f"{cells[row]} rows for {expected[row]} tokens",
    )


def _check_signal_keys(routing: Columns, signals: Columns) -> Iterator[Finding]:
    names = ("pass_id", "request", "layer", "position")
    if signals["pass_id"].size != routing["pass_id"].size:
        found = f"{signals['pass_id'].size} rows of signals beside {routing['pass_id'].size} of routing"
        yield Finding("error", "signals do not match routing", "equally many rows", 1, (Place(found),))
        return
    differs = np.zeros(routing["pass_id"].size, bool)
    for name in names:
        differs |= signals[name] != routing[name]
    yield from found_at(differs, routing, "signals do not match routing", "the same rows", lambda row: "another row")
