"""How far simulation is off: one run of replays on a machine, and its judgement against simulations with its own profile.

`python -m experiments.fidelity run DIRECTORY --seconds N` on the machine, `pack` where files must travel, `judge` anywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from experiments.command import Parser, guarded
from experiments.errors import ConfigError
from experiments.fidelity_grid import FACTORS, POLICIES, SLOTS, TINY, numbers
from experiments.fidelity_pack import pack_run
from experiments.profiles import names
from experiments.terminal import mend_streams
from policies import registry
from tracer.schema import choices

PROGRAM = "fidelity"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, pack or judge; exits with 2 after an error of the user, with 128 and its number after a signal."""
    started = monotonic()
    mend_streams()
    options = _parser().parse_args(arguments)
    guarded(PROGRAM, lambda: print(_done(options, started)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    run = commands.add_parser("run", help="calibrate this machine and replay all cells on it")
    run.add_argument("directory", type=Path, help="of the run, absent or empty")
    run.add_argument("--seconds", type=float, required=True, help="after which the run has ended")
    run.add_argument("--device", choices=["cuda", "cpu"], help="default cuda if any")
    run.add_argument("--trace", default="proxy-19x256-signals", help="(default %(default)s)")
    run.add_argument("--per-request", type=int, metavar="N", help="first forwards of each request (default all)")
    run.add_argument("--warmup-requests", type=int, default=0, metavar="N", help="first ones, which are not counted")
    run.add_argument("--policies", default=",".join(POLICIES), help="(default %(default)s)")
    run.add_argument("--slots", default=",".join(map(str, SLOTS)), help="of each layer (default %(default)s)")
    run.add_argument("--factors", default=",".join(map(str, FACTORS)), help="of copies (default %(default)s)")
    run.add_argument("--repeats", type=int, default=3, help="of all cells at most (default %(default)s)")
    run.add_argument("--shape", default="llada2.0-mini", help=f"sizes, or {TINY} for a rehearsal (default %(default)s)")
    run.add_argument("--profile", type=Path, metavar="FILE.yaml", help="take this one, do not calibrate")
    pack = commands.add_parser("pack", help="put what a run has found so far into a few tar files")
    pack.add_argument("directory", type=Path)
    pack.add_argument("target", type=Path)
    judge = commands.add_parser("judge", help="simulate the cells of runs and compare")
    judge.add_argument("directory", type=Path, help="of a run")
    judge.add_argument("--output", type=Path, default=Path("docs/fidelity"), help="(default %(default)s)")
    return parser


def _done(options: argparse.Namespace, started: float) -> str:
    if options.command == "pack":
        return pack_run(options.directory, options.target)
    if options.command == "judge":
        from experiments.fidelity_judge import judge  # polars and matplotlib, which the machine of a run may lack

        return judge(options.directory, options.output)
    options.policies = _policies(options.policies)
    options.slots, options.factors = numbers(options.slots, "--slots"), numbers(options.factors, "--factors")
    for name, value in (("--per-request", options.per_request), ("--repeats", options.repeats)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    if options.warmup_requests < 0:
        raise ConfigError(f"--warmup-requests {options.warmup_requests}: must be at least 0")
    if options.shape != TINY and options.shape not in names("shape"):
        raise ConfigError(f"--shape {options.shape}: not known; {choices(options.shape, [*names('shape'), TINY])}")
    if options.shape == TINY and options.profile is None:
        raise ConfigError(f"--shape {TINY}: needs --profile, only true sizes are calibrated")
    from experiments.fidelity_run import run  # torch, which judging does without

    return run(options, started)


def _policies(text: str) -> list[str]:
    found = list(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in registry.POLICIES:
            raise ConfigError(f"--policies {name}: not known; {choices(name, registry.POLICIES)}")
    return found


if __name__ == "__main__":
    main()
