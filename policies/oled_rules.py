"""What OLED-MoE decides at each gate and after each forward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.capacity import apportion, smooth
from policies.confidence import Readings, confidence_at
from policies.contract import PolicyError, plain_plan
from policies.dispatch import DispatchParams
from policies.jit import jit
from policies.lru import touch
from policies.misses import split_in_decode
from policies.priority import CONFIDENCE, ORDER, gates_at, priority
from policies.retention import best, by_priority, equal_capacity, ids_of, missed_of, nobody_resident, with_admitted
from tracer.schema import ForwardKind, ModelShape

WINDOW = 5  # decode forwards, of smooth=window5
JOINING = ("fixed", "activated", "missed")
_FIXED, _MISSED = JOINING.index("fixed"), JOINING.index("missed")
_PREFILL = int(ForwardKind.PREFILL)
# Indices into State.counts: one array, since every array of the state costs time at each call from Python.
_LAST_TOUCH = 0  # time of it, under LRU order
_SMOOTHED = 1  # forwards in the statistics
_DECODED = 2  # decode forwards


class Params(NamedTuple):
    """What never changes."""

    signal: int  # of priority.SIGNALS
    lru_order: int  # index into lru.ORDERS
    recent_ties: bool
    coop: bool
    dispatch: DispatchParams
    joining: int  # index into JOINING: which experts of the run join n bar's average
    readings: Readings | None
    ema: float  # 0: the mean of the last forwards
    c_min: int
    resize_every: int
    lazy: bool
    prefill_updates: bool
    max_admit: int


class State(NamedTuple):
    """What is remembered between gates."""

    keys: NDArray[np.float64]  # [L, E] priority at the layer's last execution; 0 under LRU order
    recency: NDArray[np.int64]  # [L, E] breaks ties of keys; under LRU order the time of last touch
    average: NDArray[np.float64]  # [2] tokens and experts, whose ratio is n bar
    seen: NDArray[np.int64]  # [2, L] activated experts and hits of this forward
    smoothed: NDArray[np.float64]  # [2, L] activation ratio and utilization
    history: NDArray[np.float64]  # [5, 2, L] the same, of the last forwards
    target: NDArray[np.int64]  # [L] slots that each layer is to have
    counts: NDArray[np.int64]  # [3] by the indices above


def begin(
    shape: ModelShape, slots: int, fewest: int, average: tuple[int, int]
) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities.

    Args:
        shape: of the model.
        slots: of all layers together.
        fewest: slots that every layer must be able to have.
        average: tokens and experts whose ratio is n bar.

    Raises:
        PolicyError: too few slots, or more than experts.
    """
    num_layers, num_experts = shape.num_layers, shape.num_experts
    capacity = equal_capacity(shape, slots)
    if slots < num_layers * fewest:
        raise PolicyError(
            f"{slots} slots for {num_layers} layers: layer_adapt with c_min={fewest} needs {num_layers * fewest}"
        )
    state = State(
        keys=np.zeros((num_layers, num_experts)),
        recency=np.zeros((num_layers, num_experts), np.int64),
        average=np.array(average, np.float64),
        seen=np.zeros((2, num_layers), np.int64),
        smoothed=np.zeros((2, num_layers)),
        history=np.zeros((WINDOW, 2, num_layers)),
        target=capacity.copy(),
        counts=np.zeros(3, np.int64),
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
        touch(params.lru_order, state.recency, state.counts[_LAST_TOUCH:], step, resident)
    elif params.recent_ties:
        for expert in range(load.size):
            recency[expert] = step.forward + 1 if load[expert] > 0 else recency[expert]

    if params.signal == ORDER and not params.coop:
        transfers, on_cpu = ids_of(missed), np.empty(0, np.int64)
    else:
        confidence = confidence_at(params.readings, step)
        gates = gates_at(step.signals, step)
        reuse = priority(step.expert_ids, gates, confidence, CONFIDENCE, load.size)
        if params.signal != ORDER:
            ranked = reuse
            if params.signal != CONFIDENCE:
                ranked = priority(step.expert_ids, gates, confidence, params.signal, load.size)
            for expert in range(load.size):
                keys[expert] = ranked[expert]
        if params.coop:
            nbar = state.average[0] / state.average[1]
            transfers, on_cpu = split_in_decode(
                params.dispatch, nbar, reuse, step, missed, num_activated, view.estimates
            )
            if params.joining != _FIXED and step.kind != _PREFILL:
                for expert in range(load.size):
                    if missed[expert] or (load[expert] > 0 and params.joining != _MISSED):
                        state.average[0] += load[expert]
                        state.average[1] += 1.0
        else:
            transfers, on_cpu = by_priority(missed, reuse), np.empty(0, np.int64)
    capacity = min(view.capacity[layer], state.target[layer])
    held = with_admitted(resident, transfers, params.max_admit, keys, recency)
    return plain_plan(transfers, on_cpu, best(held, capacity, keys, recency))


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
    if is_decode or params.prefill_updates:
        newest = np.empty((2, num_layers), np.float64)
        for layer in range(num_layers):
            newest[0, layer] = state.seen[0, layer] / num_experts
            newest[1, layer] = state.seen[1, layer] / view.capacity[layer]
        smooth(newest, state.history, state.smoothed, state.counts[_SMOOTHED], params.ema)
        state.counts[_SMOOTHED] += 1
        state.counts[_DECODED] += is_decode
    if not is_decode or state.counts[_DECODED] % params.resize_every != 0:
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
