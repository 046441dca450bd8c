import math
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch
from test_pretrain import MICRO

from tracer import text_scores
from tracer.corpus import documents, prompts
from tracer.llada2 import LLaDA2
from tracer.pretrain import prepare
from tracer.pretrain_scores import Answers
from tracer.text_scores import compiles, heldout_loss, text_summary

HEAD = 'def f(x):\n    """Doc."""'


@pytest.mark.parametrize(
    ("answer", "is_ended", "expected"),
    [
        ("\n    return x", True, True),
        ("\n    return x is 1", True, True),  # a warning of the compiler is no error
        ("\n    return (x", True, False),
        ("\n    if x:", True, False),
        ("\n    try:\n        x()\n", True, False),
        ("", True, False),
        ("\n", False, False),
        ("\n    retu", False, False),  # no whole line is left
        ("\n    return x\n\ndef g(", False, True),
        ("\n    return (x,\n", False, True),
        ("\n    if x:\n        re", False, True),
        ("\n    try:\n        x()\n    exc", False, True),
        ("\n    text = '''one\ntwo", False, True),
        ("\n    if x:\n    return x\n    retu", False, False),
        ("\n    x = [1, 2\n    y = 3\n    retu", False, False),
        ("\n    return x x\n    y", False, False),
        ("\n    return '\0'\n", False, False),
    ],
)
def test_code_compiles_as_far_as_it_goes(answer, is_ended, expected):
    assert compiles(HEAD, answer, is_ended) is expected


def test_code_that_people_wrote_compiles_wherever_it_is_cut():
    for document in prompts("code", 12):
        assert compiles(document.prompt, document.completion, True)
        lines = document.completion.splitlines(keepends=True)
        first = next(number for number, line in enumerate(lines, start=1) if line.strip())
        for length in range(first, len(lines)):
            is_continued = all(line.endswith("\\\n") or not line.strip() for line in lines[:length])
            assert compiles(document.prompt, "".join(lines[:length]) + "    hal", False) is not is_continued


@pytest.fixture(scope="module")
def untrained():
    config = replace(MICRO, shares={"code": 0.5, "prose": 0.5}, num_documents={"code": 40, "prose": 40})
    tokenizer, _ = prepare(config)
    torch.manual_seed(0)
    return config, tokenizer, LLaDA2(config.model_config(config.vocab_size, tokenizer.eos_id))


def test_an_untrained_model_has_the_loss_of_a_uniform_guess(untrained):
    config, tokenizer, model = untrained
    with torch.no_grad():
        model.lm_head.weight.zero_()
    for workload in ("code", "prose", "arithmetic"):
        found = heldout_loss(model, tokenizer, config, workload)
        assert found == pytest.approx(math.log(config.vocab_size), rel=1e-5)


def test_the_held_out_loss_is_that_of_the_masked_tokens(untrained):
    config, tokenizer, model = untrained
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    found = heldout_loss(model, tokenizer, config, "code", 8)
    assert found == heldout_loss(model, tokenizer, config, "code", 8) != heldout_loss(model, tokenizer, config, "code")
    assert found > math.log(config.vocab_size)


@pytest.fixture(scope="module", autouse=True)
def sources_are_read_once():
    read = cache(lambda *args, **kwargs: list(islice(documents(*args, **kwargs), 150)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_scores, "documents", read)
        patch.setattr(text_scores, "prompts", cache(prompts))
        yield


def answering(texts, is_ended):
    def answer(model, tokenizer, given, settings):
        assert settings.gen_length == 128
        assert len(given) == len(texts)
        return Answers(texts, 2.5, is_ended)

    return answer


def test_a_summary_counts_what_compiles(untrained):
    config, tokenizer, model = untrained
    chosen = text_scores.prompts("code", 4, packages=())
    texts = [document.completion for document in chosen[:3]] + ["\n    )\n"]
    found = text_summary(model, tokenizer, config, "code", 4, 16, answering(texts, [True, True, False, False]))
    assert (found["num_prompts"], found["num_ended"], found["num_compiled"], found["num_compiled_ended"]) == (
        4,
        2,
        3,
        2,
    )
    assert found["tokens_per_denoise"] == 2.5
    assert found["heldout_loss"] == heldout_loss(model, tokenizer, config, "code")
    assert found["samples"] == [{"prompt": d.prompt, "answer": d.completion} for d in chosen[:3]]
    prose = text_summary(model, tokenizer, config, "prose", 4, 16, answering(texts, [True] * 4))
    assert "num_compiled" not in prose
