"""`oled-generate`: synthetic traces, controls of a trace, batches of recorded requests, and records to calibrate from."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.calibration import recorded
from experiments.command import Parser, guarded
from experiments.profiles import load_shape
from experiments.terminal import mend_streams
from tracer import locality
from tracer.calibration_file import load, save
from tracer.controls import control_metadata, shuffled, uniform
from tracer.merge import merge, merged_metadata
from tracer.own_version import own_version
from tracer.schema import GATE_DTYPES, ModelShape, Pass, TraceError, TraceMetadata
from tracer.shipped import find_trace
from tracer.store import TraceReader, TraceWriter
from tracer.synthetic import SyntheticSettings, SyntheticTrace
from tracer.synthetic_decode import DecodeScript

PROGRAM = "oled-generate"
MAX_LAYERS = 1024  # far more than any model has


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a trace, or a record of one; exits with 2 after an error of the user, with 128 and its number after a signal."""
    mend_streams()
    options = _parser().parse_args(arguments)
    guarded(PROGRAM, lambda: print(options.run(options)))


def describe(path: Path) -> str:
    """What a trace on disk is like, measured, in lines for a terminal."""
    reader = TraceReader(path)
    metadata = reader.metadata
    forwards = list(locality.denoise_sets(reader, metadata.shape.num_experts))
    activated = locality.activated_per_layer(forwards)
    means = {
        "adjacent overlap": locality.within_blocks(forwards).mean_overlap,
        "across blocks": locality.across_blocks(forwards).mean_overlap,
        "between requests": locality.between_requests(forwards).mean_overlap,
    }
    overlaps = {name: "no such pair" if mean is None else f"{mean:.3f}" for name, mean in means.items()}
    experts = "none, no denoise forward"
    if activated.size:
        experts = f"{activated.mean():.1f} of {metadata.shape.num_experts} (by layer {activated.min():.1f} to {activated.max():.1f})"
    lines = {
        "trace": f"{path} ({metadata.source})",
        "holds": f"{reader.num_requests} requests, {reader.num_passes} passes",
        "activated experts": experts,
        **overlaps,
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Make traces without running a model.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    made = command("synthetic", _synthetic, "a trace calibrated to the numbers that the OLED-MoE paper prints")
    _add_output(made)
    _add_synthetic(made)
    for name, run, text in (
        ("uniform", _uniform, "a trace with independent uniform routing: no locality of any kind"),
        ("shuffled", _shuffled, "a trace whose decode forwards have exchanged their routing: no temporal locality"),
    ):
        made = command(name, run, text)
        made.add_argument("trace", help="directory of a trace, or the name of a shipped one")
        _add_output(made)
        made.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (default 0)")
        if name == "shuffled":
            made.add_argument("--within-requests", action="store_true", help="exchange only within each request")
    made = command("merge", _merge, "requests recorded one by one as continuous batching would run them")
    made.add_argument("traces", nargs="+", metavar="trace", help="one or more; requests are taken from them in turn")
    _add_output(made)
    made.add_argument("--batch", type=int, required=True, metavar="N", help="requests that run at once")
    made = command(
        "record", _record, "a record of requests for policies to learn from, as `oled-simulate calibration=`"
    )
    made.add_argument("traces", nargs="+", metavar="trace", help="one or more, of one model")
    _add_output(made, "file to be made, NAME.calibration.npz")
    made.add_argument("--requests", type=int, metavar="N", help="only the first, trace after trace (default all)")
    return parser


def _add_output(parser: argparse.ArgumentParser, text: str = "directory to be made, NAME.trace") -> None:
    parser.add_argument("output", type=Path, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace what has that name, if it is of this kind")


def _add_synthetic(parser: argparse.ArgumentParser) -> None:
    given, script = SyntheticSettings, DecodeScript()
    flags = {
        "model": (
            ("shape", str, "llada2.0-mini", "name of a shipped model shape, or path of a .yaml file"),
            ("layers", int, None, "MoE layers, if not the shape's"),
            ("experts", int, None, "experts of a layer, if not the shape's"),
            ("top-k", int, None, "experts of a token, if not the shape's"),
            ("groups", int, given.num_groups, "groups of experts; 1 is none"),
            ("top-groups", int, given.top_groups, "groups that a token chooses from"),
        ),
        "what the paper prints, for LLaDA2.0 at block length 16; other values are assumed": (
            ("activated", float, None, "mean activated experts of a layer (default 60 for mini, 90 for flash)"),
            ("overlap", float, given.overlap, "of adjacent forwards; printed are 0.85 to 0.90"),
            ("boundary-overlap", float, given.boundary_overlap, "across blocks; printed is more than 0.65"),
        ),
        "assumed": (
            ("layer-heterogeneity", float, given.layer_heterogeneity, "how much layers differ, from 0 up"),
            (
                "confidence-coupling",
                float,
                given.confidence_coupling,
                "how much steadier confident tokens are, from 0 up",
            ),
            ("request-share", float, given.request_share, "how much requests differ, 0 to 1"),
            ("accept-ratio", float, script.accept_ratio, "chance of a mask to reach the threshold"),
            ("prompt-length", int, script.prompt_length, "mean tokens of a prompt"),
        ),
        "run": (
            ("requests", int, given.num_requests, "one after the other"),
            ("gen-length", int, script.gen_length, "new tokens of a request"),
            ("block-length", int, script.block_length, "tokens of a block"),
            ("threshold", float, script.threshold, "of confidence"),
            ("seed", int, given.seed, "of all random numbers"),
        ),
    }
    metavars = {str: "NAME", int: "N", float: "X"}
    for title, of_group in flags.items():
        group = parser.add_argument_group(title)
        for flag, kind, default, text in of_group:
            shown = text if default is None else f"{text} (default {default})"
            group.add_argument(f"--{flag}", type=kind, default=default, metavar=metavars[kind], help=shown)
    parser.add_argument(
        "--gate-dtype",
        choices=GATE_DTYPES,
        default=given.gate_dtype,
        help=f"how gates are stored (default {given.gate_dtype})",
    )


def _synthetic(options: argparse.Namespace) -> str:
    shape = _shape(options)
    trace = SyntheticTrace(
        SyntheticSettings(
            shape=shape,
            num_groups=options.groups,
            top_groups=options.top_groups,
            activated=options.activated,
            overlap=options.overlap,
            boundary_overlap=options.boundary_overlap,
            layer_heterogeneity=options.layer_heterogeneity,
            confidence_coupling=options.confidence_coupling,
            request_share=options.request_share,
            num_requests=options.requests,
            script=DecodeScript(
                block_length=options.block_length,
                gen_length=options.gen_length,
                threshold=options.threshold,
                prompt_length=options.prompt_length,
                accept_ratio=options.accept_ratio,
                **({"vocab": shape.vocab} if shape.vocab else {}),
            ),
            gate_dtype=options.gate_dtype,
            seed=options.seed,
        )
    )
    return _write(options, trace.metadata, trace, trace.num_passes)


def _shape(options: argparse.Namespace) -> ModelShape:
    """The named shape with other counts, where these are given."""
    shape = load_shape(options.shape)
    if options.layers is not None and not 1 <= options.layers <= MAX_LAYERS:
        raise TraceError(f"layers {options.layers}: must be 1 to {MAX_LAYERS}")
    first = shape.layer_ids[0]
    return replace(
        shape,
        layer_ids=shape.layer_ids if options.layers is None else tuple(range(first, first + options.layers)),
        num_experts=shape.num_experts if options.experts is None else options.experts,
        top_k=shape.top_k if options.top_k is None else options.top_k,
    )


def _uniform(options: argparse.Namespace) -> str:
    reader = TraceReader(find_trace(options.trace))
    metadata = control_metadata(reader.metadata, "uniform", options.seed)
    return _write(options, metadata, uniform(reader, reader.metadata.shape, options.seed), reader.num_passes)


def _shuffled(options: argparse.Namespace) -> str:
    reader = TraceReader(find_trace(options.trace))
    within = options.within_requests
    metadata = control_metadata(reader.metadata, "shuffled", options.seed, within_requests=within)
    passes = reader.passes(signals=reader.has_signals)
    return _write(options, metadata, shuffled(passes, options.seed, within_requests=within), reader.num_passes)


def _merge(options: argparse.Namespace) -> str:
    readers = [TraceReader(find_trace(name)) for name in options.traces]
    metadata = merged_metadata([reader.metadata for reader in readers], options.batch)
    signals = all(reader.has_signals for reader in readers)
    passes = merge([reader.passes(signals=signals) for reader in readers], options.batch)
    return _write(options, metadata, passes, sum(reader.num_passes for reader in readers))


def _write(options: argparse.Namespace, metadata: TraceMetadata, passes: Iterable[Pass], num_forwards: int) -> str:
    """Write a trace and describe it, with a bar on stderr when that is a terminal.

    A forward is what a pass does for one request.
    """
    bar = tqdm(total=num_forwards, unit="forward", desc=PROGRAM, disable=None, leave=False)
    with bar, TraceWriter(options.output, metadata, overwrite=options.overwrite) as writer:
        for item in passes:
            writer.write(item)
            bar.update(len(item.requests))
    return describe(options.output)


def _record(options: argparse.Namespace) -> str:
    path = options.output
    if path.exists():
        if not options.overwrite:
            raise TraceError(f"{path}: exists already; choose another name, or ask to overwrite it")
        load(path)  # what is not a record is not replaced
    found = recorded([TraceReader(find_trace(name)) for name in options.traces], options.requests)
    save(path, found)
    return f"record              {path} ({found.name})\nholds               {found.num_requests} requests"


if __name__ == "__main__":
    main()
