"""Perfetto's trace format, as much of it as a timeline needs: each packet goes to the file as soon as it is made."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import BinaryIO

# Field numbers of perfetto/trace/*.proto
_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE_ID, _TRACK_EVENT, _INTERNED_DATA, _SEQUENCE_FLAGS, _TRACK_DESCRIPTOR = 8, 10, 11, 12, 13, 60
_UUID, _NAME, _PARENT_UUID, _COUNTER, _CHILD_ORDERING, _SIBLING_ORDER_RANK = 1, 2, 5, 8, 11, 12  # of TrackDescriptor
_UNIT_NAME = 6  # of CounterDescriptor
_DEBUG_ANNOTATIONS, _TYPE, _NAME_IID, _TRACK_UUID, _COUNTER_VALUE = 4, 9, 10, 11, 30  # of TrackEvent
_EVENT_NAMES, _ANNOTATION_NAMES = 2, 3  # of InternedData
_INTERNED_IID, _INTERNED_NAME = 1, 2
_ANNOTATION_NAME_IID, _INT_VALUE, _STRING_VALUE = 1, 4, 6  # of DebugAnnotation

_EXPLICIT = 3  # order of a track's children
_SLICE_BEGIN, _SLICE_END, _COUNTER_SAMPLE = 1, 2, 4  # types of TrackEvent
_STATE_CLEARED, _NEEDS_STATE = 1, 2  # sequence flags: names are known from this packet on; this packet uses them


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; a negative number as its two's complement of 64 bits."""
    if 0 <= value < 0x80:
        return bytes((value,))
    value &= 0xFFFF_FFFF_FFFF_FFFF
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


_PACKET_KEY, _EVENT_KEY = _varint(_PACKET << 3 | 2), _varint(_TRACK_EVENT << 3 | 2)
_TIMESTAMP_KEY, _VALUE_KEY = _varint(_TIMESTAMP << 3), _varint(_COUNTER_VALUE << 3)
_SEQUENCE = _number(_SEQUENCE_ID, 1)
_WITH_NAMES = _SEQUENCE + _number(_SEQUENCE_FLAGS, _NEEDS_STATE)


@lru_cache(4096)
def _event_of(kind: int, track: int) -> bytes:
    """How an event of this type begins."""
    return _number(_TYPE, kind) + _number(_TRACK_UUID, track)


@lru_cache(65536)
def _annotation(iid: int, value: int | str) -> bytes:
    content = _number(_INT_VALUE, value) if isinstance(value, int) else _bytes(_STRING_VALUE, value.encode())
    return _bytes(_DEBUG_ANNOTATIONS, _number(_ANNOTATION_NAME_IID, iid) + content)


class TraceWriter:
    """Writes tracks, slices and counters; of what was written it remembers the names alone.

    Times are whole ns. Slices of one track follow one another or lie within one another, and are written in order of
    time; tracks do not heed each other's order.

    Args:
        file: open for writing; the caller closes it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_tracks = 0
        self._names: dict[tuple[int, str], int] = {}  # by kind of name
        self._heads: dict[tuple[int, str], bytes] = {}  # how a slice of this track and name begins
        self._write(_SEQUENCE + _number(_SEQUENCE_FLAGS, _STATE_CLEARED))

    def track(self, name: str, parent: int = 0, rank: int = 0) -> int:
        """A track for slices, or with tracks below it a group of them; returns its number.

        Args:
            name: as it is shown.
            parent: number of the track it lies below; 0 is none.
            rank: place among those of its parent, lowest first.
        """
        return self._describe(name, parent, rank, b"")

    def counter(self, name: str, parent: int, rank: int, unit: str) -> int:
        """A track for the values of a counter; returns its number."""
        return self._describe(name, parent, rank, _bytes(_COUNTER, _bytes(_UNIT_NAME, unit.encode())))

    def begin(self, track: int, time_ns: int, name: str, arguments: Mapping[str, int | str]) -> None:
        """A slice begins, which `end` of the same track ends."""
        key = track, name
        if key not in self._heads:
            named = _number(_NAME_IID, self._iid(_EVENT_NAMES, name))
            self._heads[key] = _event_of(_SLICE_BEGIN, track) + named
        event = self._heads[key]
        for argument, value in arguments.items():
            event += _annotation(self._iid(_ANNOTATION_NAMES, argument), value)
        self._event(time_ns, _WITH_NAMES, event)

    def end(self, track: int, time_ns: int) -> None:
        """The slice of this track that began last ends."""
        self._event(time_ns, _SEQUENCE, _event_of(_SLICE_END, track))

    def count(self, track: int, time_ns: int, value: int) -> None:
        """A counter has this value from now on."""
        self._event(time_ns, _SEQUENCE, _event_of(_COUNTER_SAMPLE, track) + _VALUE_KEY + _varint(value))

    def _describe(self, name: str, parent: int, rank: int, counter: bytes) -> int:
        self._num_tracks += 1
        descriptor = _number(_UUID, self._num_tracks) + _bytes(_NAME, name.encode())
        if parent:
            descriptor += _number(_PARENT_UUID, parent)
        descriptor += _number(_CHILD_ORDERING, _EXPLICIT) + _number(_SIBLING_ORDER_RANK, rank) + counter
        self._write(_SEQUENCE + _bytes(_TRACK_DESCRIPTOR, descriptor))
        return self._num_tracks

    def _iid(self, kind: int, name: str) -> int:
        """Number of a name, which is written out once."""
        key = kind, name
        if key not in self._names:
            self._names[key] = len(self._names) + 1
            entry = _number(_INTERNED_IID, self._names[key]) + _bytes(_INTERNED_NAME, name.encode())
            self._write(_WITH_NAMES + _bytes(_INTERNED_DATA, _bytes(kind, entry)))
        return self._names[key]

    def _event(self, time_ns: int, head: bytes, event: bytes) -> None:
        self._write(_TIMESTAMP_KEY + _varint(time_ns) + head + _EVENT_KEY + _varint(len(event)) + event)

    def _write(self, packet: bytes) -> None:
        self._file.write(_PACKET_KEY + _varint(len(packet)) + packet)
