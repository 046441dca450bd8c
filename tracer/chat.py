"""A prompt as the message of a user, by the chat template of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tracer.files import first_line
from tracer.prompts import Prompt
from tracer.records import read_object
from tracer.schema import TraceError
from tracer.tokenizer import special_tokens

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


class ChatTemplate:
    """Renders prompts. Templates come with weights, so they run in a sandbox: no attribute or file of ours is in reach.

    Args:
        source: of the template, in Jinja.
        special: text of the special tokens by role, such as `eos_token`.
        where: the file that holds it, for errors.

    Raises:
        TraceError: the source is no template.
    """

    def __init__(self, source: str, special: dict[str, str], where: str) -> None:
        self._special, self._where = special, where
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._template = self._checked(lambda: environment.from_string(source))
        self.hash = sha256(source.encode()).hexdigest()

    def render(self, text: str) -> str:
        """A conversation of one message by a user, up to where the model's answer begins.

        Raises:
            TraceError: the template fails, or makes nothing of the message.
        """
        messages = [{"role": "user", "content": text}]
        template: Template = self._template
        return self._checked(lambda: template.render(messages=messages, add_generation_prompt=True, **self._special))

    def _checked(self, call: Any) -> Any:
        try:
            return call()
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise TraceError(f"{self._where}: the chat template fails: {first_line(error)}") from error


def load_chat_template(directory: Path) -> ChatTemplate:
    """Read the chat template of a checkpoint directory: `chat_template.jinja`, or the tokenizer's configuration.

    Raises:
        TraceError: there is none, or it is no template.
    """
    path = directory / TEMPLATE_FILE
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens(directory), str(path))
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: not UTF-8 text at byte {error.start}") from None
    path = directory / CONFIG_FILE
    source = read_object(path).get("chat_template") if path.is_file() else None
    if isinstance(source, list):  # several by name
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    if not isinstance(source, str):
        raise TraceError(
            f"{directory}: no {TEMPLATE_FILE}, and no chat_template in {CONFIG_FILE}; chat=true needs the checkpoint's own"
        )
    return ChatTemplate(source, special_tokens(directory), str(path))


def render_prompts(template: ChatTemplate, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, each as a conversation."""
    return [prompt._replace(text=template.render(prompt.text)) for prompt in prompts]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As text for a model: unlike Jinja's own filter, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # of the user, not of Greenwich
