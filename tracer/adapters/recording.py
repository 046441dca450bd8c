"""One request of an engine that decodes by itself: what its forwards show, made into passes of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tracer.adapters.forward import Forward, Rules
from tracer.adapters.passes import Place, make_pass
from tracer.schema import ForwardKind, Pass, TraceError


class Recording:
    """Takes what hooks see, forward by forward; a pass is made once it is known what its forward accepted.

    A forward ends unsettled. What it accepted shows when the decoder reports it (`decoded`), or else in the tokens that
    are fed into the next forward, or, at the end of the request, in the tensor that was fed in last, which the loops of
    block diffusion write to in place.
    """

    def __init__(self, request: int, rules: Rules, settings: dict[str, Any]) -> None:
        self.passes: list[Pass] = []
        self.request = request
        self.rules = rules
        self.settings = settings  # how the request is decoded
        self.num_forwards = 0
        self._running: Forward | None = None
        self._unsettled: Forward | None = None
        self._before: Forward | None = None
        self._final: NDArray[np.int64] | None = None
        self._block, self._block_start, self._iteration = -1, -1, 0

    @contextmanager
    def forward(
        self, input_ids: Tensor | None, positions: Tensor | None = None, region: slice | None = None
    ) -> Iterator[None]:
        """A forward runs within; nothing of it counts if it raises an error. `end` must follow.

        Args:
            input_ids: [1, T], the engine's own tensor.
            positions: [T] or [1, T], ascending; None for 0 to T - 1.
            region: rows that the loop decodes; None where the forward only stores keys and values, or where the
                decoder reports it.

        Raises:
            TraceError: it holds no token ids, or several requests, or the forward before has not ended.
        """
        if self._running is not None:
            self._refuse("begins within another forward; the hook of the model fired too often")
        if input_ids is None:
            self._refuse("is fed embeddings; only token ids can be recorded")
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            self._refuse(f"token ids of shape {list(input_ids.shape)}; one request at a time is recorded, [1, T]")
        forward = Forward(input_ids[0], positions, region)
        if len(forward.positions) != len(forward.token_ids) or np.any(np.diff(forward.positions) < 1):
            self._refuse(f"{len(forward.token_ids)} tokens at positions {forward.positions}; must ascend, one for each")
        self._settle(forward)
        self._running = forward
        try:
            yield
        except BaseException:
            self._running = None
            raise

    def routed(self, layer_id: int, ids: Tensor, weights: Tensor) -> None:
        """The gate of a layer chose ids [T, K] with these weights [T, K]; copies are kept of both."""
        if self._running is None:
            self._refuse(f"the hook of layer {layer_id} fired outside of it")
        self._running.routed.append((layer_id, ids.detach().clone(), weights.detach().clone()))

    def layer_input(self, layer_id: int, router_input: Tensor) -> None:
        """What gate and experts of a layer are given, [1, T, H] or [T, H]."""
        if self._running is not None:  # a copy: fused experts write their output over it
            self._running.router_inputs[layer_id] = router_input.detach().clone()

    def layer_output(self, layer_id: int, output: Tensor) -> None:
        """The residual stream after a layer, [1, T, H] or [T, H]."""
        if self._running is not None:
            self._running.outputs[layer_id] = output.detach()

    def end(self, logits: Tensor | None) -> None:
        """The forward ends with logits [1, R, V] or [R, V] of its last R rows.

        Raises:
            TraceError: a hook fired too often or never, or what it showed cannot be.
        """
        forward, self._running = self._running, None
        if forward is None:
            self._refuse("ends before it began")
        try:
            forward.finish(logits, self.rules)
        except TraceError as error:
            self._refuse(str(error))
        self._unsettled = forward
        self.num_forwards += 1

    def decoded(self, start: int, after: Tensor) -> None:
        """The decoder has worked on the forward that ended last.

        Args:
            start: absolute position of the first token that it could change.
            after: [S], the tokens from there on as they are now.

        Raises:
            TraceError: no forward ended since the last time, or it did not run these positions.
        """
        forward = self._unsettled
        if forward is None:
            self._refuse("the decoder ran without a forward; the hook of the model never fired")
        tokens = after.detach().flatten().cpu().numpy()
        first = int(np.searchsorted(forward.positions, start))
        rows = slice(first, first + len(tokens))
        if not np.array_equal(forward.positions[rows], start + np.arange(len(tokens))):
            self._refuse(
                f"the decoder changed {len(tokens)} positions from {start} on, which the forward before did not run"
            )
        forward.region = rows
        final = forward.token_ids.copy()
        final[rows] = tokens
        self._close(forward, final)

    def end_with(self, tokens: Tensor) -> None:
        """Say what the whole sequence is at the end, [N] or [1, N] from position 0, where it is not written in place."""
        self._final = tokens.detach().flatten().cpu().numpy().astype(np.int64)

    def finish(self) -> list[Pass]:
        """The request is complete.

        Raises:
            TraceError: no forward was seen, or the last one shows nothing of what it accepted.
        """
        if self._running is not None:
            self._refuse("never ended")
        if not self.num_forwards:
            raise TraceError(
                f"request {self.request}: no forward reached the hooks; CUDA graphs and torch.compile skip them"
            )
        last = self._unsettled
        if last is not None:
            final = self._at_end(last)
            is_masked = last.region is not None and (last.token_ids[last.region] == self.rules.mask_id).any()
            if is_masked and np.array_equal(final, last.token_ids):
                raise TraceError(
                    f"request {self.request}: nothing shows what its last forward accepted; a loop that does not write into the tensor that it feeds in must pass its result to end_with"
                )
            self._close(last, final)
        return self.passes

    def _at_end(self, last: Forward) -> NDArray[np.int64]:
        if self._final is None:
            return last.live.cpu().numpy().astype(np.int64)
        final = last.token_ids.copy()
        known = last.positions < len(self._final)
        final[known] = self._final[last.positions[known]]
        return final

    def _refuse(self, what: str) -> NoReturn:
        raise TraceError(f"request {self.request}, forward {self.num_forwards}: {what}")

    def _settle(self, following: Forward) -> None:
        """Make the pass of the forward before, by the tokens that the next one is fed."""
        forward = self._unsettled
        if forward is None:
            return
        final = forward.token_ids.copy()
        _, mine, its = np.intersect1d(forward.positions, following.positions, assume_unique=True, return_indices=True)
        final[mine] = following.token_ids[its]
        self._close(forward, final)

    def _close(self, forward: Forward, final: NDArray[np.int64]) -> None:
        if forward.region is None and self._block >= 0 and np.any(final != forward.token_ids):
            forward.region = slice(0, len(final))  # it had no masks to decode, but changed tokens
        place = self._place(forward)
        before = self._before if place.iteration else None
        self.passes.append(make_pass(forward, place, final, before, self.rules, self.request))
        forward.free()
        self._before, self._unsettled = forward, None

    def _place(self, forward: Forward) -> Place:
        """Kind of a forward, its block, and its iteration there; a block begins where another stretch is decoded."""
        if forward.region is None and self._block < 0:
            return Place(ForwardKind.PREFILL, -1, 0)
        self._iteration += 1
        if forward.region is None:
            return Place(ForwardKind.COMMIT, self._block, self._iteration)
        start = int(forward.positions[forward.region.start])
        if start != self._block_start:
            self._block, self._block_start, self._iteration = self._block + 1, start, 0
        is_masked = (forward.token_ids[forward.region] == self.rules.mask_id).any()
        return Place(ForwardKind.DENOISE if is_masked else self.rules.unmasked, self._block, self._iteration)
