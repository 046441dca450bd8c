"""`oled-compare`: how far simulated runs are from their replays on hardware, as a verdict, a table and a plot."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.command import Parser, guarded
from experiments.compare_files import TIMELINE, check, write
from experiments.compare_judge import compare
from experiments.compare_pairs import Pair
from experiments.compare_runs import read_runs
from experiments.compare_table import as_text
from experiments.compare_timeline import write_timelines
from experiments.errors import ConfigError
from experiments.terminal import mend_streams
from experiments.timeline import FORWARDS, Window
from experiments.whole import whole_directory
from tracer.own_version import own_version
from tracer.schema import choices

PROGRAM = "oled-compare"
_NARROWEST, _WIDEST = 80, 120  # tables
_EPILOG = """\
Cells are named POLICY/SLOTS/xN/TRACE, where xN says how often each byte was
copied, to stand for a link of 1/N of the bandwidth: a replay of
h2d_bytes_factor=2 is held against a simulated link of half the bytes a second.
Runs pair where trace, policy with its knobs, slots, bandwidth, sizes, warm-up
and hardware profile are the same.

  oled-compare simulated replayed --output fidelity
  oled-compare simulated replayed --fitted 'lru/100/x1/*'
  oled-compare simulated replayed --output fidelity \\
      --timeline lru/40/x1/proxy-19x256-code --window 30:10

docs/fidelity.md says what each number is. The exit code is 0 whatever the
verdict, with --strict 1 where a target is missed; 2 after an error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; exits with 2 after an error of the user, with 128 and its number after a signal."""
    mend_streams()
    options = _parser().parse_args(arguments)
    return guarded(PROGRAM, lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="How far simulated runs are from their replays on hardware.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="results of oled-simulate and oled-replay, their sweeps, or what oled-compare wrote; in any order",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write table, plot and all numbers there")
    parser.add_argument("--overwrite", action="store_true", help="replace the comparison that lies there")
    parser.add_argument(
        "--fitted",
        action="append",
        default=[],
        metavar="CELL",
        help="cell that the profile was fitted to, which is shown and not judged; * stands for any part; repeatable",
    )
    parser.add_argument("--timeline", metavar="CELL", help=f"write both runs of a cell into {TIMELINE}, for Perfetto")
    parser.add_argument(
        "--window",
        metavar="FIRST:N",
        help=f"forwards of the timeline; default the first {FORWARDS} decode forwards that are counted",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    return parser


def _run(options: argparse.Namespace) -> int:
    window = _window(options.window)
    for given, needed in (("timeline", "output"), ("window", "timeline"), ("overwrite", "output")):
        if getattr(options, given) and not getattr(options, needed):
            raise ConfigError(f"--{given}: needs --{needed}")
    comparison = compare(read_runs(options.runs), options.fitted)
    drawn = None if options.timeline is None else _pair_named(comparison.pairs, options.timeline)
    if options.output is not None:
        with whole_directory(options.output, lambda: check(options.output, options.overwrite)) as partial:
            if drawn is not None:
                with (partial / TIMELINE).open("wb") as file:
                    write_timelines(drawn, file, window)
            write(comparison, partial)
    print(as_text(comparison, _width()))
    if options.output is not None:
        print(f"\nWritten: {options.output}")
    return int(options.strict and not comparison.is_met)


def _window(text: str | None) -> Window:
    if text is None:
        return Window()
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise ConfigError(f"--window {text}: must be FIRST:N, two whole numbers")
    return Window(int(found[1]), int(found[2]))


def _pair_named(pairs: Sequence[Pair], name: str) -> Pair:
    for pair in pairs:
        if pair.name == name:
            return pair
    raise ConfigError(f"--timeline {name}: no such cell; {choices(name, [pair.name for pair in pairs])}")


def _width() -> int:
    """Of a line: that of the terminal, within what the tables are made for."""
    columns = shutil.get_terminal_size((_NARROWEST, 24)).columns if sys.stdout.isatty() else _NARROWEST
    return min(max(columns, _NARROWEST), _WIDEST)


if __name__ == "__main__":
    sys.exit(main())
