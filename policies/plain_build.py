"""Make of a PlainPolicy what every driver calls, and say where in its own file an error came from."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from policies.build import PolicyModule
from policies.check import check_boundary, check_plan, place_of
from policies.contract import Context, End, Plan, PlanError, Policy, PolicyError, Step, View
from policies.knobs import variant_of
from policies.plain import PlainPolicy
from policies.pool_retention import capacity_of
from policies.retention import nobody_resident
from tracer.schema import ModelShape

_SIMPLE = (int, float, bool, str)


def module_of(kind: type[PlainPolicy]) -> PolicyModule:
    """What stands for the module of a class: its Knobs, and its build.

    Raises:
        PolicyError: its knobs cannot be given by name.
    """

    def build(knobs: Any, context: Context) -> Policy:
        return built_of(kind, partial(kind, **vars(knobs)), context)

    return cast(PolicyModule, SimpleNamespace(Knobs=knobs_of(kind), build=build))


def built_of(kind: type[PlainPolicy], make: Callable[[], PlainPolicy], context: Context) -> Policy:
    """The policy that runs objects of a class, one for each run.

    Args:
        kind: the class.
        make: makes an object that has not begun.
        context: what it may learn from.

    Raises:
        PolicyError: an object cannot be made, or needs signals that the trace lacks.
    """
    code = _Code(kind)
    with code.told("__init__"):
        first = make()
    if kind.decide is PlainPolicy.decide:
        raise PolicyError(f"{code.at()}: {kind.__name__} has no decide(self, step, view)")
    if first.reads_signals and not context.has_signals:
        raise PolicyError(f"{kind.__name__} reads signals, which this trace lacks")
    seen = context if first.clairvoyant else replace(context, passes=())
    return Policy(
        kind.__name__,
        _Params(code, make, seen),
        _init,
        _decide,
        None if kind.after_forward is PlainPolicy.after_forward else _boundary,
        pool=first.pool,
        misses=first.misses,
        reads_estimates=True,  # nobody knows what it reads
        reads_signals=first.reads_signals,
        prefetches=first.prefetches,
        resizes=first.resizes,
        clairvoyant=first.clairvoyant,
        file=code.path if Path(code.path).is_file() else "",
    )


def built_of_object(policy: PlainPolicy, context: Context) -> Policy:
    """The policy that runs copies of an object, which itself never begins.

    Raises:
        PolicyError: it cannot be built.
    """
    kind = type(policy)
    knobs = knobs_of(kind)
    # a knob that the object does not keep under its own name cannot be told
    kept = {entry.name: getattr(policy, entry.name, entry.default) for entry in fields(knobs)}
    told = knobs(**{name: "?" if value is MISSING else value for name, value in kept.items()})
    return replace(built_of(kind, partial(deepcopy, policy), context), variant=variant_of(told))


def knobs_of(kind: type[PlainPolicy]) -> type[Any]:
    """A dataclass of the arguments that a class is made with.

    A knob has the type of its annotation, else that of its default; a whole number without an annotation may be any.

    Raises:
        PolicyError: an argument cannot be given by name, or its default cannot be written on a command line.
    """
    required: list[tuple[str, Any]] = []
    optional: list[tuple[str, Any, Any]] = []
    for name, entry in _parameters(kind).items():
        default = tuple(entry.default) if isinstance(entry.default, list) else entry.default
        if entry.kind in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD, entry.POSITIONAL_ONLY):
            raise PolicyError(
                f"{_Code(kind).at()}: {kind.__name__} takes {entry}; must be knobs with names of their own"
            )
        if type(default).__hash__ is None:
            raise PolicyError(
                f"{_Code(kind).at()}: knob {name} of {kind.__name__} is {type(default).__name__} by default; "
                "must be a number, text, true or false, None, or a list of these"
            )
        if default is entry.empty:
            required.append((name, _type_of(entry)))
        else:
            optional.append((name, _type_of(entry), default))
    return make_dataclass("Knobs", [*required, *optional])


def _parameters(kind: type[PlainPolicy]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(kind, eval_str=True).parameters
    except NameError:  # an annotation of what is imported for a type checker alone
        return inspect.signature(kind).parameters


def _type_of(entry: inspect.Parameter) -> Any:
    hint, of_default = entry.annotation, type(entry.default)
    if hint is entry.empty:
        return float if of_default is int else of_default if of_default in _SIMPLE else Any
    optional_of = [kind for kind in get_args(hint) if kind is not type(None)]
    is_optional = type(None) in get_args(hint) and len(optional_of) == 1 and optional_of[0] in _SIMPLE
    if is_optional:
        return optional_of[0] | None
    return hint if hint in _SIMPLE else Any


class _Code:
    """Where a class is written, for messages about it."""

    def __init__(self, kind: type[PlainPolicy]) -> None:
        self._kind = kind
        code = getattr(kind.__dict__.get("decide"), "__code__", None)
        self.path = code.co_filename if code else getattr(inspect.getmodule(kind), "__file__", None) or "?"

    def at(self, method: str = "decide") -> str:
        """File and line of a method."""
        code = getattr(getattr(self._kind, method), "__code__", None)
        if code is None or code.co_filename != self.path:
            return Path(self.path).name
        return f"{Path(self.path).name}, line {code.co_firstlineno}"

    def line_of(self, error: BaseException, method: str) -> str:
        """File and line of the class's own code that an error passed last."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename == self.path:
                return f"{Path(self.path).name}, line {frame.lineno}"
        return self.at(method)

    @contextmanager
    def told(self, method: str, where: Step | End | None = None) -> Iterator[None]:
        """Within it, an error of the class is one line that begins with the place in its file.

        Args:
            method: that is called.
            where: of the run; drivers say it themselves with a PolicyError.
        """
        try:
            yield
        except PlanError as error:
            place = f"{place_of(where)}: " if where is not None else ""
            raise PlanError(f"{place}{self.line_of(error, method)}: {error}") from error
        except PolicyError as error:
            raise PolicyError(f"{self.line_of(error, method)}: {error}") from error
        except Exception as error:  # somebody's code can fail in any way
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise PolicyError(f"{self.line_of(error, method)}: {what}") from error


@dataclass(frozen=True)
class _Params:
    """What never changes."""

    code: _Code
    make: Callable[[], PlainPolicy]
    context: Context


@dataclass
class _State:
    """The object of one run, and the score that the engine reads while it goes on."""

    own: PlainPolicy
    score: NDArray[np.float64] | None  # [L, E]


def _init(params: _Params, shape: ModelShape, slots: int) -> tuple[_State, NDArray[np.bool_], NDArray[np.int64]]:
    code = params.code
    with code.told("__init__"):
        own = params.make()
    with code.told("learn"):
        own.learn(params.context)
    with code.told("start"):
        answer = own.start(shape, slots)
    resident, capacity = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if resident is None:
        resident = nobody_resident(shape)
    if capacity is None:
        capacity = capacity_of(own.pool, shape, slots)
    state = _State(own, np.zeros(nobody_resident(shape).shape) if own.prefetches else None)
    _copy_score(state, code.at("start"))
    return state, cast(NDArray[np.bool_], resident), cast(NDArray[np.int64], capacity)


def _decide(params: _Params, state: _State, step: Step, view: View) -> Plan:
    own, code = state.own, params.code
    with code.told("decide", step):
        answer = own.decide(step, view)
    where = code.at()
    if isinstance(answer, Plan) and len(answer.on_cpu) and own.misses == "h2d":
        raise PlanError(
            f'{place_of(step)}: {where}: experts {answer.on_cpu.tolist()} are served on the CPU, and the class says misses = "h2d"; '
            "must say another word, such as cpu"
        )
    try:
        check_plan(answer, step, view)
    except PlanError as error:
        raise PlanError(f"{error}; planned by decide in {where}") from error
    if len(answer.prefetches) and not own.prefetches:
        raise PlanError(f"{place_of(step)}: {where}: the plan prefetches; the class must say prefetches = True")
    _copy_score(state, f"{place_of(step)}: {where}")
    return answer._replace(retained=answer.retained.copy())  # may be the view itself, which changes


def _boundary(params: _Params, state: _State, end: End, view: View) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    code, where = params.code, params.code.at("after_forward")
    with code.told("after_forward", end):
        answer = state.own.after_forward(end, view)
    _copy_score(state, f"{place_of(end)}: {where}")
    if answer is None:
        return view.capacity, np.zeros_like(view.resident)
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise PlanError(
            f"{place_of(end)}: {where}: after_forward gave {type(answer).__name__}, must be None or (capacity, evictions)"
        )
    try:
        check_boundary(*answer, end, view)
    except PlanError as error:
        raise PlanError(f"{error}; decided by after_forward in {where}") from error
    if not (state.own.resizes or np.array_equal(answer[0], view.capacity)):
        raise PlanError(f"{place_of(end)}: {where}: slots move between layers; the class must say resizes = True")
    return answer


def _copy_score(state: _State, where: str) -> None:
    if state.score is None:
        return
    score = state.own.score
    if not isinstance(score, np.ndarray) or score.shape != state.score.shape or np.isnan(score).any():
        raise PlanError(
            f"{where}: prefetches = True needs self.score, an array of {state.score.shape} without nan, set by start; "
            f"found {type(score).__name__}{f' of {score.shape}' if isinstance(score, np.ndarray) else ''}"
        )
    state.score[:] = score
