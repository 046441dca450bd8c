"""Which replays a simulated run is to be held against: cells, each of one simulated run and the repeats of its replay."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.compare_runs import CONDITIONS, SHARED, Ran
from experiments.errors import ConfigError
from experiments.table import HASH_DIGITS
from policies.registry import POLICIES

# What must be the same in a simulated run and its replay, beside slots and bandwidth
_SAME = (
    *("policy", "variant", "trace_hash", "warmup", "calibration", "seed", "staging_slots"),
    *("charged_hidden", "charged_expert_intermediate", "expert_bytes", "machine_digest"),
)
_Key = tuple[Hashable, ...]
# What a reader is told of a difference in them
_WORDS = {
    "trace_hash": "trace",
    "machine_digest": "hardware profile",
    "variant": "knobs",
}
_OF_GROUP = tuple(key for key in _SAME if key not in ("policy", "variant", "calibration", "seed"))


@dataclass(frozen=True, eq=False)
class Pair:
    """One cell: a simulated run and all repeats of its replay, over the same forwards.

    `name` tells it from all others of a comparison; `section` is the same for cells that differ in policy, slots and
    bandwidth alone.
    """

    name: str
    simulated: Ran
    repeats: tuple[Ran, ...]
    section: tuple[str, ...]

    @property
    def group(self) -> _Key:
        """The same for cells whose policies are to be ranked, but for the slots; faster links come first."""
        return *self.section, -self.simulated.bytes_per_s

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of its replay."""
        return self.repeats[0].facts

    @property
    def slots(self) -> int | None:
        """Of each layer; None for a policy that ignores them."""
        return self.facts["slots_per_layer"] if self.facts["sized"] else None


class Unpaired(NamedTuple):
    """A run that has nothing to be held against."""

    name: str
    why: str


def pairs_of(runs: Iterable[Ran]) -> tuple[list[Pair], list[Unpaired]]:
    """Pair simulated runs and replays; repeats of a replay are one cell.

    Where a run covers more forwards than its partner, both are cut to the forwards that they share.

    Raises:
        ConfigError: there is no pair, or runs that should be of the same forwards are not.
    """
    listed = list(runs)
    simulated, replayed = _by_key(run for run in listed if not run.is_replay), _replays(listed)
    if not simulated or not replayed:
        missing = "simulated" if not simulated else "replayed"
        raise ConfigError(f"no {missing} run among these; a comparison needs runs of oled-simulate and of oled-replay")
    paired = {key: (_only(simulated[key[0]]), repeats) for key, repeats in replayed.items() if key[0] in simulated}
    used = {key[0] for key in paired}
    unpaired = [
        Unpaired(_label_with_link(repeats[0]), f"replayed, not simulated{_nearest(repeats[0], simulated.values())}")
        for key, repeats in replayed.items()
        if key[0] not in simulated
    ]
    unpaired += [
        Unpaired(_label_with_link(found[0]), f"simulated, not replayed{_nearest(found[0], replayed.values())}")
        for key, found in simulated.items()
        if key not in used
    ]
    if not paired:
        raise ConfigError("no simulated run has its replay among these: " + "; ".join(f"{a}: {b}" for a, b in unpaired))
    names = _names([repeats[0] for _, repeats in paired.values()])
    pairs = [_pair(name, alone, repeats) for name, (alone, repeats) in zip(names, paired.values(), strict=True)]
    policies = list(POLICIES)

    def place(pair: Pair) -> tuple[Any, ...]:
        policy = pair.facts["policy"]
        rank = policies.index(policy) if policy in policies else len(policies)
        return pair.group, pair.slots or 0, rank, policy, pair.facts["variant"]

    return sorted(pairs, key=place), unpaired


def _key(run: Ran) -> _Key:
    slots = run.facts["slots_per_layer"] if run.facts["sized"] else None
    return *(run.facts[key] for key in _SAME), run.bytes_per_s, slots


def _by_key(runs: Iterable[Ran]) -> dict[_Key, list[Ran]]:
    found: dict[_Key, list[Ran]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    return found


def _replays(runs: Iterable[Ran]) -> dict[tuple[_Key, _Key], list[Ran]]:
    """By the key of their simulated run and the conditions that they were made under."""
    found: dict[tuple[_Key, _Key], list[Ran]] = {}
    for run in runs:
        if run.is_replay:
            conditions = (run.factor, *(run.facts[key] for key in CONDITIONS))
            found.setdefault((_key(run), conditions), []).append(run)
    return found


def _only(found: Sequence[Ran]) -> Ran:
    """The simulated run of a cell; both engines may have made it, as they say the same."""
    first = found[0]
    for other in found[1:]:
        if not other.forwards["time_ns"].equals(first.forwards["time_ns"]):
            raise ConfigError(f"{first.name} and {other.name}: simulate the same cell and differ; give one of them")
    return first


def _pair(name: str, simulated: Ran, repeats: Sequence[Ran]) -> Pair:
    num_forwards = min(run.forwards.height for run in (simulated, *repeats))
    whole = simulated.cut(num_forwards)
    cut = tuple(run.cut(num_forwards) for run in repeats)
    for run in cut:
        for column in SHARED:
            if not run.forwards[column].equals(whole.forwards[column]):
                raise ConfigError(
                    f"{run.name} and {simulated.name}: differ in {column} of their forwards; must be over the same requests"
                )
    facts = repeats[0].facts
    conditions = tuple(str(facts[key]) for key in CONDITIONS)
    section = (facts["trace"], *(str(facts[key]) for key in _OF_GROUP), *conditions)
    return Pair(name, whole, cut, section)


def _label(run: Ran) -> str:
    """Policy, slots, how often bytes are copied, and trace: most cells are told apart by these."""
    variant = f"({run.facts['variant'].replace(', ', ',')})" if run.facts["variant"] else ""
    slots = [str(run.facts["slots_per_layer"])] if run.facts["sized"] else []
    return "/".join([f"{run.facts['policy']}{variant}", *slots, f"x{run.factor:g}", run.facts["trace"]])


def _label_with_link(run: Ran) -> str:
    return f"{_label(run)} at {run.bytes_per_s / 1e9:.4g} GB/s"


def _names(replays: Sequence[Ran]) -> list[str]:
    """Labels, with as much of the rest behind as tells apart those that share one."""
    names = [_label(run) for run in replays]
    rest = [[f"{run.bytes_per_s / 1e9:g}GB/s" for run in replays]]
    rest += [[_short(run.facts[key]) for run in replays] for key in (*CONDITIONS, *_SAME[2:])]
    for values in rest:
        if len(set(names)) == len(names):
            break
        if len(set(values)) > 1:
            names = [f"{name}/{value}" for name, value in zip(names, values, strict=True)]
    return names


def _short(value: Any) -> str:
    text = str(value)
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:HASH_DIGITS] if is_digest else text.replace(" ", "-").replace("/", "-")


def _nearest(run: Ran, others: Iterable[Sequence[Ran]]) -> str:
    """What the run that is most alike has another of; nothing where no run is of this policy."""
    alike = [found[0] for found in others if found[0].facts["policy"] == run.facts["policy"]]
    if not alike:
        return ""
    keys = (*_SAME, "bandwidth", "slots_per_layer")
    differing = [
        [_WORDS.get(key, key) for key, a, b in zip(keys, _key(run), _key(other), strict=True) if a != b]
        for other in alike
    ]
    return f" (the nearest has another {' and '.join(min(differing, key=len))})"
