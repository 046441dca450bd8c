"""`routed_experts` as vLLM and SGLang return them: arrays in files, or what their servers answered."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.files import first_line
from tracer.import_answers import count_at, decode_array, decode_ids, object_at, objects_at, read_answers, tokens_at
from tracer.import_forwards import Tokens
from tracer.schema import TraceError

_SGLANG_DTYPE = "int32"  # where the answer does not say
_NUM_POSITIONS = 1 << 31  # that a trace can hold


@dataclass(frozen=True)
class Given:
    """What a file may not say. Layers are columns of the arrays, dense ones among them."""

    num_prompt: int | None = None  # tokens of every prompt
    start: int = 0  # first position that the arrays have, as asked of the engine
    num_layers: int | None = None
    top_k: int | None = None


def read_vllm(paths: Iterable[Path], given: Given) -> Iterator[Tokens]:
    """Requests in `.npy`, `.npz`, `.json` and `.jsonl` files of vLLM, one after the other.

    `.npy` is the array of one request. In `.npz` each array is one, or `NAME.prompt` and `NAME.output` are its two
    parts. JSON is of answers of the server with `routed_experts` of each choice, and, in v0.21, `prompt_routed_experts`.

    Raises:
        TraceError: with file and request, what is missing or does not fit.
    """
    for path in paths:
        if path.suffix in (".npy", ".npz"):
            yield from _arrays(path, given)
        else:
            for where, answer in read_answers(path):
                yield from _vllm(where, answer, given)


def read_sglang(paths: Iterable[Path], given: Given) -> Iterator[Tokens]:
    """Requests in `.json` and `.jsonl` files of answers of SGLang, native ones or as of OpenAI's API.

    Raises:
        TraceError: with file and request, what is missing or does not fit.
    """
    for path in paths:
        for where, answer in read_answers(path):
            yield from _sglang(where, answer, given)


def _arrays(path: Path, given: Given) -> Iterator[Tokens]:
    try:
        if path.suffix == ".npy":  # np.load would take archives and speak of pickles
            found = np.lib.format.open_memmap(path, mode="r")
            yield _tokens(str(path), found, _required_prompt(str(path), given), None, given)
            return
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            for name in dict.fromkeys(_stem(name) for name in archive.files):
                where = f"{path}: {name}"
                names = [part for part in (f"{name}.prompt", f"{name}.output") if part in archive.files]
                if names:
                    parts = [_required_array(where, archive[part]) for part in names]
                    yield _split(where, parts, len(parts[0]) if names[0].endswith(".prompt") else 0, given)
                else:
                    array = _required_array(where, archive[name])
                    yield _tokens(where, array, _required_prompt(where, given), None, given)
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, TraceError):
            raise
        why = getattr(error, "strerror", None) or first_line(error)
        raise TraceError(f"{path}: cannot be read as an array: {why}") from None


def _required_array(where: str, found: Any) -> NDArray[Any]:
    """What an archive holds under a name, which is no array if it is not of numpy."""
    if not isinstance(found, np.ndarray) or found.ndim != 3:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else "no array"
        raise TraceError(f"{where}: is {what}, must be whole numbers [tokens, layers, top_k]")
    return found


def _stem(name: str) -> str:
    for end in (".prompt", ".output"):
        if name.endswith(end):
            return name.removesuffix(end)
    return name


def _required_prompt(where: str, given: Given) -> int:
    if given.num_prompt is None:
        raise TraceError(f"{where}: does not say how many of its tokens are of the prompt: give --prompt-tokens")
    return given.num_prompt


def _vllm(where: str, answer: Mapping[str, Any], given: Given) -> Iterator[Tokens]:
    choices = objects_at(where, answer, "choices")
    if not choices:
        raise TraceError(f"{where}: has no choices; must be an answer of vLLM with routed_experts in each choice")
    usage = object_at(where, answer, "usage")
    cached = count_at(where, object_at(where, usage, "prompt_tokens_details"), "cached_tokens") or 0
    for number, choice in enumerate(choices):
        place = where if len(choices) == 1 else f"{where}, choice {number}"
        routed = choice.get("routed_experts")
        if routed is None:
            raise TraceError(f"{place}: has no routed_experts; vLLM gives them with --enable-return-routed-experts")
        prompt_ids = tokens_at(place, answer, "prompt_token_ids") or tokens_at(place, choice, "prompt_token_ids")
        num_prompt = _num_prompt(place, usage, prompt_ids, given)
        output_ids = tokens_at(place, choice, "token_ids")
        num_output = count_at(place, usage, "completion_tokens") if len(choices) == 1 else None
        num_output = len(output_ids) if output_ids else num_output
        num_cached = num_prompt if number else cached  # a prompt runs once for all of its choices
        if answer.get("prompt_routed_experts") is not None:
            parts = [decode_array(place, answer["prompt_routed_experts"]), decode_array(place, routed)]
            yield _split(place, parts, num_prompt, given, num_cached, _ids(prompt_ids, output_ids))
        else:
            array = decode_array(place, routed)
            start = count_at(place, routed, "start") if isinstance(routed, dict) else None
            start = given.start if start is None else start
            counts = None if num_output is None else num_prompt + num_output - 1 - start
            _require_rows(place, array, counts, f"{num_prompt} tokens of the prompt and {num_output} generated", start)
            yield _tokens(place, array, num_prompt, _ids(prompt_ids, output_ids), given, start, num_cached)


def _sglang(where: str, answer: Mapping[str, Any], given: Given) -> Iterator[Tokens]:
    usage = object_at(where, answer, "usage")
    choice = next(iter(objects_at(where, answer, "choices")), {})
    of_choice = object_at(where, choice, "sgl_ext") or object_at(where, choice, "sglext")
    extra = {**of_choice, **object_at(where, answer, "sglext"), **object_at(where, answer, "meta_info")}
    schema = object_at(where, extra, "expert_ids_schema")
    num_prompt = _num_prompt(where, extra if "prompt_tokens" in extra else usage, None, given)
    num_output = count_at(where, extra if "completion_tokens" in extra else usage, "completion_tokens")
    dtype = schema.get("dtype") or extra.get("routed_experts_dtype") or _SGLANG_DTYPE
    parts = [extra.get("input_expert_ids"), extra.get("output_expert_ids")]
    texts = [extra["routed_experts"]] if extra.get("routed_experts") else [part for part in parts if part]
    if not texts:
        raise TraceError(
            f"{where}: has no routed_experts; SGLang gives them with --enable-return-routed-experts and, in the "
            "request, return_routed_experts"
        )
    if len(texts) == 1 and parts[1] is not None and parts[0] is None and not extra.get("routed_experts"):
        raise TraceError(f"{where}: has output_expert_ids alone; ask for input_expert_ids too")
    num_layers = count_at(where, schema, "num_layers") or given.num_layers
    top_k = count_at(where, schema, "top_k") or given.top_k
    if not num_layers or not top_k:
        raise TraceError(
            f"{where}: ids have no shape: give --model-config, or --num-layers (all of the model's) and --top-k"
        )
    flat = np.concatenate([decode_ids(where, text, dtype) for text in texts])
    if flat.size % (num_layers * top_k):
        raise TraceError(f"{where}: {flat.size} ids are no rows of {num_layers} layers of {top_k}")
    array = flat.reshape(-1, num_layers, top_k)
    if num_output is not None:
        counts = num_prompt + num_output - 1 - given.start
        what = f"{num_prompt} tokens of the prompt and {num_output} generated"
        _require_rows(where, array, counts, what, given.start)
    cached = count_at(where, extra, "cached_tokens")
    cached = cached or count_at(where, object_at(where, usage, "prompt_tokens_details"), "cached_tokens") or 0
    token_ids = _ids(tokens_at(where, answer, "input_ids"), tokens_at(where, answer, "output_ids"))
    yield _tokens(where, array, num_prompt, token_ids, given, given.start, cached)


def _num_prompt(where: str, usage: Mapping[str, Any], ids: list[int] | None, given: Given) -> int:
    """Tokens of the prompt."""
    if ids is not None:
        return len(ids)
    stated = count_at(where, usage, "prompt_tokens")
    return _required_prompt(where, given) if stated is None else stated


def _ids(prompt_ids: list[int] | None, output_ids: list[int] | None) -> NDArray[np.int64] | None:
    """Input tokens of all positions, where both parts are known."""
    if prompt_ids is None or output_ids is None:
        return None
    return np.array([*prompt_ids, *output_ids], np.int64)


def _require_rows(where: str, array: NDArray[Any], wanted: int | None, counts: str, start: int) -> None:
    if wanted is None or array.ndim != 3 or len(array) == wanted:
        return
    behind = f" from position {start} on" if start else ""
    raise TraceError(
        f"{where}: routed_experts have {len(array)} rows for {counts}; needs {wanted}, one for each token{behind} but the "
        "last, which was not run (--start says from which position they were asked for)"
    )


def _split(
    where: str,
    parts: list[NDArray[Any]],
    num_prompt: int,
    given: Given,
    num_cached: int = 0,
    token_ids: NDArray[np.int64] | None = None,
) -> Tokens:
    """A request whose prompt and output were returned apart."""
    if any(part.ndim != 3 or part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise TraceError(
            f"{where}: arrays {[list(part.shape) for part in parts]}, must be [tokens, layers, top_k] alike"
        )
    if len(parts) == 2 and len(parts[0]) != num_prompt:
        raise TraceError(f"{where}: {len(parts[0])} rows of the prompt, which has {num_prompt} tokens")
    return _tokens(where, np.concatenate(parts), num_prompt, token_ids, given, 0, num_cached)


def _tokens(
    where: str,
    array: NDArray[Any],
    num_prompt: int,
    token_ids: NDArray[np.int64] | None,
    given: Given,
    start: int | None = None,
    num_cached: int = 0,
) -> Tokens:
    start = given.start if start is None else start
    if array.ndim != 3 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise TraceError(
            f"{where}: is {array.dtype} {list(array.shape)}, must be whole numbers [tokens, layers, top_k]"
        )
    if start + len(array) > _NUM_POSITIONS:
        raise TraceError(f"{where}: rows from position {start} on; a trace holds positions up to {_NUM_POSITIONS - 1}")
    if num_cached > num_prompt:
        raise TraceError(f"{where}: {num_cached} cached tokens of a prompt of {num_prompt}")
    if start + len(array) < num_prompt:
        raise TraceError(f"{where}: {len(array)} rows from position {start} on end within the prompt of {num_prompt}")
    positions = start + np.arange(len(array))
    if token_ids is not None and positions[-1] >= token_ids.size:
        raise TraceError(f"{where}: has a row for position {positions[-1]}, and {token_ids.size} tokens")
    missing = (array < 0).all(axis=(1, 2)) & (positions < num_prompt)  # v0.21 marks what the prefix cache had by -1
    num_missing = int(np.argmin(missing)) if not missing.all() else len(array)
    return Tokens(
        name=where,
        num_prompt=num_prompt,
        num_cached=max(num_cached, start, start + num_missing),
        positions=positions,
        expert_ids=np.asarray(array),
        token_ids=None if token_ids is None else token_ids[positions],
    )
