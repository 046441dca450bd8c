"""Generation and width that the PCIe link of a GPU runs at, which an idle link lowers and a bad slot keeps low."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

import torch

from policies.profile import ProfileError

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


def check_link(
    before: LinkState | None, after: LinkState | None, *, allow_slow: bool = False, key: str = "--slow-link"
) -> None:
    """Refuse measurements over a link that changed meanwhile, or that runs below what it could.

    Both states are to be read while copies run, since an idle link is trained down.

    Args:
        before: None where it cannot be told.
        after: likewise.
        allow_slow: take a link that is slower than GPU and slot allow.
        key: that allows it, for the message.

    Raises:
        ProfileError: the link changed, or is slower than GPU and slot allow.
    """
    if before != after:
        raise ProfileError(f"the link changed while it was measured, from {before} to {after}: measure again")
    if allow_slow or after is None:
        return
    if (after.generation, after.width) != (after.max_generation, after.max_width):
        raise ProfileError(
            f"the link runs at {after} while it is busy, and could at PCIe {after.max_generation}.0 x{after.max_width}: "
            f"it has trained down; seat the card anew or look for errors of the link, or allow it with {key}"
        )


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
