"""What `oled-import` says of files and settings that are not what they should be: one line, and nothing is left."""

import gzip
import io
import json
import warnings
from base64 import b64encode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from engines import NUM_EXPERTS, as_bytes, as_npy, routed, sglang_answer, vllm_answer, write_lines

from experiments.import_command import main

ROWS = routed(6)
EXPERTS = ("--experts", str(NUM_EXPERTS))


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """What the command says when it refuses."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        before = sorted(tmp_path.iterdir())
        with warnings.catch_warnings(action="error"), pytest.raises(SystemExit) as exit_:
            main([*words, "x.trace"])
        said = capsys.readouterr()
        assert exit_.value.code == 2
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert sorted(tmp_path.iterdir()) == before
        return said.err.removeprefix("oled-import: error: ").removesuffix("\n")

    return run


def archive(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def damaged(content, at):
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


WHOLE = archive(**{"a.prompt": ROWS[:3], "a.output": ROWS[3:]})


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.npz", b"PK\x03\x04 nothing", "cannot be read as an array: File is not a zip file"),
        ("a.npz", WHOLE[:-60], "cannot be read as an array: File is not a zip file"),
        ("a.npz", damaged(WHOLE, 200), "cannot be read as an array: Bad CRC-32"),
        ("a.npz", archive(**{"a.prompt": np.array(3), "a.output": ROWS}), "a: is int64 [], must be whole numbers"),
        ("a.npz", archive(a=np.array([{}], object)), "Object arrays cannot be loaded when allow_pickle=False"),
        ("a.npy", b"hello world", "the magic string is not correct"),
    ],
)
def test_arrays_that_are_none(refused, tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    said = refused("vllm", name, *EXPERTS, "--prompt-tokens", "2")
    assert said.startswith(f"{name}: ")
    assert why in said


def test_pickles_are_refused(refused, tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}, 1], object), allow_pickle=True)
    assert "Python objects" in refused("vllm", "a.npy", *EXPERTS, "--prompt-tokens", "2")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"choices": [3]}, "choices must be a list of objects"),
        ({"usage": [1]}, "usage is list, must be an object"),
        ({"usage": {"prompt_tokens_details": 1}}, "prompt_tokens_details is int, must be an object"),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": "a"}}}, "cached_tokens is 'a', must be a whole number"),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 10**30}}}, "cached tokens of a prompt of 3"),
        ({"usage": {"completion_tokens": "4"}}, "completion_tokens is '4', must be a whole number"),
        ({"choices": [{"routed_experts": b64encode(WHOLE).decode()}]}, "the magic string is not correct"),
        ({"choices": [{"routed_experts": {"data": "", "shape": [0], "start": "x"}}]}, "start is 'x', must be a whole"),
        ({"choices": [{"routed_experts": as_npy(ROWS), "token_ids": 5}]}, "token_ids must be a list of token ids"),
        ({"choices": [{"routed_experts": as_npy(ROWS), "token_ids": [1.5]}]}, "token_ids must be a list of token ids"),
        ({"prompt_token_ids": [1 << 40]}, "prompt_token_ids must be a list of token ids"),
    ],
)
def test_values_of_other_types_in_answers_of_vllm(refused, tmp_path, changes, why):
    write_lines(tmp_path / "a.jsonl", [vllm_answer(ROWS, 3, ids=False) | changes])
    said = refused("vllm", "a.jsonl", *EXPERTS, "--prompt-tokens", "3")
    assert said.startswith("a.jsonl, line 1: ")
    assert why in said


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"meta_info": [1]}, "meta_info is list, must be an object"),
        ({"choices": 3}, "choices must be a list of objects"),
        ({"choices": [{"sglext": 3}]}, "sglext is int, must be an object"),
        (sglang_answer(ROWS, 3, expert_ids_schema=3), "expert_ids_schema is int, must be an object"),
        (sglang_answer(ROWS, 3, expert_ids_schema={"num_layers": "3"}), "num_layers is '3', must be a whole number"),
        (sglang_answer(ROWS, 3, prompt_tokens=True), "prompt_tokens is True, must be a whole number"),
        (sglang_answer(ROWS, 3) | {"output_ids": 3, "input_ids": [1]}, "output_ids must be a list of token ids"),
        (sglang_answer(ROWS, 3, routed_experts=[as_bytes(ROWS)]), "routed_experts are no base64"),
    ],
)
def test_values_of_other_types_in_answers_of_sglang(refused, tmp_path, answer, why):
    write_lines(tmp_path / "a.jsonl", [answer])
    assert why in refused("sglang", "a.jsonl", *EXPERTS, "--num-layers", "5", "--top-k", "4", "--prompt-tokens", "3")


def test_damaged_gzip(refused, tmp_path):
    content = gzip.compress(json.dumps(vllm_answer(ROWS, 3)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(content[:20] + b"\xff" * 20 + content[40:])
    assert refused("vllm", "a.jsonl.gz", *EXPERTS).startswith("a.jsonl.gz: cannot be read: ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--start", "99999999999999999999"), "a trace holds positions up to 2147483647"),
        (("--layers", "0-9999999999"), "layers '0-9999999999': must be below 65536"),
    ],
)
def test_numbers_beyond_every_model(refused, tmp_path, words, why):
    np.save(tmp_path / "a.npy", ROWS)
    assert why in refused("vllm", "a.npy", *EXPERTS, "--prompt-tokens", "2", *words)


def test_sizes_of_sglang_are_above_0(refused, tmp_path):
    write_lines(tmp_path / "a.jsonl", [sglang_answer(ROWS, 3)])
    said = refused("sglang", "a.jsonl", *EXPERTS, "--num-layers", "-5", "--top-k", "-4")
    assert said == "--num-layers is -5, must be 1 or more"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"text_config": 3}, "text_config is 3, must be an object"),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers is 10000000000, must be 1 to 65536"),
        ({"first_k_dense_replace": "x"}, "first_k_dense_replace is 'x', must be 0 or more"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, must be a list"),
        ({"num_attention_heads": "x"}, "num_heads is 'x', must be a whole number"),
        ({"num_experts": "8"}, "num_experts is '8', must be a whole number"),
    ],
)
def test_config_of_other_types(refused, tmp_path, changes, why):
    np.save(tmp_path / "a.npy", ROWS)
    config = {"num_experts": 24, "num_experts_per_tok": 4, "num_hidden_layers": 5, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert refused("vllm", "a.npy", "--model-config", "config.json", "--prompt-tokens", "2") == f"config.json: {why}"


TABLE = {"prompt_id": [0, 0], "token_idx": [0, 1], "layer_idx": [1, 1], "selected_experts": [[1, 2], [3, 4]], "phase": ["prefill"] * 2}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"phase": [[1], [1]]}, "column phase is list<element: int64>, must be of text"),
        ({"prompt_id": [[1], [1]]}, "column prompt_id is list<element: int64>, must be of numbers or text"),
        ({"selected_experts": ["1 2", "nan 2"]}, "column selected_experts holds numbers that are not whole"),
        ({"router_scores": [[1e308, 1e308]] * 2}, "gates [1e+308, 1e+308], must be 0 or more, with a sum above 0"),
    ],
)
def test_columns_of_other_types(refused, tmp_path, changes, why):
    pq.write_table(pa.table(TABLE | changes), tmp_path / "a.parquet")
    assert why in refused("table", "--map", "moe-policylang", *EXPERTS, "a.parquet")


def test_a_column_that_is_there_twice(refused, tmp_path):
    (tmp_path / "a.csv").write_text(f"{','.join(TABLE)},phase\n0,0,1,[1 2],prefill,prefill\n")
    said = refused("table", "--map", "moe-policylang", *EXPERTS, "a.csv")
    assert said == "a.csv: has several columns 'phase'; must have one"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"columns": {"position": "", "layer": "b", "expert_ids": "c"}}, "columns.position must name a column"),
        ({"num_prompt": -4}, "num_prompt is -4, must be 0 or more"),
    ],
)
def test_mappings_that_cannot_be(refused, tmp_path, changes, why):
    mapping = {"columns": {"position": "a", "layer": "b", "expert_ids": "c"}} | changes
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(mapping))
    pq.write_table(pa.table(TABLE), tmp_path / "a.parquet")
    assert refused("table", "--map", "map.yaml", *EXPERTS, "a.parquet") == f"map.yaml: {why}"
