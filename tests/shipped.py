"""What is read of a shipped trace once in a process: most of the time of a test that needs only its first requests."""

from functools import cache

from tracer.schema import ModelShape, Pass
from tracer.shipped import find_trace
from tracer.store import TraceReader


@cache
def tiny(num_requests: int) -> tuple[ModelShape, list[Pass]]:
    """Shape, and passes with their signals, of the first requests of `proxy-tiny`."""
    reader = TraceReader(find_trace("proxy-tiny"))
    return reader.metadata.shape, [p for p in reader.passes(signals=True) if p.requests.max() < num_requests]
