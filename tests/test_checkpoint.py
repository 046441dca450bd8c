import errno
import json
import math
import os
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from llada2_models import FLASH, MINI, config, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tracer import checkpoint
from tracer import shard as shard_file
from tracer.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    checkpoint_hash,
    load,
    read_config,
    read_index,
    read_provenance,
    save,
    tensor_shapes,
)
from tracer.schema import TraceError

CHECKPOINTS = os.environ.get("OLEDSIM_CHECKPOINTS")
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS, reason="set OLEDSIM_CHECKPOINTS to a directory that holds llada2.0-mini and llada2.1-mini"
)
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.expert_bias"


@pytest.fixture
def saved(tmp_path):
    """A directory of several shards; its model."""
    model = tiny_model(1)
    save(model, tmp_path / "model", max_shard_bytes=60_000)
    return tmp_path / "model", model


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def replace_tensor(directory, name, tensor):
    shard = read_index(directory)[name]
    save_file(load_file(shard) | {name: tensor}, shard)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12), torch.arange(12))


# ---- names and shapes ----


@pytest.mark.parametrize(
    ("values", "count", "parameters", "weight_bytes"),
    [(MINI, 14_813, 16_255_638_528, 32_511_286_784), (FLASH, 24_161, 102_889_697_280, 205_779_410_432)],
)
def test_c1_c2_totals_from_shapes(values, count, parameters, weight_bytes):
    shapes = tensor_shapes(config(values))
    biases = [name for name in shapes if name.endswith(".expert_bias")]
    assert len(shapes) == count
    assert sum(math.prod(shape) for name, shape in shapes.items() if name not in biases) == parameters
    assert 2 * sum(map(math.prod, shapes.values())) == weight_bytes
    assert sum(math.prod(shapes[name]) for name in biases) == 256 * len(biases)


@pytest.mark.parametrize(("values", "num_bytes"), [(MINI, 32_511_296_512), (FLASH, 205_779_426_304)])
def test_c1_bytes_with_biases_in_fp32(values, num_bytes):
    shapes = tensor_shapes(config(values))
    sizes = {name: 4 if name.endswith(".expert_bias") else 2 for name in shapes}
    assert sum(sizes[name] * math.prod(shape) for name, shape in shapes.items()) == num_bytes


def test_names_and_shapes_of_mini():
    shapes = tensor_shapes(config(MINI))
    expected = {
        "model.word_embeddings.weight": (157184, 2048),
        "lm_head.weight": (157184, 2048),
        "model.norm.weight": (2048,),
        "model.layers.19.input_layernorm.weight": (2048,),
        "model.layers.19.post_attention_layernorm.weight": (2048,),
        "model.layers.19.attention.query_key_value.weight": (3072, 2048),
        "model.layers.19.attention.query_layernorm.weight": (128,),
        "model.layers.19.attention.key_layernorm.weight": (128,),
        "model.layers.19.attention.dense.weight": (2048, 2048),
        "model.layers.0.mlp.gate_proj.weight": (5120, 2048),
        "model.layers.0.mlp.up_proj.weight": (5120, 2048),
        "model.layers.0.mlp.down_proj.weight": (2048, 5120),
        "model.layers.1.mlp.gate.weight": (256, 2048),
        "model.layers.1.mlp.gate.expert_bias": (256,),
        "model.layers.1.mlp.experts.255.gate_proj.weight": (512, 2048),
        "model.layers.1.mlp.experts.255.up_proj.weight": (512, 2048),
        "model.layers.1.mlp.experts.255.down_proj.weight": (2048, 512),
        "model.layers.1.mlp.shared_experts.gate_proj.weight": (512, 2048),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (512, 2048),
        "model.layers.1.mlp.shared_experts.down_proj.weight": (2048, 512),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert "model.layers.0.mlp.gate.weight" not in shapes


@needs_checkpoints
@pytest.mark.parametrize(
    ("name", "total_size", "bias_bytes"), [("llada2.0-mini", 32_511_286_784, 2), ("llada2.1-mini", 32_511_296_512, 4)]
)
def test_released_config_and_index(name, total_size, bias_bytes):
    directory = Path(CHECKPOINTS) / name
    found = read_config(directory)
    assert found == config(MINI)
    assert found.to_dict() == json.loads((directory / CONFIG_NAME).read_text()) | {"use_qk_norm": True}
    index = read_index(directory)
    shapes = tensor_shapes(found)
    assert index.keys() == shapes.keys()
    sizes = (math.prod(shape) * (bias_bytes if "expert_bias" in name else 2) for name, shape in shapes.items())
    assert sum(sizes) == total_size
    assert json.loads((directory / INDEX_NAME).read_text())["metadata"]["total_size"] == total_size
    if not any(path.is_file() for path in index.values()):
        with pytest.raises(TraceError, match=r"missing shards: model-0000.-of-0000.\.safetensors, .* and \d more"):
            load(directory)


# ---- round trip ----


def test_saved_model_comes_back_bit_by_bit(saved):
    directory, model = saved
    rounded = model.to(torch.bfloat16)
    again = load(directory)
    assert again.config == model.config
    assert again.dtype == torch.bfloat16
    for name, tensor in rounded.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(logits(again), logits(rounded))
    assert torch.equal(logits(load(directory, dtype=torch.float32)), logits(rounded.float()))


def test_loaded_model_can_be_trained(saved):
    model = load(saved[0], dtype=torch.float32)
    model(torch.arange(12).unsqueeze(0), torch.arange(12)).square().sum().backward()
    assert model.layers[1].mlp.experts.w13.grad.abs().sum() > 0


def test_layout_is_that_of_the_released_models(saved):
    directory, model = saved
    index = json.loads((directory / INDEX_NAME).read_text())
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["weight_map"].keys() == tensor_shapes(model.config).keys()
    total = 0
    for file in files:
        with safe_open(directory / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
        stored = load_file(directory / file)
        size = sum(tensor.nbytes for tensor in stored.values())
        assert size <= 60_000 or len(stored) == 1
        total += size
        for name, tensor in stored.items():
            assert index["weight_map"][name] == file
            assert tensor.shape == tensor_shapes(model.config)[name]
            assert tensor.dtype == (torch.float32 if "expert_bias" in name else torch.bfloat16)
    assert index["metadata"]["total_size"] == total
    assert json.loads((directory / CONFIG_NAME).read_text()) == model.config.to_dict()


def test_t3_stacked_rows_are_gate_then_up(saved):
    directory, model = saved
    expert = model.layers[2].mlp.experts
    intermediate = model.config.moe_intermediate_size
    for matrix, expected in (
        ("gate_proj", expert.w13[3, :intermediate]),
        ("up_proj", expert.w13[3, intermediate:]),
        ("down_proj", expert.w2[3]),
    ):
        name = f"model.layers.2.mlp.experts.3.{matrix}.weight"
        assert torch.equal(load_file(read_index(directory)[name])[name], expected.bfloat16())
    replace_tensor(directory, EXPERT, torch.ones(intermediate, model.config.hidden_size, dtype=torch.bfloat16))
    changed = load(directory).layers[2].mlp.experts.w13[3]
    assert torch.equal(changed[:intermediate], expert.w13[3, :intermediate].bfloat16())
    assert (changed[intermediate:] == 1).all()


def test_names_decide_and_shard_order_does_not(saved):
    """Every tensor moves to one file with a name of its own, as the released 2.1 numbers shards from 0."""
    directory, _ = saved
    expected = logits(load(directory))
    tensors = {}
    for path in sorted(set(read_index(directory).values())):
        tensors |= load_file(path)
        path.unlink()
    save_file(tensors, directory / "model-00000-of-00001.safetensors")
    edit_json(
        directory / INDEX_NAME,
        lambda index: index.update(weight_map=dict.fromkeys(reversed(tensors), "model-00000-of-00001.safetensors")),
    )
    assert torch.equal(logits(load(directory)), expected)


def test_expert_bias_keeps_the_stored_dtype(saved):
    directory, model = saved
    exact = model.layers[1].mlp.gate.expert_bias
    assert torch.equal(load(directory).layers[1].mlp.gate.expert_bias, exact)
    rounded = load(directory, expert_bias_dtype=torch.bfloat16).layers[1].mlp.gate.expert_bias
    assert torch.equal(rounded, exact.bfloat16())
    assert not torch.equal(rounded.float(), exact)
    replace_tensor(directory, BIAS, exact.bfloat16())
    stored = load(directory)
    assert stored.layers[1].mlp.gate.expert_bias.dtype == torch.bfloat16
    assert stored.layers[2].mlp.gate.expert_bias.dtype == torch.float32
    assert stored.layers[1].mlp.gate(torch.ones(1, model.config.hidden_size)).biased.dtype == torch.float32


def test_hash_covers_config_index_and_shards(saved):
    directory, model = saved
    hashes = [checkpoint_hash(directory)]
    assert hashes == [checkpoint_hash(directory)]
    replace_tensor(directory, BIAS, torch.zeros(model.config.num_experts))
    hashes.append(checkpoint_hash(directory))
    edit_json(directory / INDEX_NAME, lambda index: index["metadata"].update(total_size=1))
    hashes.append(checkpoint_hash(directory))
    edit_json(directory / CONFIG_NAME, lambda values: values.update(pad_token_id=1))
    hashes.append(checkpoint_hash(directory))
    assert len(set(hashes)) == 4
    (directory / "README.md").write_text("not part of it")
    assert checkpoint_hash(directory) == hashes[-1]


def test_hash_is_that_of_the_contents_wherever_they_are(saved):
    directory, model = saved
    save(model, directory.with_name("copy"), max_shard_bytes=60_000)
    assert checkpoint_hash(directory) == checkpoint_hash(directory.with_name("copy"))


def test_provenance_lists_shards_and_size(saved):
    directory, _ = saved
    found = read_provenance(directory)
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) > 2
    assert found.shards == {path.name: sha256(path.read_bytes()).hexdigest() for path in shards}
    listed = [directory / CONFIG_NAME, directory / INDEX_NAME, *shards]
    lines = "".join(f"{path.name} {sha256(path.read_bytes()).hexdigest()}\n" for path in listed)
    assert found.checkpoint_hash == checkpoint_hash(directory) == sha256(lines.encode()).hexdigest()
    assert found.total_size == sum(tensor.nbytes for path in shards for tensor in load_file(path).values())
    assert found.training is None
    edit_json(directory / INDEX_NAME, lambda index: index.pop("metadata"))
    assert read_provenance(directory).total_size is None


def test_provenance_holds_the_facts_of_the_training(saved):
    directory, _ = saved
    before = checkpoint_hash(directory)
    (directory / "training.json").write_text('{"minutes": 1.5}')
    assert read_provenance(directory).training == {"minutes": 1.5}
    assert checkpoint_hash(directory) == before
    (directory / "training.json").write_text("[]")
    fails(directory, f"{directory / 'training.json'}: must hold a JSON object, found list", read_provenance)


# ---- writing ----


def test_save_refuses_what_is_there(saved):
    directory, model = saved
    before = checkpoint_hash(directory)
    with pytest.raises(TraceError, match=r"exists and is not an empty directory; remove it or name another$"):
        save(model, directory)
    assert checkpoint_hash(directory) == before
    empty = directory.with_name("empty")
    empty.mkdir()
    save(model, empty)
    assert [path.name for path in sorted(empty.iterdir())] == [
        CONFIG_NAME,
        "model-00001-of-00001.safetensors",
        INDEX_NAME,
    ]


def test_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tracer.checkpoint.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tiny_model(2), tmp_path / "new" / "model")
    assert list((tmp_path / "new").iterdir()) == []


# ---- faults ----


def fails(directory, message, call=load):
    with pytest.raises(TraceError) as error:
        call(directory)
    assert str(error.value) == message
    assert "\n" not in message


def test_no_index_even_beside_a_single_file(saved):
    directory, _ = saved
    (directory / INDEX_NAME).unlink()
    save_file({"a": torch.zeros(1)}, directory / "model.safetensors")
    message = f"{directory}: no model.safetensors.index.json; a checkpoint directory holds config.json, model.safetensors.index.json and its shards"
    for call in (load, read_index, checkpoint_hash):
        fails(directory, message, call)


def test_no_config_and_no_directory(tmp_path):
    for directory in (tmp_path, tmp_path / "absent"):
        message = f"{directory}: no config.json; a checkpoint directory holds config.json, model.safetensors.index.json and its shards"
        fails(directory, message)
        fails(directory, message, read_config)


def test_config_faults_name_the_file(saved):
    path = saved[0] / CONFIG_NAME
    whole = path.read_text()
    edit_json(path, lambda values: values.pop("n_group"))
    fails(saved[0], f"{path}: missing key n_group")
    path.write_text(whole)
    edit_json(path, lambda values: values.update(num_nextn_predict_layers=1))
    fails(saved[0], f"{path}: unknown key num_nextn_predict_layers")
    path.write_text(whole)
    edit_json(path, lambda values: values.update(expert_capacity=48, block_size=32))
    fails(saved[0], f"{path}: key block_size is block-level routing (LLaDA2.2); only LLaDA2.0 and 2.1 are read")


@pytest.mark.parametrize("name", [CONFIG_NAME, INDEX_NAME])
def test_damaged_json(saved, name):
    path = saved[0] / name
    path.write_text('{"model_type": ')
    fails(saved[0], f"{path}: is not JSON: Expecting value: line 1 column 16 (char 15)")
    path.write_text("[]")
    fails(saved[0], f"{path}: must hold a JSON object, found list")
    path.write_text("[" * 100_000)
    with pytest.raises(TraceError, match="is not JSON: maximum recursion depth"):
        load(saved[0])
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(TraceError, match="is not JSON"):
        load(saved[0])


def test_index_without_weight_map(saved):
    path = saved[0] / INDEX_NAME
    edit_json(path, lambda index: index.pop("weight_map"))
    fails(saved[0], f"{path}: no object weight_map, which names the shard of every tensor")


def test_unknown_tensors_are_named_and_counted(saved):
    path = saved[0] / INDEX_NAME
    edit_json(path, lambda index: index["weight_map"].update({"model.layers.1.mlp.w9": "a.safetensors"}))
    count = len(tensor_shapes(saved[1].config))
    fails(saved[0], f"{path}: 1 unknown tensor: model.layers.1.mlp.w9; config.json asks for {count} tensors")
    edit_json(path, lambda index: index["weight_map"].update({f"x{i}": "a.safetensors" for i in range(4)}))
    fails(
        saved[0],
        f"{path}: 5 unknown tensors: model.layers.1.mlp.w9, x0, x1 and 2 more; config.json asks for {count} tensors",
    )


def test_missing_tensors_are_named_and_counted(saved):
    path = saved[0] / INDEX_NAME
    edit_json(path, lambda index: index["weight_map"].pop(EXPERT))
    count = len(tensor_shapes(saved[1].config))
    fails(saved[0], f"{path}: 1 missing tensor: {EXPERT}; config.json asks for {count} tensors")


@pytest.mark.parametrize("shard", ["../a.safetensors", "", "."])
def test_shard_outside_the_directory(saved, shard):
    path = saved[0] / INDEX_NAME
    edit_json(path, lambda index: index["weight_map"].update({EXPERT: shard}))
    fails(saved[0], f"{path}: shard {shard!r} of {EXPERT}: must be the name of a file in this directory")


def test_a_file_that_cannot_be_read_is_named(saved, monkeypatch):
    directory, _ = saved
    shard = sorted(set(read_index(directory).values()))[0]

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shard_file, "safe_open", broken)
    fails(
        directory,
        f"{read_index(directory)['model.word_embeddings.weight']}: cannot be read as a shard: [Errno 5] Input/output error",
    )
    monkeypatch.setattr(checkpoint.hashlib, "file_digest", broken)
    fails(directory, f"{shard}: cannot be read: Input/output error", checkpoint_hash)
    monkeypatch.setattr(Path, "read_text", broken)
    fails(directory, f"{directory / CONFIG_NAME}: cannot be read: Input/output error", read_config)


def test_missing_shard(saved):
    directory, _ = saved
    shards = sorted(set(read_index(directory).values()))
    shards[1].unlink()
    for call in (load, checkpoint_hash):
        fails(directory, f"{directory}: 1 missing shard: {shards[1].name}, which {INDEX_NAME} names", call)


def test_truncated_shard(saved):
    shard = read_index(saved[0])[EXPERT]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(TraceError) as error:
        load(saved[0])
    assert str(error.value).startswith(f"{shard}: cannot be read as a shard: ")
    assert "\n" not in str(error.value)


def test_tensor_missing_from_its_shard(saved):
    shard = read_index(saved[0])[EXPERT]
    tensors = load_file(shard)
    del tensors[EXPERT]
    save_file(tensors, shard)
    fails(saved[0], f"{shard}: holds no tensor {EXPERT}, which the index looks for there")


def test_wrong_shape(saved):
    directory, model = saved
    shape = tensor_shapes(model.config)[EXPERT]
    replace_tensor(directory, EXPERT, torch.zeros(shape[::-1], dtype=torch.bfloat16))
    shard = read_index(directory)[EXPERT]
    fails(directory, f"{shard}: {EXPERT} has shape {list(shape[::-1])}, config.json asks for {list(shape)}")


def test_wrong_dtype(saved):
    directory, model = saved
    replace_tensor(directory, EXPERT, torch.zeros(tensor_shapes(model.config)[EXPERT], dtype=torch.int8))
    shard = read_index(directory)[EXPERT]
    fails(
        directory,
        f"{shard}: {EXPERT} is stored as I8, allowed are BF16, F16, F32",
    )


@pytest.mark.parametrize("name", [EXPERT, BIAS, "model.word_embeddings.weight"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_value_that_is_no_number(saved, name, value):
    directory, model = saved
    tensor = torch.zeros(tensor_shapes(model.config)[name], dtype=torch.float32)
    tensor[-1] = float(value)
    replace_tensor(directory, name, tensor)
    shard = read_index(directory)[name]
    fails(directory, f"{shard}: {name} holds {value}, allowed are finite numbers")


def test_a_value_beyond_the_asked_dtype(saved):
    directory, model = saved
    tensor = torch.full(tensor_shapes(model.config)[EXPERT], -70_000.0)
    replace_tensor(directory, EXPERT, tensor)
    load(directory, dtype=torch.bfloat16)
    shard = read_index(directory)[EXPERT]
    fails(
        directory,
        f"{shard}: {EXPERT} holds -70000, which torch.float16 cannot hold",
        lambda directory: load(directory, dtype=torch.float16),
    )
    bias = torch.full(tensor_shapes(model.config)[BIAS], 1e38)
    replace_tensor(directory, EXPERT, torch.zeros_like(tensor))
    replace_tensor(directory, BIAS, bias)
    load(directory, dtype=torch.float16)  # biases keep what is stored
    with pytest.raises(TraceError, match=r"holds 1e\+38, which torch.float16 cannot hold"):
        load(directory, expert_bias_dtype=torch.float16)


def test_a_model_that_does_not_fit_into_memory(saved, monkeypatch):
    directory, _ = saved
    monkeypatch.setattr(checkpoint, "free_bytes", lambda device: 100_000)
    with pytest.raises(TraceError) as error:
        load(directory, dtype=torch.float32)
    assert re.fullmatch(
        rf"{re.escape(str(directory))}: the model takes \d+\.\d GB in torch.float32, cpu has 0\.0 GB free",
        str(error.value),
    )


def test_a_model_that_the_allocator_refuses(saved, monkeypatch):
    directory, _ = saved

    def full(self, *, device):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory\nException raised from ...")

    monkeypatch.setattr(torch.nn.Module, "to_empty", full)
    fails(
        directory,
        f"{directory}: no memory for the model on cpu: [enforce fail at alloc_cpu.cpp:127] can't allocate memory",
    )
