"""The decode loops written out once more, step by step from their description, for one request and with plain lists.

Each takes `forward(text)`, which gives logits [T, V] of a whole text from position 0 on, and returns what it ran: kind,
block, iteration, first position, tokens fed in, positions accepted and positions edited; then the row and what is
returned.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np


class Ran(NamedTuple):
    kind: str
    block: int
    iteration: int
    start: int
    tokens: list
    accepted: list
    edited: list


def softmax(logits):
    shifted = np.exp(np.float64(logits) - np.float64(max(logits)))
    return shifted / shifted.sum()


def argmax_and_probability(logits):
    """x0 and p(x0) of one position."""
    best = int(np.argmax(logits))
    return best, np.float32(softmax(logits)[best])


def drawn(logits, temperature, uniform):
    p = softmax([x / temperature for x in logits])
    token = next(token for token, below in enumerate(accumulate(p)) if uniform < below)
    return token, p[token]


def proposals(rows, temperature, rng, tempered):
    """x0 and its confidence at each position; one uniform number each where something is drawn."""
    if temperature == 0:
        return [argmax_and_probability(row) for row in rows]
    numbers = rng.random(len(rows))
    found = []
    for row, uniform in zip(rows, numbers, strict=True):
        token, confidence = drawn(row, temperature, uniform)
        found.append((token, confidence if tempered else softmax(row)[token]))
    return found


def row_of_masks(prompt, s):
    total = s.gen_length + len(prompt)
    total += -total % s.block_length
    return list(prompt) + [s.mask_id] * (total - len(prompt))


def masks(x, start, stop, s):
    return [i for i in range(start, stop) if x[i] == s.mask_id]


def dinfer(prompt, s, forward, rng):
    x, ran, B = row_of_masks(prompt, s), [], s.block_length  # noqa: N806 - the name that the description has
    full = len(prompt) // B * B
    stop = max(full, B)
    forward(x[:stop])
    ran.append(Ran("prefill", -1, 0, 0, x[:stop], [], []))
    for block, start in enumerate(range(full, len(x), B)):
        iteration, had_masks = 0, False
        while masks(x, start, start + B, s):
            k = max(min(len(masks(x, start, start + B, s)) // 8, 4), 2)
            before = list(x)
            for _ in range(k):
                open_ = masks(x, start, start + B, s)
                had_masks = bool(open_)
                tokens = x[start : start + B]
                found = proposals(forward(x[: start + B])[start:], s.temperature, rng, tempered=False)
                eligible = {i: found[i - start] for i in open_ if found[i - start][0] != s.mask_id}
                accepted = []
                if eligible:
                    best = np.float32(max(c for _, c in eligible.values()))
                    bar = min(np.float32(s.threshold), best - np.float32(1e-5))
                    accepted = [i for i, (_, c) in eligible.items() if np.float32(c) >= bar]
                for i in accepted:
                    x[i] = eligible[i][0]
                ran.append(Ran("denoise" if open_ else "idle", block, iteration, start, tokens, accepted, []))
                iteration += 1
            if x == before and s.temperature == 0:
                return "for ever"
        if had_masks:
            forward(x[: start + B])
            ran.append(Ran("commit", block, iteration, start, x[start : start + B], [], []))
        if s.early_stop and s.eos_id in x[start : start + B]:
            x[start + B :] = [s.eos_id] * len(x[start + B :])
            break
    return ran, x, [i for i in x if i != s.eos_id]


def take_above(open_, found, threshold, quota, start):
    """Masked positions above the threshold if there are enough, else the best ones."""
    above = [i for i in open_ if np.float32(found[i - start][1]) > np.float32(threshold)]
    if len(above) >= quota:
        return above
    return sorted(sorted(open_, key=lambda i: -found[i - start][1])[:quota])


def answer_to_first_eos(x, prompt, s):
    answer = x[len(prompt) : len(prompt) + s.gen_length]
    return answer[: answer.index(s.eos_id) + 1] if s.eos_id in answer else answer


def hf20(prompt, s, forward, rng):
    x, ran, B = row_of_masks(prompt, s), [], s.block_length  # noqa: N806
    temperature = 1.0 if s.temperature == 0 and s.sampler == "stock" else s.temperature
    steps = min(s.steps, s.gen_length // s.minimal_topk)
    quota = [B // steps + (1 if i < B % steps else 0) for i in range(steps)]
    first = len(prompt) // B
    for number in range(first, len(x) // B):
        start, stop = number * B, number * B + B
        for step in range(steps):
            open_ = masks(x, start, stop, s)
            if not open_:
                break
            tokens = x[:stop]
            found = proposals(forward(tokens)[start:], temperature, rng, tempered=True)
            taken = take_above(open_, found, s.threshold, quota[step], start)
            for i in taken:
                x[i] = found[i - start][0]
            accepted = [i for i in taken if x[i] != s.mask_id]
            ran.append(Ran("denoise", number - first, step, 0, tokens, accepted, []))
            if s.early_stop and any(x[i] == s.eos_id for i in taken):
                eos = x[:stop].index(s.eos_id)
                if s.mask_id not in x[len(prompt) : eos]:
                    return ran, [s.eos_id if i == s.mask_id else i for i in x], x[: eos + 1]
        if s.eos_id in x[len(prompt) : stop]:
            x[stop:] = [s.eos_id] * len(x[stop:])
            break
    return ran, x, answer_to_first_eos(x, prompt, s)


def edit_set(x, prompt, open_, found, threshold, start, stop):
    return [
        i
        for i in range(max(start, len(prompt)), stop)
        if i not in open_ and np.float32(found[i - start][1]) > np.float32(threshold) and found[i - start][0] != x[i]
    ]


def hf21(prompt, s, forward, rng):
    x, ran, B = row_of_masks(prompt, s), [], s.block_length  # noqa: N806
    first = len(prompt) // B
    for number in range(first, len(x) // B):
        start, stop = number * B, number * B + B
        post_steps = iteration = 0
        while True:
            open_ = masks(x, start, stop, s)
            if not open_:
                post_steps += 1
            if post_steps > s.max_post_steps:
                break
            tokens = x[:stop]
            found = proposals(forward(tokens)[start:], s.temperature, rng, tempered=True)
            taken = take_above(open_, found, s.threshold, s.num_to_transfer, start)
            edited = edit_set(x, prompt, open_, found, s.edit_threshold, start, stop)
            for i in taken + edited:
                x[i] = found[i - start][0]
            accepted = [i for i in taken if x[i] != s.mask_id]
            ran.append(Ran("denoise" if open_ else "edit", number - first, iteration, 0, tokens, accepted, edited))
            iteration += 1
            if iteration > 200:
                return "for ever"
            if not open_ and not edited:
                break
        if s.early_stop and s.eos_id in x[len(prompt) : stop]:
            x[stop:] = [s.eos_id] * len(x[stop:])
            break
    return ran, x, answer_to_first_eos(x, prompt, s)


def sglang_prefill(prompt, s, x, forward):
    ran = []
    for iteration in range(len(prompt) // s.block_length):
        start, stop = iteration * s.block_length, (iteration + 1) * s.block_length
        forward(x[:stop])
        ran.append(Ran("prefill", -1, iteration, start, x[start:stop], [], []))
    return ran


def sglang_low_confidence(prompt, s, forward, rng):
    x, B = row_of_masks(prompt, s), s.block_length  # noqa: N806
    ran = sglang_prefill(prompt, s, x, forward)
    for block, start in enumerate(range(len(prompt) // B * B, len(x), B)):
        stop = start + B
        iteration = 0
        while open_ := masks(x, start, stop, s):
            if iteration == B:
                return "masks left"
            tokens = x[start:stop]
            found = proposals(forward(x[:stop])[start:], 0, rng, tempered=False)
            taken = take_above(open_, found, s.threshold, 1, start)
            for i in taken:
                x[i] = found[i - start][0]
            accepted = [i for i in taken if x[i] != s.mask_id]
            ran.append(Ran("denoise", block, iteration, start, tokens, accepted, []))
            iteration += 1
        forward(x[:stop])
        ran.append(Ran("commit", block, iteration, start, x[start:stop], [], []))
        if s.early_stop and s.eos_id in x[len(prompt) : stop]:
            x[stop:] = [s.eos_id] * len(x[stop:])
            break
    return ran, x, answer_to_first_eos(x, prompt, s)


def sglang_joint_threshold(prompt, s, forward, rng):
    x, B = row_of_masks(prompt, s), s.block_length  # noqa: N806
    ran = sglang_prefill(prompt, s, x, forward)
    for block, start in enumerate(range(len(prompt) // B * B, len(x), B)):
        stop = start + B
        post, iteration, finished, changed = 0, 0, False, False
        for _ in range(B + s.max_post_steps + (1 if s.always_commit else 0)):
            if finished:
                break
            tokens = x[start:stop]
            logits = np.array(forward(x[:stop])[start:], np.float32)
            changed = False
            if s.penalty > 0:
                for i in range(1, B):
                    logits[i, tokens[i - 1]] -= np.float32(s.penalty)
            found = [argmax_and_probability(row) for row in logits]
            open_ = masks(x, start, stop, s)
            taken, edited = [], []
            if open_:
                taken = take_above(open_, found, s.threshold, 1, start)
            else:
                post += 1
                finished = post > s.max_post_steps
            if not finished:
                edited = edit_set(x, prompt, open_, found, s.edit_threshold, start, stop)
                changed = bool(taken + edited)
                finished = not changed
            for i in taken + edited:
                x[i] = found[i - start][0]
            accepted = [i for i in taken if x[i] != s.mask_id]
            ran.append(Ran("denoise" if open_ else "edit", block, iteration, start, tokens, accepted, edited))
            iteration += 1
        if masks(x, start, stop, s):
            return "masks left"
        if changed or s.always_commit:
            forward(x[:stop])
            ran.append(Ran("commit", block, iteration, start, x[start:stop], [], []))
        if s.early_stop and s.eos_id in x[len(prompt) : stop]:
            x[stop:] = [s.eos_id] * len(x[stop:])
            break
    return ran, x, answer_to_first_eos(x, prompt, s)


LOOPS = {
    "dinfer": dinfer,
    "hf20": hf20,
    "hf21": hf21,
    "sglang_low_confidence": sglang_low_confidence,
    "sglang_joint_threshold": sglang_joint_threshold,
}
