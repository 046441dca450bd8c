"""The summary of a run: one value for each column of the tables, and more."""

from __future__ import annotations

from typing import Any

from experiments import metrics
from experiments.acted import idle_mechanisms
from experiments.calibration import warnings_of
from experiments.lower_bound import LowerBound
from experiments.profiles import changes_of, profile_hash
from experiments.results import ForwardTable
from experiments.setting import Setting
from policies.contract import Policy
from tracer.files import metadata_hash
from tracer.statistics import training_minutes

# The columns of tables, in order; `summary.json` holds more.
COLUMNS = (
    "policy",
    "slots_per_layer",
    "hardware",
    "trace",
    "source",
    "tpot_ms",
    "ttft_ms",
    "utilization",
    "utilization_slot_weighted",
    "hit_ratio",
    "token_hit_ratio",
    "effective_transfer_ratio",
    "h2d_bytes",
    "exposed_stall_ms",
    "decision_hash",
    "warmup",
    "variant",
    "pool",
    "misses",
)


def summary_of(table: ForwardTable, policy: Policy, setting: Setting, bound: LowerBound) -> dict[str, Any]:
    """One value for each of COLUMNS, in their order, and then the rest."""
    forwards, metadata = table.frame(), setting.reader.metadata
    measured = metrics.measure(forwards, setting.costs.expert_bytes)
    least_ms = bound.tpot_ms(measured["num_accepted"])
    given, profile, charged, costs = setting.given, setting.profile, setting.charged, setting.costs
    num_slots = round(forwards["num_slots"][0])  # of all layers; the sum never changes
    values = {
        "policy": policy.name,
        "variant": policy.variant,
        "pool": policy.pool,
        "misses": policy.misses,
        "sized": policy.sized,
        "clairvoyant": policy.clairvoyant,
        "slots_per_layer": num_slots // metadata.shape.num_layers,
        "trace": setting.reader.path.stem,
        "trace_hash": metadata_hash(metadata),
        "source": metadata.source,
        "traced_hidden": metadata.shape.hidden,
        "training_minutes": training_minutes(metadata),
        "warmup": given.warmup_requests,
        "hardware": profile.name,
        "hardware_changes": changes_of(profile),
        "profile_hash": profile_hash(profile),
        "provenance": profile.provenance_at(charged, costs.expert_bytes),
        "provisional": profile.provisional,
        "charged_hidden": charged.hidden,
        "charged_expert_intermediate": charged.expert_intermediate,
        "expert_bytes": costs.expert_bytes,
        "gpu_expert_bytes": (num_slots + setting.staging_slots) * costs.expert_bytes,
        "decision_hash": table.decision_hash,
        "calibration": setting.calibration,
        "calibration_chosen": given.calibration != "auto",
        "warnings": [
            *policy.warnings,
            *idle_mechanisms(policy, forwards),
            *warnings_of(setting.context, setting.reader, given.calibration),
        ],
        **measured,
        "lower_bound_tpot_ms": least_ms,
        "gap_to_lower_bound_ratio": measured["tpot_ms"] / least_ms - 1 if least_ms else None,
    }
    return {name: values[name] for name in COLUMNS} | values
