"""One safetensors file, mapped into memory: its tensors are views of the file, read when they are touched."""

from __future__ import annotations

import json
import math
import mmap
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tracer.checkpoint_layout import CONFIG_NAME, Place
from tracer.schema import TraceError

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Shard:
    """The tensors of one file, none of them read yet.

    The map is shared and read-only, so that the system may drop its pages whenever it needs memory; the library's
    own map for PyTorch is a private one that can be written to, of which the system may allow no more than memory.
    Tensors keep the map alive; writing to one ends the process.

    Raises:
        TraceError: The file cannot be read, or is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="numpy"):  # checks the header, and the file's length by it
                pass
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (SafetensorError, OSError) as error:  # safetensors names no file
            raise TraceError(f"{path}: cannot be read as a shard: {error}") from None
        self._start = 8 + int.from_bytes(mapped[:8], "little")
        self._entries = json.loads(mapped[8 : self._start])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def tensor(self, place: Place) -> Tensor:
        """A tensor of the model.

        Raises:
            TraceError: What is stored there is missing, or has another shape or a dtype that is not read.
        """
        entry = self._entries.get(place.name)
        if entry is None:
            raise TraceError(f"{self._path}: holds no tensor {place.name}, which the index looks for there")
        if tuple(entry["shape"]) != place.shape:
            raise TraceError(
                f"{self._path}: {place.name} has shape {entry['shape']}, {CONFIG_NAME} asks for {list(place.shape)}"
            )
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise TraceError(
                f"{self._path}: {place.name} is stored as {entry['dtype']}, allowed are {', '.join(_DTYPES)}"
            )
        start, stop = (self._start + offset for offset in entry["data_offsets"])
        stored = self._bytes[start:stop]
        if start % dtype.itemsize:  # only old files have such; a view of other items must begin at one
            stored = stored.clone()
        return place.of(stored.view(dtype).view(place.shape))


def require_finite(where: str, stored: Tensor, dtype: torch.dtype) -> None:
    """Refuse NaN and infinity, and values that become infinite in the dtype of the model."""
    for extreme in torch.aminmax(stored):  # both are NaN where one value is, and much quicker than isfinite
        value = extreme.item()
        if abs(value) <= torch.finfo(dtype).max:
            continue
        if not math.isfinite(value):
            raise TraceError(f"{where} holds {value:g}, allowed are finite numbers")
        if not extreme.to(dtype).isfinite():  # some beyond the largest number are rounded to it
            raise TraceError(f"{where} holds {value:g}, which {dtype} cannot hold")
