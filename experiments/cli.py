"""The way in for every Hydra command: its configuration from conf/, and one line for whatever the user got wrong."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments import sweeper
from experiments.cells import cells_of
from experiments.errors import ConfigError
from experiments.messages import USER_ERRORS, explain
from experiments.terminal import INTERRUPTED, Ended, ending_as_error, flush, mend_streams
from policies.contract import PolicyError
from tracer.own_version import own_version

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: 1 shows tracebacks


def hydra_command(
    program: str,
    config_name: str,
    run: Callable[[DictConfig], None],
    finish: Callable[[Path, str], None] | None = None,
) -> None:
    """Run a command line: `run` once, or with -m once for every cell of the grid.

    A user's error ends in one line on stderr and exit code 2; a cell's error is kept, the other cells run, and it is
    listed at the end with exit code 1. An interrupt exits with 130, another signal to end with 128 and its number, a
    reader that went away as SIGPIPE would.

    Args:
        program: name of the command, as messages show it.
        config_name: of the primary configuration in conf/.
        run: the work; its results go to `hydra.runtime.output_dir`.
        finish: called after a multirun with its directory and the name of its grid.
    """
    mend_streams()
    if "--version" in sys.argv[1:]:
        print(f"{program} {own_version()}")
        return
    Directories.clear()
    with ending_as_error():
        _run_to_its_end(program, config_name, run, finish)


def _run_to_its_end(
    program: str,
    config_name: str,
    run: Callable[[DictConfig], None],
    finish: Callable[[Path, str], None] | None,
) -> None:
    """Run, and turn what stopped it into one line and an exit code, with nothing half-made left."""
    wants_traceback = os.environ.get(FULL_ERROR) == "1"
    try:
        _run(program, config_name, run, finish)
        flush()
    except BrokenPipeError:  # whoever read what we print has seen enough
        _settle()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (KeyboardInterrupt, Ended) as end:
        _settle()
        kept = f"; finished cells are kept in {Directories.sweep}" if _has_finished(Directories.sweep) else ""
        what, code = (
            (f"ended by {end.signal.name}", end.code) if isinstance(end, Ended) else ("interrupted", INTERRUPTED)
        )
        print(f"{program}: {what}{kept}", file=sys.stderr)
        raise SystemExit(code) from None
    except USER_ERRORS as error:
        _settle()
        if wants_traceback:
            raise
        print(f"{program}: error: {explain(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:
        _settle()
        raise


def _has_finished(sweep: Path | None) -> bool:
    """Whether a multirun has cells that a later one need not run again."""
    return sweep is not None and any(cell["error"] is None for cell in cells_of(sweep).values())


def _settle() -> None:
    """Leave nothing behind, neither in directories nor in stdout."""
    Directories.tidy()
    with suppress(OSError):
        flush()


def _run(
    program: str,
    config_name: str,
    run: Callable[[DictConfig], None],
    finish: Callable[[Path, str], None] | None,
) -> None:
    job = Job(program, run, grid=secrets.token_hex(8))
    sweeper.register()
    with _hydra_environment(_ordered(sys.argv[1:])):
        try:
            hydra.main("pkg://conf", config_name, version_base="1.3")(job)()
        except ValueError as error:  # Hydra's complaint about flags and values; a job's own errors do not pass here
            raise error if isinstance(error, USER_ERRORS) else ConfigError(str(error)) from error
    if job.failure is not None:
        raise job.failure
    if Directories.sweep is not None:
        if finish is not None:
            finish(Directories.sweep, job.grid)
        _report_failures(program, Directories.sweep, job.grid)


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
    for override in OverridesParser.create().parse_overrides(overrides):
        varies = override.is_sweep_override() or "${" in str(override.input_line)
        if found.multirun and override.key_or_group == "output.dir" and varies:
            raise ConfigError(f"{override.input_line}: a grid has one directory, and its cells lie below it")
    return [*overrides, *(argument for argument in arguments if argument not in overrides)]


@contextmanager
def _hydra_environment(arguments: list[str]) -> Iterator[None]:
    """Have Hydra read these arguments and raise its errors, instead of printing them in its own way."""
    before_arguments, before_switch, get_mode = sys.argv, os.environ.get(FULL_ERROR), Hydra.get_mode
    sys.argv = [sys.argv[0], *arguments]
    os.environ[FULL_ERROR] = "1"
    if not any("hydra.mode" in argument or argument.startswith(("-c", "--config-")) for argument in arguments):
        Hydra.get_mode = lambda *_, **__: None  # it composes the configuration once more, in 0.3 s, to find none
    try:
        yield
    finally:
        sys.argv, Hydra.get_mode = before_arguments, get_mode
        if before_switch is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before_switch


@dataclass
class Job:
    """What Hydra calls for a single run, and what the sweeper runs for each cell of a multirun.

    The error of a single run is kept here, because Hydra would print its own lines for it. A module-level class, so
    that launchers can send it to other processes.
    """

    program: str
    run: Callable[[DictConfig], None]
    grid: str  # names this multirun among those of its directory
    failure: Exception | None = field(default=None, compare=False)

    def __call__(self, config: DictConfig) -> None:
        """Run the whole command."""
        try:
            self.run(config)
        except Exception as error:  # raised again when Hydra has returned
            self.failure = error
        except SystemExit as end:  # a policy's own: no run of ours ends the program
            self.failure = PolicyError(f"the policy ended the program, by sys.exit({end.code!r})")


def _report_failures(program: str, sweep: Path, grid: str) -> None:
    """List the cells of this grid that failed, and exit with 1 if there are any."""
    failed = [cell for cell in cells_of(sweep).values() if cell["grid"] == grid and cell["error"] is not None]
    if not failed:
        return
    print(f"{program}: {len(failed)} of the cells in {sweep} failed:", file=sys.stderr)
    for cell in failed:
        print(f"{program}: error: {' '.join(cell['overrides'])}: {cell['error']}", file=sys.stderr)
    raise SystemExit(1)


class Directories(Callback):
    """Remembers where Hydra writes, so that a command that failed leaves nothing behind.

    Hydra makes the instance from `hydra.callbacks`; what it saw is kept in the class.
    """

    sweep: ClassVar[Path | None] = None
    created: ClassVar[list[Path]] = []  # directories that were not there before, innermost first

    @staticmethod
    def clear() -> None:
        """Forget what an earlier command did."""
        Directories.sweep, Directories.created = None, []

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra's hook before a single run."""
        self._note(Path(config.hydra.run.dir).absolute())

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra's hook before a multirun."""
        Directories.sweep = Path(config.hydra.sweep.dir).absolute()
        self._note(Directories.sweep)

    @staticmethod
    def _note(directory: Path) -> None:
        Directories.created = [path for path in (directory, *directory.parents) if not path.exists()]

    @staticmethod
    def tidy() -> None:
        """Remove the directories that were made for a command that failed, where nothing came of it."""
        sweep = Directories.sweep
        if sweep in Directories.created and [path.name for path in sweep.glob("*")] == ["multirun.yaml"]:
            (sweep / "multirun.yaml").unlink()  # no cell was begun
        for path in Directories.created:
            with suppress(OSError):  # holds something, or is gone
                path.rmdir()
