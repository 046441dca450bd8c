import json
import os
from pathlib import Path

import pytest

from tracer.chat import ChatTemplate, load_chat_template, render_prompts
from tracer.prompts import Prompt
from tracer.schema import TraceError

SHORT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def save(directory, template=None, **config):
    values = {"eos_token": "<|endoftext|>", **config}
    if template is not None:
        values["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def test_a_prompt_becomes_a_users_message(tmp_path):
    template = load_chat_template(save(tmp_path, SHORT))
    prompts = render_prompts(template, [Prompt(1, "How many?"), Prompt(2, " {{ 1 }} ")])
    assert prompts == [(1, "<user>How many?<answer>"), (2, "<user> {{ 1 }} <answer>")]


def test_special_tokens_have_their_names_in_a_template(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"mask_token": {"content": "<|mask|>"}}')
    template = load_chat_template(
        save(tmp_path, "{{ eos_token }}{{ mask_token }}{{ bos_token }}{{ messages[0].content }}")
    )
    assert template.render("x") == "<|endoftext|><|mask|>x"


def test_whitespace_of_blocks_is_dropped_as_transformers_does(tmp_path):
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert load_chat_template(save(tmp_path, source)).render("x") == "x\n"


def test_json_of_a_template_escapes_nothing(tmp_path):
    source = "{{ messages | tojson }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert load_chat_template(save(tmp_path, source)).render("<é>") == '[{"role": "user", "content": "<é>"}]01'


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path):
    save(tmp_path, SHORT)
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert load_chat_template(tmp_path).render("x") == "file: x"


def test_of_several_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    assert load_chat_template(save(tmp_path, named)).render("x") == "x!"


@pytest.mark.parametrize("template", [None, 7, [], [{"name": "tools", "template": "x"}], [{"name": "default"}]])
def test_a_checkpoint_without_a_template_is_refused(tmp_path, template):
    message = "no chat_template.jinja, and no chat_template in tokenizer_config.json; chat=true needs"
    with pytest.raises(TraceError, match=message):
        load_chat_template(save(tmp_path, template))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TraceError, match=message):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "the chat template fails: Expected an expression"),
        ("{{ raise_exception('roles must take turns') }}", "the chat template fails: roles must take turns"),
        ("{{ messages[0].content.x.y }}", "the chat template fails: 'str object' has no attribute 'x'"),
        ("{{ 1 / 0 }}", "the chat template fails: division by zero"),
        ("{% for i in range(10000000) %}{% endfor %}", "the chat template fails: Range too big"),
        ("{% generation %}{% endgeneration %}", "the chat template fails: Encountered unknown tag 'generation'"),
    ],
)
def test_a_template_that_fails_is_one_clear_line(tmp_path, source, message):
    with pytest.raises(TraceError) as raised:
        load_chat_template(save(tmp_path, source)).render("x")
    assert str(raised.value).startswith(f"{tmp_path}/tokenizer_config.json: {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_reaches_nothing_outside(source):
    template = ChatTemplate(source, {}, "here")
    with pytest.raises(
        TraceError, match=r"^here: the chat template fails: access to attribute '\w+' of '\w+' object is unsafe"
    ):
        template.render("x")


def test_a_template_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"abc\xff")
    with pytest.raises(TraceError, match=r"chat_template\.jinja: not UTF-8 text at byte 3"):
        load_chat_template(tmp_path)


@pytest.mark.skipif("OLEDSIM_CHECKPOINTS" not in os.environ, reason="needs the real tokenizer_config.json")
def test_llada2_0_minis_own_template():
    template = load_chat_template(Path(os.environ["OLEDSIM_CHECKPOINTS"]) / "llada2.0-mini")
    assert template.render("Why is the sky blue?") == (
        "<role>SYSTEM</role>detailed thinking off<|role_end|>"
        "<role>HUMAN</role>Why is the sky blue?<|role_end|><role>ASSISTANT</role>"
    )
