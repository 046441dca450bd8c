"""What policies cost at a gate of this machine's executor, measured by running them on recorded routing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from experiments.calibration import context_of
from experiments.errors import ConfigError
from policies.contract import Policy, PolicyError
from policies.profile import HardwareProfile, ProfileError, estimates_of
from policies.registry import POLICIES, build_policy
from replay.calibrate import Measured
from replay.calibrate_policies import WARM_FORWARDS, PolicyCost, PolicyRuns
from replay.calibrate_settings import Settings
from tracer.schema import ModelShape, Pass
from tracer.shipped import find_trace
from tracer.store import TraceReader

TRACE = "proxy-19x256-signals"


@dataclass(frozen=True, eq=False)
class Routing:
    """Recorded routing to run policies on, and the policies."""

    shape: ModelShape
    passes: Sequence[Pass]
    policies: dict[str, Policy]
    are_named: bool  # by the user


def read_routing(names: Sequence[str] | None, num_forwards: int) -> Routing:
    """The last decode forwards of a trace's last request, and the policies that can run on them.

    Comparisons with hardware run the first ones, so that what they judge is not calibrated on.

    Args:
        names: of policies; None is all that are built from no trace.
        num_forwards: of the request.

    Raises:
        ConfigError: too few forwards.
        PolicyError: a policy that was named cannot run on hardware.
    """
    if num_forwards <= WARM_FORWARDS:
        raise ConfigError(f"--forwards {num_forwards}: must be more than {WARM_FORWARDS}, which are not counted")
    reader = TraceReader(find_trace(TRACE))
    shape, last = reader.metadata.shape, reader.num_requests - 1
    passes = (p for p in reader.passes(signals=True) if int(p.requests[0]) == last and not p.is_prefill)
    context, _ = context_of(reader, warmup_requests=1)
    policies = {}
    for name in POLICIES if names is None else names:
        policy = build_policy(name, {}, replace(context, policy=name))
        if not (policy.clairvoyant or policy.place):
            policies[name] = policy
        elif names is not None:
            raise PolicyError(f"{name} is a bound, which no hardware runs")
    return Routing(shape, list(deque(passes, num_forwards)), policies, names is not None)


def measure_policies(
    routing: Routing,
    measured: Measured,
    profile: HardwareProfile,
    device_name: str,
    settings: Settings,
    say: Callable[[str], None],
) -> tuple[dict[str, float], float]:
    """Time that each policy costs at a gate, ns, with `default`, their median; and the largest spread.

    Each runs at the first shape with each cache size; its time is the mean over sizes of
    the median over forwards, since a few forwards that other work disturbs would weigh more than in a long run.

    Raises:
        PolicyError, ProfileError: a policy that was named cannot run with these slots, or memory is short.
    """
    found = measured.shapes[0]
    shape, traced = found.shape, routing.shape
    slots = [size * traced.num_layers for size in settings.policy_slots]
    runs = PolicyRuns(found, traced, routing.passes, device_name, settings.pool_bytes, max(slots))
    costs: dict[str, list[PolicyCost]] = {}
    try:
        for name, policy in routing.policies.items():
            estimates = estimates_of(profile.costs(shape, shape.expert_bytes("bfloat16"), name))
            sizes = slots if policy.sized else slots[:1]
            try:
                costs[name] = [runs.cost(policy, size, estimates) for size in sizes]
            except (PolicyError, ProfileError) as error:  # `full` needs a slot for each expert
                if routing.are_named:
                    raise
                say(f"{name}: not measured, {error}")
    finally:
        runs.close()
    times = {name: sum(cost.time.median_ns for cost in each) / len(each) for name, each in costs.items()}
    for name, each in costs.items():
        decisions = ", ".join(f"{cost.decide_us:.1f}" for cost in each)
        say(f"{name} {times[name] / 1000:.1f} us at a gate, of which the decision {decisions}")
    if not times:
        return {}, 0.0
    return {"default": median(times.values()), **times}, max(
        cost.time.spread for each in costs.values() for cost in each
    )
