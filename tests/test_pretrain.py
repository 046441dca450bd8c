import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tracer import checkpoint, pretrain
from tracer.corpus import documents, prompts
from tracer.llada2 import LLaDA2
from tracer.pretrain_batches import UNIT, batch_sizes, block_mask, draw_batch, encode_documents, pack
from tracer.pretrain_configs import BLOCK_LENGTHS, CONFIGS, PretrainConfig, find_config
from tracer.pretrain_scores import answer_each, answer_together, decode_settings, score
from tracer.pretrain_step import Trainer, balance, learning_rate, losses
from tracer.problems import final_answer
from tracer.schema import TraceError
from tracer.shipped import find_model
from tracer.tokenizer import load_tokenizer

MICRO = PretrainConfig(
    name="micro",
    model={
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
    },
    vocab_size=320,
    shares={"arithmetic": 0.75, "code": 0.25},
    num_documents={"arithmetic": 200, "code": 30},
    context=128,
    batch_size=4,
    learning_rate=1e-2,
    bias_rate=1e-2,
)


@pytest.fixture(scope="module")
def prepared():
    return pretrain.prepare(MICRO)


@pytest.fixture
def model(prepared):
    torch.manual_seed(0)
    return LLaDA2(MICRO.model_config(MICRO.vocab_size, prepared[0].eos_id))


def draw(prepared, block_length, seed=0, **changes):
    tokenizer, pools = prepared
    generator = torch.Generator().manual_seed(seed)
    return draw_batch(pools, replace(MICRO, **changes), block_length, tokenizer.mask_id, generator)


def test_documents_are_packed_at_multiples_of_the_largest_block(prepared):
    tokenizer, _ = prepared
    texts = [*islice(documents("arithmetic"), 40), *islice(documents("code"), 10)]
    encoded = list(encode_documents(texts, tokenizer, 256))
    pool = pack(encoded, 256, tokenizer.eos_id)
    found = []
    for row in zip(*(values.tolist() for values in pool), strict=True):
        tokens, indices, positions, is_prompt, is_counted = map(np.array, row)
        assert (is_counted == (indices < 256 // UNIT)).all()
        for index in np.unique(indices[is_counted]):
            here = np.flatnonzero(indices == index)
            assert here[0] % UNIT == 0
            assert (np.diff(here) == 1).all()
            assert (positions[here] == np.arange(len(here))).all()
            found.append((tuple(tokens[here]), int(is_prompt[here].sum())))
            assert is_prompt[here][: found[-1][1]].all()
    filled = [(tuple(ids + [tokenizer.eos_id] * (-len(ids) % UNIT)), prompt_length) for ids, prompt_length in encoded]
    assert sorted(found) == sorted(filled)


def test_a_document_that_does_not_fit_is_cut_and_a_long_prompt_left_out(prepared):
    tokenizer, _ = prepared
    [document] = prompts("arithmetic", 1)
    ids = tokenizer.encode(document.text)
    long = replace(document, completion=document.completion * 20)
    given = replace(document, prompt=document.prompt * 20)
    assert list(encode_documents([document, given, long], tokenizer, 128)) == [
        ([*ids, tokenizer.eos_id], len(tokenizer.encode(document.prompt))),
        (tokenizer.encode(long.text)[:128], len(tokenizer.encode(document.prompt))),
    ]
    with pytest.raises(TraceError, match="no document"):
        pack(encode_documents([given], tokenizer, 128), 128, tokenizer.eos_id)


@pytest.mark.parametrize("block_length", [1, 2, 4, 8])
def test_block_mask_is_its_definition(block_length):
    found = torch.tensor([[0] * 8, [0] * 8, [0, 0, 0, 0, 1, 1, 2, 2]])
    documents_of = torch.tensor([[0] * 8, [0] * 4 + [1] * 4])
    for indices in (
        (documents_of, found[2:])
        if block_length <= 2
        else (documents_of,)
        if block_length <= 4
        else (documents_of[:1],)
    ):
        mask = block_mask(indices, block_length)
        num_rows, length = indices.shape
        assert mask.shape == (num_rows, 1, 2 * length, 2 * length)
        for row in range(num_rows):
            for i in range(2 * length):
                for j in range(2 * length):
                    query_block, key_block = i % length // block_length, j % length // block_length
                    same_document = indices[row, i % length] == indices[row, j % length]
                    if i < length and j < length:
                        expected = query_block == key_block
                    elif i < length:
                        expected = key_block < query_block
                    elif j < length:
                        expected = False
                    else:
                        expected = key_block <= query_block
                    assert mask[row, 0, i, j] == (expected and bool(same_document))


@pytest.mark.parametrize("block_length", BLOCK_LENGTHS)
def test_masked_tokens_are_those_that_count(prepared, block_length):
    tokenizer, _ = prepared
    batch = draw(prepared, block_length)
    noisy, clean = batch.token_ids.chunk(2, dim=1)
    is_masked = noisy == tokenizer.mask_id
    assert (clean == batch.targets).all()
    assert (noisy == clean)[~is_masked].all()
    assert (is_masked == (batch.weights > 0)).all()
    assert batch.weights[is_masked].min() >= 1
    assert batch.weights.max() <= MICRO.max_token_weight
    assert not (clean == tokenizer.mask_id).any()
    if block_length == 1:  # the ratio is 1 in every block: the loss of an autoregressive model
        unmasked = draw(prepared, 1, given_prompt_ratio=0.0)
        assert (unmasked.weights.sum(1) >= UNIT).all()


def test_a_given_prompt_is_never_masked(prepared):
    def first_tokens(given_prompt_ratio):  # every document starts with its prompt
        batches = [draw(prepared, 64, seed, given_prompt_ratio=given_prompt_ratio) for seed in range(20)]
        return torch.cat([batch.weights[batch.positions[:, : MICRO.context] == 0] for batch in batches])

    assert (first_tokens(1.0) == 0).all()
    assert (first_tokens(0.0) > 0).float().mean() > 0.3


def test_a_batch_holds_every_workload():
    assert batch_sizes(MICRO) == {"arithmetic": 3, "code": 1}
    assert batch_sizes(replace(MICRO, shares={"code": 0.99, "arithmetic": 0.01})) == {"code": 3, "arithmetic": 1}


@pytest.mark.parametrize("block_length", [4, 16, 64])
def test_training_shows_a_block_what_decoding_shows_it(prepared, model, block_length):
    batch = draw(prepared, block_length)
    with torch.no_grad():
        trained = model(batch.token_ids, batch.positions, mask=batch.mask)
        for row in range(len(batch.targets)):
            length = (
                int((batch.positions[row, : MICRO.context].diff() < 0).nonzero().min() + 1)
                if (batch.positions[row, : MICRO.context].diff() < 0).any()
                else MICRO.context
            )
            noisy, clean = batch.token_ids[row, :length], batch.token_ids[row, MICRO.context :][:length]
            cache = model.new_cache(1, length)
            for start in range(0, length, block_length):
                stop = start + block_length
                positions = torch.arange(start, stop)
                decoded = model(noisy[None, start:stop], positions, cache=cache)
                torch.testing.assert_close(decoded[0], trained[row, start:stop], atol=2e-5, rtol=1e-4)
                model(clean[None, start:stop], positions, cache=cache)
                cache.length = stop


def test_loss_is_the_weighted_mean_of_what_counts():
    logits = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]])
    loss, entropy = losses(logits, torch.tensor([[0, 1, 2]]), torch.tensor([[1.0, 3.0, 0.0]]))
    assert float(loss) == pytest.approx((-np.log(0.66524096) + 3 * np.log(3)) / 4, rel=1e-6)
    p = np.array([0.66524096, 0.24472847, 0.09003057])  # only the first token is predicted right
    assert float(entropy) == pytest.approx(-(p * np.log(p)).sum() / 4, rel=1e-6)


def test_a_few_steps_lower_the_loss(prepared, model):
    trainer = Trainer(model, MICRO)
    batch = draw(prepared, 16)
    found = [float(trainer.step(batch, 1e-2)["loss"]) for _ in range(12)]
    assert found[0] == pytest.approx(np.log(MICRO.vocab_size), rel=0.1)
    assert found[-1] < 0.6 * found[0]


def test_training_touches_every_weight_but_not_the_biases_gradient(prepared, model):
    before = {name: values.clone() for name, values in model.named_parameters()}
    trainer = Trainer(model, MICRO)
    for block_length in BLOCK_LENGTHS:
        trainer.step(draw(prepared, block_length), 1e-2)
    assert all(not torch.equal(values, before[name]) for name, values in model.named_parameters())
    for _, layer in model.moe_layers():
        assert layer.gate.expert_bias.dtype == torch.float32
        assert not layer.gate.expert_bias.requires_grad
        assert (layer.gate.expert_bias.abs() <= len(BLOCK_LENGTHS) * MICRO.bias_rate + 1e-6).all()


def test_the_bias_falls_for_the_busy_and_rises_for_the_idle(model):
    [(layer_id, layer)] = model.moe_layers()
    highest = balance(model, {layer_id: torch.tensor([0, 1, 2, 3, 2, 2, 2, 4])}, 0.5)
    assert layer.gate.expert_bias.tolist() == [0.5, 0.5, 0, -0.5, 0, 0, 0, -0.5]
    assert float(highest) == 2


def test_the_bias_moves_load_towards_balance(prepared, model):
    [(_, layer)] = model.moe_layers()
    with torch.no_grad():
        layer.gate.expert_bias[0] = 1.0  # so that every token of every batch goes to expert 0
    trainer = Trainer(model, MICRO)
    batch = draw(prepared, 16)
    ratios = [float(trainer.step(batch, 0.0)["max_load_ratio"]) for _ in range(150)]
    assert ratios[0] == pytest.approx(8 / 2)  # E / K
    assert np.mean(ratios[-20:]) < 1.5


def test_the_learning_rate_follows_the_share_of_the_time():
    config = replace(MICRO, learning_rate=1.0, warmup_ratio=0.1, final_learning_rate_ratio=0.2)
    assert learning_rate(config, 0.05) == pytest.approx(0.5)
    assert learning_rate(config, 0.1) == pytest.approx(1.0)
    assert learning_rate(config, 0.55) == pytest.approx(0.6)
    assert learning_rate(config, 1.0) == learning_rate(config, 1.7) == pytest.approx(0.2)


class CountingClock:
    """Says one second more at each look."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "out"
    clock, lines = CountingClock(), []
    pretrain.train(
        replace(MICRO, shares={"arithmetic": 1.0}),
        directory,
        seconds=8,
        device=torch.device("cpu"),
        report=lines.append,
        clock=clock,
    )
    return directory, clock, lines


def test_training_stops_at_its_limit_and_leaves_curve_and_checkpoint(run, model, prepared):
    directory, clock, lines = run
    assert clock.now == 9  # two looks before the first step, one before each; the last saw the limit
    curve = [json.loads(line) for line in (directory / "loss.jsonl").read_text().splitlines()]
    assert [point["step"] for point in curve] == list(range(1, 7))
    assert curve[-1]["tokens"] == 6 * MICRO.batch_size * MICRO.context
    assert [json.loads(line) for line in lines[1:]] == curve
    assert all(np.isfinite(point["loss"]) for point in curve)
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint", "loss.jsonl"]
    loaded = checkpoint.load(directory / "checkpoint", dtype=torch.float32)
    assert loaded.config.pad_token_id == load_tokenizer(directory / "checkpoint").eos_id


def test_a_checkpoint_says_how_it_was_trained(run):
    directory, _, _ = run
    assert checkpoint.read_provenance(directory / "checkpoint").training == {
        "config": "micro",
        "seed": 0,
        "device": "cpu",
        "minutes": round(8 / 60, 2),  # the clock's first look began it, the ninth ended it
        "steps": 6,
        "million_tokens": round(6 * MICRO.batch_size * MICRO.context / 1e6, 1),
    }


def test_a_limit_that_preparation_uses_up_is_refused(tmp_path):
    small = replace(MICRO, shares={"arithmetic": 1.0}, num_documents={"arithmetic": 10})
    device = torch.device("cpu")
    with pytest.raises(TraceError, match="time limit of 1 s: preparation alone took 1 s"):
        pretrain.train(small, tmp_path, seconds=1, device=device, report=print, clock=CountingClock())


def test_a_checkpoint_replaces_the_one_before_it(prepared, model, tmp_path):
    tokenizer, _ = prepared
    directory = tmp_path / "checkpoint"
    pretrain.save(model, tokenizer, directory, {"steps": 1})
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    pretrain.save(model, tokenizer, directory, {"steps": 2})
    assert checkpoint.read_provenance(directory).training == {"steps": 2}
    assert (checkpoint.load(directory).lm_head.weight == 0.5).all()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_configurations_are_checked():
    with pytest.raises(TraceError, match="workload 'poems'"):
        replace(MICRO, shares={"poems": 1.0})
    with pytest.raises(TraceError, match="context 100: must be a multiple of 64"):
        replace(MICRO, context=100)
    with pytest.raises(TraceError, match="batch_size 1"):
        replace(MICRO, batch_size=1)


def test_command_line_refuses_in_one_line(tmp_path, capsys):
    assert pretrain.main(["--config", "nope", "--minutes", "1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: config 'nope': allowed are proxy-tiny")
    assert pretrain.main(["--evaluate", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    used = ["--config", "proxy-tiny", "--minutes", "1", "--device", "cpu", "--out", str(Path(__file__).parent)]
    assert pretrain.main(used) == 2
    assert "is not empty; remove it or name another" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain.main(["--evaluate", "proxy-tiny", "--problems", "0"])
    assert "--problems 0: must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain.main(["--config", "proxy-tiny"])
    assert "give --config, --minutes and --out" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_grouped_experts_have_the_gradients_of_single_ones():
    config = find_config("proxy-tiny").model_config(768, 0)
    torch.manual_seed(0)
    _, layer = next(LLaDA2(config).moe_layers())
    x = torch.randn(500, config.hidden_size)
    ids = torch.randint(8, 64, (500, 8))  # the first 8 experts stay idle
    weights = torch.rand(500, 8)
    gradients = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        experts = layer.experts.to(device, dtype)
        experts.zero_grad()
        given = x.clone().to(device, dtype).detach().requires_grad_()
        experts(given, ids.to(device), weights.to(device)).float().square().sum().backward()
        gradients.append([value.grad.float().cpu().clone() for value in (given, experts.w13, experts.w2)])
    for exact, grouped in zip(*gradients, strict=True):
        assert (exact - grouped).norm() < 0.03 * exact.norm()
    assert (gradients[1][1][:8] == 0).all()
    assert (gradients[1][2][:8] == 0).all()


@pytest.fixture(scope="module")
def shipped():
    directory = find_model("proxy-tiny")
    return directory, checkpoint.load(directory, dtype=torch.float32), load_tokenizer(directory)


def test_the_shipped_model_is_small_and_has_the_promised_shape(shipped):
    directory, model, tokenizer = shipped
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 6_000_000
    config = find_config("proxy-tiny")
    assert model.config == config.model_config(config.vocab_size, tokenizer.eos_id)
    shape = model.config.shape()
    assert (shape.layer_ids, shape.num_experts, shape.top_k, shape.num_shared_experts) == ((1, 2, 3), 64, 8, 1)
    assert tokenizer.vocab_size == model.config.vocab_size
    for _, layer in model.moe_layers():
        assert layer.gate.expert_bias.dtype == torch.float32
        assert layer.gate.expert_bias.abs().max() > 0


def test_the_shipped_model_answers_problems_it_never_saw(shipped):
    _, model, tokenizer = shipped
    problems = prompts("arithmetic", 20)
    found = score(problems, lambda texts: answer_each(model, tokenizer, texts, decode_settings(tokenizer, 16)))
    assert found.num_right >= 12
    assert found.num_right_constant <= 2
    assert sum(right for right, _ in found.right_by_operations.values()) == found.num_right
    signs = [[sign for sign in "+-*" if f" {sign} " in problem.completion] for problem in problems]
    right = [final_answer(text) == problem.answer for text, problem in zip(found.texts, problems, strict=True)]
    for sign, counts in found.right_by_sign.items():
        of_sign = [is_right for is_right, has in zip(right, signs, strict=True) if sign in has]
        assert counts == (sum(of_sign), len(of_sign))
    assert list(found.right_by_sign) == ["+", "-", "*"]
    assert found.tokens_per_denoise > 2


@pytest.mark.parametrize("block_length", [1, 8, 32])
def test_answers_in_one_batch_are_those_of_the_decode_loop(shipped, block_length):
    _, model, tokenizer = shipped
    texts = [document.prompt for document in prompts("arithmetic", 4, "demo")]
    settings = decode_settings(tokenizer, block_length)
    one_by_one = answer_each(model, tokenizer, texts, settings)
    together = answer_together(model, tokenizer, texts, settings)
    assert together.texts == one_by_one.texts
    assert together.is_ended == one_by_one.is_ended == [True] * 4
    assert together.tokens_per_denoise == pytest.approx(one_by_one.tokens_per_denoise)


def test_a_text_that_the_limit_cuts_off_has_not_ended(shipped):
    _, model, tokenizer = shipped
    chosen = sorted((document.prompt for document in prompts("arithmetic", 12, "demo")), key=len)
    texts = [chosen[0], chosen[-1]]
    for answer in (answer_each, answer_together):
        whole = answer(model, tokenizer, texts, decode_settings(tokenizer, 8))
        found = answer(model, tokenizer, texts, decode_settings(tokenizer, 8, gen_length=10))
        assert found.is_ended == [False, False]
        assert all(long.startswith(short) for long, short in zip(whole.texts, found.texts, strict=True))
        assert [len(tokenizer.encode(text)) for text in found.texts] == [10, 10]


def test_the_shipped_prompts_are_held_out(shipped):
    directory, _, _ = shipped
    lines = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    assert lines == [{"prompt": d.prompt, "answer": d.answer} for d in prompts("arithmetic", 12, "demo")]
    assert not {line["prompt"] for line in lines} & {document.prompt for document in prompts("arithmetic", 200)}


def test_the_model_card_holds_the_end_of_the_learning_curve(shipped):
    directory, _, _ = shipped
    curve = [json.loads(line) for line in (directory / "loss.jsonl").read_text().splitlines()]
    card = (directory / "README.md").read_text()
    shown = [point for point in curve if "accuracy" in point]
    assert len(shown) == 9
    for point in (*shown, curve[-1]):
        assert f"| {point['step']} | {point['tokens'] / 1e6:.1f} | {point['loss']:.3f} |" in card


def test_the_shipped_facts_of_the_training_are_those_of_curve_and_card(shipped):
    directory, _, _ = shipped
    training = checkpoint.read_provenance(directory).training
    last = json.loads((directory / "loss.jsonl").read_text().splitlines()[-1])
    assert (training["steps"], training["million_tokens"]) == (last["step"], round(last["tokens"] / 1e6, 1))
    assert f"One {training['device']}, PyTorch 2.11, {training['minutes']} minutes" in (
        directory / "README.md"
    ).read_text().replace("\n", " ")
    assert (training["config"], training["seed"]) == ("proxy-tiny", find_config("proxy-tiny").seed)


def test_configurations_are_known_by_name(tmp_path):
    assert set(CONFIGS) >= {"proxy-tiny"}
    with pytest.raises(TraceError, match="config 'proxy-huge': allowed are proxy-tiny"):
        find_config("proxy-huge")
