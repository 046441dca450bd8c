"""Generation and width that the PCIe link of a GPU runs at, which an idle link lowers and a bad slot keeps low."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

import torch
from torch import Tensor

from policies.profile import ProfileError
from replay.device import Device

_BUSY_COPIES = 300  # while the state is read
_QUERY = "pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max"


class LinkState(NamedTuple):
    """What a PCIe link runs at, and the most that this GPU and this slot allow."""

    generation: int
    width: int
    max_generation: int
    max_width: int

    def __str__(self) -> str:
        return f"PCIe {self.generation}.0 x{self.width}"


def read_link(device: torch.device) -> LinkState | None:
    """The link of a CUDA device as it runs now; None where neither NVML nor nvidia-smi can tell."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return _from_nvml(uuid) or _from_nvidia_smi(uuid)


def busy_link(device: Device, target: Tensor, source: Tensor) -> LinkState | None:
    """The link's state while copies run, since an idle one is trained down; None where there is none, or nobody can tell.

    Args:
        device: whose link it is.
        target: on the device, written to.
        source: as large, in host memory.
    """
    if device.torch_device.type != "cuda":
        return None
    with device.copying():
        for _ in range(_BUSY_COPIES):
            device.copy(target, source)
    state = read_link(device.torch_device)
    device.synchronize()
    return state


def check_link(busy: LinkState | None, key: str) -> None:
    """Refuse a link that is slower than GPU and slot allow.

    Args:
        busy: its state while copies run; None where it cannot be told.
        key: that allows such a link, for the message.

    Raises:
        ProfileError: with these.
    """
    if busy is not None and (busy.generation, busy.width) != (busy.max_generation, busy.max_width):
        raise ProfileError(
            f"the link runs at {busy} while it is busy, and could at PCIe {busy.max_generation}.0 x{busy.max_width}: "
            f"it has trained down; seat the card anew or look for errors of the link, or allow it with {key}"
        )


def check_unchanged(before: LinkState | None, after: LinkState | None) -> None:
    """Refuse what was measured over a link that changed meanwhile; both states while copies run.

    Raises:
        ProfileError: it did.
    """
    if before != after:
        raise ProfileError(f"the link changed while it was measured, from {before} to {after}: measure again")


def _from_nvml(uuid: str) -> LinkState | None:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # of nvidia-ml-py, which few need
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return LinkState(
            pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        )
    except pynvml.NVMLError:
        return None


def _from_nvidia_smi(uuid: str) -> LinkState | None:
    command = ["nvidia-smi", "-i", uuid, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return LinkState(*(int(number) for number in answer.stdout.split(",")))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):  # not there, or it knows no such numbers
        return None
