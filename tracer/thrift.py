"""Thrift's compact protocol, as far as Parquet uses it: structures to values and back, whatever they mean.

Source: thrift-compact-protocol.md of Apache Thrift.
"""

from __future__ import annotations

from typing import Any, NamedTuple

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


class Field(NamedTuple):
    """A value and its type; a value is an int, bytes, a List or a Struct."""

    type: int
    value: Any


class List(NamedTuple):
    """Values of one type."""

    type: int
    values: list[Any]


Struct = dict[int, Field]  # by field number


class ThriftError(ValueError):
    """Bytes are not what this protocol has."""


def parse(data: bytes, at: int = 0) -> tuple[Struct, int]:
    """The structure at a place in these bytes, and where it ends.

    Raises:
        ThriftError: there is none, or the bytes end within it.
    """
    reader = _Reader(data, at)
    try:
        return reader.struct(), reader.at
    except (IndexError, RecursionError) as error:
        raise ThriftError("the structure goes on beyond the bytes") from error


def dump(struct: Struct) -> bytes:
    """A structure as bytes."""
    out = bytearray()
    _write_struct(out, struct)
    return bytes(out)


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ThriftError("a number is too long")

    def _whole(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _bytes(self, size: int) -> bytes:
        if self.at + size > len(self._data):
            raise IndexError
        value = self._data[self.at : self.at + size]
        self.at += size
        return value

    def struct(self) -> Struct:
        fields: Struct = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._whole()
            fields[number] = Field(head & 0x0F, self._value(head & 0x0F))
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return self._byte()
        if kind in (I16, I32, I64):
            return self._whole()
        if kind == DOUBLE:
            return self._bytes(8)
        if kind == BINARY:
            return self._bytes(self._varint())
        if kind in (LIST, SET):
            return self._list()
        if kind == STRUCT:
            return self.struct()
        raise ThriftError(f"type {kind} is not known")

    def _list(self) -> List:
        head = self._byte()
        size = head >> 4 if head >> 4 < 15 else self._varint()
        kind = head & 0x0F
        if kind in (TRUE, FALSE):  # a byte each, unlike as fields
            return List(kind, [self._byte() for _ in range(size)])
        return List(kind, [self._value(kind) for _ in range(size)])


def _write_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_struct(out: bytearray, struct: Struct) -> None:
    last = 0
    for number, (kind, value) in sorted(struct.items()):
        kind = (TRUE if value else FALSE) if kind in (TRUE, FALSE) else kind
        if 0 < number - last < 16:
            out.append(number - last << 4 | kind)
        else:
            out.append(kind)
            _write_varint(out, number << 1)
        last = number
        if kind not in (TRUE, FALSE):
            _write_value(out, kind, value)
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in (I16, I32, I64):
        _write_varint(out, value << 1 if value >= 0 else (-value << 1) - 1)
    elif kind == BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind == DOUBLE:
        out += value
    elif kind in (BYTE, TRUE, FALSE):
        out.append(value)
    elif kind == STRUCT:
        _write_struct(out, value)
    else:
        size = len(value.values)
        out.append(min(size, 15) << 4 | value.type)
        if size >= 15:
            _write_varint(out, size)
        for entry in value.values:
            _write_value(out, value.type, entry)
