"""`oled-calibrate`: measures what this machine costs, and writes it as a hardware profile."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import yaml

from experiments.calibrate_policies import measure_policies, read_routing
from experiments.command import Parser, guarded
from experiments.errors import ConfigError
from experiments.profiles import load_shape, profile_from_dict
from experiments.terminal import mend_streams
from experiments.whole import whole_file
from policies.profile import HardwareProfile, ProfileError
from policies.registry import POLICIES
from replay.arena import MIB
from replay.calibrate import calibrate
from replay.calibrate_settings import QUICK, Settings
from replay.calibrated import notes_of, profile_of
from tracer.own_version import own_version
from tracer.schema import choices

PROGRAM = "oled-calibrate"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write a profile; exits with 2 after an error of the user, with 128 and its number after a signal."""
    mend_streams()
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(words)
    guarded(PROGRAM, lambda: print(_run(options, shlex.join([PROGRAM, *words]))))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Measure copies, GPU, CPU and policies of this machine, and write a hardware profile. "
        "Let nothing else run meanwhile.",
        allow_abbrev=False,
    )
    parser.add_argument("output", type=Path, metavar="FILE.yaml", help="profile to write, for hardware.path=FILE.yaml")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="NAME",
        help="model to measure for, repeatable (default llada2.0-mini)",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cpu copies memory to memory (default cuda if any)")
    parser.add_argument("--workers", type=int, metavar="N", help="CPU threads (default all cores but one)")
    parser.add_argument(
        "--pool-mib",
        type=int,
        metavar="N",
        help=f"host memory to measure with, pinned (default {Settings().pool_bytes // MIB}); more than caches hold",
    )
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help="to run for its time at a gate, repeatable (default all)"
    )
    parser.add_argument("--forwards", type=int, metavar="N", help="of each such run (default 16, --quick 5)")
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats, to try the command")
    parser.add_argument("--slow-link", action="store_true", help="measure over a link that has trained down")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE.yaml")
    return parser


def _run(options: argparse.Namespace, command: str) -> str:
    _require_room(options.output, options.overwrite)
    device = _device(options.device)
    settings = _settings(options)
    shapes = [load_shape(name) for name in dict.fromkeys(options.shape or ["llada2.0-mini"])]
    for name in options.policy or []:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r}: not known; {choices(name, POLICIES)}")
    routing = read_routing(options.policy, settings.policy_forwards)
    start = monotonic()

    def say(line: str) -> None:
        print(f"[{monotonic() - start:5.1f} s] {line}", file=sys.stderr, flush=True)

    measured = calibrate(shapes, device, settings, say, allow_slow_link=options.slow_link)
    say(f"{len(routing.policies)} policies in the executor")
    name, date = options.output.stem, datetime.now(UTC).date().isoformat()
    policy_ns, spread = measure_policies(routing, measured, profile_of(measured, name, date, {}), device, settings, say)
    seconds = monotonic() - start
    notes = [f"Measured in {seconds:.0f} s by", f"  {command}", *notes_of(measured)]
    write_profile(options.output, profile_of(measured, name, date, policy_ns, spread), notes)
    return f"{options.output}: measured in {seconds:.0f} s; use it with hardware.path={options.output}"


def _require_room(path: Path, overwrite: bool) -> None:
    """Refuse, before anything is measured, a file that could not be written or read."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: must end in .yaml")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such directory")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path}: exists already; --overwrite replaces it")


def _device(name: str | None) -> str:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: PyTorch finds no CUDA device; --device cpu measures this machine without one")
    return "cuda" if has_cuda and name != "cpu" else "cpu"


def _settings(options: argparse.Namespace) -> Settings:
    changes: dict[str, Any] = {}
    if options.workers is not None:
        changes["num_workers"] = options.workers
    if options.pool_mib is not None:
        if options.pool_mib < 1:
            raise ConfigError(f"--pool-mib {options.pool_mib}: must be at least 1")
        changes["pool_bytes"] = options.pool_mib * MIB
    if options.forwards is not None:
        changes["policy_forwards"] = options.forwards
    return replace(QUICK if options.quick else Settings(), **changes)


def write_profile(path: Path, profile: HardwareProfile, notes: Sequence[str]) -> None:
    """Write a profile as YAML, with notes as comments at its head; the file appears whole or not at all.

    Raises:
        ProfileError: the text would not be read as this profile.
    """
    text = profile_as_yaml(profile, notes)
    if profile_from_dict(yaml.safe_load(text), str(path)) != profile:
        raise ProfileError(f"{path}: not written, the text would be read as another profile")
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def profile_as_yaml(profile: HardwareProfile, notes: Sequence[str]) -> str:
    """A profile as YAML: notes as comments, then keys in their order, those with their default value left out."""
    values = asdict(profile)
    defaults = {field.name: field.default for field in fields(HardwareProfile)}
    kept = {key: _plain(value) for key, value in values.items() if value not in (defaults[key], {}, ())}
    comments = "".join(f"# {line}".rstrip() + "\n" for line in notes)
    return comments + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def _plain(value: Any) -> Any:
    """Lists for tuples, without what is None, as YAML has no tuples."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    main()
