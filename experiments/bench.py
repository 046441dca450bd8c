"""`python -m experiments.bench`: what the parts of this project cost on this machine, in tables to be read and kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.bench_caches import caches_as_text, measure_caches
from experiments.bench_decide import decisions_as_text, measure_decisions
from experiments.bench_engines import engines_as_text, measure_engines
from experiments.bench_memory import TRACE as REPEATED
from experiments.bench_memory import measure_memory, memory_as_text
from experiments.bench_others import look_in
from experiments.bench_sweep import POLICIES as GRID_POLICIES
from experiments.bench_sweep import SIZES, TRACES, measure_sweep, sweep_as_text
from experiments.command import Parser, guarded
from experiments.identity import versions
from experiments.terminal import mend_streams

TRACE = "proxy-19x256-signals"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `python -m experiments.bench`; exits with 2 after an error of the user."""
    mend_streams()
    options = _parser().parse_args(arguments)

    def work() -> None:
        report = {"machine": machine(), **options.run(options)}
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(options.show(report))

    guarded("bench", work)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m experiments.bench", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "time of one decision of each policy, asked from Python at every gate as drivers ask"
    decide = commands.add_parser("decide", help=text, description=text, allow_abbrev=False)
    decide.add_argument("--trace", default=TRACE, help=f"shipped name or path (default {TRACE})")
    decide.add_argument("--slots", type=int, default=40, metavar="N", help="slots of each layer (default 40)")
    decide.add_argument("--forwards", type=_count, default=160, metavar="N", help="first of the trace (default 160)")
    decide.add_argument("--repeats", type=_count, default=5, metavar="N", help="of everything (default 5)")
    decide.add_argument(
        "--policy",
        action="append",
        metavar="'NAME KNOB=VALUE ...'",
        help="one to measure, repeatable (default all, with their default knobs)",
    )
    decide.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    decide.set_defaults(
        run=lambda given: measure_decisions(given.trace, given.slots, given.policy, given.forwards, given.repeats),
        show=decisions_as_text,
    )
    _add_engines(commands)
    _add_caches(commands)
    _add_sweep(commands)
    _add_memory(commands)
    return parser


def _add_engines(commands: Any) -> None:
    text = "layer executions a second of each policy with full timing, compiled and in the event engine"
    engines = commands.add_parser("engines", help=text, description=text, allow_abbrev=False)
    engines.add_argument("--trace", default=TRACE, help=f"shipped name or path (default {TRACE})")
    engines.add_argument("--slots", type=_count, default=40, metavar="N", help="of each layer (default 40)")
    engines.add_argument("--forwards", type=_count, default=200, metavar="N", help="first of the trace (default 200)")
    engines.add_argument("--repeats", type=_count, default=5, metavar="N", help="compiled (default 5)")
    engines.add_argument("--policy", action="append", metavar="NAME", help="repeatable (default all)")
    engines.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    engines.set_defaults(
        run=lambda given: measure_engines(given.trace, given.slots, given.policy, given.forwards, given.repeats),
        show=engines_as_text,
    )


def _add_memory(commands: Any) -> None:
    text = "peak memory and time of a run over a trace that is larger than memory should be, which it makes"
    memory = commands.add_parser("memory", help=text, description=text, allow_abbrev=False)
    memory.add_argument("--megabytes", type=_count, default=2000, metavar="N", help="of the trace (default 2000)")
    memory.add_argument("--trace", default=REPEATED, help=f"that is repeated, name or path (default {REPEATED})")
    memory.add_argument("--policy", default="oled", metavar="NAME", help="default oled")
    memory.add_argument("--slots", type=_count, default=40, metavar="N", help="of each layer (default 40)")
    memory.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    memory.set_defaults(
        run=lambda given: measure_memory(given.megabytes * 10**6, given.trace, given.policy, given.slots),
        show=memory_as_text,
    )


def _add_sweep(commands: Any) -> None:
    text = "time of a whole grid of the command: policies, cache sizes, bandwidths and traces"
    grid = commands.add_parser("sweep", help=text, description=text, allow_abbrev=False)
    grid.add_argument(
        "--trace", action="append", help=f"shipped name or path, repeatable (default {', '.join(TRACES)})"
    )
    grid.add_argument("--policy", action="append", metavar="NAME", help="repeatable (default eight of them)")
    grid.add_argument(
        "--slots", type=int, action="append", metavar="N", help="of each layer, repeatable (default 8 sizes)"
    )
    grid.add_argument("--jobs", type=_count, metavar="N", help="processes (default one for each processor)")
    grid.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    grid.set_defaults(
        run=lambda given: measure_sweep(
            given.trace or TRACES, given.policy or GRID_POLICIES, given.slots or SIZES, given.jobs
        ),
        show=sweep_as_text,
    )


def _add_caches(commands: Any) -> None:
    text = "accesses per second of caches that serve experts one by one, beside libcachesim and moe-policylang"
    caches = commands.add_parser("caches", help=text, description=text, allow_abbrev=False)
    caches.add_argument("--trace", default="proxy-19x256-code", help="shipped name or path (default proxy-19x256-code)")
    caches.add_argument(
        "--slots", type=int, action="append", metavar="N", help="of each layer, repeatable (default 40 and 100)"
    )
    caches.add_argument(
        "--forwards", type=_count, default=1200, metavar="N", help="of the synthetic stream (default 1200)"
    )
    caches.add_argument("--repeats", type=_count, default=5, metavar="N", help="of everything (default 5)")
    caches.add_argument("--others", type=Path, metavar="DIR", help="where pip install --target put other simulators")
    caches.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    caches.set_defaults(
        run=_measure_caches,
        show=caches_as_text,
    )


def _measure_caches(given: argparse.Namespace) -> dict[str, Any]:
    if given.others is not None:
        look_in(given.others)
    return measure_caches(given.trace, given.slots or [40, 100], given.forwards, given.repeats)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def machine() -> dict[str, Any]:
    """What a time depends on, beside the code: processor, system, how busy it is, and versions."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "versions": versions(("numpy", "numba")),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


if __name__ == "__main__":
    main()
