import ast
import importlib
import re
from collections import Counter
from itertools import islice
from pydoc_data.topics import topics

import pytest

from tracer import corpus
from tracer.corpus import SPLITS, WORKLOADS, documents, prompts, split_of, summary
from tracer.problems import OPERATIONS, TEMPLATES, final_answer, problems, worked_solution
from tracer.schema import TraceError
from tracer.sources import code_pieces, library_files, package_files, plain_paragraphs, read_pieces
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
    wanted = {"train": 300, "heldout": 200}
    return {(w, s): list(islice(documents(w, s), n)) for w in ("code", "prose") for s, n in wanted.items()}


@pytest.mark.parametrize("workload", ["code", "prose"])
def test_held_out_files_are_not_trained_on(library, workload):
    train, heldout = library[workload, "train"], library[workload, "heldout"]
    assert (len(train), len(heldout)) == (300, 200)
    assert {split_of(document.key) for document in train} == {"train"}
    assert {split_of(document.key) for document in heldout} == {"heldout"}
    assert not {document.key for document in train} & {document.key for document in heldout}
    assert all(document.prompt.rstrip() == document.prompt != document.text for document in train)


def test_code_parses_and_has_its_head_in_the_prompt(library):
    for document in library["code", "heldout"]:
        compile(document.text, document.key, "exec", flags=0x400, dont_inherit=True)  # 0x400 stops at the syntax tree
        assert re.match(r"@|async def |def |class ", document.prompt)


def test_the_library_is_without_tests_and_packages(library):
    keys = [file.key for file in library_files()]
    assert len(keys) > 300
    assert not [key for key in keys if re.search(r"(^|/)(tests?|site-packages)/", key)]
    assert {document.key for found in library.values() for document in found if ":" in document.key} <= {
        *(f"file:{key}" for key in keys),
        *(f"topic:{name}" for name in topics),
    }


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


BODY = """
    total = 0
    for value in values:
        total += value * {number}
    return total
"""


def definition(name, number=1, docstring="Add up what there is."):
    return f'def {name}(values):\n    """{docstring}"""{BODY.format(number=number)}'


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package that can be found, but not imported."""

    def write(files, name="some_package"):
        for path, text in {"__init__.py": "raise SystemError('imported')\n", **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def test_tests_vendored_generated_and_large_files_are_no_sources(package):
    kept = ["a.py", "deep/b.py", "c.py"]
    left_out = [
        "tests/d.py",
        "deep/test/e.py",
        "_vendor/f.py",
        "third_party/g.py",
        "test_h.py",
        "i_test.py",
        "j_pb2.py",
    ]
    files = {path: definition("f") for path in (*kept, *left_out)}
    files["k.py"] = "# Automatically generated by a tool.\n" + definition("f")
    files["l.py"] = definition("f") + "#" * 1_000_000
    files["m.txt"] = definition("f")
    found = package_files(package(files))
    assert [file.key for file in found] == [f"some_package/{path}" for path in ("__init__.py", *sorted(kept))]


def test_a_package_is_capped_at_whole_files(package):
    name = package({f"{number}.py": definition("f") for number in range(40)})
    size = len(definition("f"))
    everything = package_files(name)
    some = package_files(name, max_bytes=10 * size)
    assert 9 <= len(some) <= 10
    assert set(some) < set(everything)
    assert some == sorted(some, key=lambda file: file.key)
    assert set(package_files(name, max_bytes=5 * size)) < set(some)


def test_unknown_packages_are_refused_by_name(package):
    with pytest.raises(TraceError, match=r"package 'no_such_package': is not installed here; name installed"):
        documents("code", packages=("no_such_package",))
    with pytest.raises(TraceError, match=r"package 'email.mime': is not installed here; name installed top-level"):
        documents("prose", packages=("email.mime",))
    with pytest.raises(TraceError, match="package 'sys': has no Python sources"):
        documents("code", packages=("sys",))
    with pytest.raises(TraceError, match="package 'only_tests': has no Python sources"):
        package_files(package({"__init__.py": "# generated by a tool\n", "tests/a.py": ""}, "only_tests"))


def test_pieces_come_in_the_order_of_the_files_however_many_processes(package):
    files = {f"{number:02}.py": definition("f", number) + definition("g", number) for number in range(40)}
    found = package_files(package(files | {"broken.py": "def f(:\n", "null.py": "\0"}))
    alone, together = read_pieces(found, 1), read_pieces(found, 2)
    assert alone == together
    assert [pieces.file for pieces in alone] == found
    for pieces in alone[:40]:
        assert pieces.code == [(head, BODY.format(number=int(pieces.file.path.stem)).rstrip()) for head in HEADS]
    assert [pieces.code for pieces in alone[40:]] == [[], [], []]


HEADS = [f'def {name}(values):\n    """Add up what there is."""' for name in "fg"]


def code_of(source, **options):
    return list(code_pieces(source.split("\n"), ast.parse(source), **options))


@pytest.mark.parametrize("opening", ['"""', "r'''", '"""\n    '])
def test_a_long_docstring_keeps_its_first_paragraph(opening):
    closing = opening[-3:] if not opening[-1].isspace() else '"""'
    source = (
        f"def f(values):\n    {opening}One line\n    and another.\n\n    More.\n\n    And more.\n    {closing}" + BODY
    )
    [(whole, body)] = code_of(source)
    assert whole + body == source.rstrip()
    [(short, same_body)] = code_of(source, max_docstring_lines=4)
    assert short == f"def f(values):\n    {opening}One line\n    and another.{closing}"
    assert same_body == body
    assert code_of(source, max_docstring_lines=20) == [(whole, body)]


def test_a_long_docstring_of_one_paragraph_stays():
    source = 'def f(values):\n    """One\n    two\n    three\n    four\n    """' + BODY
    assert code_of(source, max_docstring_lines=2) == code_of(source)


def test_prose_is_what_reads_like_prose():
    plain = "Return what was asked for, in the order\nin which it was asked for."
    others = [">>> f(1)\nNone of what follows is prose", "| 1 | 2 |\n| 3 | 4 |", "x = [a[0], b[1]]", "\ud800 half", ""]
    assert plain_paragraphs("\n\n".join([plain, *others, plain])) == f"{plain}\n\n{plain}"


def thinned(files_of):
    """Finds one in five of the files of the largest split, and all others."""

    def find(*arguments):
        by_split = {
            is_train: [f for f in files_of(*arguments) if is_trained(f) is is_train] for is_train in (True, False)
        }
        return sorted(by_split[False] + by_split[True][::5], key=lambda file: file.key)

    return find


def is_trained(file):
    return split_of(f"file:{file.key}") == "train"


@pytest.fixture(scope="module")
def mixed():
    corpus._mixed.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("library_files", "package_files"):
            patch.setattr(corpus, name, thinned(getattr(corpus, name)))
        yield {
            (workload, split): list(documents(workload, split, packages=PACKAGES))
            for workload in ("code", "prose")
            for split in SPLITS
        }
    corpus._mixed.cache_clear()


PACKAGES = ("networkx", "hypothesis")


@pytest.mark.parametrize("workload", ["code", "prose"])
def test_no_completion_is_in_two_splits_and_no_document_twice(mixed, workload):
    for split in SPLITS:
        found = mixed[workload, split]
        assert {split_of(document.key) for document in found} == {split}
        assert len({document.text for document in found}) == len(found) > 100
        assert {document.package for document in found} <= {"python", *PACKAGES}
    by_split = [{" ".join(d.completion.split()) for d in mixed[workload, split]} for split in SPLITS]
    assert sum(map(len, by_split)) == len(set.union(*by_split))
    assert {document.package for document in mixed[workload, "train"][:200]} == {"python", *PACKAGES}


def test_the_summary_says_what_was_dropped(mixed):
    found = summary(PACKAGES)
    for workload in ("code", "prose"):
        train, facts = mixed[workload, "train"], found[workload]
        assert facts["num_documents"] == len(train)
        assert facts["num_characters"] == sum(len(document.text) for document in train)
        assert sum(facts["num_characters_by_package"].values()) == facts["num_characters"]
        assert facts["num_dropped_repeated"] > 0
        assert facts["num_dropped_of_other_split"] > 0


@pytest.mark.parametrize("workload", ["code", "prose"])
def test_prompts_of_packages_vary_in_length_and_origin(mixed, workload):
    found = prompts(workload, 40, packages=PACKAGES)
    assert found[:7] == prompts(workload, 7, packages=PACKAGES)
    assert set(found) <= set(mixed[workload, "heldout"])
    bounds = (50, 110, 200, 340, 560)
    classes = [sum(bound <= len(document.prompt) for bound in bounds) for document in found]
    assert classes[:8] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert {document.package for document in found[:8]} == {"python", *PACKAGES}
    assert all(len(document.completion) >= 300 for document in found)
    with pytest.raises(TraceError, match="prompts wanted"):
        prompts(workload, 100_000, packages=PACKAGES)


def test_packages_change_nothing_about_arithmetic():
    with_packages = islice(documents("arithmetic", seed=3, packages=PACKAGES), 50)
    assert list(with_packages) == list(islice(documents("arithmetic", seed=3), 50))
    assert prompts("arithmetic", 5, packages=PACKAGES) == prompts("arithmetic", 5)
