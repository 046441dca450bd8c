"""What a run is made of, found and checked; the policy, which can be costly to build, comes after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.arguments import Arguments
from experiments.identity import asked, identity
from experiments.policy import OwnPolicy, name_of
from experiments.profiles import find_profile, find_shape, profile_hash
from policies.contract import Context, Policy, PolicyError
from policies.profile import Costs, HardwareProfile, ProfileError, staging_of
from tracer.files import metadata_hash
from tracer.schema import ModelShape, TraceError
from tracer.store import TraceReader

if TYPE_CHECKING:
    from experiments.kept import Kept

GIB = 2**30


@dataclass(frozen=True, eq=False)
class Setting:
    """One run, but for its policy."""

    given: Arguments
    policy: str | OwnPolicy
    reader: TraceReader
    profile: HardwareProfile
    shape: str | ModelShape
    charged: ModelShape
    costs: Costs
    context: Context
    calibration: str  # where it is from, in words
    staging_slots: int

    @property
    def traced(self) -> ModelShape:
        """The model that was traced."""
        return self.reader.metadata.shape

    def config(self, variant: str = "") -> dict[str, Any]:
        """What was asked for, as plain data: the configuration that was given, or one made of the arguments.

        Args:
            variant: of the policy, which tells one from others where it is no name.
        """
        given, knobs = self.given, dict(self.given.knobs or {})
        if given.config is not None:
            return asked(given.config)
        if not isinstance(self.policy, str):
            knobs = {"knobs": knobs, "variant": variant}
        return asked(
            {
                "trace": str(self.reader.path),
                "policy": {"name": name_of(self.policy), **knobs},
                "hardware": asdict(self.profile),
                "shape": self.shape if isinstance(self.shape, str) else asdict(self.shape),
                "cache": {"slots_per_layer": given.slots_per_layer, "gib": given.cache_gib},
                "expert_dtype": given.expert_dtype,
                "warmup_requests": given.warmup_requests,
                "calibration": given.calibration,
                "staging_slots": given.staging_slots,
                "engine": given.engine,
                "seed": given.seed,
                "output": {
                    "per_layer": given.per_layer,
                    "decisions": given.decisions,
                    "timeline": given.timeline,
                    "timeline_from_forward": given.timeline_from_forward,
                    "timeline_forwards": given.timeline_forwards,
                },
            }
        )

    def identity(self, config: Mapping[str, Any]) -> str:
        """SHA-256 that is the same for runs that must have the same results."""
        return identity(config, metadata_hash(self.reader.metadata), profile_hash(self.profile), self.calibration)

    def slots(self, policy: Policy) -> int:
        """Expert slots of all layers together, without staging.

        Raises:
            PolicyError: more than there are experts, or less than one for each layer.
        """
        num_layers, num_experts = self.traced.num_layers, self.traced.num_experts
        if self.given.cache_gib is None:
            per_layer = self.given.slots_per_layer or 0
            if policy.sized and not 1 <= per_layer <= num_experts:
                raise PolicyError(
                    f"slots_per_layer is {self.given.slots_per_layer}, must be 1 to {num_experts}, the experts of a "
                    "layer of this trace"
                )
            return per_layer * num_layers
        layer_bytes = num_layers * self.costs.expert_bytes
        if policy.sized and not layer_bytes <= self.given.cache_gib * GIB < (num_experts + 1) * layer_bytes:
            least, most = layer_bytes / GIB, num_experts * layer_bytes / GIB
            raise PolicyError(
                f"cache.gib is {self.given.cache_gib:g}, must be {least:.3g} to {most:.4g}: 1 to {num_experts} experts of "
                f"{self.costs.expert_bytes} bytes in each of {num_layers} layers"
            )
        return int(self.given.cache_gib * GIB // layer_bytes) * num_layers if policy.sized else 0


def setting_of(
    given: Arguments,
    trace: str | Path | TraceReader,
    policy: str | OwnPolicy,
    hardware: str | Path | HardwareProfile,
    shape: str | ModelShape,
    kept: Kept,
) -> Setting:
    """Find what the arguments of `simulate` name, among what earlier runs have found where that is kept.

    Raises:
        TraceError, PolicyError, ProfileError: one of them is not what it must be.
    """
    reader = kept.reader(trace)
    profile = find_profile(hardware)
    traced = reader.metadata.shape
    charged = find_shape(shape, traced)
    _check_warmup(given.warmup_requests, reader)
    costs = profile.costs(charged, charged.expert_bytes(given.expert_dtype), name_of(policy))
    context, calibration = kept.context(reader, given.warmup_requests, given.calibration, given.seed)
    staging = staging_of(costs.transfer_chunk, given.staging_slots)
    if staging > (most := max(2 * costs.transfer_chunk, traced.num_layers * traced.num_experts)):
        raise ProfileError(f"staging_slots is {staging}, must be at most {most}, all experts of this trace")
    return Setting(given, policy, reader, profile, shape, charged, costs, context, calibration, staging)


def _check_warmup(warmup_requests: int, reader: TraceReader) -> None:
    if not 0 <= warmup_requests < reader.num_requests:
        requests = "1 request" if reader.num_requests == 1 else f"{reader.num_requests} requests"
        allowed = "0" if reader.num_requests == 1 else f"0 to {reader.num_requests - 1}"
        raise TraceError(
            f"warmup_requests is {warmup_requests}, must be {allowed}: the trace holds {requests}, one must count"
        )
