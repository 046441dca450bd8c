"""What a comparison reads of a run's summary and manifest, and of which type each of it must be."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from experiments.errors import ConfigError

_TEXT, _BOOL, _COUNT = "text", "true or false", "a whole number, 0 or more"
_NUMBER, _POSITIVE = "a number", "a number above 0"
# what every summary says, and a comparison needs
NEEDED = {
    **dict.fromkeys(("policy", "variant", "trace", "trace_hash", "source", "hardware", "hardware_changes"), _TEXT),
    **dict.fromkeys(("provenance", "profile_hash", "decision_hash"), _TEXT),
    **dict.fromkeys(("slots_per_layer", "warmup", "expert_bytes"), _COUNT),
    **dict.fromkeys(("charged_hidden", "charged_expert_intermediate", "traced_hidden"), _COUNT),
    **dict.fromkeys(("sized", "clairvoyant", "provisional", "calibration_chosen"), _BOOL),
    **dict.fromkeys(("calibration", "training_minutes", "tokens_per_forward"), ""),  # may be null
}
# what a replay says of how it was made; a simulation says none of it
CONDITIONS = ("mode", "device", "machine", "is_pinned", "cpu_kernel", "num_distinct_experts", "weights")
_OR_NULL = {
    **dict.fromkeys(("calibration", "mode", "device", "machine", "cpu_kernel", "weights"), _TEXT),
    **dict.fromkeys(("training_minutes", "tokens_per_forward"), _NUMBER),
    **dict.fromkeys(("num_distinct_experts", "staging_slots", "seed"), _COUNT),
    "is_pinned": _BOOL,
}
_ALWAYS = {key: kind for key, kind in NEEDED.items() if kind} | {"engine": _TEXT}
_LINK = {"h2d_bytes_factor": _POSITIVE, "h2d_bytes_per_s": _POSITIVE}
_OF_MANIFEST = ("h2d_bytes_per_s", "seed", "staging_slots")


def check_facts(facts: Mapping[str, Any], name: str, summary: str, manifest: str) -> None:
    """Refuse values of other types than those that comparisons read.

    Args:
        facts: with all of NEEDED.
        name: of the run, for messages.
        summary: name of the file that most are from.
        manifest: name of the file that the others are from.

    Raises:
        ConfigError: there is one.
    """
    allowed = {key: (kind, False) for key, kind in {**_ALWAYS, **_LINK}.items()}
    allowed |= {key: (kind, True) for key, kind in _OR_NULL.items()}
    for key, (kind, or_null) in allowed.items():
        value = facts.get(key)
        if not ((value is None and or_null) or _is(value, kind)):
            file = manifest if key in _OF_MANIFEST else summary
            raise ConfigError(f"{name}: {file}: {key} is {value!r}, must be {kind}{' or null' * or_null}")


def _is(value: Any, kind: str) -> bool:
    if kind == _TEXT:
        return isinstance(value, str)
    if kind == _BOOL or isinstance(value, bool):
        return kind == _BOOL and isinstance(value, bool)
    if kind == _COUNT:
        return isinstance(value, int) and 0 <= value < 2**63
    if not isinstance(value, (int, float)) or abs(value) > 1e300 or not isfinite(value):
        return False
    return kind == _NUMBER or value > 0
