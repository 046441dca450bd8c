"""Byte-level BPE tokenizers in the files of a checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tracer.records import read_object
from tracer.schema import TraceError

MASK_TOKEN = "<|mask|>"
EOS_TOKEN = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
_NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer:
    """Text to ids and back, and the ids of the two tokens that decoding needs."""

    def __init__(self, bpe: tokenizers.Tokenizer, mask_token: str, eos_token: str, where: str) -> None:
        self._bpe = bpe
        self.mask_token, self.eos_token = mask_token, eos_token
        self.mask_id, self.eos_id = (_id_of(bpe, token, where) for token in (mask_token, eos_token))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. A model's embedding may have more rows."""
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is put before or after it."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, on all cores."""
        return [found.ids for found in self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens are left out."""
        return self._bpe.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a checkpoint directory."""
        self._bpe.save(str(directory / TOKENIZER_FILE))
        names = {"eos_token": self.eos_token, "mask_token": self.mask_token, "pad_token": self.eos_token}
        settings = {
            **names,
            "add_bos_token": False,
            "add_eos_token": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (directory / _NAME_FILES[0]).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE in which every digit is a token of its own.

    Raises:
        TraceError: vocab_size has no room for the 256 bytes and the two special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [EOS_TOKEN, MASK_TOKEN]
    if vocab_size < len(alphabet) + len(special):
        raise TraceError(f"vocab_size {vocab_size}: must be at least {len(alphabet) + len(special)}")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    return Tokenizer(bpe, MASK_TOKEN, EOS_TOKEN, "new tokenizer")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint directory; its configuration names the mask and the end of text.

    Raises:
        TraceError: a file is missing or broken, names no mask or end of text, or names a token it does not hold.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise TraceError(f"{path}: no such file; a checkpoint directory must hold its tokenizer")
    try:
        bpe = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise TraceError(f"{path}: not a tokenizer file ({error})") from error
    names = special_tokens(directory)
    for key in ("mask_token", "eos_token"):
        if key not in names:
            raise TraceError(f"{directory}: {' and '.join(_NAME_FILES)} name no {key}")
    return Tokenizer(bpe, names["mask_token"], names["eos_token"], str(path))


def special_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by role; the first of the two files that names one wins."""
    names: dict[str, str] = {}
    for file in _NAME_FILES:
        path = directory / file
        if not path.is_file():
            continue
        for role, token in read_object(path).items():
            text = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(text, str):
                names.setdefault(role, text)
    return names


def _id_of(bpe: tokenizers.Tokenizer, token: str, where: str) -> int:
    found = bpe.token_to_id(token)
    if found is None:
        raise TraceError(f"{where}: holds no token {token!r}")
    return found
