"""Training sequences for block diffusion: documents packed, masked block by block, beside their clean copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tracer.corpus import Document
from tracer.pretrain_configs import BLOCK_LENGTHS, PretrainConfig
from tracer.schema import TraceError
from tracer.tokenizer import Tokenizer

UNIT = max(BLOCK_LENGTHS)
_ENCODED_AT_ONCE = 10_000


class Pool(NamedTuple):
    """Packed sequences of one workload, S of T tokens each.

    A document starts at a multiple of the largest block length and is filled up to the next one with the end of
    text, so that block borders are the same as when it stands alone, and no block tells where its text ends.
    """

    tokens: Tensor  # [S, T] int32
    documents: Tensor  # [S, T] int16, index within the sequence; the unused rest is a document of its own
    positions: Tensor  # [S, T] int16, from 0 in each document
    is_prompt: Tensor  # [S, T] bool
    is_counted: Tensor  # [S, T] bool, false in the unused rest

    def to(self, device: torch.device) -> Pool:
        """Move to a device."""
        return Pool(*(values.to(device) for values in self))


class Batch(NamedTuple):
    """What one training step sees: the noisy copy of B sequences in positions 0 to T - 1, the clean one behind."""

    token_ids: Tensor  # [B, 2T]
    positions: Tensor  # [B, 2T]
    mask: Tensor  # [B, 1, 2T, 2T] bool, true where the row may attend to the column
    targets: Tensor  # [B, T]
    weights: Tensor  # [B, T] of the loss, 0 where the token is not masked


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, context: int
) -> Iterator[tuple[list[int], int]]:
    """Yield ids and prompt length of each document, ended by the end of text where it fits and cut where it does not.

    A document whose prompt takes more than half of the context is left out.
    """
    remaining = iter(documents)
    while chunk := list(islice(remaining, _ENCODED_AT_ONCE)):
        prompts = tokenizer.encode_all([document.prompt for document in chunk])
        completions = tokenizer.encode_all([document.completion for document in chunk])
        for prompt, completion in zip(prompts, completions, strict=True):
            if len(prompt) <= context // 2:
                yield [*prompt, *completion, tokenizer.eos_id][:context], len(prompt)


def pack(encoded: Iterable[tuple[list[int], int]], context: int, eos_id: int) -> Pool:
    """Put documents one behind the other into sequences of `context` tokens, each into the first one with room.

    Raises:
        TraceError: there is no document.
    """
    rows: list[list[tuple[list[int], int]]] = []
    open_rows: dict[int, list[list[tuple[list[int], int]]]] = {}  # by units that are free
    num_units = context // UNIT
    for ids, prompt_length in encoded:
        needed = -(-len(ids) // UNIT)
        free = next((units for units in range(needed, num_units) if open_rows.get(units)), num_units)
        if free == num_units:
            rows.append([])
        row = rows[-1] if free == num_units else open_rows[free].pop()
        row.append((ids, prompt_length))
        open_rows.setdefault(free - needed, []).append(row)
    if not rows:
        raise TraceError("no document to train on fits the context")
    shape = (len(rows), context)
    tokens = np.full(shape, eos_id, dtype=np.int32)
    documents = np.full(shape, num_units, dtype=np.int16)
    positions = np.tile(np.arange(context, dtype=np.int16), (len(rows), 1))
    is_prompt = np.zeros(shape, dtype=bool)
    for row, content in enumerate(rows):
        start = 0
        for index, (ids, prompt_length) in enumerate(content):
            stop = start + -(-len(ids) // UNIT) * UNIT
            tokens[row, start : start + len(ids)] = ids
            documents[row, start:stop] = index
            positions[row, start:stop] -= start
            is_prompt[row, start : start + prompt_length] = True
            start = stop
    arrays = (tokens, documents, positions, is_prompt, documents < num_units)
    return Pool(*(torch.from_numpy(values) for values in arrays))


def block_mask(documents: Tensor, block_length: int) -> Tensor:
    """Who may attend to whom in a noisy copy followed by its clean one.

    A noisy block sees itself and the clean blocks before it; a clean block sees the clean blocks up to itself; no
    document sees another.

    Args:
        documents: [B, T].
        block_length: tokens of a block, the first of which starts at 0.

    Returns:
        [B, 1, 2T, 2T] bool.

    Source:
        Block Diffusion (BD3-LM), section on vectorised training; LLaDA2.0, section on block diffusion training.
    """
    length = documents.shape[1]
    blocks = torch.arange(length, device=documents.device) // block_length
    query, key = blocks[:, None], blocks[None, :]
    nothing = torch.zeros_like(query == key)
    noisy = torch.cat((query == key, key < query), dim=1)
    clean = torch.cat((nothing, key <= query), dim=1)
    within = documents.repeat(1, 2)
    same = within[:, :, None] == within[:, None, :]
    return (same & torch.cat((noisy, clean))).unsqueeze(1)


def draw_batch(
    pools: Mapping[str, Pool],
    config: PretrainConfig,
    block_length: int,
    mask_id: int,
    generator: torch.Generator,
) -> Batch:
    """Draw sequences of every workload and mask them: each block with a ratio t of its own, uniform in [1 / length, 1].

    The loss weight of a masked token is 1 / t, at most `max_token_weight`.
    """
    device = generator.device
    drawn = []
    for workload, size in batch_sizes(config).items():
        pool = pools[workload]
        rows = torch.randint(len(pool.tokens), (size,), generator=generator, device=device)
        drawn.append(Pool(*(values[rows] for values in pool)))
    tokens, documents, positions, is_prompt, is_counted = (torch.cat(values) for values in zip(*drawn, strict=True))
    tokens, positions = tokens.long(), positions.long()
    num_rows, length = tokens.shape

    def uniform(width: int) -> Tensor:
        return torch.rand(num_rows, width, generator=generator, device=device)

    lowest = 1 / block_length
    ratios = (lowest + (1 - lowest) * uniform(length // block_length)).repeat_interleave(block_length, dim=1)
    is_given = uniform(length // UNIT + 1).gather(1, documents.long()) < config.given_prompt_ratio
    masked = (uniform(length) < ratios) & is_counted & ~(is_given & is_prompt)
    weights = torch.where(masked, (1 / ratios).clamp(max=config.max_token_weight), 0.0)
    return Batch(
        token_ids=torch.cat((tokens.masked_fill(masked, mask_id), tokens), dim=1),
        positions=positions.repeat(1, 2),
        mask=block_mask(documents, block_length),
        targets=tokens,
        weights=weights,
    )


def batch_sizes(config: PretrainConfig) -> dict[str, int]:
    """Sequences of each workload in a batch: its share, rounded, at least one; the first workload takes the rest."""
    first, *others = config.shares
    total = sum(config.shares.values())
    sizes = {name: max(1, round(config.batch_size * config.shares[name] / total)) for name in others}
    return {first: config.batch_size - sum(sizes.values()), **sizes}
