"""A model as the decode loops want it: requests side by side, each with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracer.decode_state import Window
from tracer.llada2 import KVCache, LLaDA2
from tracer.observe import Observation
from tracer.schema import TraceError


@dataclass
class _Row:
    """Keys and values of one request."""

    cache: KVCache
    num_run: int = 0  # positions that have keys and values, committed or not


class ObservedModel:
    """Runs windows of several requests as one forward, and shows it to an observation.

    Windows of different lengths are padded on the right; pads are seen by no token, and are no part of what is
    observed, though experts work on them.

    Args:
        model: in inference, on its device.
        observation: cleared before each forward, so that it shows the last one; None observes nothing.
        block_length: of the block-causal mask.
        mask_mode: strict, under which later blocks are not seen; or soft01, which only prefers the earlier ones.
    """

    def __init__(
        self, model: LLaDA2, observation: Observation | None, block_length: int, mask_mode: str = "strict"
    ) -> None:
        self._model = model
        self._observation = observation
        self._block_length = block_length
        self._mask_mode = mask_mode
        self._rows: dict[int, _Row] = {}

    def open(self, request: int, num_positions: int) -> None:
        """Make room for the keys and values of a request."""
        self._rows[request] = _Row(self._model.new_cache(1, num_positions))

    def close(self, request: int) -> None:
        """Free them."""
        del self._rows[request]

    @torch.no_grad()
    def forward(self, windows: Sequence[Window]) -> Tensor:
        """Logits [N, V] of the tokens of all windows, one window after the other."""
        rows = [self._commit(window) for window in windows]
        sizes = [len(window.token_ids) for window in windows]
        token_ids = torch.zeros(len(windows), max(sizes), dtype=torch.int64)
        for row, window in zip(token_ids, windows, strict=True):
            row[: len(window.token_ids)] = torch.from_numpy(window.token_ids)
        device = self._model.device
        starts = torch.tensor([window.start for window in windows])
        mask = attention_mask(starts, torch.tensor(sizes), self._block_length, self._mask_mode)
        kept = _kept(sizes, device)
        if self._observation is not None:
            self._observation.clear(kept)
        logits = self._model(
            token_ids.to(device),
            (starts[:, None] + torch.arange(max(sizes))).to(device),
            mask=None if mask is None else mask.to(device),
            additive=self._mask_mode == "soft01",
            cache=rows[0].cache if len(rows) == 1 else _Caches([row.cache for row in rows], sizes),
            observer=self._observation,
        )
        for row, window, size in zip(rows, windows, sizes, strict=True):
            row.num_run = window.start + size
        flat = logits.flatten(0, 1)
        return flat if kept is None else flat[kept]

    def _commit(self, window: Window) -> _Row:
        """Commit what a request has run below its window."""
        row = self._rows[window.request]
        if not row.cache.length <= window.start <= row.num_run:
            raise TraceError(
                f"request {window.request}: forward from position {window.start}, {row.cache.length} are committed and "
                f"{row.num_run} were run"
            )
        row.cache.length = window.start
        return row


class _Caches(KVCache):
    """The caches of several requests, as the one of a batch: their keys and values stand side by side, padded."""

    def __init__(self, caches: list[KVCache], sizes: list[int]) -> None:
        self._caches, self._sizes = caches, sizes
        self.length = max(cache.length for cache in caches)

    def extend(self, layer_id: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's keys and values, [B, kv heads, T, head_dim], each to its request, and return all."""
        pairs = [
            cache.extend(layer_id, keys[row : row + 1, :, :size], values[row : row + 1, :, :size])
            for row, (cache, size) in enumerate(zip(self._caches, self._sizes, strict=True))
        ]
        return _side_by_side([pair[0] for pair in pairs]), _side_by_side([pair[1] for pair in pairs])


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    """Tensors [1, heads, S, head_dim] as one [B, heads, longest S, head_dim]; pads are 0."""
    _, heads, _, dim = tensors[0].shape
    longest = max(tensor.shape[2] for tensor in tensors)
    stacked = tensors[0].new_zeros(len(tensors), heads, longest, dim)
    for row, tensor in zip(stacked, tensors, strict=True):
        row[:, : tensor.shape[2]] = tensor[0]
    return stacked


def attention_mask(starts: Tensor, sizes: Tensor, block_length: int, mode: str) -> Tensor | None:
    """Who attends to whom, when requests run windows on top of what they have committed.

    Args:
        starts: [B], first position of each window; all positions below it are committed.
        sizes: [B], tokens of each window.
        block_length: blocks start at position 0.
        mode: strict: a token attends to its own block and those before. soft01: to everything that is not a pad, with 1
            added to the scores that `strict` allows, as LLaDA2.1's released `generate` does.

    Returns:
        [B, 1, T, S], T the longest window and S the most positions: bool for strict, fp32 to be added for soft01; None
        where everything is allowed alike.
    """
    ends = starts + sizes
    queries = starts[:, None] + torch.arange(int(sizes.max()))  # [B, T]
    keys = torch.arange(int(ends.max()))  # [S]
    allowed = (keys // block_length) <= (queries // block_length)[:, :, None]  # [B, T, S]
    is_there = (keys < ends[:, None])[:, None, :]  # [B, 1, S]
    if (allowed & is_there).all():
        return None
    if mode == "strict":
        return (allowed & is_there)[:, None]
    return allowed.float().masked_fill(~is_there, float("-inf"))[:, None]


def _kept(sizes: list[int], device: torch.device) -> Tensor | None:
    """Rows of the padded batch that are no pads; None where there are none."""
    width = max(sizes)
    if min(sizes) == width:
        return None
    rows = [torch.arange(row * width, row * width + size) for row, size in enumerate(sizes)]
    return torch.cat(rows).to(device)
