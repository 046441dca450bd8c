"""`oled-export`: traces in the formats of other tools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from experiments.command import Parser, guarded
from experiments.terminal import mend_streams
from tracer.export_oracle import write_oracle
from tracer.own_version import own_version
from tracer.schema import TraceError
from tracer.shipped import find_trace
from tracer.store import TraceReader

PROGRAM = "oled-export"


def main(arguments: Sequence[str] | None = None) -> None:
    """Export a trace; exits with 2 after an error of the user, with 128 and its number after a signal."""
    mend_streams()
    options = _parser().parse_args(arguments)
    guarded(PROGRAM, lambda: print(options.run(options)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Write a trace as other tools read it.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="FORMAT")
    text = "oracleGeneral of libCacheSim: experts one by one, each with its next use"
    made = commands.add_parser("oracle", help=text, description=text, allow_abbrev=False)
    made.set_defaults(run=_oracle)
    made.add_argument("trace", help="directory of a trace, or the name of a shipped one")
    made.add_argument("output", type=Path, help="file to be made, NAME.oracleGeneral")
    made.add_argument("--overwrite", action="store_true", help="replace the file that has that name")
    made.add_argument("--layer", type=int, metavar="N", help="this MoE layer alone; default all, as one cache")
    made.add_argument(
        "--bytes",
        action="store_true",
        help="give objects the bytes of an expert; default 1, so that sizes count experts",
    )
    return parser


def _oracle(options: argparse.Namespace) -> str:
    reader = TraceReader(find_trace(options.trace))
    shape = reader.metadata.shape
    size = 1
    if options.bytes:
        size = shape.expert_bytes()
        if not size:
            raise TraceError(f"{reader.path}: does not know the sizes of its model, which --bytes needs")
    bar = tqdm(total=reader.num_passes, unit="pass", desc=PROGRAM, disable=None, leave=False)
    with bar:
        num_records = write_oracle(
            reader,
            shape,
            options.output,
            layer=options.layer,
            expert_bytes=size,
            overwrite=options.overwrite,
            on_pass=bar.update,
        )
    of = "all layers" if options.layer is None else f"layer {options.layer}"
    return f"{options.output}: {num_records} accesses of {of}, {reader.num_passes} passes of {reader.path.name}"


if __name__ == "__main__":
    main()
