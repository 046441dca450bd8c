import re
from collections import Counter
from itertools import islice

import pytest

from tracer.corpus import SPLITS, WORKLOADS, documents, prompts, split_of
from tracer.problems import OPERATIONS, TEMPLATES, final_answer, problems, worked_solution
from tracer.schema import TraceError
from tracer.tokenizer import load_tokenizer, train_tokenizer

STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)\.")


@pytest.fixture(scope="module")
def some_problems():
    return list(islice(problems(seed=3), 3000))


def test_at_least_twenty_templates_of_one_or_two_operations_all_drawn(some_problems):
    assert len(TEMPLATES) >= 20
    assert len(set(TEMPLATES)) == len(TEMPLATES)
    assert {len(operations) for operations, _ in TEMPLATES} == {1, 2}
    assert {problem.template for problem in some_problems} == set(range(len(TEMPLATES)))


def test_every_solution_computes_what_it_says(some_problems):
    for problem in some_problems:
        steps = STEP.findall(problem.solution)
        signs = TEMPLATES[problem.template][0]
        assert [step[1] for step in steps] == list(signs)
        assert max(problem.operands) <= 99
        carried = problem.operands[0]
        for (left, sign, right, result), operand in zip(steps, problem.operands[1:], strict=True):
            assert (int(left), int(right)) == (carried, operand)
            carried = OPERATIONS[sign](int(left), int(right))
            assert int(result) == carried >= 0
        assert problem.answer == carried == final_answer(problem.solution)
        rest = STEP.sub("", problem.solution).strip()
        assert rest == f"The answer is {carried}."


def test_every_operand_stands_in_the_question(some_problems):
    for problem in some_problems:
        assert Counter(re.findall(r"\d+", problem.question)) == Counter(map(str, problem.operands))


def test_the_worked_example():
    text = "12 + 34 = 46. 46 - 5 = 41. The answer is 41."
    assert worked_solution("+-", (12, 34, 5)) == (text, 41)
    assert worked_solution("-", (5, 6)) is None
    assert final_answer("no number here") is None


def test_no_problem_is_in_two_splits():
    keys = {split: {d.key for d in islice(documents("arithmetic", split, seed=5), 400)} for split in SPLITS}
    heldout = {document.key for document in prompts("arithmetic", 200)}
    assert len(heldout) == 200
    assert not heldout & {document.key for document in islice(documents("arithmetic"), 10_000)}
    for split, found in keys.items():
        assert {split_of(key) for key in found} == {split}


def test_the_split_does_not_move():
    found = [split_of(key) for key in ("7:43,28", "7:43,29", "16:36,92,70", "file:ast.py", "file:json/decoder.py")]
    assert found == ["heldout", "calibration", "heldout", "train", "train"]


def test_prompts_are_the_same_every_time_and_never_those_of_training():
    assert prompts("arithmetic", 5) == prompts("arithmetic", 8)[:5]
    assert not {d.key for d in prompts("arithmetic", 12, "demo")} & {d.key for d in prompts("arithmetic", 200)}
    with pytest.raises(TraceError, match="'train' is trained on"):
        prompts("arithmetic", 1, "train")
    with pytest.raises(TraceError, match="prompts wanted"):
        prompts("prose", 100_000)


@pytest.fixture(scope="module")
def library():
    wanted = {"train": 1500, "heldout": 10_000}
    return {(w, s): list(islice(documents(w, s), n)) for w in ("code", "prose") for s, n in wanted.items()}


@pytest.mark.parametrize("workload", ["code", "prose"])
def test_held_out_files_are_not_trained_on(library, workload):
    train, heldout = library[workload, "train"], library[workload, "heldout"]
    assert len(train) == 1500
    assert len(heldout) > 100
    assert {split_of(document.key) for document in train} == {"train"}
    assert {split_of(document.key) for document in heldout} == {"heldout"}
    assert not {document.key for document in train} & {document.key for document in heldout}
    assert all(document.prompt.rstrip() == document.prompt != document.text for document in train)


def test_code_parses_and_has_its_head_in_the_prompt(library):
    for document in library["code", "heldout"]:
        compile(document.text, document.key, "exec", flags=0x400, dont_inherit=True)  # 0x400 stops at the syntax tree
        assert re.match(r"@|async def |def |class ", document.prompt)


def test_code_holds_no_tests_and_no_packages(library):
    assert not [d.key for d in library["code", "train"] if re.search(r"[:/](tests?|site-packages)/", d.key)]


def test_unknown_names_are_refused():
    with pytest.raises(TraceError, match=f"workload 'poems': allowed are {', '.join(WORKLOADS)}"):
        documents("poems")
    with pytest.raises(TraceError, match="split 'dev': allowed are train, heldout"):
        documents("code", "dev")


@pytest.fixture(scope="module")
def tokenizer():
    texts = [document.text for document in islice(documents("arithmetic"), 500)]
    return train_tokenizer(texts, 400)


def test_text_survives_the_tokenizer(tokenizer, library):
    texts = [document.text for document in library["code", "heldout"][:100]]
    texts += ["", " 12 +  34\n\t= 46", "naïve Σ 語 \x00 🙂"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_all(texts)] == texts
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]


def test_every_digit_is_a_token_of_its_own(tokenizer):
    digits = {digit: tokenizer.encode(digit) for digit in "0123456789"}
    assert all(len(ids) == 1 for ids in digits.values())
    assert tokenizer.encode("90210") == [digits[digit][0] for digit in "90210"]
    assert [i for i in tokenizer.encode("has 12 of 7") if [i] in digits.values()] == [digits[d][0] for d in "127"]


def test_a_prompt_and_its_completion_are_encoded_as_one_text(tokenizer):
    for document in prompts("arithmetic", 20):
        assert tokenizer.encode(document.prompt) + tokenizer.encode(document.completion) == tokenizer.encode(
            document.text
        )


def test_a_saved_tokenizer_is_read_by_the_names_of_its_files(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.mask_id, loaded.eos_id) == (tokenizer.mask_id, tokenizer.eos_id)
    assert loaded.vocab_size == tokenizer.vocab_size <= 400
    assert loaded.encode("How many apples? 12") == tokenizer.encode("How many apples? 12")
    assert loaded.decode([loaded.eos_id, *loaded.encode("12"), loaded.mask_id]) == "12"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": "<|mask|>", "eos_token": "x"}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.mask_id, loaded.eos_id) == (tokenizer.mask_id, tokenizer.eos_id)


def test_a_directory_without_its_tokenizer_is_refused(tokenizer, tmp_path):
    with pytest.raises(TraceError, match="no such file; a checkpoint directory must hold its tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TraceError, match="name no mask_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": "[MASK]", "eos_token": "<|endoftext|>"}')
    with pytest.raises(TraceError, match=r"holds no token '\[MASK\]'"):
        load_tokenizer(tmp_path)
    for content, message in (
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must hold a JSON object, found list"),
    ):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(TraceError, match=rf"tokenizer_config.json: {message}"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TraceError, match="not a tokenizer file"):
        load_tokenizer(tmp_path)
    with pytest.raises(TraceError, match="vocab_size 100"):
        train_tokenizer(["a"], 100)
