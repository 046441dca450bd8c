"""`python -m tracer.bench`: what reading a checkpoint and tracing it cost here: time, memory, and tracing beside none."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from tracer.bench_decode import Workload, measure_decodes
from tracer.checkpoint import load, model_bytes, model_name, read_config, read_provenance
from tracer.llada2 import LLaDA2
from tracer.llada2_config import LLaDA2Config
from tracer.memory import host_peak
from tracer.random_checkpoint import write_random
from tracer.schema import TraceError

MINI = LLaDA2Config(
    vocab_size=157184,
    hidden_size=2048,
    num_hidden_layers=20,
    first_k_dense_replace=1,
    intermediate_size=5120,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=256,
    num_experts_per_tok=8,
    num_shared_experts=1,
    moe_intermediate_size=512,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    rope_theta=600000,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-6,
    max_position_embeddings=32768,
    initializer_range=0.02,
    pad_token_id=156892,
)
_TINY = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "moe_intermediate_size": 16}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 32}
SHAPES = {"llada2.0-mini": MINI, "tiny": replace(MINI, **_TINY, vocab_size=1024, pad_token_id=1022)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXPERTS: dict[str, bool | None] = {"auto": None, "memory": False, "mapped": True}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns 2 after an error of the user."""
    options = _parser().parse_args(arguments)
    try:
        report = measure(options)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except (TraceError, OSError) as error:
        print(f"tracer.bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tracer.bench: interrupted", file=sys.stderr)
        return 130
    print(as_text(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tracer.bench", description=__doc__, allow_abbrev=False)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="one that is there")
    source.add_argument(
        "--shape", choices=tuple(SHAPES), default="llada2.0-mini", help="of random weights, written first"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where they and traces go (default: temporary files)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--experts", choices=tuple(EXPERTS), default="auto", help="where routed experts are")
    parser.add_argument("--signals", action="store_true", help="also trace what policies beyond the paper's read")
    parser.add_argument("--block-length", type=_count, default=32, metavar="N")
    parser.add_argument(
        "--gen-length", type=_count, default=64, metavar="N", help="new tokens of each decode (default 64)"
    )
    parser.add_argument("--prompt-length", type=_count, default=128, metavar="N")
    parser.add_argument(
        "--pairs", type=_count, default=8, metavar="N", help="decodes with and without tracing (default 8)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint unless there is one, hash and load it, and decode with it, with and without tracing.

    Raises:
        TraceError: the checkpoint cannot be read, or there is no room for it.
    """
    with TemporaryDirectory(prefix="oledsim-", dir=options.directory) as temporary:
        directory, written = options.checkpoint, None
        if directory is None:
            directory = Path(temporary) / f"random-{options.shape}"
            written = _write(SHAPES[options.shape], directory)
        config = read_config(directory)
        hashed = _hash(directory)
        model, loaded = _load(directory, config, options)
        workload = Workload(
            options.block_length, options.gen_length, options.prompt_length, options.pairs, options.signals
        )
        provenance = hashed.pop("provenance")
        decoded = measure_decodes(model, workload, model_name(directory), provenance, Path(temporary) / "bench.trace")
    return {"machine": machine(model), "written": written, "hashed": hashed, "loaded": loaded, "decoded": decoded}


def _write(config: LLaDA2Config, directory: Path) -> dict[str, Any]:
    free = shutil.disk_usage(directory.parent).free
    needed = model_bytes(config, torch.bfloat16).all
    if needed > free:
        raise TraceError(
            f"{directory.parent}: needs {needed / 1e9:.1f} GB for the checkpoint, {free / 1e9:.1f} GB are free"
        )
    with _timed("writing", needed) as (on_bytes, seconds):
        num_bytes = write_random(config, directory, on_bytes=on_bytes)
    return {"num_bytes": num_bytes, "seconds": seconds()}


def _hash(directory: Path) -> dict[str, Any]:
    with _timed("hashing", None) as (on_bytes, seconds):
        provenance = read_provenance(directory, on_bytes)
    return {"provenance": provenance, "seconds": seconds()}


def _load(directory: Path, config: LLaDA2Config, options: argparse.Namespace) -> tuple[LLaDA2, dict[str, Any]]:
    torch.empty(0, device=options.device)  # the memory of CUDA itself is no part of the model's
    before = host_peak(reset=True)
    with _timed("loading", model_bytes(config, torch.bfloat16).all) as (on_bytes, seconds):
        model = load(
            directory,
            device=options.device,
            dtype=DTYPES[options.dtype],
            mapped=EXPERTS[options.experts],
            on_bytes=on_bytes,
        )
        _wait(model)
    on_cuda = model.device.type == "cuda"
    return model, {
        "num_bytes": model_bytes(config, torch.bfloat16).all,
        "seconds": seconds(),
        "largest_shard_bytes": max(path.stat().st_size for path in directory.glob("*.safetensors")),
        "host_peak_bytes": None if before is None else (host_peak() or 0) - before,
        "gpu_bytes": torch.cuda.max_memory_allocated(model.device) if on_cuda else None,
        "mapped": model.has_mapped_experts,
    }


@contextmanager
def _timed(what: str, total: int | None) -> Iterator[tuple[Callable[[int], object], Callable[[], float]]]:
    """A bar of bytes on a terminal, and the seconds since it began."""
    began = time.perf_counter()
    settings = {"unit": "B", "unit_scale": True, "leave": False, "disable": not sys.stderr.isatty()}
    with tqdm(total=total, desc=f"tracer.bench: {what}", **settings) as bar:
        yield bar.update, lambda: time.perf_counter() - began


def _wait(model: LLaDA2) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def machine(model: LLaDA2) -> dict[str, Any]:
    """What a time depends on, beside the code."""
    on_cuda = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if on_cuda else platform.processor() or platform.machine(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def as_text(report: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    found, loaded, decoded = report["machine"], report["loaded"], report["decoded"]
    rows = []
    if report["written"]:
        rows.append(("write a random checkpoint", _rate(report["written"])))
    rows.append(("hash it", _rate(report["hashed"] | {"num_bytes": loaded["num_bytes"]})))
    rows.append((f"load it{', experts mapped' if loaded['mapped'] else ''}", _rate(loaded)))
    if loaded["host_peak_bytes"] is not None:
        largest = loaded["largest_shard_bytes"] / 1e9
        rows.append(("host memory while loading, at most", f"{loaded['host_peak_bytes'] / 1e9:.2f} GB, largest shard {largest:.2f} GB"))  # fmt: skip
    if loaded["gpu_bytes"] is not None:
        rows.append(("GPU memory of the model", f"{loaded['gpu_bytes'] / 1e9:.2f} GB"))
        rows.append(("GPU memory while tracing, at most", f"{decoded['gpu_bytes'] / 1e9:.2f} GB"))
    pairs = decoded["pairs"]
    without, traced, writing = (
        statistics.median(1e3 * pair[name] / pair["num_forwards"] for pair in pairs)
        for name in ("plain_s", "traced_s", "writing_s")
    )
    overheads = [pair["traced_s"] / pair["plain_s"] - 1 for pair in pairs]
    rows += [
        ("a forward without tracing", f"{without:.2f} ms"),
        ("a forward with tracing", f"{traced:.2f} ms, of which checking and writing {writing:.2f} ms"),
        ("tracing", f"{statistics.median(overheads):+.1%} (median of pairs; {min(overheads):+.1%} to {max(overheads):+.1%})"),
        ("trace", f"{decoded['trace_bytes_per_forward'] / 1e3:.1f} kB a forward"),
    ]  # fmt: skip
    head = (
        f"{found['device']}, {found['dtype']}, torch {found['versions']['torch']}: {decoded['num_layers']} MoE layers, "
        f"block {decoded['block_length']}, {pairs[0]['num_forwards']} forwards a decode, pairs of decodes: {len(pairs)}, "
        f"{'with' if decoded['signals'] else 'without'} signals"
    )
    return "\n".join([head, "", "| step | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def _rate(step: dict[str, Any]) -> str:
    return f"{step['num_bytes'] / 1e9:.1f} GB in {step['seconds']:.1f} s, {step['num_bytes'] / step['seconds'] / 1e9:.2f} GB/s"


if __name__ == "__main__":
    raise SystemExit(main())
