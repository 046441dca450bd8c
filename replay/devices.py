"""The device of a name."""

from __future__ import annotations

import torch

from replay.device import Device
from replay.device_cuda import open_cuda
from replay.device_host import open_host


def open_device(name: str) -> Device:
    """The device of this name: `cpu`, `cuda` or `cuda:N`."""
    device = torch.device(name)
    return open_cuda(device) if device.type == "cuda" else open_host()
