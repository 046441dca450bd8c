"""What a fidelity run replays: cells of policy, cache size and bandwidth, and the forwards of a trace that all share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.errors import ConfigError
from experiments.profiles import load_shape
from policies.contract import Policy
from policies.profile import HardwareProfile
from tracer.schema import ModelShape, Pass
from tracer.store import TraceReader

POLICIES = ("ondemand", "lru", "oled", "ktransformers", "moe_infinity", "gate_ahead")
SLOTS, FACTORS = (40, 100), (1, 2)
# requests of a shipped trace that are of different texts, in order
WORKLOADS = {"proxy-19x256-signals": ("arithmetic", "code", "prose")}
TINY = "tiny"
MANIFEST, PROFILE = "manifest.json", "measured.yaml"  # of a run; a profile is called as its file is


@dataclass(frozen=True)
class Cell:
    """One configuration that is run."""

    policy: str
    slots_per_layer: int  # 0 of a policy that ignores the size
    factor: int  # by which copies are longer than an expert, as over a slower link

    @property
    def name(self) -> str:
        """What files call it."""
        size = f"-{self.slots_per_layer}" if self.slots_per_layer else ""
        return f"{self.policy}{size}-x{self.factor}"


def cells_of(policies: Mapping[str, Policy], slots: Sequence[int], factors: Sequence[int]) -> list[Cell]:
    """The cells of policies by name; one that ignores the size has one for each factor."""
    cells = [
        Cell(name, size if policy.sized else 0, factor)
        for factor in factors
        for size in slots
        for name, policy in policies.items()
    ]
    return list(dict.fromkeys(cells))


class FirstForwards(TraceReader):
    """A trace of which only the first forwards of each request are read.

    Args:
        path: of the trace.
        per_request: forwards; None is all.
    """

    def __init__(self, path: Path, per_request: int | None) -> None:
        super().__init__(path)
        self.per_request = per_request

    def passes(self, *, signals: bool = False) -> Iterator[Pass]:
        """Passes in order, those that are beyond a request's first forwards left out."""
        seen: Counter[int] = Counter()
        for pass_ in super().passes(signals=signals):
            requests = pass_.requests.tolist()
            seen.update(requests)
            if self.per_request is None or max(seen[request] for request in requests) <= self.per_request:
                yield pass_


def shape_of(name: str, traced: ModelShape) -> ModelShape:
    """The sizes that are run: those of a model by name, or `tiny`, with which a machine without a GPU tries everything."""
    if name != TINY:
        return load_shape(name)
    return replace(
        traced,
        hidden=64,
        expert_intermediate=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab=128,
        dense_intermediate=64,
        num_dense_layers=1,
    )


def slowed(profile: HardwareProfile, factor: int) -> HardwareProfile:
    """The machine with the link over which a copy takes its latency once and its bytes `factor` times."""
    return replace(profile, h2d_bytes_per_s=profile.h2d_bytes_per_s / factor)


def numbers(text: str, key: str) -> tuple[int, ...]:
    """Whole numbers with commas between them.

    Raises:
        ConfigError: it is something else.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise ConfigError(f"{key} {text}: must be different whole numbers of at least 1, with commas between them")
    return found
