"""The timeline of a run of `simulate`: what its group of tracks is called, and which forwards it may show."""

from __future__ import annotations

from typing import BinaryIO

from experiments.errors import ConfigError
from experiments.setting import Setting
from experiments.timeline import Timeline, Window
from experiments.timeline_packets import TraceWriter
from policies.contract import Policy


def timeline_of(setting: Setting, policy: Policy, slots: int, file: BinaryIO) -> Timeline:
    """The timeline that was asked for, to be written into `file`.

    Args:
        setting: of the run.
        policy: that it runs.
        slots: of all layers together.
        file: open for writing.

    Raises:
        ConfigError: the window begins where the run has ended, or holds no forward.
    """
    given, reader, traced = setting.given, setting.reader, setting.traced
    window = Window(given.timeline_from_forward, given.timeline_forwards)
    if window.first is not None and not 0 <= window.first < reader.num_passes:
        raise ConfigError(
            f"timeline_from_forward is {window.first}, must be 0 to {reader.num_passes - 1}: the trace holds "
            f"{reader.num_passes} forwards"
        )
    if window.length is not None and window.length < 1:
        raise ConfigError(f"timeline_forwards is {window.length}, must be 1 or more, or null for all that follow")
    name = policy.name + (f" ({policy.variant})" if policy.variant else "")
    size = f"{slots // traced.num_layers} slots a layer, " if policy.sized else ""
    return Timeline(
        TraceWriter(file),
        f"simulated: {name}, {size}{setting.profile.name}, {reader.path.stem}",
        costs=setting.costs,
        num_experts=traced.num_experts,
        is_global=policy.pool == "global",
        window=window,
        warmup_requests=given.warmup_requests,
    )
