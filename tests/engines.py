"""Routing as vLLM and SGLang would return it, and their wire formats."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_LAYERS, NUM_EXPERTS, TOP_K = 5, 24, 4  # the first layer is dense


def routed(num_rows: int, seed: int = 0, dtype: str = "uint8") -> NDArray[Any]:
    """What an engine captured of these tokens, [rows, layers, top_k], a dense layer's ids all zero."""
    rng = np.random.default_rng(seed)
    scores = rng.random((1, NUM_LAYERS, NUM_EXPERTS)) + 0.5 * rng.random((num_rows, NUM_LAYERS, NUM_EXPERTS))
    ids = np.argsort(-scores, axis=-1)[..., :TOP_K]
    ids[:, 0] = 0
    return ids.astype(dtype)


def as_npy(array: NDArray[Any]) -> str:
    """As vLLM 0.22 sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def as_bytes(array: NDArray[Any]) -> str:
    """As SGLang sends it."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def vllm_answer(array: NDArray[Any], num_prompt: int, *, ids: bool = True, cached: int = 0) -> dict[str, Any]:
    """An answer of vLLM's completions API to one prompt."""
    num_output = len(array) + 1 - num_prompt
    choice: dict[str, Any] = {"index": 0, "text": "", "routed_experts": as_npy(array)}
    if ids:
        choice |= {"token_ids": list(range(50, 50 + num_output)), "prompt_token_ids": list(range(num_prompt))}
    usage: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    if cached:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"id": "cmpl", "choices": [choice], "usage": usage}


def sglang_answer(array: NDArray[Any], num_prompt: int, **meta: Any) -> dict[str, Any]:
    """An answer of SGLang's /generate to one prompt."""
    num_output = len(array) + 1 - num_prompt
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return {"text": "", "meta_info": {**counts, "routed_experts": as_bytes(array.astype(np.int32)), **meta}}


def write_lines(path: Path, answers: list[dict[str, Any]]) -> Path:
    """Answers as JSON lines."""
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path
