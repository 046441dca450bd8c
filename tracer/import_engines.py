"""`routed_experts` as vLLM and SGLang return them: arrays in files, or what their servers answered."""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.files import first_line
from tracer.import_forwards import Tokens
from tracer.schema import TraceError

WIRE_DTYPES = ("uint8", "int16", "uint16", "int32", "int64")
_SGLANG_DTYPE = "int32"  # where the answer does not say


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
            for where, answer in _answers(path):
                yield from _vllm(where, answer, given)


def read_sglang(paths: Iterable[Path], given: Given) -> Iterator[Tokens]:
    """Requests in `.json` and `.jsonl` files of answers of SGLang, native ones or as of OpenAI's API.

    Raises:
        TraceError: with file and request, what is missing or does not fit.
    """
    for path in paths:
        for where, answer in _answers(path):
            yield from _sglang(where, answer, given)


def _arrays(path: Path, given: Given) -> Iterator[Tokens]:
    try:
        found = np.load(path, allow_pickle=False, mmap_mode="r" if path.suffix == ".npy" else None)
        if isinstance(found, np.ndarray):
            yield _tokens(str(path), found, _required_prompt(str(path), given), None, given)
            return
        with found:
            names = dict.fromkeys(_stem(name) for name in found.files)
            for name in names:
                where = f"{path}: {name}"
                if f"{name}.prompt" in found.files or f"{name}.output" in found.files:
                    parts = [found[part] for part in (f"{name}.prompt", f"{name}.output") if part in found.files]
                    num_prompt = len(found[f"{name}.prompt"]) if f"{name}.prompt" in found.files else 0
                    yield _split(where, parts, num_prompt, given)
                else:
                    yield _tokens(where, found[name], _required_prompt(where, given), None, given)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: cannot be read as an array: {first_line(error)}") from None


def _stem(name: str) -> str:
    for end in (".prompt", ".output"):
        if name.endswith(end):
            return name.removesuffix(end)
    return name


def _required_prompt(where: str, given: Given) -> int:
    if given.num_prompt is None:
        raise TraceError(f"{where}: does not say how many of its tokens are of the prompt: give --prompt-tokens")
    return given.num_prompt


def _answers(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each answer of a file, with its place: one JSON value in all, or one in each line."""
    name = path.name.removesuffix(".gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if name.endswith(".json"):
                yield from _each(str(path), json.load(file))
            elif name.endswith(".jsonl"):
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield from _each(f"{path}, line {number}", json.loads(line))
            else:
                raise TraceError(f"{path}: must be a .npy, .npz, .json or .jsonl file")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or first_line(error)}") from None
    except (ValueError, RecursionError, EOFError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: is not JSON: {first_line(error)}") from None


def _each(where: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, answer in enumerate(value if isinstance(value, list) else [value]):
        place = f"{where}, answer {number}" if isinstance(value, list) else where
        if not isinstance(answer, dict):
            raise TraceError(f"{place}: is {type(answer).__name__}, must be an answer of a server")
        yield place, answer


def _vllm(where: str, answer: Mapping[str, Any], given: Given) -> Iterator[Tokens]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise TraceError(f"{where}: has no choices; must be an answer of vLLM with routed_experts in each choice")
    usage = answer.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for number, choice in enumerate(choices):
        place = where if len(choices) == 1 else f"{where}, choice {number}"
        routed = choice.get("routed_experts")
        if routed is None:
            raise TraceError(f"{place}: has no routed_experts; vLLM gives them with --enable-return-routed-experts")
        prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        num_prompt = _count(place, usage.get("prompt_tokens"), prompt_ids, given)
        output_ids = choice.get("token_ids")
        num_output = len(output_ids) if output_ids else usage.get("completion_tokens") if len(choices) == 1 else None
        num_cached = num_prompt if number else int(cached)  # a prompt runs once for all of its choices
        if answer.get("prompt_routed_experts") is not None:
            parts = [_decoded(place, answer["prompt_routed_experts"]), _decoded(place, routed)]
            yield _split(place, parts, num_prompt, given, num_cached, _ids(prompt_ids, output_ids))
        else:
            array = _decoded(place, routed)
            start = routed.get("start", given.start) if isinstance(routed, dict) else given.start
            counts = None if num_output is None else num_prompt + num_output - 1 - start
            _require_rows(place, array, counts, f"{num_prompt} tokens of the prompt and {num_output} generated", start)
            yield _tokens(place, array, num_prompt, _ids(prompt_ids, output_ids), given, start, num_cached)


def _sglang(where: str, answer: Mapping[str, Any], given: Given) -> Iterator[Tokens]:
    meta = answer.get("meta_info") or {}
    usage = answer.get("usage") or {}
    choice = next(iter(answer.get("choices") or [{}]))
    extra = {**(choice.get("sgl_ext") or choice.get("sglext") or {}), **(answer.get("sglext") or {}), **meta}
    schema = extra.get("expert_ids_schema") or {}
    num_prompt = _count(where, extra.get("prompt_tokens", usage.get("prompt_tokens")), None, given)
    output_ids = answer.get("output_ids")
    num_output = extra.get("completion_tokens", usage.get("completion_tokens"))
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
    num_layers, top_k = schema.get("num_layers", given.num_layers), schema.get("top_k", given.top_k)
    if not num_layers or not top_k:
        raise TraceError(
            f"{where}: ids have no shape: give --model-config, or --num-layers (all of the model's) and --top-k"
        )
    flat = np.concatenate([_from_base64(where, text, dtype) for text in texts])
    if flat.size % (num_layers * top_k):
        raise TraceError(f"{where}: {flat.size} ids are no rows of {num_layers} layers of {top_k}")
    array = flat.reshape(-1, num_layers, top_k)
    if num_output is not None:
        counts = num_prompt + num_output - 1 - given.start
        what = f"{num_prompt} tokens of the prompt and {num_output} generated"
        _require_rows(where, array, counts, what, given.start)
    cached = int(extra.get("cached_tokens") or (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    prompt_ids = answer.get("input_ids")
    yield _tokens(where, array, num_prompt, _ids(prompt_ids, output_ids), given, given.start, cached)


def _count(where: str, stated: Any, ids: Any, given: Given) -> int:
    """Tokens of the prompt."""
    if isinstance(ids, list):
        return len(ids)
    if isinstance(stated, int) and stated >= 0:
        return stated
    return _required_prompt(where, given)


def _ids(prompt_ids: Any, output_ids: Any) -> NDArray[np.int64] | None:
    """Input tokens of all positions, where both parts are known."""
    if not isinstance(prompt_ids, list) or not isinstance(output_ids, list):
        return None
    return np.array([*prompt_ids, *output_ids], np.int64)


def _decoded(where: str, routed: Any) -> NDArray[Any]:
    """An array as a server sends it: base64 of a `.npy`, its bytes with shape and dtype beside, or nested lists."""
    try:
        if isinstance(routed, str):
            return np.load(io.BytesIO(base64.b64decode(routed, validate=True)), allow_pickle=False)
        if isinstance(routed, dict):
            return _from_base64(where, routed["data"], routed.get("dtype", "int32")).reshape(routed["shape"])
        return np.array(routed)
    except (KeyError, TypeError, ValueError, EOFError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{where}: routed_experts cannot be decoded: {first_line(error)}") from None


def _from_base64(where: str, text: Any, dtype: str) -> NDArray[Any]:
    if dtype not in WIRE_DTYPES:
        raise TraceError(f"{where}: ids are {dtype!r}, must be one of {', '.join(WIRE_DTYPES)}")
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype).newbyteorder("<"))
    except (TypeError, ValueError, binascii.Error) as error:
        raise TraceError(f"{where}: routed_experts are no base64 of {dtype}: {first_line(error)}") from None


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
