"""The way in for every Hydra command: its configuration from conf/, and one line for whatever the user got wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from policies.contract import PlanError, PolicyError
from policies.profile import ProfileError
from tracer.schema import TraceError, choices

ERROR_FILE = "error.json"
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: 1 shows tracebacks


class ConfigError(ValueError):
    """A key of the command line is missing or cannot be used so; the message says which and what is allowed."""


# What a user can get wrong, and read in one line; anything else is a bug and keeps its traceback.
USER_ERRORS = (ConfigError, TraceError, PlanError, PolicyError, ProfileError, OmegaConfBaseException, OSError)


def hydra_command(
    program: str,
    config_name: str,
    run: Callable[[DictConfig], None],
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Run a command line: `run` once, or with -m once for every cell of the grid.

    A user's error ends in one line on stderr and exit code 2; a cell's error is kept, the other cells run, and it is
    listed at the end with exit code 1. An interrupt exits with 130.

    Args:
        program: name of the command, as messages show it.
        config_name: of the primary configuration in conf/.
        run: the work; its results go to `hydra.runtime.output_dir`.
        finish: called after a multirun with its directory.
    """
    if "--version" in sys.argv[1:]:
        print(f"{program} {version('oledsim')}")
        return
    wants_traceback = os.environ.get(FULL_ERROR) == "1"
    Directories.clear()
    try:
        _run(program, config_name, run, finish)
    except KeyboardInterrupt:
        Directories.tidy()
        kept = f"; finished cells are kept in {Directories.sweep}" if Directories.sweep else ""
        print(f"{program}: interrupted{kept}", file=sys.stderr)
        raise SystemExit(130) from None
    except (HydraException, *USER_ERRORS) as error:
        Directories.tidy()
        if wants_traceback:
            raise
        print(f"{program}: error: {explain(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:
        Directories.tidy()
        raise


def explain(error: BaseException) -> str:
    """One line of what was wrong, where, and what is allowed."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name}: not known; {choices(name, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; must be key=value, with quotes around values that hold any of (){{}}[],=: or blanks"
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
    return " ".join(str(error).split())


def _run(
    program: str,
    config_name: str,
    run: Callable[[DictConfig], None],
    finish: Callable[[Path], None] | None,
) -> None:
    job = Job(program, run)
    with _hydra_environment(_ordered(sys.argv[1:])):
        try:
            hydra.main("pkg://conf", config_name, version_base="1.3")(job)()
        except ValueError as error:  # Hydra's complaint about flags and values; a job's own errors do not pass here
            raise error if isinstance(error, USER_ERRORS) else ConfigError(str(error)) from error
    if job.failure is not None:
        raise job.failure
    if Directories.sweep is not None:
        if finish is not None:
            finish(Directories.sweep)
        _report_failures(program, Directories.sweep)


def _ordered(arguments: list[str]) -> list[str]:
    """The command line with its flags last, checked: the parser of Hydra wants all key=value in one row."""
    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise ConfigError(f"{message}; --help lists keys, --hydra-help lists flags")

    parser.error = refuse  # type: ignore[method-assign]
    found = parser.parse_intermixed_args(arguments)
    if found.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun: reads a pickle, which could run anything; it is not supported")
    overrides = found.overrides
    return [*overrides, *(argument for argument in arguments if argument not in overrides)]


@contextmanager
def _hydra_environment(arguments: list[str]) -> Iterator[None]:
    """Have Hydra read these arguments and raise its errors, instead of printing them in its own way."""
    before_arguments, before_switch = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [sys.argv[0], *arguments]
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        sys.argv = before_arguments
        if before_switch is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before_switch


@dataclass
class Job:
    """What Hydra calls for each configuration; errors are kept here, because Hydra would print its own lines for them.

    A module-level class, so that launchers can send it to other processes.
    """

    program: str
    run: Callable[[DictConfig], None]
    failure: Exception | None = field(default=None, compare=False)

    def __call__(self, config: DictConfig) -> None:
        """Run one configuration, whole command or cell."""
        settings = HydraConfig.get()
        try:
            if settings.mode != RunMode.MULTIRUN:
                self.run(config)
                return
        except Exception as error:  # raised again when Hydra has returned
            self.failure = error
            return
        directory, overrides = Path(settings.runtime.output_dir), list(settings.overrides.task)
        print(f"{self.program}: cell {settings.job.num}: {' '.join(overrides)}", file=sys.stderr)
        (directory / ERROR_FILE).unlink(missing_ok=True)
        try:
            self.run(config)
        except Exception as error:  # one cell; the others go on, and all failures are listed at the end
            _record_failure(directory, overrides, error)


def _record_failure(directory: Path, overrides: list[str], error: Exception) -> None:
    if isinstance(error, USER_ERRORS):
        text = explain(error)
    else:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        traceback.print_exception(error)
    record = {"overrides": overrides, "error": text}
    (directory / ERROR_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _report_failures(program: str, sweep: Path) -> None:
    """List the cells that failed, and exit with 1 if there are any."""
    records: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(sweep.rglob(ERROR_FILE))]
    if not records:
        return
    print(f"{program}: {len(records)} of the cells in {sweep} failed:", file=sys.stderr)
    for record in records:
        print(f"{program}: error: {' '.join(record['overrides'])}: {record['error']}", file=sys.stderr)
    raise SystemExit(1)


class Directories(Callback):
    """Remembers where Hydra writes, so that a command that failed leaves nothing behind.

    Hydra makes the instance from `hydra.callbacks`; what it saw is kept in the class.
    """

    sweep: ClassVar[Path | None] = None
    created: ClassVar[list[Path]] = []  # directories that were not there before
    written: ClassVar[list[Path]] = []  # what Hydra writes before any work is done

    @classmethod
    def clear(cls) -> None:
        """Forget what an earlier command did."""
        cls.sweep, cls.created, cls.written = None, [], []

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra's hook before a single run."""
        directory = Path(config.hydra.run.dir).absolute()
        self._note(directory)
        if config.hydra.output_subdir is not None:
            self.written.append(directory / config.hydra.output_subdir)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra's hook before a multirun."""
        Directories.sweep = Path(config.hydra.sweep.dir).absolute()
        self._note(Directories.sweep)

    @classmethod
    def _note(cls, directory: Path) -> None:
        cls.created = [path for path in (directory, *directory.parents) if not path.exists()]

    @classmethod
    def tidy(cls) -> None:
        """Remove Hydra's own files of a command that failed, and the directories that were made for them."""
        for path in cls.written:
            shutil.rmtree(path, ignore_errors=True)
        if (
            cls.sweep is not None
            and cls.sweep in cls.created
            and [path.name for path in cls.sweep.glob("*")] == ["multirun.yaml"]
        ):
            (cls.sweep / "multirun.yaml").unlink()  # no cell was begun
        for path in cls.created:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
