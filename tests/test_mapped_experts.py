import json
import struct

import pytest
import torch
from llada2_models import FLASH, MINI, TINY, Recorder, config, tiny_model
from safetensors.torch import load_file, save_file

from tracer import checkpoint
from tracer.checkpoint import load, read_index, save
from tracer.mapped_experts import MappedExperts
from tracer.moe import Experts
from tracer.schema import TraceError

EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
IDS = torch.arange(24).reshape(2, 12)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def saved(tmp_path):
    save(tiny_model(1), tmp_path / "model", max_shard_bytes=60_000)
    return tmp_path / "model"


@torch.no_grad()
def seen(model, ids=IDS):
    recorder = Recorder()
    logits = model(ids, torch.arange(ids.shape[1]), observer=recorder)
    return logits, [routing for _, _, routing, _ in recorder.layers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mapped_is_bit_by_bit_what_memory_gives(saved, dtype):
    held, mapped = load(saved, dtype=dtype), load(saved, dtype=dtype, mapped=True)
    assert (held.has_mapped_experts, mapped.has_mapped_experts) == (False, True)
    (expected, routings), (found, others) = seen(held), seen(mapped)
    assert torch.equal(found, expected)
    for one, other in zip(routings, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def test_one_layer_on_its_own_and_again():
    """Layers share the room that experts are copied to; what was there before has no part in a result."""
    experts = Experts(tiny_model().config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(7, TINY["hidden_size"]), torch.rand(7, 4)
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(7)])
    stored = [
        checkpoint.StoredExpert(*(checkpoint.StoredMatrix("here", matrix) for matrix in (*w13.chunk(2), w2)))
        for w13, w2 in zip(experts.w13, experts.w2, strict=True)
    ]
    mapped = MappedExperts(stored, checkpoint.Staging())
    expected = experts(x, ids, weights)
    for _ in range(2):
        assert torch.equal(mapped(x, ids, weights), expected)


def test_no_parameter_holds_an_expert(saved):
    model = load(saved, mapped=True)
    assert not [name for name, _ in model.named_parameters() if ".experts." in name]
    matrix = model.layers[2].mlp.experts.stored[3].up
    assert matrix.where == f"{read_index(saved)[EXPERT]}: {EXPERT}"
    assert matrix.tensor.dtype == torch.bfloat16
    before = matrix.tensor.data_ptr()
    model.to(torch.bfloat16)
    assert model.layers[2].mlp.experts.stored[3].up.tensor.data_ptr() == before


def test_a_cast_model_computes_in_its_new_dtype(saved):
    expected = seen(load(saved, dtype=torch.float16))[0]
    model = load(saved, dtype=torch.float32, mapped=True)
    seen(model)
    assert torch.equal(seen(model.to(torch.float16))[0], expected)


def replace_tensor(directory, name, tensor):
    shard = read_index(directory)[name]
    tensors = load_file(shard)
    shard.unlink()
    save_file(tensors | {name: tensor}, shard)


def test_what_is_not_finite_is_found_when_it_is_used(saved):
    bad = torch.zeros(TINY["moe_intermediate_size"], TINY["hidden_size"], dtype=torch.bfloat16)
    bad[-1, -1] = torch.nan
    replace_tensor(saved, EXPERT, bad)
    model = load(saved, mapped=True)
    x = torch.ones(1, TINY["hidden_size"])
    experts = model.layers[2].mlp.experts
    experts(x, torch.tensor([[0, 1, 2, 4]]), torch.ones(1, 4))
    with pytest.raises(TraceError) as error:
        experts(x, torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4))
    assert str(error.value) == f"{read_index(saved)[EXPERT]}: {EXPERT} holds nan, allowed are finite numbers"


def test_values_beyond_the_dtype_are_found_when_they_are_used(saved):
    shape = (TINY["moe_intermediate_size"], TINY["hidden_size"])
    replace_tensor(saved, EXPERT, torch.full(shape, -70_000.0))
    experts = load(saved, mapped=True).layers[2].mlp.experts
    ids, weights = torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4)
    experts(torch.ones(1, TINY["hidden_size"]), ids, weights)  # in fp32 they are fine
    with pytest.raises(TraceError, match=r"holds -70000, which torch.float16 cannot hold$"):
        experts(torch.ones(1, TINY["hidden_size"], dtype=torch.float16), ids, weights)


def test_faults_that_need_no_values_are_found_at_once(saved):
    replace_tensor(saved, EXPERT, torch.zeros(3, 5))
    with pytest.raises(
        TraceError, match=r"experts\.3\.up_proj\.weight has shape \[3, 5\], config\.json asks for \[12, 32\]$"
    ):
        load(saved, mapped=True)
    read_index(saved)[EXPERT].unlink()
    with pytest.raises(TraceError, match="1 missing shard: "):
        load(saved, mapped=True)


def test_mapped_only_where_there_is_no_room(saved, monkeypatch):
    size = checkpoint.model_bytes(tiny_model().config, torch.float32)
    assert size.all - size.rest == 3 * 16 * 3 * 12 * 32 * 4
    for room, expected in ((size.all, False), (size.all - 1, True), (size.rest, True)):
        monkeypatch.setattr(checkpoint, "free_bytes", lambda device, room=room: room)
        assert load(saved, dtype=torch.float32, mapped=None).has_mapped_experts is expected
    monkeypatch.setattr(checkpoint, "free_bytes", lambda device: size.rest - 1)
    with pytest.raises(
        TraceError, match=r"the model without its routed experts takes 0\.0 GB in torch\.float32, cpu has"
    ):
        load(saved, dtype=torch.float32, mapped=None)


@pytest.mark.parametrize(
    ("values", "all_bytes", "rest"), [(MINI, 32_511_286_784, 1_909_644_800), (FLASH, 205_779_410_432, 6_063_431_168)]
)
def test_bytes_of_the_released_models(values, all_bytes, rest):
    """The rest is all bytes less 30,601,641,984 of mini's experts, or 199,715,979,264 of flash's."""
    assert checkpoint.model_bytes(config(values), torch.bfloat16) == (all_bytes, rest)
    assert checkpoint.model_bytes(config(values), torch.float32) == (2 * all_bytes, 2 * rest)


def test_a_mapped_model_can_be_saved(saved):
    save(load(saved, mapped=True), saved.with_name("again"), max_shard_bytes=60_000)
    assert checkpoint.checkpoint_hash(saved.with_name("again")) == checkpoint.checkpoint_hash(saved)


def test_files_are_not_written_to(saved):
    before = checkpoint.checkpoint_hash(saved)
    seen(load(saved, mapped=True))
    assert checkpoint.checkpoint_hash(saved) == before


def test_tensors_that_do_not_start_at_whole_items(saved):
    """Files of old writers: a header of any length."""
    expected = seen(load(saved))[0]
    for path in set(read_index(saved).values()):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(json.loads(content[8 : 8 + length])).encode()
        header += b" " * (len(header) % 2 == 0)
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    assert torch.equal(seen(load(saved, mapped=True))[0], expected)
    assert torch.equal(seen(load(saved))[0], expected)
