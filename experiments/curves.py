"""`oled-curves`: hit ratio and cache utilization at every cache size, as a table and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
from omegaconf import MISSING, DictConfig, OmegaConf
from tqdm import tqdm

from experiments.command import Parser, guarded
from experiments.curves_files import PLOT, check, write
from experiments.curves_plot import plot_curves
from experiments.curves_points import points_of, run_point
from experiments.curves_table import as_frame, as_text, facts_of
from experiments.errors import ConfigError
from experiments.terminal import mend_streams
from experiments.whole import whole_directory
from policies.contract import PolicyError
from simulator.curves import CURVES, NEED_GATES, curves
from tracer.own_version import own_version
from tracer.schema import Pass, TraceError, choices
from tracer.shipped import find_trace
from tracer.store import TraceReader

PROGRAM = "oled-curves"
_HELP = """\
every key is given as KEY=VALUE:
  trace             name of a shipped trace, or the path of any other
  curves            names from those below, with commas between; default all
  warmup_requests   first requests, which run and do not count; default 1
  points            policies to run in simulated time and to draw as points,
                    each with knobs behind it if any:
                    points='oled,oled coop=false,moe_infinity'
  points_slots      cache sizes of the points, expert slots for each MoE layer;
                    default 40
  hardware, shape   machine and sizes that points are charged, as for
                    oled-simulate; default rtx5090 and trace
  output.dir        directory of the results; default outputs/DATE/TIME
  output.overwrite  replace curves that something else was asked for; the same
                    are always replaced

Every curve copies all misses and gives each layer as many slots, from 1 to all
experts:
  lru, lru_misses_first, lru_id  lru; the latter two with policy.lru_order
                                 =misses_first and =id
  load, gate, confidence         oled policy.layer_adapt=false
                                 policy.coop=false with these values of
                                 policy.priority_signal
  ideal_min                      ideal_min policy.misses=h2d
  seq                            LRU that serves experts one by one, as
                                 simulators of other caches do; no policy of
                                 ours, whose layers activate experts together
"""


@dataclass
class Output:
    """Where the results go."""

    dir: str | None = None  # null is outputs/DATE/TIME
    overwrite: bool = False


@dataclass
class Keys:
    """Every key of `oled-curves`."""

    trace: str = MISSING
    curves: str = ",".join(CURVES)
    warmup_requests: int = 1
    points: str | None = None
    points_slots: str = "40"
    hardware: str = "rtx5090"
    shape: str = "trace"
    output: Output = field(default_factory=Output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; exits with 2 after an error of the user, with 128 and its number after a signal."""
    mend_streams()
    parser = Parser(
        prog=PROGRAM,
        description="Hit ratio and cache utilization at every cache size, as a table and a plot.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args(arguments).keys
    guarded(PROGRAM, lambda: run(_read(given)))


def _read(given: Sequence[str]) -> DictConfig:
    """The configuration that a command line asks for.

    Raises:
        ConfigError: an argument is no KEY=VALUE.
    """
    config: Any = OmegaConf.structured(Keys)
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: must be KEY=VALUE; --help lists the keys")
        OmegaConf.update(config, key, value)
    return config


class _Watched:
    """The passes of a trace, with a bar on stderr while they are read, if that is a terminal."""

    def __init__(self, reader: TraceReader, times: int) -> None:
        self._reader = reader
        self.bar = tqdm(total=times * reader.num_passes, desc=PROGRAM, unit="forward", disable=None, leave=False)

    def __iter__(self) -> Iterator[Pass]:
        for pass_ in self._reader:
            yield pass_
            self.bar.update()


def run(config: DictConfig) -> None:
    """Draw what one configuration asks for, write it and print its table."""
    reader = TraceReader(find_trace(config.trace))
    names = _known(_names(config.curves), reader, is_asked=config.curves != Keys.curves)
    points = points_of(config.points or "", config.points_slots, reader.metadata.shape)
    if not 0 <= config.warmup_requests < reader.num_requests:
        raise TraceError(
            f"warmup_requests is {config.warmup_requests}, must be 0 or more and below {reader.num_requests}, the requests of the trace"
        )
    asked: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    directory = Path(config.output.dir or f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}")
    with whole_directory(directory, lambda: check(directory, asked, config.output.overwrite)) as partial:
        watched = _Watched(reader, 2 if "ideal_min" in names else 1)
        with watched.bar:
            found = curves(watched, reader.metadata.shape, names, config.warmup_requests)
        facts = facts_of(reader, config.warmup_requests, found)
        frame = as_frame(found, facts)
        rows = [
            run_point(point, reader, config.hardware, config.shape, config.warmup_requests, facts) for point in points
        ]
        frame = pl.concat([frame, *rows])
        plot_curves(frame, partial / PLOT)
        write(frame, asked, reader, partial)
    print(f"{as_text(frame)}\n\nWritten: {directory}")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in CURVES:
            raise ConfigError(f"curves={name}: not known; {choices(name, CURVES)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"curves={text}: must name one or more, each once")
    return names


def _known(names: list[str], reader: TraceReader, *, is_asked: bool) -> list[str]:
    """The names without those that the trace cannot give, which are refused where they were asked for."""
    lacking = [name for name in names if name in NEED_GATES and "gates" in reader.metadata.lacks]
    if not lacking:
        return names
    if is_asked:
        raise PolicyError(f"curves={','.join(lacking)}: gates are null in this trace, and these rank by them")
    print(f"{PROGRAM}: without {', '.join(lacking)}, as gates are null in this trace", file=sys.stderr)
    return [name for name in names if name not in lacking]


if __name__ == "__main__":
    main()
