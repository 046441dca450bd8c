"""Measures what the GPU does by itself: a layer without routed experts, launched as the executor does, and arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from replay.calibrate_plans import PassSize
from replay.device import Device
from replay.machine import Machine
from replay.repeats import Repeated, repeated, repeated_by_size


def row_ns(device: Device, launch: Callable[[int], object], count: int) -> float:
    """Mean time of one of `count` launches in a row, each given its number, on a device that is busy when it begins."""
    start, end = device.event(), device.event()
    launch(0)
    start.record(device.compute)
    for number in range(count):
        launch(number)
    end.record(device.compute)
    end.synchronize()
    return device.ns_between(start, end) / count


def measure_layer(
    machine: Machine, first: int, sizes: Sequence[PassSize], repeats: int, count: int
) -> dict[PassSize, Repeated]:
    """What the executor launches at a layer's start, up to the copies of its ids to the host, by the pass's size.

    Where the host launches more slowly than the GPU runs, it is the time of launching, as it would be in a run.

    Args:
        machine: some of whose passes have these sizes.
        first: the first of these passes; one for each size, in their order.
        sizes: tokens and committed positions.
        repeats: of each.
        count: layers in a row.
    """
    numbers = {size: first + i for i, size in enumerate(sizes)}
    num_layers = machine.layout.num_layers

    def layer_ns(size: PassSize) -> float:
        number = numbers[size]
        return row_ns(machine.device, lambda i: machine.start_layer(number, i % num_layers), count)

    with torch.inference_mode():
        return repeated_by_size(layer_ns, sizes, repeats)


def flops_per_s(device: Device, repeats: int, count: int) -> float:
    """Rate of a large matrix product in bfloat16."""
    where = device.torch_device
    size = 8192 if where.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=where).to(torch.bfloat16) for _ in range(2))
    time = repeated(lambda: row_ns(device, lambda _: torch.mm(left, right), count), repeats)
    return 2e9 * size**3 / time.median_ns
