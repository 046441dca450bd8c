"""Prompts to trace: read from a JSONL or plain text file, and turned into token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tracer.decode_settings import DecodeSettings
from tracer.llada2_config import LLaDA2Config
from tracer.schema import TraceError
from tracer.tokenizer import Tokenizer

LONGEST_LINE = 64 << 20  # bytes
MOST_BYTES = 1 << 30


class Prompt(NamedTuple):
    """One prompt and the line of its file, from 1."""

    line: int
    text: str


def read_prompts(path: Path, max_prompts: int | None = None) -> list[Prompt]:
    """Read one prompt a line: in a .jsonl, .ndjson or .json file the key `prompt` of each object, else the line itself.

    Args:
        path: UTF-8 text. Other keys of a JSON line are ignored; no line may be blank.
        max_prompts: how many to take from the start; all by default. Lines after them are not looked at.

    Raises:
        TraceError: the file cannot be read or is empty, or a line holds no prompt.
    """
    is_json = path.suffix in (".jsonl", ".ndjson", ".json")
    prompts: list[Prompt] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file, path), start=1):
                if not line.strip():
                    raise TraceError(f"{path}, line {number}: blank, each line must hold a prompt")
                prompts.append(Prompt(number, _json_prompt(line, f"{path}, line {number}") if is_json else line))
                if len(prompts) == max_prompts:
                    break
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; prompts is a file with one prompt a line") from error
    if not prompts:
        raise TraceError(f"{path}: the file is empty, one prompt a line is needed")
    return prompts


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    """Lines one by one, so that none is read that is not needed; files without an end are refused."""
    num_bytes = 0
    while raw := file.readline(LONGEST_LINE + 1):
        if len(raw) > LONGEST_LINE or num_bytes + len(raw) > MOST_BYTES:
            what, most = ("line", LONGEST_LINE) if len(raw) > LONGEST_LINE else ("file", MOST_BYTES)
            raise TraceError(
                f"{path}: a {what} of more than {most >> 20} MiB; prompts is a file with one prompt a line"
            )
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: not UTF-8 text at byte {num_bytes + error.start}") from None
        text = text.removeprefix("\ufeff") if num_bytes == 0 else text
        num_bytes += len(raw)
        if text:  # not splitlines: JSON may hold other separators as they are
            yield from text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, config: LLaDA2Config, settings: DecodeSettings, where: str
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        prompts: what to encode.
        tokenizer: of the model.
        config: of the model, for its limits.
        settings: how the prompts will be answered.
        where: name of the prompts' file, for errors.

    Raises:
        TraceError: the tokenizer is not this model's, or a prompt has no token, holds the mask, or leaves no room
            for its answer.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise TraceError(
            f"tokenizer of {tokenizer.vocab_size} tokens: must be the model's, which knows {config.vocab_size} at most"
        )
    whole_blocks = config.max_position_embeddings // settings.block_length * settings.block_length
    longest = whole_blocks - settings.gen_length
    if whole_blocks == 0:
        raise TraceError(
            f"block_length {settings.block_length}: must be at most the model's {config.max_position_embeddings} positions"
        )
    if longest < 1:
        blocks = "" if whole_blocks == config.max_position_embeddings else f", {whole_blocks} of them in whole blocks"
        raise TraceError(
            f"gen_length {settings.gen_length}: must leave room for a prompt in the model's "
            f"{config.max_position_embeddings} positions{blocks}"
        )
    encoded = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        if not 1 <= len(ids) <= longest:
            raise TraceError(
                f"{where}, line {prompt.line}: the prompt has {len(ids)} tokens, must be 1 to {longest} "
                f"(max_position_embeddings {config.max_position_embeddings} in whole blocks, less gen_length {settings.gen_length})"
            )
        if settings.mask_id in ids:
            raise TraceError(
                f"{where}, line {prompt.line}: the prompt holds the mask token, which stands for text to be written"
            )
        encoded.append(ids)
    return encoded


def _json_prompt(line: str, where: str) -> str:
    """The prompt of one JSON line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many brackets
        raise TraceError(f"{where}: not JSON that can be read ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: found a JSON {type(record).__name__}, must be an object with the key prompt")
    text = record.get("prompt")
    if not isinstance(text, str):
        found = (
            f"keys {', '.join(record) or 'none'}" if "prompt" not in record else f"prompt of type {type(text).__name__}"
        )
        raise TraceError(f"{where}: found {found}, must have the key prompt with a text")
    if not text.strip():
        raise TraceError(f"{where}: the prompt is blank")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TraceError(f"{where}: the prompt holds half a character (a lone surrogate)")
    return text
