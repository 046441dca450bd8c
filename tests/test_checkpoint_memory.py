"""Checkpoints with the released names, and with experts of the released size under a limit that cannot hold them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from llada2_models import MINI, config
from safetensors import SafetensorError

from experiments import trace as command
from tracer.checkpoint import checkpoint_hash, load, read_index, read_provenance, tensor_shapes
from tracer.doctor import check
from tracer.random_checkpoint import write_random
from tracer.schema import TraceError
from tracer.store import TraceReader
from tracer.tokenizer import train_tokenizer

CHECKPOINTS = os.environ.get("OLEDSIM_CHECKPOINTS")
MB = 10**6
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks of a process are those of Linux")
# All 14,813 names of LLaDA2.0-mini, small; and its expert, 6 MiB in bf16, 201 MB of them.
NAMES = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 8}  # fmt: skip
EXPERTS = {"num_hidden_layers": 2, "intermediate_size": 512, "num_experts": 32}
SPARE = 190 * MB
FAST = ["decode.gen_length=4", "decode.block_length=4"]


def write(directory, changes):
    """A checkpoint in the layout of 2.1, with a tokenizer and prompts."""
    tokenizer = train_tokenizer(["Sam has 12 pens and buys 30 more. How many? 12 + 30 = 42"] * 4, 320)
    small = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.eos_id, "max_position_embeddings": 64}
    write_random(config(MINI, **small, **changes), directory)
    tokenizer.save(directory)
    (directory / "prompts.txt").write_text("How many pens?\n12 + 30 =\n")
    return directory


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    return write(tmp_path_factory.mktemp("names") / "LLaDA2.1-mini", NAMES)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("experts") / "LLaDA2.1-mini", EXPERTS)


WATCHED = """
import json, re, resource, sys
from pathlib import Path
import pyarrow.parquet, torch
from experiments import trace
from tracer.checkpoint import load
directory, stored, spare, *arguments = sys.argv[1:]

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

load(directory, device="meta", mapped=True)  # what the first use of anything takes is no part of it
for device in ("meta", "cpu"):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmHWM")
    load(directory, device=device)
    print(status("VmHWM") - before)
limit = status("VmData") + int(spare)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.empty(int(stored), dtype=torch.uint8)
except RuntimeError as error:
    print(str(error).splitlines()[0])
sys.argv = ["oled-trace", *arguments]
trace.main()
"""


@pytest.fixture(scope="module")
def watched(experts):
    """What a process of its own takes to load the model, and says when it traces it under a limit."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    arguments = [experts, stored_bytes(experts), SPARE, *arguments_of(experts, experts / "mapped.trace", "auto")]
    script = [sys.executable, "-c", WATCHED, *map(str, arguments)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def stored_bytes(directory):
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def arguments_of(directory, out, experts):
    return [
        f"model={directory}",
        f"prompts={directory}/prompts.txt",
        f"output.trace={out}",
        f"experts={experts}",
        *FAST,
    ]


def trace_here(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["oled-trace", *arguments_of(*arguments)])
    command.main()


def columns(path):
    return [
        (item.kinds, item.positions, item.token_ids_in, item.p_argmax, item.expert_ids, item.gates)
        for item in TraceReader(path)
    ]


def assert_same_trace(one, other):
    found, expected = columns(one), columns(other)
    assert len(found) == len(expected) >= 8
    for parts in zip(found, expected, strict=True):
        for a, b in zip(*parts, strict=True):
            assert np.array_equal(a, b)


@needs_linux
def test_shards_are_streamed_one_at_a_time(experts, watched):
    """The device `meta` keeps nothing, as a GPU keeps nothing in the memory of its host."""
    on_meta, on_cpu = map(int, watched[0][:2])
    sizes = [path.stat().st_size for path in experts.glob("*.safetensors")]
    assert len(sizes) == 8
    assert 1.5 * max(sizes) < 0.5 * sum(sizes)  # else nothing would be shown
    assert on_meta < 1.5 * max(sizes)
    assert on_cpu < 1.5 * max(sizes) + sum(sizes)


@needs_linux
def test_traced_under_a_limit_that_cannot_hold_the_experts(experts, watched, tmp_path, monkeypatch):
    """The system refuses the process what the experts take, in float32 as in bfloat16."""
    (_, _, refused, *_), err = watched
    assert SPARE < 32 * 6_291_456
    assert "memory" in refused
    assert f"routed experts are read from {experts} when used" in err
    trace_here(monkeypatch, experts, tmp_path / "held.trace", "memory")
    assert_same_trace(experts / "mapped.trace", tmp_path / "held.trace")
    assert check(experts / "mapped.trace").findings == []


def test_all_released_names_load_and_trace(names, tmp_path, monkeypatch):
    index = read_index(names)
    assert index.keys() == tensor_shapes(config(MINI)).keys()
    assert len(index) == 14_813
    shards = {path.name for path in index.values()}
    assert shards == {f"model-{i:05}-of-00008.safetensors" for i in range(8)}
    if CHECKPOINTS:
        released = json.loads((Path(CHECKPOINTS) / "llada2.1-mini" / "model.safetensors.index.json").read_text())
        assert {name: path.name for name, path in index.items()} == released["weight_map"]
    for experts in ("memory", "mapped"):
        trace_here(monkeypatch, names, tmp_path / f"{experts}.trace", experts)
    assert_same_trace(tmp_path / "mapped.trace", tmp_path / "memory.trace")
    reader = TraceReader(tmp_path / "mapped.trace")
    assert reader.metadata.source == "model:LLaDA2.1-mini"
    assert reader.metadata.shape.layer_ids == tuple(range(1, 20))
    assert reader.metadata.details["expert_bias_dtype"] == "float32"
    assert reader.metadata.details["checkpoint_hash"] == read_provenance(names).checkpoint_hash
    assert check(tmp_path / "mapped.trace").findings == []


def test_random_weights_are_all_their_own(tmp_path):
    size = write_random(config(initializer_range=0.05), tmp_path / "new", num_shards=3, seed=1)
    model = load(tmp_path / "new")
    assert read_provenance(tmp_path / "new").total_size == size
    matrices = torch.cat([mlp.experts.w13.detach().flatten(1) for _, mlp in model.moe_layers()]).float()
    assert len(matrices.unique(dim=0)) == len(matrices) == 3 * 16
    assert matrices.std().item() == pytest.approx(0.05, rel=0.05)
    assert len(torch.stack([mlp.gate.expert_bias for _, mlp in model.moe_layers()]).unique()) == 3 * 16
    write_random(config(initializer_range=0.05), tmp_path / "again", num_shards=3, seed=1)
    assert checkpoint_hash(tmp_path / "again") == checkpoint_hash(tmp_path / "new")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("tracer.random_checkpoint.save_file", full)
    with pytest.raises(
        TraceError, match=r"model-00000-of-00008\.safetensors cannot be written: I/O error: No space left"
    ):
        write_random(config(), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_random_checkpoints_refuse(tmp_path):
    with pytest.raises(TraceError, match=r"^9 shards: must be 1 to 8, the experts of a layer$"):
        write_random(config(num_experts=8), tmp_path / "new", num_shards=9)
    with pytest.raises(TraceError, match="exists already"):
        write_random(config(), tmp_path)
    assert list(tmp_path.iterdir()) == []
