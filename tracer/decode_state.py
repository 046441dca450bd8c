"""The tokens of a request that is being decoded, and the forwards over stretches of them that a loop asks for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tracer.decode_sample import Prediction, Proposal
from tracer.decode_settings import DecodeError, DecodeSettings
from tracer.schema import ForwardKind

MOST_SAMPLED = 500  # forwards over masks after which a block whose tokens are drawn is given up


class Window(NamedTuple):
    """What one request runs in its next forward: consecutive positions, which see all before them.

    Keys and values below `start` are those of the last forward that ran these positions, and are committed: no later
    window begins before them.
    """

    request: int
    token_ids: NDArray[np.int64]  # [T]
    start: int  # position of the first
    kind: ForwardKind


class Reply(NamedTuple):
    """What a forward gave for a window."""

    logits: Tensor  # [T, V]
    prediction: Prediction  # [T]
    wall_ns: int  # of the pass


class Active(NamedTuple):
    """What a rule sees of the block that a forward decodes. A positions."""

    logits: Tensor  # [A, V]
    prediction: Prediction  # [A]
    token_ids: NDArray[np.int64]  # [A] that were fed in
    masked: NDArray[np.bool_]  # [A]
    is_prompt: NDArray[np.bool_]  # [A]


class Choice(NamedTuple):
    """What a rule makes of a forward; `written` positions, masked or not, get their proposed token."""

    ids: NDArray[np.int64]  # [A]
    written: NDArray[np.bool_]  # [A]


@dataclass(frozen=True, eq=False)
class ForwardEvent:
    """One forward pass of one request, as the loop saw it."""

    request: int
    block: int  # from 0 at the first block that is decoded; -1 in prefill
    iteration: int  # within the block, from 0
    kind: ForwardKind
    positions: NDArray[np.int64]  # [T] absolute
    token_ids_in: NDArray[np.int64]  # [T]
    is_masked_in: NDArray[np.bool_]  # [T]
    argmax_ids: NDArray[np.int64]  # [T]
    p_argmax: NDArray[np.float32]  # [T]
    p_current: NDArray[np.float32]  # [T] NaN for a mask
    accepted: NDArray[np.bool_]  # [T] masks that this forward turned into tokens
    edited: NDArray[np.bool_]  # [T] tokens that it replaced, be it by a mask
    kv_len: int  # committed positions before this forward
    wall_ns: int  # of the pass, from the call of the model to its probabilities on the host


class Ending(NamedTuple):
    """What is left of a request at its end."""

    generated_ids: NDArray[np.int64]  # the answer, without an end of text
    returned_ids: NDArray[np.int64]  # what the engine's own call returns


T = TypeVar("T")
Steps = Generator[Window, Reply, T]  # a loop asks for forwards one by one, and is sent what they gave
Rule = Callable[[Active], Choice]


class Decoding:
    """A request that is being decoded."""

    def __init__(
        self,
        prompt_ids: NDArray[np.int64],
        settings: DecodeSettings,
        on_forward: Callable[[ForwardEvent], None],
        request: int,
    ) -> None:
        self.token_ids = np.full(settings.num_positions(len(prompt_ids)), settings.mask_id, dtype=np.int64)
        self.token_ids[: len(prompt_ids)] = prompt_ids
        self.settings = settings
        self.prompt_length = len(prompt_ids)
        self.request = request
        self.rng = np.random.default_rng([settings.seed, request])
        self._on_forward = on_forward

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Number, first position and end of each block that is decoded; a prompt's tail shares the first."""
        length = self.settings.block_length
        starts = range(self.prompt_length // length * length, len(self.token_ids), length)
        return [(block, start, start + length) for block, start in enumerate(starts)]

    @property
    def answer(self) -> NDArray[np.int64]:
        """The new tokens as they are, at most gen_length."""
        return self.token_ids[self.prompt_length : self.prompt_length + self.settings.gen_length]

    def num_masked(self, start: int, stop: int) -> int:
        """Masks that are left in [start, stop)."""
        return int(np.count_nonzero(self.token_ids[start:stop] == self.settings.mask_id))

    def holds_eos(self, start: int, stop: int) -> bool:
        """Whether the end of text stands in [start, stop)."""
        return bool((self.token_ids[start:stop] == self.settings.eos_id).any())

    def forward(
        self,
        kind: ForwardKind,
        block: int,
        iteration: int,
        start: int,
        stop: int,
        *,
        rule: Rule | None = None,
        active: int | None = None,
    ) -> Steps[ForwardEvent]:
        """Run positions [start, stop), write what the rule says, if there is one, and report the forward.

        Args:
            kind: of the forward.
            block: that is decoded, -1 in prefill.
            iteration: in the block.
            start: first position.
            stop: behind the last position.
            rule: what is written.
            active: first position that the rule sees; all by default.
        """
        token_ids = self.token_ids[start:stop].copy()
        masked = token_ids == self.settings.mask_id
        reply = yield Window(self.request, token_ids, start, kind)
        guess = reply.prediction
        if not np.isfinite(guess.p_argmax).all():
            self.refuse(block, iteration, "logits are not finite")
        ids, written = token_ids, np.zeros_like(masked)
        if rule is not None:
            ids, written = self._choose(rule, reply, token_ids, masked, start, start if active is None else active)
        self.token_ids[start:stop] = np.where(written, ids, token_ids)
        event = ForwardEvent(
            request=self.request,
            block=block,
            iteration=iteration,
            kind=kind,
            positions=np.arange(start, stop),
            token_ids_in=token_ids,
            is_masked_in=masked,
            argmax_ids=guess.argmax_ids,
            p_argmax=guess.p_argmax,
            p_current=np.where(masked, np.float32("nan"), guess.p_current),
            accepted=written & masked & (ids != self.settings.mask_id),
            edited=written & ~masked,
            kv_len=start,
            wall_ns=reply.wall_ns,
        )
        self._on_forward(event)
        return event

    def refuse(self, block: int, iteration: int, why: str) -> NoReturn:
        """Raise a DecodeError that says where."""
        raise DecodeError(f"request {self.request}, block {block}, iteration {iteration}: {why}")

    def end_here(self, stop: int) -> None:
        """Fill what stands behind `stop` with the end of text: it was never decoded."""
        self.token_ids[stop:] = self.settings.eos_id

    def _choose(
        self,
        rule: Rule,
        reply: Reply,
        token_ids: NDArray[np.int64],
        masked: NDArray[np.bool_],
        start: int,
        active: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ask the rule, and spread its choice over the window."""
        rows = slice(active - start, None)
        seen = Active(
            reply.logits[rows],
            Prediction._make(values[rows] for values in reply.prediction),
            token_ids[rows],
            masked[rows],
            np.arange(active, start + len(token_ids)) < self.prompt_length,
        )
        choice = rule(seen)
        ids, written = token_ids.copy(), np.zeros_like(masked)
        ids[rows], written[rows] = choice
        return ids, written


class StallWatch:
    """Tells a block that can never come to its end: greedy decoding that is where it was before, or too many draws."""

    def __init__(self, decoding: Decoding, block: int, start: int, stop: int) -> None:
        self._decoding, self._block, self._start, self._stop = decoding, block, start, stop
        self._seen: set[tuple[int, bytes]] = set()
        self._num_looks = 0

    def look(self, iteration: int, post_steps: int) -> None:
        """Look at the block before a forward over its masks.

        Args:
            iteration: of the forward.
            post_steps: of the loop, which limits them; a state is what it was only if they are the same.

        Raises:
            DecodeError: the block would be decoded for ever.
        """
        self._num_looks += 1
        state = (post_steps, self._decoding.token_ids[self._start : self._stop].tobytes())
        is_back = self._decoding.settings.is_greedy and state in self._seen
        if is_back or self._num_looks > MOST_SAMPLED:
            remaining = self._decoding.num_masked(self._start, self._stop)
            found = "the same tokens again" if is_back else f"{MOST_SAMPLED} forwards over masks"
            self._decoding.refuse(
                self._block,
                iteration,
                f"{found}, and {remaining} masks are left; the model predicts masks, and this would go on for ever",
            )
        self._seen.add(state)


def proposal_of(prediction: Prediction) -> Proposal:
    """The likeliest tokens and their probabilities."""
    return Proposal(prediction.argmax_ids, prediction.p_argmax)


def until_eos(ids: NDArray[np.int64], eos_id: int) -> Ending:
    """An answer up to the first end of text, which is returned but no part of the text.

    Source:
        LLaDA2.0 and LLaDA2.1, released `generate`; SGLang.
    """
    found = np.flatnonzero(ids == eos_id)
    end = int(found[0]) if found.size else len(ids)
    return Ending(ids[:end].copy(), ids[: end + 1].copy())
