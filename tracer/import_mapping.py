"""Which columns of somebody's table hold what a trace needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from tracer.records import make_record
from tracer.schema import ForwardKind, TraceError, choices

DECODE = "decode"  # what `kinds` calls forwards of an autoregressive model that run one generated token
_KINDS = (*(kind.name.lower() for kind in ForwardKind), DECODE)


@dataclass(frozen=True)
class ColumnNames:
    """Names of columns; an empty one is not there.

    A row is of one token in one layer, or, where `expert_ids` is a whole number, of one expert of these. Without
    `forward` the model is autoregressive: the prompt is one forward, each other position one of its own.
    """

    position: str  # of the token, absolute
    layer: str
    expert_ids: tuple[str, ...]  # one column of lists, of text or of numbers, or one of numbers for each of the top k
    request: str = ""  # none: all rows are of one
    forward: str = ""  # ascending within a request
    gates: tuple[str, ...] = ()  # as expert_ids; any scale
    token_id: str = ""
    kind: str = ""  # what is in it is a key of `kinds`
    block: str = ""
    iteration: str = ""
    masked: str = ""
    accepted: str = ""
    p_argmax: str = ""
    p_current: str = ""

    def names(self) -> list[str]:
        """Every column that is read, once."""
        found: list[str] = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            found += value if isinstance(value, tuple) else [value]
        return [name for name in dict.fromkeys(found) if name]


@dataclass(frozen=True)
class TableMapping:
    """How a table is read.

    Args:
        columns: which holds what.
        kinds: what the column `kind` holds, to `prefill` or `decode`, or any other kind of forward.
        num_prompt: tokens of every prompt, for autoregressive tables without a column `kind`.
        optional: columns that a table may lack; what they hold is null then.
    """

    columns: ColumnNames
    kinds: dict[str, str] = field(default_factory=lambda: {kind: kind for kind in _KINDS})
    num_prompt: int | None = None
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        columns = self.columns
        for name in ("position", "layer"):
            if not getattr(columns, name):
                raise TraceError(f"columns.{name} must name a column")
        if self.num_prompt is not None and self.num_prompt < 0:
            raise TraceError(f"num_prompt is {self.num_prompt}, must be 0 or more")
        if not all(columns.expert_ids) or not columns.expert_ids:
            raise TraceError("columns.expert_ids must name one column or more")
        if columns.gates and len(columns.gates) != len(columns.expert_ids):
            raise TraceError("columns.gates must name as many columns as columns.expert_ids")
        for value, kind in self.kinds.items():
            allowed = ("prefill", DECODE) if not columns.forward else _KINDS
            if kind not in allowed and kind != value:
                raise TraceError(f"kinds.{value} is {kind!r}, must be one of {', '.join(allowed)}")
        if not columns.forward:
            for name in ("block", "iteration", "masked", "accepted"):
                if getattr(columns, name):
                    raise TraceError(f"columns.{name} needs columns.forward: without it every position runs once")

    def over(self, there: Sequence[str]) -> TableMapping:
        """The same for a table that has these columns, without the optional ones that it lacks.

        Raises:
            TraceError: it lacks another or has one twice, or nothing says which tokens are of the prompt.
        """
        if twice := [name for name in self.columns.names() if list(there).count(name) > 1]:
            raise TraceError(f"has several columns {twice[0]!r}; must have one")
        missing = [name for name in self.columns.names() if name not in there]
        for name in missing:
            if name not in self.optional:
                raise TraceError(f"no column {name!r}; {choices(name, there)}")

        def kept(value: Any) -> Any:
            if isinstance(value, tuple):
                return () if set(value) & set(missing) else value
            return "" if value in missing else value

        columns = ColumnNames(**{entry.name: kept(getattr(self.columns, entry.name)) for entry in fields(ColumnNames)})
        if not columns.forward and not columns.kind and self.num_prompt is None:
            raise TraceError(
                "nothing says which tokens are of the prompt: needs a column for columns.kind, or --prompt-tokens"
            )
        return replace(self, columns=columns)


# moe-policylang 1.15.0: a row for each (prompt, token, layer), with the scores of the chosen experts
MAPPINGS: dict[str, dict[str, Any]] = {
    "moe-policylang": {
        "columns": {
            "request": "prompt_id",
            "position": "token_idx",
            "layer": "layer_idx",
            "expert_ids": ["selected_experts"],
            "gates": ["router_scores"],
            "token_id": "token_id",
            "kind": "phase",
        },
        "kinds": {"prefill": "prefill", "decode": "decode"},
        "optional": ["router_scores", "token_id", "phase"],  # as its recorder is asked for them
    },
}


def load_mapping(name_or_path: str) -> TableMapping:
    """A mapping of these by name, or one from a YAML file.

    Raises:
        TraceError: there is neither, or it is not a mapping.
    """
    if name_or_path in MAPPINGS:
        return _made(MAPPINGS[name_or_path], f"mapping {name_or_path}")
    path = Path(name_or_path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(
            f"mapping {name_or_path!r}: cannot be read: {error.strerror}; named ones are {', '.join(MAPPINGS)}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise TraceError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    return _made(values, str(path))


def _made(values: Any, where: str) -> TableMapping:
    if isinstance(values, dict) and isinstance(columns := values.get("columns"), dict):
        lists = {name: [columns[name]] for name in ("expert_ids", "gates") if isinstance(columns.get(name), str)}
        values = values | {"columns": columns | lists}
    return make_record(TableMapping, values, where, TraceError)
