"""What a device is to do, written down by compiled code and carried out in one go."""

# pyright: reportCallIssue=false
# (an intrinsic is called without its first argument)

from __future__ import annotations

import numpy as np

from policies.jit import jit
from replay.core_calls import (
    CALL_COPY,
    CALL_ELAPSED,
    CALL_LAUNCH,
    CALL_QUERY,
    CALL_RECORD,
    CALL_WAIT,
    NOT_READY,
    call1,
    call2,
    call3,
    call4,
)

# of a command, [4] int64: what, and on what
RECORD_COMPUTE, RECORD_COPIES = 0, 1  # event
WAIT_COMPUTE, WAIT_COPIES = 2, 3  # event
COPY, COPY_ON_DEVICE = 4, 5  # address to write, address to read, bytes; the second by the stream that computes
LAUNCH = 6  # number of the work


@jit
def carry_out(core, first, last):
    """Put some of the commands that were written down on a GPU's streams; returns 0, or the number of its error."""
    calls, events, graphs, commands = core.calls, core.events, core.graphs, core.commands
    compute, copies = core.streams[0], core.streams[1]
    for i in range(first, last):
        what, a = commands[i, 0], commands[i, 1]
        if what == COPY:
            error = call4(calls[CALL_COPY], a, commands[i, 2], commands[i, 3], copies)
        elif what == RECORD_COPIES:
            error = call2(calls[CALL_RECORD], events[a], copies)
        elif what == RECORD_COMPUTE:
            error = call2(calls[CALL_RECORD], events[a], compute)
        elif what == WAIT_COMPUTE:
            error = call3(calls[CALL_WAIT], compute, events[a], 0)
        elif what == WAIT_COPIES:
            error = call3(calls[CALL_WAIT], copies, events[a], 0)
        elif what == LAUNCH:
            error = call2(calls[CALL_LAUNCH], graphs[a], compute)
        else:
            error = call4(calls[CALL_COPY], a, commands[i, 2], commands[i, 3], compute)
        if error != 0:
            return error
    return 0


@jit
def has_come(core, event):
    """An event has come: by the driver, or, without a GPU, by what threads have noted in `come`.

    An error of the driver counts as come: the next command meets it again, and says so.
    """
    query = core.calls[CALL_QUERY]
    if query == 0:
        return core.come[event] != 0
    return call1(query, core.events[event]) != NOT_READY


@jit
def times_of(calls, events, count, times_ns):
    """When events came, ns since the first of them, into [count] int64.

    Each is measured from one nearby, as the driver answers in float32 of ms. Returns 0, or its error.
    """
    answer = np.zeros(1, np.float32)
    near, near_ns = 0, 0
    times_ns[0] = 0
    for event in range(1, count):
        error = call3(calls[CALL_ELAPSED], answer.ctypes.data, events[near], events[event])
        if error != 0:
            return error
        times_ns[event] = near_ns + np.int64(np.rint(np.float64(answer[0]) * 1e6))
        if event - near >= 256:
            near, near_ns = event, times_ns[event]
    return 0
