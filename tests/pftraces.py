"""Perfetto traces as plain Python values, read with Perfetto's own protocol buffers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

perfetto_trace = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
UnknownFieldSet = pytest.importorskip("google.protobuf.unknown_fields").UnknownFieldSet


class Slice(NamedTuple):
    start_ns: int
    end_ns: int
    name: str
    arguments: dict[str, int | str]
    depth: int


@dataclass
class Track:
    name: str
    parent: int
    rank: int
    unit: str
    slices: list[Slice] = field(default_factory=list)  # in the order of their ends
    counts: list[tuple[int, int]] = field(default_factory=list)


def read_tracks(path: Path) -> dict[int, Track]:
    """Tracks by number; whatever a reader of the format could not make sense of fails here."""
    trace = perfetto_trace.Trace.FromString(path.read_bytes())
    names: dict[str, dict[int, str]] = defaultdict(dict)
    tracks: dict[int, Track] = {}
    opened: dict[int, list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    last_ns: dict[int, int] = defaultdict(int)
    is_first = True
    for packet in trace.packet:
        for message in (packet, packet.track_event, packet.track_descriptor, packet.interned_data):
            assert not len(UnknownFieldSet(message))
        assert packet.trusted_packet_sequence_id == 1
        assert (packet.sequence_flags & packet.SEQ_INCREMENTAL_STATE_CLEARED != 0) == is_first
        is_first = False
        for kind in ("event_names", "debug_annotation_names"):
            for entry in getattr(packet.interned_data, kind):
                assert entry.iid not in names[kind]
                names[kind][entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            assert described.uuid not in tracks
            assert described.child_ordering == described.EXPLICIT
            unit = described.counter.unit_name if described.HasField("counter") else ""
            tracks[described.uuid] = Track(described.name, described.parent_uuid, described.sibling_order_rank, unit)
        if packet.HasField("track_event"):
            event, time_ns = packet.track_event, packet.timestamp
            track, stack = tracks[event.track_uuid], opened[event.track_uuid]
            assert time_ns >= last_ns[event.track_uuid]
            last_ns[event.track_uuid] = time_ns
            if event.type == event.TYPE_COUNTER:
                assert track.unit
                track.counts.append((time_ns, event.counter_value))
            elif event.type == event.TYPE_SLICE_BEGIN:
                assert packet.sequence_flags & packet.SEQ_NEEDS_INCREMENTAL_STATE
                arguments = {}
                for one in event.debug_annotations:
                    key = names["debug_annotation_names"][one.name_iid]
                    arguments[key] = getattr(one, one.WhichOneof("value"))
                stack.append((time_ns, names["event_names"][event.name_iid], arguments))
            else:
                assert event.type == event.TYPE_SLICE_END
                start_ns, name, arguments = stack.pop()
                track.slices.append(Slice(start_ns, time_ns, name, arguments, len(stack)))
    assert not any(opened.values())
    return tracks


def by_name(tracks: dict[int, Track]) -> dict[str, Track]:
    named = {track.name: track for track in tracks.values()}
    assert len(named) == len(tracks)
    return named
