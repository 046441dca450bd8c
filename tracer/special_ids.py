"""Whether a tokenizer is the model's: the ids of mask and end of text, as far as the checkpoint says them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracer.checkpoint_layout import CONFIG_NAME, read_file
from tracer.llada2_config import SPECIAL_IDS, LLaDA2Config
from tracer.records import read_object
from tracer.schema import TraceError
from tracer.tokenizer import Tokenizer

GENERATION_NAME = "generation_config.json"
# Released models say neither id in their files: they are defaults of the released generate().
RELEASED_VOCAB = 157184
RELEASED_IDS = {"mask": 156895, "eos": 156892}


def check_special_ids(directory: Path, config: LLaDA2Config, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose mask or end of text has another id than the model's.

    Raises:
        TraceError: It has; or generation_config.json is damaged.
    """
    tokens = {"mask": (tokenizer.mask_token, tokenizer.mask_id), "eos": (tokenizer.eos_token, tokenizer.eos_id)}
    for where, role, asked in _asked(directory, config):
        token, found = tokens[role]
        allowed = asked if isinstance(asked, list) else [asked]
        if asked is not None and found not in allowed:
            raise TraceError(
                f"{directory}: {token} has id {found} in the tokenizer, {where} says {', '.join(map(str, allowed))}; "
                "the tokenizer must be the model's"
            )


def _asked(directory: Path, config: LLaDA2Config) -> Iterator[tuple[str, str, Any]]:
    """Where an id is said, of which token, and the id or ids."""
    files = {CONFIG_NAME: read_file(directory / CONFIG_NAME)}
    if (directory / GENERATION_NAME).is_file():
        files[GENERATION_NAME] = read_object(directory / GENERATION_NAME)
    for name, values in files.items():
        for key, role in SPECIAL_IDS.items():
            yield f"{key} of {name}", role, values.get(key)
    if config.vocab_size == RELEASED_VOCAB:
        for role, token_id in RELEASED_IDS.items():
            yield "the released generate()", role, token_id
