"""`routed_experts` of vLLM and SGLang as traces: their shapes and types, and what they do when capture fails."""

import base64
import gzip
import json
import sys

import numpy as np
import pytest
from commands import command
from engines import NUM_EXPERTS, NUM_LAYERS, TOP_K, as_bytes, as_npy, routed, sglang_answer, vllm_answer, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.import_command import main
from tracer.doctor import check
from tracer.import_engines import Given, read_sglang, read_vllm
from tracer.import_forwards import forwards_of
from tracer.import_shape import shape_of_config
from tracer.schema import ForwardKind, ModelShape, TraceError
from tracer.store import TraceReader

EXPERTS = ("--experts", str(NUM_EXPERTS))


@pytest.fixture
def oled_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: command(lambda: sys.exit(main(list(words))))


@pytest.fixture
def as_json(tmp_path):
    """Writes a value to a file."""

    def write(value):
        path = tmp_path / "value.json"
        path.write_text(json.dumps(value))
        return path

    return write


def assert_holds(reader, arrays, num_prompts):
    """The trace holds these rows, the dense layer left out: the prompt at once, then token by token."""
    passes = list(reader)
    assert reader.num_requests == len(arrays)
    at = 0
    for request, (array, num_prompt) in enumerate(zip(arrays, num_prompts, strict=True)):
        prompt, *decoded = passes[at : at + len(array) - num_prompt + 1]
        at += 1 + len(decoded)
        ids = np.sort(array[:, 1:].astype(np.int64), axis=-1)
        np.testing.assert_array_equal(prompt.expert_ids, ids[:num_prompt].transpose(1, 0, 2))
        assert (prompt.kind, prompt.kv_lens[0], prompt.num_accepted[0]) == (ForwardKind.PREFILL, 0, 0)
        for number, pass_ in enumerate(decoded):
            np.testing.assert_array_equal(pass_.expert_ids[:, 0], ids[num_prompt + number])
            assert (pass_.kind, pass_.blocks[0], pass_.num_accepted[0]) == (ForwardKind.DENOISE, number, 1)
            assert pass_.positions[0] == pass_.kv_lens[0] == num_prompt + number
        for pass_ in (prompt, *decoded):
            assert pass_.requests.tolist() == [request]
            assert np.isnan(pass_.gates).all()
            assert np.isnan(pass_.p_argmax).all()
            assert pass_.wall_ns == -1
    assert at == len(passes)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=3),
    st.sampled_from(["uint8", "int16", "int32"]),
)
@settings(max_examples=6, deadline=None)
def test_rows_of_vllm_are_kept_whatever_their_type(tmp_path_factory, sizes, dtype):
    directory = tmp_path_factory.mktemp("t")
    arrays = [routed(prompt + more, seed, dtype) for seed, (prompt, more) in enumerate(sizes)]
    answers = [vllm_answer(array, prompt) for array, (prompt, _) in zip(arrays, sizes, strict=True)]
    path = write_lines(directory / "answers.jsonl", answers)
    finished = command(lambda: sys.exit(main(["vllm", str(path), str(directory / "x.trace"), *EXPERTS])))
    assert (finished.code, finished.err) == (0, "")
    assert "source import:vllm" in finished.out
    assert "null throughout: confidence, gates\n" in finished.out
    reader = TraceReader(directory / "x.trace")
    assert reader.metadata.shape == ModelShape((1, 2, 3, 4), NUM_EXPERTS, TOP_K, hidden=0, expert_intermediate=0)
    assert_holds(reader, arrays, [prompt for prompt, _ in sizes])
    assert next(p.token_ids_in.tolist() for p in reader) == list(range(sizes[0][0]))
    assert check(directory / "x.trace").findings == []


def test_sglang_with_sizes_given(oled_import, tmp_path):
    arrays = [routed(9, 1), routed(12, 2)]
    write_lines(tmp_path / "a.jsonl", [sglang_answer(arrays[0], 4), sglang_answer(arrays[1], 7)])
    finished = oled_import("sglang", "a.jsonl", "x.trace", *EXPERTS)
    assert finished.code == 2
    assert finished.err == (
        "oled-import: error: a.jsonl, line 1: ids have no shape: give --model-config, or --num-layers (all of the "
        "model's) and --top-k\n"
    )
    sizes = ("--num-layers", str(NUM_LAYERS), "--top-k", str(TOP_K))
    finished = oled_import("sglang", "a.jsonl", "x.trace", *EXPERTS, *sizes)
    assert (finished.code, finished.err) == (0, "")
    assert "null throughout: confidence, gates, token_ids" in finished.out
    assert_holds(TraceReader(tmp_path / "x.trace"), arrays, [4, 7])


def test_sglang_says_its_shape_and_type_where_it_does(as_json):
    array = routed(9)
    schema = {"num_layers": NUM_LAYERS, "top_k": TOP_K, "dtype": "int32"}
    meta = {"prompt_tokens": 4, "completion_tokens": 6}
    parts = {"input_expert_ids": as_bytes(array[:3].astype(np.int32)), "output_expert_ids": as_bytes(array[3:].astype(np.int32))}  # fmt: skip
    small = {"routed_experts": as_bytes(array), "routed_experts_dtype": "uint8"}
    openai = {"usage": meta, "choices": [{}], "sglext": {"routed_experts": as_bytes(array.astype(np.int32))}}
    given = Given(num_layers=NUM_LAYERS, top_k=TOP_K)
    for answer in (
        {"meta_info": meta | parts | {"expert_ids_schema": schema}},
        {"meta_info": meta | small},
        openai,
        openai | {"choices": [{"sgl_ext": openai["sglext"]}], "sglext": None},
    ):
        (found,) = read_sglang([as_json(answer)], given)
        np.testing.assert_array_equal(found.expert_ids, array)
        assert (found.num_prompt, found.num_cached) == (4, 0)


def test_arrays_in_files(oled_import, tmp_path):
    array = routed(9)
    np.save(tmp_path / "one.npy", array)
    np.savez(tmp_path / "two.npz", **{"a.prompt": array[:4], "a.output": array[4:], "b": array})
    finished = oled_import("vllm", "one.npy", "x.trace", *EXPERTS)
    assert "one.npy: does not say how many of its tokens are of the prompt: give --prompt-tokens" in finished.err
    finished = oled_import("vllm", "one.npy", "two.npz", "x.trace", "--prompt-tokens", "4", *EXPERTS)
    assert (finished.code, finished.err) == (0, "")
    assert_holds(TraceReader(tmp_path / "x.trace"), [array] * 3, [4] * 3)
    np.save(tmp_path / "evil.npy", np.array([{}], object), allow_pickle=True)
    finished = oled_import("vllm", "evil.npy", "y.trace", "--prompt-tokens", "4", *EXPERTS)
    assert finished.code == 2
    assert "evil.npy: cannot be read as an array" in finished.err


def test_prompt_and_output_apart_as_v0_21_has_them(as_json):
    array = routed(9).astype(np.int16)
    usage = {"prompt_tokens": 4, "completion_tokens": 6}
    answer = {
        "prompt_routed_experts": array[:4].tolist(),
        "choices": [{"routed_experts": array[4:].tolist()}],
        "usage": usage,
    }
    (found,) = read_vllm([as_json(answer)], Given())
    np.testing.assert_array_equal(found.expert_ids, array)
    assert (found.num_prompt, found.num_cached) == (4, 0)
    cached = array.copy()
    cached[:3] = -1  # how it marks what the prefix cache had
    answer["prompt_routed_experts"] = cached[:4].tolist()
    (found,) = read_vllm([as_json(answer)], Given())
    assert found.num_cached == 3
    assert [f.positions.tolist() for f in forwards_of(found)][:2] == [[3], [4]]


def test_bytes_with_shape_beside_and_compressed_lines(as_json, tmp_path):
    array = routed(7)
    answer = vllm_answer(array, 4)
    whole = {"data": as_bytes(array), "shape": list(array.shape), "dtype": "uint8", "start": 0}
    answer["choices"][0]["routed_experts"] = whole
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(answer) + "\n\n")
    (found,) = read_vllm([tmp_path / "a.jsonl.gz"], Given())
    np.testing.assert_array_equal(found.expert_ids, array)
    answer["choices"][0]["routed_experts"] = whole | {"data": as_bytes(array[2:]), "shape": [5, *array.shape[1:]], "start": 2}  # fmt: skip
    (found,) = read_vllm([as_json(answer)], Given())
    assert (found.positions.tolist(), found.num_cached) == ([2, 3, 4, 5, 6], 2)


def test_what_a_prefix_cache_had_is_not_run(as_json):
    (found,) = read_vllm([as_json(vllm_answer(routed(9), 6, cached=4))], Given())
    prompt, *_ = forwards_of(found)
    assert (prompt.positions.tolist(), prompt.kv_len) == ([4, 5], 4)


def test_choices_of_one_prompt_share_its_prefill(as_json):
    answer = vllm_answer(routed(9), 6)
    answer["choices"] *= 2
    one, two = read_vllm([as_json(answer)], Given())
    assert [f.kind for f in forwards_of(one)] == [ForwardKind.PREFILL] + [ForwardKind.DENOISE] * 3
    assert [f.kind for f in forwards_of(two)] == [ForwardKind.DENOISE] * 3
    assert next(forwards_of(two)).kv_len == 6


def spoil(**changes):
    """An answer with ids changed at [row, layer]."""
    array = routed(9)
    for place, ids in changes.values():
        array[place] = ids
    return vllm_answer(array, 4)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (spoil(a=((2, 3), 0)), "position 2, layer 3: all ids are zero, as in a buffer that was never filled: [0, 0, 0, 0]"),
        (spoil(a=((2, 3), [1, 1, 2, 3])), "position 2, layer 3: an expert stands twice in one top-k: [1, 1, 2, 3]"),
        (spoil(a=((5, 1), [1, 2, 3, 24])), "position 5, layer 1: ids must be from 0 to 23: [1, 2, 3, 24]"),
        (spoil(a=((5, 0), [1, 2, 3, 4])), "layer 0 routes to experts, and is none of the 4 MoE layers"),
        (vllm_answer(routed(9), 4) | {"usage": {"completion_tokens": 9}}, "has 9 rows"),
        ({"choices": [{}]}, "has no routed_experts; vLLM gives them with --enable-return-routed-experts"),
        ({"meta_info": {}}, "has no choices; must be an answer of vLLM"),
        ({"choices": [{"routed_experts": "?"}], "usage": {"prompt_tokens": 1}}, "routed_experts cannot be decoded"),
    ],
)  # fmt: skip
def test_what_is_not_sound_is_named_and_nothing_is_written(oled_import, tmp_path, answer, message):
    if message == "has 9 rows":
        answer["choices"][0]["token_ids"] = answer["choices"][0]["token_ids"][:-1]
        message = "routed_experts have 9 rows for 4 tokens of the prompt and 5 generated; needs 8"
    write_lines(tmp_path / "a.jsonl", [vllm_answer(routed(9), 4), answer])
    finished = oled_import("vllm", "a.jsonl", "x.trace", *EXPERTS)
    assert finished.code == 2
    assert finished.err.startswith("oled-import: error: a.jsonl, line 2")
    assert message in finished.err
    assert finished.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_bad_requests_can_be_left_out(oled_import, tmp_path):
    answers = [spoil(a=((2, 3), 0)), *(vllm_answer(routed(9, seed), 4) for seed in range(2)), spoil(a=((2, 3), 0))]
    write_lines(tmp_path / "a.jsonl", answers)
    finished = oled_import("vllm", "a.jsonl", "x.trace", *EXPERTS, "--skip-bad")
    assert finished.code == 0
    head, one, two = finished.err.splitlines()
    assert head == "oled-import: left out 2 of 4 requests:"
    assert one.startswith("  a.jsonl, line 1: position 2, layer 3: all ids are zero")
    assert two.startswith("  a.jsonl, line 4")
    assert_holds(TraceReader(tmp_path / "x.trace"), [routed(9, 0), routed(9, 1)], [4, 4])


def test_an_engine_that_captured_nothing_is_named(oled_import, tmp_path):
    write_lines(tmp_path / "a.jsonl", [vllm_answer(np.zeros_like(routed(9)), 4)])
    finished = oled_import("vllm", "a.jsonl", "x.trace", *EXPERTS)
    assert "no layer holds any expert id but 0 and below: the engine captured nothing" in finished.err


def test_rows_that_repeat_are_errors_when_they_go_on(oled_import, tmp_path):
    array = np.repeat(routed(4), [4, 1, 1, 8], axis=0)
    deep = np.concatenate([array] + [array[:, 1:]] * 4, axis=1)  # 20 layers, as 16 ids of a row prove nothing
    write_lines(tmp_path / "a.jsonl", [vllm_answer(deep, 4)])
    finished = oled_import("vllm", "a.jsonl", "x.trace", *EXPERTS)
    assert finished.code == 1
    assert "error: repeated rows, as in a buffer that never changed" in finished.out  # of the prompt
    assert "warning: equal routing of two inputs, one after the other, 2 times" in finished.out
    assert "error: stale routing, though the input changed, 5 times" in finished.out
    assert "NOT SOUND" in finished.out


CONFIG = {
    "num_hidden_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "hidden_size": 64,
    "moe_intermediate_size": 16, "intermediate_size": 256, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "torch_dtype": "bfloat16", "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


def test_a_config_gives_every_size(oled_import, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_lines(tmp_path / "a.jsonl", [sglang_answer(routed(9), 4)])
    finished = oled_import("sglang", "a.jsonl", "x.trace", "--model-config", "config.json")
    assert (finished.code, finished.err) == (0, "")
    shape = TraceReader(tmp_path / "x.trace").metadata.shape
    assert shape == ModelShape(
        (1, 2, 3, 4), NUM_EXPERTS, TOP_K, 64, 16, gate_scale=2.5, num_shared_experts=1, num_heads=4, num_kv_heads=2,
        head_dim=16, vocab=100, dense_intermediate=256, num_dense_layers=1,
    )  # fmt: skip
    assert shape.expert_bytes() == 3 * 64 * 16 * 2


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2, 3)),  # Mixtral
        ({"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, (1, 3, 5)),
        ({"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [2]}, (0, 1, 3)),
        ({"text_config": {"num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 3}}, (3,)),
    ],
)  # fmt: skip
def test_layers_by_config(as_json, config, layers):
    assert shape_of_config(as_json(config)).layer_ids == layers


def test_a_config_without_experts_is_refused(as_json):
    with pytest.raises(TraceError, match="has none of num_experts, n_routed_experts"):
        shape_of_config(as_json({"num_hidden_layers": 4, "num_experts_per_tok": 2}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "how many experts a layer has is not in the file: give --experts, --model-config or --shape"),
        (("--layers", "1-4"), "--layers stands beside --experts"),
        (("--layers", "4-1", *EXPERTS), "layers '4-1': must be ascending numbers such as 1-19 or 0,2,4-6"),
        (("--layers", "1-9", *EXPERTS), "arrays of 5 layers, and the MoE layers are 1 to 9"),
        (("--shape", "llada2.0-mini"), "arrays of 5 layers, and the MoE layers are 1 to 19"),
        (("--start", "-1", *EXPERTS), "--start is -1, must be 0 or more"),
        (("--start", "2", *EXPERTS), "needs 7, one for each token from position 2 on"),
    ],
)
def test_options_that_do_not_fit_are_named(oled_import, tmp_path, words, message):
    write_lines(tmp_path / "a.jsonl", [vllm_answer(routed(9), 4)])
    finished = oled_import("vllm", "a.jsonl", "x.trace", *words)
    assert finished.code == 2
    assert message in finished.err
    assert finished.err.count("\n") == 1
    assert not (tmp_path / "x.trace").exists()


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"choices": []}', "\xff"])
def test_files_that_are_no_answers(oled_import, tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    finished = oled_import("vllm", "a.json", "x.trace", *EXPERTS)
    assert finished.code == 2
    assert "error: a.json" in finished.err
    assert finished.err.count("\n") == 1
    assert oled_import("vllm", "b.txt", "x.trace", *EXPERTS).code == 2


def test_base64_is_not_unpickled(as_json):
    payload = base64.b64encode(np.array([{}], object).dumps()).decode()
    answer = vllm_answer(routed(9), 4)
    answer["choices"][0]["routed_experts"] = payload
    with pytest.raises(TraceError, match="cannot be decoded"):
        list(read_vllm([as_json(answer)], Given()))
    assert as_npy(routed(1))  # which is what it would have been
