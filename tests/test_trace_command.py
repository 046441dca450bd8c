import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from commands import interruptible
from llada2_models import save_tiny_checkpoint

from experiments import trace as command
from tracer import decode_dinfer, prompts
from tracer.doctor import check
from tracer.prompts import read_prompts
from tracer.recover import recover
from tracer.schema import ForwardKind, TraceError
from tracer.shipped import find_model
from tracer.store import TraceReader

FAST = ["decode.gen_length=20", "decode.threshold=0.1"]
PROMPTS = ["Sam has 3 pens.", "How many pens and pens and pens and pens are there? 12 + 30 =", "12"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def workplace(tmp_path, monkeypatch, checkpoint):
    """An empty working directory with a model and prompts, and the command to run in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(checkpoint)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return tmp_path


@pytest.fixture
def oled_trace(workplace, monkeypatch, capsys):
    """Runs the command within this process; a subprocess would import PyTorch again for every case."""

    def run(*arguments, model="tiny", prompts="prompts.txt", output="out.trace"):
        given = {"model": model, "prompts": prompts, "output.trace": output}
        overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
        monkeypatch.setattr(sys, "argv", ["oled-trace", *overrides, *arguments])
        try:
            command.main()
        except SystemExit as exit_:
            return exit_.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_traces_prints_texts_and_a_summary(workplace, oled_trace):
    code, out, err = oled_trace(*FAST)
    assert (code, err) == (0, "")
    reader = TraceReader(workplace / "out.trace")
    passes = list(reader)
    assert reader.num_requests == 3
    assert reader.metadata.source == "model:tiny"
    assert reader.metadata.gate_dtype == "float16"
    assert reader.metadata.details["engine"] == "oledsim"
    assert len(reader.metadata.details["checkpoint_hash"]) == 64
    shards = sorted(path.name for path in (workplace / "tiny").glob("*.safetensors"))
    assert sorted(reader.metadata.details["checkpoint"]["shards"]) == shards
    assert reader.metadata.details["checkpoint"]["total_size"] > 0
    assert "training" not in reader.metadata.details
    assert [f"--- line {n}: 20 tokens" in out for n in (1, 2, 3)] == [True] * 3
    decode = [item for item in passes if item.kind != ForwardKind.PREFILL]
    accepted = sum(int(item.num_accepted[0]) for item in passes)
    summary = {line[:20].strip(): line[20:] for line in out.splitlines()[-5:]}
    assert summary["trace"] == "out.trace (model:tiny)"
    assert summary["forwards"].startswith(f"{len(passes)}: prefill 3, denoise ")
    assert summary["tokens per forward"].startswith(f"{accepted / len(decode):.2f} ({accepted} accepted")
    assert " of 48 in a denoise forward (layer 1: " in summary["activated experts"]
    assert "floor between unrelated requests: 0." in summary["adjacent overlap"]
    assert files(workplace)[:3] == ["out.trace", "out.trace/forwards.parquet", "out.trace/routing.parquet"]
    assert not [name for name in files(workplace) if name.startswith((".", "outputs"))]


def test_facts_of_the_training_reach_the_trace(workplace, oled_trace, checkpoint):
    facts = {"config": "tiny", "minutes": 1.5, "device": "cpu", "steps": 7, "million_tokens": 0.1, "seed": 0}
    shutil.copytree(checkpoint, workplace / "trained")
    (workplace / "trained" / "training.json").write_text(json.dumps(facts))
    assert oled_trace(*FAST, "max_prompts=1", model="trained")[0] == 0
    assert TraceReader(workplace / "out.trace").metadata.details["training"] == facts


def test_damaged_facts_of_the_training_are_refused(workplace, oled_trace, checkpoint):
    shutil.copytree(checkpoint, workplace / "trained")
    (workplace / "trained" / "training.json").write_text("{")
    refused(workplace, oled_trace, "trained/training.json: is not JSON", *FAST, model="trained")


def keys_of(schema, prefix=""):
    for field in fields(schema):
        nested = field.default_factory
        if is_dataclass(nested):
            yield from keys_of(nested, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_help_lists_every_key(oled_trace):
    code, out, err = oled_trace("--help", model=None, prompts=None, output=None)
    assert (code, err) == (0, "")
    listed = [line.split()[0] for line in out.splitlines() if re.match(r"[a-z_.]+  +\S", line)]
    assert sorted(listed) == sorted(keys_of(command.Trace))
    assert max(map(len, out.splitlines())) <= 80


def test_options_reach_the_trace(workplace, oled_trace):
    (workplace / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": 42}) + "\n" for text in PROMPTS)
    )
    code, out, _ = oled_trace(
        *FAST,
        "decode.block_length=8",
        "decode.early_stop=false",
        "gate_dtype=uint8",
        "signals=true",
        "max_prompts=1",
        "dtype=bfloat16",
        prompts="prompts.jsonl",
        output="made/here/out.trace",
    )
    assert code == 0
    assert "floor between unrelated requests: needs two requests" in out
    reader = TraceReader(workplace / "made/here/out.trace")
    assert (reader.num_requests, reader.has_signals, reader.metadata.gate_dtype) == (1, True, "uint8")
    assert reader.metadata.decode["block_length"] == 8
    assert reader.metadata.decode["early_stop"] is False
    assert reader.metadata.details["dtype"] == "bfloat16"
    assert {len(item.positions) for item in reader if item.blocks[0] >= 0} == {8}


@pytest.mark.parametrize(
    ("gate_dtype", "block_length", "signals"),
    [("float16", 16, "false"), ("uint8", 1, "true"), ("float32", 4, "true"), ("float16", 64, "true")],
)
def test_the_doctor_finds_nothing(workplace, oled_trace, gate_dtype, block_length, signals):
    chosen = [f"gate_dtype={gate_dtype}", f"decode.block_length={block_length}", f"signals={signals}"]
    assert oled_trace(*FAST, *chosen)[0] == 0
    report = check(workplace / "out.trace")
    assert report.findings == []
    assert report.num_forwards["prefill"] == 3
    assert report.num_pairs == report.num_tokens * 3 * 4


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("hf20", ["decode.sampler=stock", "decode.seed=3"]),
        ("hf21", ["decode.edit_threshold=0.1", "decode.mask_mode=soft01", "decode.max_post_steps=2"]),
        ("sglang_joint_threshold", ["decode.always_commit=false"]),
    ],
)
def test_loops_of_the_engines_side_by_side(workplace, oled_trace, loop, options):
    code, out, err = oled_trace(*FAST, "decode.gen_length=10", f"decode.loop={loop}", "decode.batch=2", *options)
    assert (code, err) == (0, "")
    assert [f"--- line {n}: " in out for n in (1, 2, 3)] == [True] * 3
    reader = TraceReader(workplace / "out.trace")
    assert max(len(item.requests) for item in reader) == 2
    assert reader.metadata.decode["loop"] == loop
    for option in options:
        key, value = option.removeprefix("decode.").split("=")
        found = reader.metadata.seed if key == "seed" else reader.metadata.decode[key]
        assert str(found).lower() == value
    assert check(workplace / "out.trace").findings == []


def test_prompts_as_messages_of_a_user(workplace, oled_trace, checkpoint):
    shutil.copytree(checkpoint, workplace / "chatty")
    template = "pens: {{ messages[0].content }}{% if add_generation_prompt %} = {% endif %}"
    (workplace / "chatty" / "chat_template.jinja").write_text(template)
    (workplace / "plain.txt").write_text("".join(f"pens: {text} = \n" for text in PROMPTS))
    assert oled_trace(*FAST, "chat=true", model="chatty")[0] == 0
    assert oled_trace(*FAST, model="chatty", prompts="plain.txt", output="plain.trace")[0] == 0
    chat, plain = TraceReader(workplace / "out.trace"), TraceReader(workplace / "plain.trace")
    for one, other in zip(chat, plain, strict=True):
        assert one.token_ids_in.tolist() == other.token_ids_in.tolist()
    assert len(chat.metadata.details["chat_template"]) == 64
    assert "chat_template" not in plain.metadata.details


def test_a_trace_is_replaced_only_on_request(workplace, oled_trace):
    assert oled_trace(*FAST)[0] == 0
    first = TraceReader(workplace / "out.trace").metadata.content_hash
    code, _, err = oled_trace(*FAST, "max_prompts=1")
    assert (code, err) == (2, "oled-trace: error: out.trace: exists already; output.overwrite=true replaces a trace\n")
    assert TraceReader(workplace / "out.trace").metadata.content_hash == first
    assert oled_trace(*FAST, "max_prompts=1", "output.overwrite=true")[0] == 0
    assert TraceReader(workplace / "out.trace").num_requests == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.jsonl: the file is empty"),
        (b'{"prompt": "a"}\n\n', "bad.jsonl, line 2: blank"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', "bad.jsonl, line 2: found keys text, must have the key prompt"),
        (b'{"prompt": "a"}\nwhat\n', "bad.jsonl, line 2: not JSON (Expecting value at column 1)"),
        (b'{"prompt": ' + b"9" * 5000 + b"}\n", "bad.jsonl, line 1: not JSON that can be read (Exceeds the limit"),
        (b"[" * 100_000 + b"\n", "bad.jsonl, line 1: not JSON that can be read (maximum recursion depth"),
        (b'{"prompt": "\\ud800"}\n', "bad.jsonl, line 1: the prompt holds half a character"),
        (b'["a"]\n', "bad.jsonl, line 1: found a JSON list"),
        (b'{"prompt": 7}\n', "bad.jsonl, line 1: found prompt of type int"),
        (b'{"prompt": "  "}\n', "bad.jsonl, line 1: the prompt is blank"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "bad.jsonl: not UTF-8 text at byte 28"),
        (b'{"prompt": "see <|mask|> here"}\n', "bad.jsonl, line 1: the prompt holds the mask token"),
        (
            b'{"prompt": "a"}\n{"prompt": "' + b"7 " * 150 + b'"}\n',
            "bad.jsonl, line 2: the prompt has 300 tokens, must be 1 to 236",
        ),
    ],
)
def test_bad_prompts(workplace, oled_trace, content, message):
    (workplace / "bad.jsonl").write_bytes(content)
    refused(workplace, oled_trace, message, *FAST, prompts="bad.jsonl")


@pytest.mark.parametrize(
    ("overrides", "given", "message"),
    [
        ([], {"prompts": "none.txt"}, "none.txt: No such file or directory"),
        ([], {"prompts": "tiny"}, "tiny: Is a directory"),
        ([], {"prompts": None}, "prompts: must be given as prompts=VALUE"),
        ([], {"model": None}, "model: must be given as model=VALUE"),
        ([], {"output": None}, "output.trace: must be given as output.trace=VALUE"),
        (
            [],
            {"model": "nothing-here"},
            "model 'nothing-here': no such directory, nor a shipped model; allowed: proxy-tiny",
        ),
        ([], {"model": "."}, ".: no config.json; a checkpoint directory holds"),
        (["max_prompts=0"], {}, "max_prompts 0: must be at least 1"),
        (["gate_dtype=int3"], {}, "gate_dtype 'int3': allowed are float32, float16, uint8"),
        (["dtype=int8"], {}, "dtype 'int8': allowed are auto, float32, bfloat16, float16"),
        (["experts=disk"], {}, "experts 'disk': allowed are auto, memory, mapped"),
        (["device=tpu"], {}, "device 'tpu': this machine has cpu"),
        (["decode.block_length=0"], {}, "block_length 0: must be at least 1"),
        (["decode.gen_length=0"], {}, "gen_length 0: must be at least 1"),
        (["decode.gen_length=256"], {}, "gen_length 256: must leave room for a prompt in the model's 256 positions"),
        (["decode.threshold=2"], {}, "threshold 2.0: must be from 0 to 1"),
        (["decode.loop=autoregressive"], {}, "decode loop 'autoregressive': allowed: dinfer, hf20, "),
        (["decode.block_length=many"], {}, "decode.block_length: "),
        (["decode.batch=33"], {}, "batch 33: must be from 1 to 32"),
        (["decode.temperature=-1"], {}, "temperature -1.0: must be a number, 0 or more"),
        (["decode.edit_threshold=0.5"], {}, "edit_threshold 0.5: the loop dinfer has no such setting, only hf21, "),
        (["decode.loop=hf21", "decode.mask_mode=hard"], {}, "mask_mode 'hard': allowed: strict, soft01"),
        (["decode.steps=few"], {}, "decode.steps: Value 'few' of type 'str' could not be converted"),
        (["chat=true"], {}, "tiny: no chat_template.jinja, and no chat_template in tokenizer_config.json; chat=true"),
        (["decode.blocklength=8"], {}, "decode.blocklength: no such key; did you mean block_length?"),
        (["decode.block_length=257"], {}, "block_length 257: must be at most the model's 256 positions"),
        (
            ["decode.block_length=100", "decode.gen_length=200"],
            {},
            "gen_length 200: must leave room for a prompt in the model's 256 positions, 200 of them in whole blocks",
        ),
        (["+foo=1"], {}, "foo: no such key; allowed: model, prompts, "),
        (["+decode.treshold=0.5"], {}, "decode.treshold: no such key; did you mean threshold?"),
        (["+output.traces=x"], {}, "output.traces: no such key; did you mean trace?"),
        ([], {"prompts": "/dev/zero"}, "/dev/zero: a line of more than 64 MiB; prompts is a file"),
        (["-m"], {"model": "tiny,", "output": "a.trace"}, "model=tiny,: cannot be read"),
        (["-m", "decode.threshold=0.5,x"], {}, "decode.threshold: Value 'x' of type 'str' could not be converted"),
        ([], {"output": "prompts.txt"}, "prompts.txt: exists already"),
        (["output.overwrite=true"], {"output": "prompts.txt"}, "prompts.txt: is not a trace"),
        ([], {"output": "prompts.txt/out.trace"}, "prompts.txt/out.trace: "),
        (
            [],
            {"output": "nope/../out.trace"},
            "nope/../out.trace: no directory nope/..; one named with .. must be there",
        ),
    ],
)
def test_bad_settings(workplace, oled_trace, overrides, given, message):
    refused(workplace, oled_trace, message, *overrides, **given)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors.index.json", "broken: no model.safetensors.index.json"),
        ("tokenizer.json", "broken/tokenizer.json: no such file"),
    ],
)
def test_incomplete_checkpoint(workplace, oled_trace, checkpoint, file, message):
    shutil.copytree(checkpoint, workplace / "broken")
    (workplace / "broken" / file).unlink()
    refused(workplace, oled_trace, message, *FAST, model="broken")


def test_a_tokenizer_of_another_model(workplace, oled_trace, checkpoint):
    shutil.copytree(checkpoint, workplace / "mixed")
    (workplace / "mixed" / "generation_config.json").write_text('{"mask_token_id": 5}')
    refused(
        workplace,
        oled_trace,
        "in the tokenizer, mask_token_id of generation_config.json says 5; the tokenizer must be the model's",
        *FAST,
        model="mixed",
    )


def test_a_model_in_the_cache_of_a_hub_has_its_own_name(workplace, oled_trace, checkpoint):
    snapshot = workplace / "hub" / "models--inclusionAI--LLaDA2.1-mini" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoint)
    assert oled_trace(*FAST, "max_prompts=1", model=str(snapshot))[0] == 0
    assert TraceReader(workplace / "out.trace").metadata.source == "model:LLaDA2.1-mini"


def refused(directory, run, message, *overrides, **given):
    """One line that says what was wrong, exit code 2, and nothing written."""
    before = files(directory)
    code, out, err = run(*overrides, **given)
    assert code == 2
    assert out == ""
    assert err.startswith("oled-trace: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert files(directory) == before


def test_a_decode_error_leaves_nothing(workplace, oled_trace, monkeypatch):
    def stall(confidence, eligible, threshold):
        return eligible & False

    monkeypatch.setattr("tracer.decode_dinfer.accept_threshold", stall)
    refused(workplace, oled_trace, "request 0, block 0, iteration 1: nothing can be accepted", *FAST)


def test_a_decode_error_leaves_the_requests_that_were_finished(workplace, oled_trace, monkeypatch):
    accept, seen = decode_dinfer.accept_threshold, []

    def stall(confidence, eligible, threshold):
        seen.append(eligible.sum())
        return accept(confidence, eligible, threshold) if len(seen) < 40 else eligible & False

    monkeypatch.setattr(decode_dinfer, "accept_threshold", stall)
    (workplace / "prompts.txt").write_text("Sam has 3 pens.\n" * 40)
    code, out, err = oled_trace(*FAST)
    assert (code, out) == (2, "")
    kept, error = err.splitlines()
    assert kept == (
        "oled-trace: requests that were finished are kept: `oled-doctor --recover out.trace` makes a trace of them"
    )
    request = int(re.match(r"oled-trace: error: request (\d+), block 0", error)[1])
    assert recover(workplace / "out.trace").num_requests == request > 0
    assert check(workplace / "out.trace").ok


def test_bad_input_in_a_process_of_its_own(workplace):
    before = files(workplace)
    (workplace / "prompts.txt").write_text("")
    line = [sys.executable, "-m", "experiments.trace", "model=tiny", "prompts=prompts.txt", "output.trace=out.trace"]
    done = subprocess.run(line, cwd=workplace, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "oled-trace: error: prompts.txt: the file is empty, one prompt a line is needed\n"
    assert files(workplace) == before


def test_an_interrupt_leaves_no_trace(workplace, oled_trace, monkeypatch):
    def interrupted(*_):
        assert list(workplace.glob(".out.trace.partial-*"))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(decode_dinfer, "accept_threshold", interrupted)
    before = files(workplace)
    with interruptible():
        assert oled_trace(*FAST) == (130, "", "oled-trace: interrupted\n")
    assert files(workplace) == before


def test_plain_text_and_json_lines_give_the_same_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("one\r\n two \n", newline="")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"id": 1, "prompt": "one"}\n{"prompt": " two "}')
    assert read_prompts(tmp_path / "a.txt") == read_prompts(tmp_path / "a.jsonl") == [(1, "one"), (2, " two ")]
    assert read_prompts(tmp_path / "a.txt", 1) == [(1, "one")]


def test_no_more_is_read_than_is_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\rtwo\r\nthree\n\xff")
    assert [prompt.text for prompt in read_prompts(path, 3)] == ["one", "two", "three"]
    with pytest.raises(TraceError, match=r"a\.txt: not UTF-8 text at byte 18"):
        read_prompts(path)
    path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(TraceError, match=r"a\.txt: the file is empty"):
        read_prompts(path)
    path.write_text("one\n" * (2 << 18))
    monkeypatch.setattr(prompts, "MOST_BYTES", 1 << 20)
    assert len(read_prompts(path, 100)) == 100
    with pytest.raises(TraceError, match=r"a\.txt: a file of more than 1 MiB"):
        read_prompts(path)


def test_line_separators_within_a_prompt_do_not_split_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n')
    assert read_prompts(path) == [(1, "one\u2028two")]


def test_a_model_is_found_by_path_and_a_shipped_one_by_its_plain_name(checkpoint, tmp_path, monkeypatch):
    assert find_model(str(checkpoint)) == Path(checkpoint)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proxy-tiny").mkdir()
    assert (find_model("proxy-tiny") / "config.json").is_file()
    assert find_model("./proxy-tiny") == Path("proxy-tiny")
    for name in ("nothing-here", "", "../data/proxy-tiny"):
        with pytest.raises(TraceError, match=f"^model '{name}': no such directory, nor a shipped model; "):
            find_model(name)
