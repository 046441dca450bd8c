import json

import pytest
from llada2_models import MINI, config, save_tiny_checkpoint

from tracer.checkpoint import read_config
from tracer.llada2_config import LLaDA2Config
from tracer.schema import TraceError
from tracer.special_ids import check_special_ids
from tracer.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def directory(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def say(directory, file, **values):
    path = directory / file
    found = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)  # a link to the shared one
    path.write_text(json.dumps(found | values))


def check(directory):
    check_special_ids(directory, read_config(directory), load_tokenizer(directory))


def refused(directory, message):
    with pytest.raises(TraceError) as error:
        check(directory)
    assert str(error.value) == f"{directory}: {message}; the tokenizer must be the model's"


def test_nothing_said_is_nothing_wrong(directory):
    check(directory)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_same_ids_may_be_said(directory, file):
    tokenizer = load_tokenizer(directory)
    say(directory, file, mask_token_id=tokenizer.mask_id, eos_token_id=tokenizer.eos_id, bos_token_id=None)
    check(directory)
    if file == "generation_config.json":
        say(directory, file, eos_token_id=[tokenizer.eos_id + 7, tokenizer.eos_id], temperature=0.0)
        check(directory)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["mask_token_id", "mask_id"])
def test_another_mask(directory, file, key):
    found = load_tokenizer(directory).mask_id
    say(directory, file, **{key: found + 1})
    refused(directory, f"<|mask|> has id {found} in the tokenizer, {key} of {file} says {found + 1}")


def test_another_end_of_text(directory):
    found = load_tokenizer(directory).eos_id
    say(directory, "generation_config.json", eos_token_id=[7, 8])
    refused(
        directory,
        f"<|endoftext|> has id {found} in the tokenizer, eos_token_id of generation_config.json says 7, 8",
    )


def test_a_released_model_with_another_tokenizer(directory):
    """Its files do not say the ids: they are defaults of the released code."""
    found = load_tokenizer(directory).mask_id
    with pytest.raises(TraceError) as error:
        check_special_ids(directory, config(MINI), load_tokenizer(directory))
    assert str(error.value) == (
        f"{directory}: <|mask|> has id {found} in the tokenizer, the released generate() says 156895; "
        "the tokenizer must be the model's"
    )


def test_special_ids_are_no_unknown_keys():
    values = config().to_dict() | {"mask_token_id": 5, "eos_token_id": [1, 2], "bos_token_id": 3}
    assert LLaDA2Config.from_dict(values, "config.json") == config()
