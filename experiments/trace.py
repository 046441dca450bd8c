"""`oled-trace`: decode prompts with a model and record every forward pass as a trace."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig
from tqdm import tqdm

from experiments.cli import Directories, hydra_command
from experiments.keys import refuse_unknown
from experiments.trace_summary import format_summary, summarise
from tracer.capture import trace_metadata, trace_prompts
from tracer.chat import load_chat_template, render_prompts
from tracer.checkpoint import Provenance, load, model_bytes, model_name, read_config, read_provenance
from tracer.decode import DecodeResult
from tracer.decode_settings import DecodeSettings
from tracer.decode_state import ForwardEvent
from tracer.llada2 import LLaDA2
from tracer.llada2_config import LLaDA2Config
from tracer.prompts import Prompt, encode_prompts, read_prompts
from tracer.schema import GATE_DTYPES, TraceError, TraceMetadata
from tracer.shipped import find_model
from tracer.special_ids import check_special_ids
from tracer.store import TraceReader, TraceWriter
from tracer.tokenizer import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXPERTS: dict[str, bool | None] = {"auto": None, "memory": False, "mapped": True}


@dataclass
class Decode:
    """How prompts are answered; null is the default of the loop."""

    loop: str = DecodeSettings.loop
    block_length: int = DecodeSettings.block_length
    threshold: float | None = None
    gen_length: int = DecodeSettings.gen_length  # new tokens of a prompt
    early_stop: bool = DecodeSettings.early_stop  # at the end of text
    temperature: float = DecodeSettings.temperature
    seed: int = DecodeSettings.seed
    batch: int = DecodeSettings.batch  # prompts that are answered side by side
    sampler: str | None = None
    steps: int | None = None
    minimal_topk: int | None = None
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    num_to_transfer: int | None = None
    mask_mode: str | None = None
    penalty: float | None = None
    always_commit: bool | None = None


@dataclass
class Output:
    """Where the trace goes."""

    trace: str = MISSING  # a directory to be made, NAME.trace
    overwrite: bool = False


@dataclass
class Trace:
    """Every key of `oled-trace`."""

    model: str = MISSING  # name of a shipped model, or path of a checkpoint directory
    prompts: str = MISSING  # JSONL with a key prompt, or plain text, one a line
    max_prompts: int | None = None  # how many of them, from the start; null is all
    chat: bool = False  # each prompt is a user's message, by the chat template of the checkpoint
    decode: Decode = field(default_factory=Decode)
    gate_dtype: str = "float16"  # how gates are stored
    signals: bool = False  # also record router scores, norms, sketches and the next layers' gates
    device: str = "cpu"
    dtype: str = "auto"  # that the model computes in
    experts: str = "auto"  # where routed experts are: in memory, or mapped files
    output: Output = field(default_factory=Output)


class SweepDirectories(Directories):
    """Hydra's directories of a multirun only: a single run has none, and its working directory is not to be tidied."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Take no note."""


def main() -> None:
    """Entry point of the command."""
    ConfigStore.instance().store(name="trace_schema", node=Trace)
    hydra_command("oled-trace", "trace", run)


def run(config: DictConfig) -> None:
    """Check everything that can be checked, then trace, and print texts and summary."""
    refuse_unknown(config, Trace)
    path = Path(config.output.trace)
    _check(config, path)
    directory = find_model(config.model)
    prompts = read_prompts(Path(config.prompts), config.max_prompts)
    model_config, tokenizer = read_config(directory), load_tokenizer(directory)
    check_special_ids(directory, model_config, tokenizer)
    settings = DecodeSettings(**config.decode, mask_id=tokenizer.mask_id, eos_id=tokenizer.eos_id)
    template = load_chat_template(directory) if config.chat else None
    texts = prompts if template is None else render_prompts(template, prompts)
    encoded = encode_prompts(texts, tokenizer, model_config, settings, config.prompts)
    model, provenance = _load(directory, model_config, config)
    metadata = trace_metadata(model, settings, model_name(directory), provenance, config.gate_dtype, config.signals)
    if template is not None:
        metadata = replace(metadata, details=metadata.details | {"chat_template": template.hash})
    progress = _Progress(len(prompts), settings.gen_length)
    with progress.bar, _recording(path, metadata, config.output.overwrite) as writer:
        results = trace_prompts(
            model,
            encoded,
            settings,
            writer,
            signals=config.signals,
            on_forward=progress.forward,
            on_result=progress.result,
        )
    reader = TraceReader(path)
    for prompt, result in zip(prompts, results, strict=True):
        print(_answer(prompt, result, tokenizer.decode(result.generated_ids)))
    shape = model_config.shape()
    print(format_summary(summarise(reader, shape), shape, path, metadata.source))


class _Progress:
    """A bar on stderr, when that is a terminal, of the tokens of all answers."""

    def __init__(self, num_prompts: int, gen_length: int) -> None:
        self._gen_length = gen_length
        self._num_accepted: Counter[int] = Counter()  # of each request that runs
        self._num_ended = 0
        self.bar = tqdm(total=num_prompts * gen_length, unit="token", desc="oled-trace", disable=None, leave=False)

    def forward(self, event: ForwardEvent) -> None:
        """Move on by what the forward accepted."""
        self._num_accepted[event.request] += int(event.accepted.sum())
        self._show()

    def result(self, request: int, result: DecodeResult) -> None:
        """Move past what an early stop left out of a request."""
        del self._num_accepted[request]
        self._num_ended += 1
        self._show()

    def _show(self) -> None:
        running = sum(min(accepted, self._gen_length) for accepted in self._num_accepted.values())
        self.bar.update(self._num_ended * self._gen_length + running - self.bar.n)


def _check(config: DictConfig, path: Path) -> None:
    """Refuse what no file needs to be read for."""
    if config.max_prompts is not None and config.max_prompts < 1:
        raise TraceError(f"max_prompts {config.max_prompts}: must be at least 1, or null for all")
    choices = {"gate_dtype": GATE_DTYPES, "dtype": ("auto", *DTYPES), "experts": tuple(EXPERTS)}
    for key, allowed in choices.items():
        if config[key] not in allowed:
            raise TraceError(f"{key} {config[key]!r}: allowed are {', '.join(allowed)}")
    num_cuda = torch.cuda.device_count()
    devices = ["cpu", *(["cuda"] if num_cuda else []), *(f"cuda:{i}" for i in range(num_cuda))]
    if config.device not in devices:
        raise TraceError(f"device {config.device!r}: this machine has {', '.join(devices)}")
    if path.exists() and not config.output.overwrite:
        raise TraceError(f"{path}: exists already; output.overwrite=true replaces a trace")


def _load(directory: Path, model_config: LLaDA2Config, config: DictConfig) -> tuple[LLaDA2, Provenance]:
    """Hash the checkpoint and read the model, with a bar of the bytes of both."""
    device = torch.device(config.device)
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = DTYPES.get(config.dtype, default)
    bar = tqdm(unit="B", unit_scale=True, desc="oled-trace: reading", disable=None, leave=False)
    with bar:
        provenance = read_provenance(directory, on_bytes=bar.update)
        mapped = EXPERTS[config.experts]
        model = load(directory, device=device, dtype=dtype, mapped=mapped, on_bytes=bar.update)
    if mapped is None and model.has_mapped_experts:
        need = model_bytes(model_config, dtype).all / 1e9
        print(
            f"oled-trace: {device} has no room for {need:.1f} GB: routed experts are read from {directory} when used",
            file=sys.stderr,
        )
    return model, provenance


@contextmanager
def _recording(path: Path, metadata: TraceMetadata, overwrite: bool) -> Iterator[TraceWriter]:
    """A writer that, whatever stops it, keeps the requests that were finished and says how to have them."""
    writer = None
    try:
        with TraceWriter(path, metadata, overwrite=overwrite, keep_finished=True) as writer:
            yield writer
    finally:
        if writer is not None and writer.kept is not None:
            remedy = f"`oled-doctor --recover {path}` makes a trace of them"
            print(f"oled-trace: requests that were finished are kept: {remedy}", file=sys.stderr)


def _answer(prompt: Prompt, result: DecodeResult, text: str) -> str:
    """The generated text under a line that says to what."""
    return f"--- line {prompt.line}: {len(result.generated_ids)} tokens\n{text}"


if __name__ == "__main__":
    main()
