"""Models without weights for the decode loops: one that follows a script, and one that answers every text at random."""

from functools import cache

import numpy as np
import torch

from tracer.decode import decode_prompts
from tracer.decode_settings import DecodeSettings

MASK, EOS, WORD, VOCAB = 7, 6, 1, 8


class Positions:
    """Checks that a window begins at what is committed, or behind it at what was run last."""

    def __init__(self):
        self.committed = self.run = 0
        self.calls = []  # start, stop

    def begin(self, token_ids, start):
        assert self.committed <= start <= self.run
        self.committed, self.run = start, start + len(token_ids)
        self.calls.append((start, self.run))


class ScriptedModel(Positions):
    """Gives the first `num_confident` masks of a window confidence .95 and the others .3; tokens keep themselves."""

    def __init__(self, num_confident=1, answers=None):
        super().__init__()
        self.num_confident = num_confident
        self.answers = answers or {}  # position -> token, else WORD

    def forward(self, token_ids, start):
        self.begin(token_ids, start)
        ids = np.array([self.answers.get(p, WORD) for p in range(start, start + len(token_ids))])
        masked = token_ids == MASK
        confidence = np.full(len(ids), 0.3)
        confidence[np.flatnonzero(masked)[: self.num_confident]] = 0.95
        logits = np.log(np.repeat((1 - confidence)[:, None] / (VOCAB - 1), VOCAB, axis=1))
        logits[np.arange(len(ids)), np.where(masked, ids, token_ids)] = np.log(confidence)
        return torch.tensor(logits, dtype=torch.float32)


class Editing(ScriptedModel):
    """Where no mask is left, gives the `edits` of the n-th such forward confidence .95."""

    def __init__(self, num_confident, edits):
        super().__init__(num_confident)
        self.edits = edits  # number -> {position: token}
        self.num_unmasked = 0

    def forward(self, token_ids, start):
        logits = super().forward(token_ids, start)
        if (token_ids == MASK).any():
            return logits
        for position, token in self.edits(self.num_unmasked).items():
            logits[position - start] = np.log(0.05 / (VOCAB - 1))
            logits[position - start, token] = np.log(0.95)
        self.num_unmasked += 1
        return logits


@cache
def noise_of_position(seed, position, vocab):
    return np.random.default_rng([seed, position]).normal(0, 2.4, vocab)


def noise(seed, text, vocab, mask_id):
    """Logits [T, V] of a text: partly of each position, so that edits settle, partly of all tokens."""
    text = [int(token) for token in text]
    of_text = np.random.default_rng([seed, len(text), *text]).normal(0, 1.2, (len(text), vocab))
    logits = of_text + np.stack([noise_of_position(seed, position, vocab) for position in range(len(text))])
    logits[:, mask_id] -= 4.0  # a mask is predicted at times
    return logits.astype(np.float32)


class NoiseModel(Positions):
    """Answers by `noise` of all tokens that it has seen up to the end of the window."""

    def __init__(self, seed, vocab, mask_id):
        super().__init__()
        self.seed, self.vocab, self.mask_id = seed, vocab, mask_id
        self.text = []

    def forward(self, token_ids, start):
        self.begin(token_ids, start)
        self.text[start:] = token_ids.tolist()
        return torch.from_numpy(noise(self.seed, self.text, self.vocab, self.mask_id)[start:])


class Alone:
    """A model of one request, with `forward(token_ids, start)`, where one of several is asked for."""

    def __init__(self, model):
        self.model = model

    def open(self, request, num_positions):
        pass

    def forward(self, windows):
        [window] = windows
        return self.model.forward(window.token_ids, window.start)

    def close(self, request):
        pass


def decode_request(model, prompt, settings, on_forward, request=0):
    """Decode one request with a fresh model that knows one only."""
    [result] = decode_prompts(
        Alone(model), [prompt], settings, lambda events: on_forward(*events), first_request=request
    )
    return result


def settings(**changes):
    values = {"block_length": 32, "gen_length": 32, "mask_id": MASK, "eos_id": EOS}
    return DecodeSettings(**values | changes)


def decode(model, prompt, **changes):
    events = []
    result = decode_request(model, prompt, settings(**changes), events.append)
    return result, events


def kinds(events):
    return [event.kind for event in events]
