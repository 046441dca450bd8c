"""What compiled code keeps of a run, and the registers among it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.experimental import structref
from numpy.typing import NDArray

from policies.jit import jit
from policies.log import PREFETCH_COUNTS
from policies.residents import Residents
from replay.core_commands import LAUNCH, RECORD_COMPUTE, RECORD_COPIES, WAIT_COMPUTE, WAIT_COPIES

# registers, by their place in `Arrays.at`
(
    LAYER,  # that runs
    EXECUTION,  # layer executions so far
    COUNTED,  # row of counts of the execution that events are counted as
    NUM_COMMANDS,
    NUM_EVENTS,  # numbers that were given out
    NUM_COPIES,
    FREE_FIRST,  # slot that is taken next, in the ring of free ones
    NUM_FREE,
    PENDING_FIRST,
    NUM_PENDING,
    NUM_QUEUED,
    NUM_ISSUED,  # prefetches that were ever queued
    CURRENT,  # copy of the prefetch that was started and has not landed; -1 without one
    LAST_END,  # event of the copy that was put on the stream last; -1 before the first
    IS_GAPLESS,  # nothing has come between it and the next one
    IS_HELD,  # no copy starts between the reading at a gate and its plan
    WAITS,  # prefetches need to know when a kernel has run; else it makes no difference
    COPY_BYTES,
    NUM_REGISTERS,
) = range(19)

ISSUED, STARTED, LANDED, LATE, UNSERVED, UNUSED, DROPPED_BEGIN, DROPPED_FLAG, DROPPED_VICTIM = range(
    len(PREFETCH_COUNTS)
)
# columns of `Arrays.copies`
COPY_LAYER, COPY_EXPERT, COPY_BEGIN, COPY_END, IS_PROMOTED = range(5)

MOST_PENDING = 64
_MARGIN = 4096  # events, copies and commands beyond what one layer needs


class Handles(NamedTuple):
    """What commands are carried out with: addresses and handles of the driver, or, without a GPU, flags of events."""

    calls: NDArray[np.int64]  # as of `core_calls`; 0 without a GPU
    streams: NDArray[np.int64]  # [2] of the one that computes and the one that copies
    events: NDArray[np.int64]  # by their numbers
    graphs: NDArray[np.int64]  # by their numbers
    come: NDArray[np.uint8]  # whether an event has come, where there is no GPU


class Told(NamedTuple):
    """What kernels are told of a layer; all but `works` as of `arrange`."""

    index: NDArray[np.int32]  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody looks for a value in it
    layout: NDArray[np.int64]
    cpu_tokens: NDArray[np.int64]
    cpu_ends: NDArray[np.int64]
    works: NDArray[np.int64]  # numbers of the kernels over groups 0, 1, ..., and last of the fetch alone


class Arrays(NamedTuple):
    """All that compiled code reads and changes. L layers, E experts, S slots, P pools."""

    resident: NDArray[np.bool_]  # [L, E] of Residents
    in_flight: NDArray[np.bool_]  # [L, E] of Residents
    capacity: NDArray[np.int64]  # [P] of Residents
    score: NDArray[np.float64]  # [L, E] of the policy, to find victims by; [0, 0] without
    slot_of: NDArray[np.int32]  # [L, E] of whoever is on the GPU, or on the way to it
    in_use: NDArray[np.bool_]  # [L, E] a kernel of the running layer has yet to read them
    is_hit: NDArray[np.bool_]  # [E] of the running layer
    leaving: NDArray[np.bool_]  # [L, E] once they were used
    entering: NDArray[np.bool_]  # [L, E] when the running layer ends
    untried: NDArray[np.bool_]  # [L, E] landed by prefetch and not activated since
    last_activated: NDArray[np.int64]  # [L, E] layer execution
    dropped: NDArray[np.bool_]  # [E] whose prefetch the beginning of the running layer dropped
    free: NDArray[np.int64]  # [S, 2] ring of free slots: slot, event after which it may be written or -1
    pending: NDArray[np.int64]  # [., 3] ring of what happens when a kernel has run: event, what, of what
    queue: NDArray[np.int64]  # [., 2] layer, expert of the prefetches that are queued; the next one last
    queue_keys: NDArray[np.float64]  # [., 3] of each: two of priority, and issue number
    copies: NDArray[np.int64]  # [., 5]
    counts: NDArray[np.int64]  # [., 9] of each layer execution, as PREFETCH_COUNTS
    commands: NDArray[np.int64]  # [., 4]
    targets: NDArray[np.int64]  # [S] address of each slot
    sources: NDArray[np.int64]  # [L, E] address of each expert
    at: NDArray[np.int64]  # registers


@structref.register
class _CoreType(types.StructRef):
    pass


class Core(structref.StructRefProxy):
    """Arrays, Handles and Told as compiled code takes them: by one reference, so that a call costs little."""


structref.define_proxy(Core, _CoreType, [*Arrays._fields, *Handles._fields, *Told._fields])


@jit
def _core(values):
    return Core(*values)


def core_of(arrays: Arrays, handles: Handles, told: Told) -> Core:
    """The three of them for compiled code, until one of their arrays is another."""
    return _core((*arrays, *handles, *told))


def arrays_of(
    residents: Residents,
    staging: int,
    num_executions: int,
    targets: NDArray[np.int64],
    sources: NDArray[np.int64],
    copy_bytes: int,
    waits: bool,
) -> Arrays:
    """State of a run at its start; residents have no slots yet.

    Args:
        residents: of the run.
        staging: slots beyond all capacity.
        num_executions: layer executions of the run.
        targets: [S] addresses.
        sources: [L, E] addresses.
        copy_bytes: of each copy.
        waits: prefetches need to know when a kernel has run.
    """
    shape = num_layers, num_experts = residents.resident.shape
    score = getattr(residents.state, "score", None)
    num_slots = int(residents.capacity.sum()) + staging
    free = np.stack([np.arange(num_slots), np.full(num_slots, -1)], axis=1)
    at = np.zeros(NUM_REGISTERS, np.int64)
    at[CURRENT] = at[LAST_END] = -1
    at[NUM_FREE], at[WAITS], at[COPY_BYTES] = num_slots, waits, copy_bytes
    return Arrays(
        residents.resident,
        residents.in_flight,
        residents.capacity,
        np.zeros((0, 0)) if score is None else score,
        slot_of=np.full(shape, -1, np.int32),
        in_use=np.zeros(shape, np.bool_),
        is_hit=np.zeros(num_experts, np.bool_),
        leaving=np.zeros(shape, np.bool_),
        entering=np.zeros(shape, np.bool_),
        untried=np.zeros(shape, np.bool_),
        last_activated=np.full(shape, -1),
        dropped=np.zeros(num_experts, np.bool_),
        free=free,
        pending=np.zeros((MOST_PENDING, 3), np.int64),
        queue=np.zeros((num_layers * num_experts, 2), np.int64),
        queue_keys=np.zeros((num_layers * num_experts, 3)),
        copies=np.zeros((_MARGIN, 5), np.int64),
        counts=np.zeros((num_executions + 1, len(PREFETCH_COUNTS)), np.int64),
        commands=np.zeros((_MARGIN, 4), np.int64),
        targets=targets,
        sources=sources,
        at=at,
    )


def with_room(arrays: Arrays) -> Arrays:
    """The same with room for the copies of another layer."""
    if arrays.at[NUM_COPIES] + _MARGIN // 2 <= len(arrays.copies):
        return arrays
    return arrays._replace(copies=np.concatenate([arrays.copies, np.zeros_like(arrays.copies)]))


def most_events(num_experts: int) -> int:
    """Events that a layer can need, and what begins while it waits."""
    return 4 * num_experts + _MARGIN


@jit
def new_event(core):
    """A number that no event has."""
    core.at[NUM_EVENTS] += 1
    return core.at[NUM_EVENTS] - 1


@jit
def command(core, what, a, b, c):
    """Write a command down."""
    number = core.at[NUM_COMMANDS]
    core.commands[number, 0], core.commands[number, 1] = what, a
    core.commands[number, 2], core.commands[number, 3] = b, c
    core.at[NUM_COMMANDS] = number + 1


@jit
def record(core, what, event):
    """Let an event be recorded, on the stream that `what` says."""
    command(core, what, event, 0, 0)
    return event


@jit
def launch(core, work):
    """Let the device do work that it knows by a number."""
    command(core, LAUNCH, work, 0, 0)


@jit
def record_compute(core):
    """A new event, recorded by the stream that computes."""
    return record(core, RECORD_COMPUTE, new_event(core))


@jit
def record_copies(core):
    """A new event, recorded by the stream that copies."""
    return record(core, RECORD_COPIES, new_event(core))


@jit
def let_compute_wait(core, event):
    """Let what computes later wait for an event."""
    command(core, WAIT_COMPUTE, event, 0, 0)


@jit
def let_copies_wait(core, event):
    """Let copies that follow wait for an event."""
    command(core, WAIT_COPIES, event, 0, 0)
