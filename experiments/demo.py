"""`make demo`: the whole path on a toy model, from prompts it has never seen to a table of policies and two plots."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import polars as pl
from omegaconf import OmegaConf
from tqdm import tqdm

from experiments import trace
from experiments.collect import table_of, write_table
from experiments.command import Parser, guarded
from experiments.figures import plot_tpot, plot_utilization
from experiments.identity import UNSIZED
from experiments.ranking import with_differences
from experiments.run import simulate
from experiments.table import WIDTH, format_table
from experiments.terminal import mend_streams
from tracer import doctor
from tracer.schema import TraceError
from tracer.shipped import find_model
from tracer.store import TraceReader

MODEL = "proxy-tiny"
NUM_PROMPTS = 12
POLICIES = ("full", "ondemand", "lru", "lfu", "prev_set", "oled", "ideal_free", "ideal_min")
FIXED = {"layer_adapt": False}  # oled with equal layers, as the bounds have them
SIZES = (8, 16, 32)
HARDWARE = "rtx5090"
SHAPE = "llada2.0-mini"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `python -m experiments.demo`."""
    parser = Parser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory of the results (default: demo)")
    out = parser.parse_args(arguments).out
    mend_streams()
    guarded("demo", lambda: run(out))


def run(out: Path) -> None:
    """Trace, check, simulate and draw, and say at each step which command does it.

    Raises:
        TraceError: the doctor finds errors in the trace that was just made.
    """
    path = out / f"{MODEL}.trace"
    prompts = find_model(MODEL) / "prompts.jsonl"
    _step(
        f"oled-trace model={MODEL} prompts={quote(str(prompts))} max_prompts={NUM_PROMPTS} output.trace={quote(str(path))} output.overwrite=true"
    )
    output = trace.Output(trace=str(path), overwrite=True)
    trace.run(
        OmegaConf.structured(trace.Trace(model=MODEL, prompts=str(prompts), max_prompts=NUM_PROMPTS, output=output))
    )

    _step(f"oled-doctor {quote(str(path))}")
    report = doctor.check(path)
    print(report)
    if not report.ok:
        raise TraceError(f"{path}: the doctor found errors")

    common = f"cache.slots_per_layer={','.join(map(str, SIZES))} hardware={HARDWARE} shape={SHAPE}"
    _step(
        f"oled-simulate -m trace={quote(str(path))} policy={','.join(POLICIES)} {common}",
        f"oled-simulate -m trace={quote(str(path))} policy=oled policy.layer_adapt=false {common}",
    )
    table = simulate_grid(path)
    print(format_table(table))

    plots = {"tpot.png": plot_tpot, "utilization.png": plot_utilization}
    for name, plot in plots.items():
        plot(table, out / name)
    write_table(table, out / "sweep.parquet")
    names = ", ".join(str(out / name) for name in (*plots, "sweep.parquet"))
    print(f"\nWritten: {names}\n\n{textwrap.fill(_paragraph(path, table), WIDTH)}")


def simulate_grid(path: Path) -> pl.DataFrame:
    """Run every policy at every size; those that ignore the size, once."""
    cells = [(policy, {}, size) for policy in POLICIES for size in (SIZES[:1] if policy in UNSIZED else SIZES)]
    cells += [("oled", FIXED, size) for size in SIZES]
    bar = tqdm(cells, unit="run", desc="simulating", disable=None, leave=False)
    results = [simulate(path, name, size, HARDWARE, knobs=knobs, shape=SHAPE) for name, knobs, size in bar]
    return table_of(with_differences([result.summary for result in results], lambda row: results[row].forwards))


def _step(*commands: str) -> None:
    """Show commands as they can be pasted into a shell."""
    for command in commands:
        lines = textwrap.wrap(
            command, WIDTH - 4, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        print("\n$ " + " \\\n".join(lines), flush=True)
    print(flush=True)


def _paragraph(path: Path, table: pl.DataFrame) -> str:
    """What was run, and what it does not show."""
    row = table.row(0, named=True)
    reader = TraceReader(path)
    shape = reader.metadata.shape
    return (
        f"What this was: {MODEL}, a toy with {shape.num_layers} MoE layers of {shape.num_experts} experts, top "
        f"{shape.top_k}, trained for the purpose, answered {reader.num_requests} prompts that it had not seen in training, on "
        f"this machine's CPU (about nine of ten of its answers are right, as its card says); each policy then replayed that routing in simulated time, {row['num_decode_forwards']} "
        f"decode forwards of {row['num_requests']} requests counted ({row['tokens_per_forward']:.2f} tokens a forward), "
        f"the first request being warm-up. Times are charged at the sizes of {SHAPE} on {HARDWARE}: a data-sheet "
        "profile, never validated on this GPU, and another model's sizes than those that were traced. What it does not "
        "show: how any policy does on LLaDA2.0. It is a check that the parts fit together, on few layers, few experts "
        "and short answers; neither order nor distance of the policies carries over to a real model. ideal_free and "
        "ideal_min bound which experts can be resident, not how fast anything can be; they have equal layers and split "
        "misses as oled does, so they stand beside oled with layer_adapt=false, and not beside the policies whose "
        "misses are all copied (column misses)."
    )


if __name__ == "__main__":
    main()
