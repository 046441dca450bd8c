"""`oled-import`: traces of what other tools recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.command import Parser, guarded
from experiments.profiles import load_shape
from experiments.terminal import mend_streams
from tracer.doctor import check
from tracer.import_engines import Given, read_sglang, read_vllm
from tracer.import_forwards import Tokens
from tracer.import_mapping import MAPPINGS, load_mapping
from tracer.import_shape import parse_layers, shape_of_config
from tracer.import_table import Request, read_table
from tracer.import_trace import Import, Outcome, write_import
from tracer.own_version import own_version
from tracer.schema import GATE_DTYPES, ModelShape, TraceError

PROGRAM = "oled-import"
_MOST_SHOWN = 5  # of the requests that were left out


def main(arguments: Sequence[str] | None = None) -> int:
    """Import; 1 where the doctor does not find the trace sound. Exits with 2 after an error of the user."""
    mend_streams()
    options = _parser().parse_args(arguments)
    return guarded(PROGRAM, lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Make a trace of what other tools recorded. What a format lacks is null in the trace, and policies "
        "that need it refuse it; docs/formats.md says what each format has.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="FORMAT")
    for name, read, text in (
        ("vllm", read_vllm, "routed_experts of vLLM: .npy, .npz, or answers of its server as .json or .jsonl"),
        ("sglang", read_sglang, "routed_experts of SGLang: answers of its server as .json or .jsonl"),
        ("table", None, "any .parquet or .csv table, by a mapping of its columns"),
    ):
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(format=name, read=read)
        made.add_argument("files", type=Path, nargs="+", metavar="file", help="one or more, requests in their order")
        made.add_argument("output", type=Path, help="directory to be made, NAME.trace")
        made.add_argument("--overwrite", action="store_true", help="replace the trace that has that name")
        made.add_argument(
            "--prompt-tokens", type=int, metavar="N", help="tokens of every prompt, where the files do not say"
        )
        if name == "table":
            made.add_argument(
                "--map",
                required=True,
                metavar="FILE",
                help=f"mapping of columns, a YAML file, or one of {', '.join(MAPPINGS)}",
            )
            made.add_argument(
                "--gate-dtype",
                choices=GATE_DTYPES,
                default=Import.gate_dtype,
                help=f"how gates are stored (default {Import.gate_dtype})",
            )
        else:
            _add_engine(made, name)
        _add_shape(made)
        made.add_argument(
            "--skip-bad", action="store_true", help="leave out requests that are not sound, and say how many"
        )
    return parser


def _add_engine(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--start", type=int, default=0, metavar="N", help="first position that the arrays were asked for (default 0)"
    )
    if name == "sglang":
        parser.add_argument("--num-layers", type=int, metavar="N", help="all layers of the model, dense ones too")
        parser.add_argument("--top-k", type=int, metavar="K", help="experts of a token")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model, of which one is needed")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--model-config", type=Path, metavar="FILE", help="config.json of the model, for all of its sizes")
    one.add_argument("--shape", metavar="NAME", help="name of a shipped model shape, or path of a .yaml file")
    one.add_argument("--experts", type=int, metavar="N", help="experts of a layer; other sizes stay unknown")
    group.add_argument(
        "--layers", metavar="LIST", help="MoE layers such as 1-19, beside --experts; default those found"
    )


def _run(options: argparse.Namespace) -> int:
    shape = _shape(options)
    requests: Callable[[], Iterator[Tokens | Request]]
    name, is_autoregressive = options.format, True
    if options.format == "table":
        mapping = load_mapping(options.map)
        if options.prompt_tokens is not None:
            mapping = replace(mapping, num_prompt=_at_least_0("prompt-tokens", options.prompt_tokens))
        name = options.map if options.map in MAPPINGS else "table"
        is_autoregressive = not mapping.columns.forward
        requests = partial(read_table, options.files, mapping)
    else:
        requests = partial(options.read, options.files, _given(options, shape))
    settings = Import(
        format=name,
        files=tuple(path.name for path in options.files),
        num_experts=options.experts,
        layer_ids=parse_layers(options.layers) if options.layers else None,
        shape=shape,
        gate_dtype=getattr(options, "gate_dtype", Import.gate_dtype),
        is_autoregressive=is_autoregressive,
        skip_bad=options.skip_bad,
    )
    bar = tqdm(unit="request", desc=PROGRAM, disable=None, leave=False)
    with bar:
        outcome = write_import(requests(), options.output, settings, overwrite=options.overwrite, on_request=bar.update)
    _say_skipped(outcome)
    report = check(options.output)
    print(report)
    return 0 if report.ok else 1


def _shape(options: argparse.Namespace) -> ModelShape | None:
    if options.layers and options.experts is None:
        raise TraceError("--layers stands beside --experts; --model-config and --shape say the layers themselves")
    if options.model_config:
        return shape_of_config(options.model_config)
    return load_shape(options.shape) if options.shape else None


def _given(options: argparse.Namespace, shape: ModelShape | None) -> Given:
    values: dict[str, Any] = {
        "num_prompt": _at_least_0("prompt-tokens", options.prompt_tokens),
        "start": _at_least_0("start", options.start),
    }
    if options.format == "sglang":
        for flag in ("num_layers", "top_k"):
            if (value := getattr(options, flag)) is not None and value < 1:
                raise TraceError(f"--{flag.replace('_', '-')} is {value}, must be 1 or more")
        values["num_layers"] = options.num_layers or (shape and shape.num_dense_layers + shape.num_layers)
        values["top_k"] = options.top_k or (shape and shape.top_k)
    return Given(**values)


def _at_least_0(flag: str, value: int | None) -> int | None:
    if value is not None and value < 0:
        raise TraceError(f"--{flag} is {value}, must be 0 or more")
    return value


def _say_skipped(outcome: Outcome) -> None:
    if not outcome.skipped:
        return
    total = outcome.num_requests + len(outcome.skipped)
    print(f"{PROGRAM}: left out {len(outcome.skipped)} of {total} requests:", file=sys.stderr)
    for why in outcome.skipped[:_MOST_SHOWN]:
        print(f"  {why}", file=sys.stderr)
    if len(outcome.skipped) > _MOST_SHOWN:
        print(f"  and {len(outcome.skipped) - _MOST_SHOWN} more", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
