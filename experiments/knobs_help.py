"""The end of `oled-simulate --help`: the knobs of the policy that the command line names, as resolver `knobs_help`."""

from __future__ import annotations

import json
from typing import Any

from omegaconf import DictConfig, OmegaConf


def knobs_help(root: DictConfig) -> str:
    """A line for each knob of the chosen policy, with the value that it has; `$` is doubled, as Hydra's templates want."""
    knobs: dict[str, Any] = OmegaConf.to_container(root.policy)  # type: ignore[assignment]
    choice = root.hydra.runtime.choices["policy"]
    if knobs.get("name") is not None:
        del knobs["name"]
    if not knobs:
        return f"policy={choice} has no knobs."
    width = max(map(len, knobs))
    lines = [f"  policy.{key:<{width}}  {_shown(value)}" for key, value in knobs.items()]
    return "\n".join([f"Knobs of policy={choice}:", *lines]).replace("$", "$$")


def _shown(value: Any) -> str:
    if value == "???":
        return "(must be given)"
    return value if isinstance(value, str) else json.dumps(value)


OmegaConf.register_new_resolver("knobs_help", lambda *, _root_: knobs_help(_root_), replace=True)
