"""What a calibration measures, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

from replay.arena import MIB
from replay.cpu_experts import default_workers


@dataclass(frozen=True)
class Settings:
    """Sizes and repeats of a calibration."""

    repeats: int = 7
    run_repeats: int = 12  # of runs of all designed layers
    count: int = 20  # layers or copies in a row, of which the mean is one repeat
    pool_bytes: int = 4096 * MIB  # of host memory, twice: for plain copies, and for experts
    copy_bytes: tuple[int, ...] = tuple(int(mib * MIB) for mib in (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48))
    tokens: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    kv_lens: tuple[int, ...] = (0, 128, 512, 1024, 2048)
    num_layers: int = 4  # of a designed forward: more weights than caches hold
    kernel_experts: tuple[int, ...] = (8, 16, 32, 48, 64)
    transfers: tuple[int, ...] = (5, 6, 7, 8, 16, 24)  # more than a chunk, with last chunks of every size
    cpu_experts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48)
    cpu_loads: tuple[int, ...] = (1, 2, 4, 8)
    block: int = 16  # tokens of a forward, where only one number is measured
    policy_slots: tuple[int, ...] = (40, 100)  # of a layer, with which policies are run
    policy_forwards: int = 16  # of each such run
    num_workers: int = field(default_factory=default_workers)


QUICK = Settings(
    repeats=2,
    run_repeats=1,
    count=2,
    pool_bytes=64 * MIB,
    copy_bytes=(MIB // 4, 2 * MIB, 16 * MIB),
    tokens=(4, 8),
    kv_lens=(0, 64),
    num_layers=2,
    kernel_experts=(2, 4, 8),
    transfers=(5, 6, 7, 8),
    cpu_experts=(1, 2, 4),
    cpu_loads=(1, 2),
    block=4,
    policy_slots=(8,),
    policy_forwards=5,
    num_workers=1,
)
