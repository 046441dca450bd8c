"""Where tensors may be: stacked experts under the names of others' tools, and what no reader should take."""

import json

import pytest
import torch
from llada2_models import config, tiny_model
from safetensors.torch import load_file, save_file
from stacked_experts import stack, write_map

from tracer.checkpoint import load, read_provenance, save
from tracer.checkpoint_layout import INDEX_NAME, locate, read_index, tensor_shapes
from tracer.schema import TraceError

STACKED = {
    "dFactory": {"experts.gate_proj": "g", "experts.up_proj": "u", "experts.down_proj": "d"},
    "transformers 5": {"experts.gate_up_proj": "gu", "experts.down_proj": "d"},
    "dInfer in memory, SGLang": {"experts.w13_weight": "gu", "experts.w2_weight": "d"},
    "dInfer's files": {"w1": "gu", "w2": "d"},
}


@pytest.fixture
def saved(tmp_path):
    model = tiny_model(3)
    save(model, tmp_path / "model", max_shard_bytes=60_000)
    return tmp_path / "model"


def states(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("producer", STACKED)
@pytest.mark.parametrize("layers", [(1, 2, 3), (2,)])
def test_t3_stacked_experts_are_those_of_single_ones(saved, producer, layers):
    expected = states(load(saved))
    stack(saved, STACKED[producer], layers)
    assert read_index(saved).keys() == tensor_shapes(config()).keys()
    found = states(load(saved))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert "stacked.safetensors" in read_provenance(saved).shards


@torch.no_grad()
def test_stacked_experts_can_be_mapped(saved):
    ids = torch.arange(24).reshape(2, 12)
    expected = load(saved)(ids, torch.arange(12))
    stack(saved, STACKED["transformers 5"])
    assert torch.equal(load(saved, mapped=True)(ids, torch.arange(12)), expected)


def refused(directory, message):
    with pytest.raises(TraceError) as error:
        load(directory)
    assert str(error.value) == message


def test_rows_in_another_order_cannot_pass_as_gate_first(saved):
    """A stack of another shape, here [E, H, 2M], is refused by its name."""
    stack(saved, STACKED["transformers 5"])
    path = saved / "stacked.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous()}, path)
    refused(saved, f"{path}: {name} has shape [16, 32, 24], config.json asks for [16, 24, 32]")


def test_experts_that_are_there_twice(saved):
    weight_map = json.loads((saved / INDEX_NAME).read_text())["weight_map"]
    write_map(saved, weight_map | {"model.layers.1.mlp.w2": "a.safetensors"})
    with pytest.raises(TraceError) as error:
        load(saved)
    assert str(error.value).startswith(f"{saved / INDEX_NAME}: model.layers.1.mlp.experts.")
    assert str(error.value).endswith(" and by model.layers.1.mlp.w2; must be by one of them")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.w1",  # dense
        "model.layers.4.mlp.w1",
        "model.layers.01.mlp.w1",
        "model.layers.1.mlp.experts.gate_up_proj.weight",
        "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv",
        "model.layers.1.self_attn.q_proj.weight",
    ],
)
def test_names_that_are_not_known(saved, name):
    weight_map = json.loads((saved / INDEX_NAME).read_text())["weight_map"]
    write_map(saved, weight_map | {name: "a.safetensors"})
    count = len(tensor_shapes(config()))
    refused(saved, f"{saved / INDEX_NAME}: 1 unknown tensor: {name}; config.json asks for {count} tensors")


def test_half_of_a_stack_is_named(saved):
    stack(saved, STACKED["dInfer's files"])
    weight_map = json.loads((saved / INDEX_NAME).read_text())["weight_map"]
    del weight_map["model.layers.3.mlp.w2"]
    write_map(saved, weight_map)
    count = len(tensor_shapes(config()))
    first = [f"model.layers.3.mlp.experts.{e}.down_proj.weight" for e in range(3)]
    refused(
        saved,
        f"{saved / INDEX_NAME}: 16 missing tensors: {', '.join(first)} and 13 more; config.json asks for {count} tensors",
    )


def test_pickled_weights_are_never_read(saved):
    (saved / INDEX_NAME).unlink()
    (saved / "pytorch_model-00001-of-00002.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    refused(
        saved,
        f"{saved}: no model.safetensors.index.json; a checkpoint directory holds config.json, model.safetensors.index.json "
        "and its shards; pytorch_model-00001-of-00002.bin is pickled, which is never read",
    )


def test_code_of_a_checkpoint_is_never_run(saved):
    for name in ("modeling_llada2_moe.py", "configuration_llada2_moe.py"):
        (saved / name).write_text("raise SystemExit('ran')\n")
    assert json.loads((saved / "config.json").read_text())["auto_map"]["AutoModel"].startswith("modeling_llada2_moe")
    load(saved)


def test_places_say_what_is_stored(saved):
    stack(saved, STACKED["transformers 5"])
    places = locate(saved, config())
    place = places["model.layers.2.mlp.experts.5.up_proj.weight"]
    assert place.name == "model.layers.2.mlp.experts.gate_up_proj"
    assert place.shape == (16, 24, 32)
    assert (place.expert, place.rows) == (5, slice(12, 24))
    assert list(places) == list(tensor_shapes(config()))
