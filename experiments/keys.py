"""Keys of a configuration that nothing reads: Hydra lets them in with +."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig

from experiments.errors import ConfigError
from tracer.schema import choices


def refuse_unknown(config: DictConfig, schema: type[Any], group: str = "") -> None:
    """Refuse keys that the schema, or one within it, does not have.

    Args:
        config: a node that was made from the schema.
        schema: dataclass of its keys.
        group: key of the node with a dot behind, for messages.

    Raises:
        ConfigError: there is one.
    """
    hints = get_type_hints(schema)
    allowed = [entry.name for entry in fields(schema)]
    for key in config:
        if key not in allowed:
            raise ConfigError(f"{group}{key}: no such key; {choices(str(key), allowed)}")
        if is_dataclass(hints[str(key)]):
            refuse_unknown(config[key], hints[str(key)], f"{group}{key}.")  # type: ignore[arg-type]  # a class
