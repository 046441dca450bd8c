"""What a user got wrong, in one line: where, what was found, what is allowed."""

from __future__ import annotations

import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from experiments.errors import ConfigError
from policies.contract import PlanError, PolicyError
from policies.profile import ProfileError
from tracer.schema import TraceError, choices

# What a user can get wrong, and read in one line; anything else is a bug and keeps its traceback.
USER_ERRORS = (
    *(ConfigError, TraceError, PlanError, PolicyError, ProfileError),
    *(HydraException, OmegaConfBaseException, OSError, MemoryError),
)


def explain(error: BaseException) -> str:
    """One line of what was wrong, where, and what is allowed."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name}: not known; {choices(name, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; must be key=value, with quotes around values that hold any of (){{}}[],=:, blanks or letters beyond ASCII"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        keys = [str(key) for key in cause.parent_node if key != "hydra"]
        return f"{cause.full_key}: no such key; {choices(str(cause.key), keys)}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key}: must be given as {cause.full_key}=VALUE"
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", str(error)):
        return f"{ambiguous[1]}: several values of a key need -m, which runs them all"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"not enough memory: {error or 'an allocation failed'}"
    return " ".join(str(error).split())
