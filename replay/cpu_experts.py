"""Runs batches of experts on the CPU, beside the thread that issues copies to the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.profile import ProfileError
from replay.cpu_amx import HAS_AMX, TILE, tile_configurations
from replay.cpu_kernel import HAS_BFLOAT16, LEAST_PACKED, MULTIPLE, most_threads, run_batch, use_threads
from replay.cpu_onednn import OneDnn

KERNELS = ("rows", "onednn")
_TILES = tile_configurations()
_ONE_AT_A_TIME = Lock()  # one of numba's thread pools ends the process when two threads enter it


class Batch(NamedTuple):
    """Experts to run, each over some rows of a hidden state."""

    experts: Sequence[Tensor]  # of J experts: gate [M, H], up [M, H] and down [H, M] in a row, bfloat16, on the host
    ends: NDArray[np.int64]  # [J] end of each expert's rows within the batch, ascending
    rows: NDArray[np.int64]  # [N] row of `hidden` of each row of the batch
    hidden: Tensor  # [T, H] bfloat16
    out: Tensor  # [N, H] bfloat16, written in the order of the batch


def default_workers() -> int:
    """All cores that this process may use but one, which issues copies."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def check_workers(num_workers: int) -> None:
    """Refuse a number of workers that this process has no cores for."""
    most = min(len(os.sched_getaffinity(0)), most_threads())
    if not 1 <= num_workers <= most:
        raise ProfileError(f"{num_workers} CPU workers: must be from 1 to {most}, the cores of this process")


class CpuExperts:
    """Computes SwiGLU experts on worker threads, one batch at a time, without holding the interpreter lock.

    `start` returns at once and `wait` when the results are written. `rows` is our kernel, in which all workers share
    the rows of all matrices; `onednn` runs one expert a worker through PyTorch, which uses AMX where the CPU has it.

    Args:
        hidden: H.
        intermediate: M.
        num_workers: threads; None leaves one core free.
        kernel: of KERNELS.

    Raises:
        ProfileError: no such kernel, no such number of workers, or sizes that the kernel does not take.
    """

    def __init__(self, hidden: int, intermediate: int, *, num_workers: int | None = None, kernel: str = "rows") -> None:
        self.hidden, self.intermediate, self.kernel = hidden, intermediate, kernel
        self.num_workers = default_workers() if num_workers is None else num_workers
        if kernel not in KERNELS:
            raise ProfileError(f"CPU kernel {kernel!r}: allowed are {', '.join(KERNELS)}")
        check_workers(self.num_workers)
        if kernel == "rows" and (hidden % MULTIPLE or intermediate % MULTIPLE):
            raise ProfileError(f"CPU kernel rows: sizes {hidden} and {intermediate} must be multiples of {MULTIPLE}")
        self._asked: SimpleQueue[Batch | None] = SimpleQueue()
        self._answers: SimpleQueue[Exception | None] = SimpleQueue()
        self._is_running = False
        self._thread = Thread(target=self._work, name="cpu-experts", daemon=True)
        self._thread.start()

    def start(self, batch: Batch) -> None:
        """Begin a batch; what it refers to must stay as it is until `wait` has returned.

        Raises:
            ProfileError: a batch is running, or a tensor or array is not what `Batch` says.
        """
        if self._is_running:
            raise ProfileError("a batch of CPU experts is running: wait for it first")
        self._check(batch)
        self._is_running = True
        self._asked.put(batch)

    def has_answer(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._answers.empty()

    def wait(self) -> None:
        """Return when the batch that was started has written its results.

        Raises:
            ProfileError: no batch was started.
        """
        if not self._is_running:
            raise ProfileError("no batch of CPU experts was started")
        error = self._answers.get()
        self._is_running = False
        if error is not None:
            raise error

    def close(self) -> None:
        """Let the workers end; a running batch is finished first."""
        self._asked.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, batch: Batch) -> None:
        size = 3 * self.hidden * self.intermediate
        for place, expert in enumerate(batch.experts):
            if expert.dtype != torch.bfloat16 or expert.numel() != size or expert.is_cuda or not expert.is_contiguous():
                raise ProfileError(
                    f"expert {place} of the batch: {expert.numel()} numbers of {expert.dtype} on {expert.device}, must be "
                    f"{size} of torch.bfloat16 in a row on the host"
                )
        num_rows = len(batch.rows)
        ends = np.diff(batch.ends, prepend=0)
        if len(ends) != len(batch.experts) or (ends < 0).any() or ends.sum() != num_rows:
            raise ProfileError(f"a batch of {len(batch.experts)} experts and {num_rows} rows has ends {batch.ends}")
        for name, found, rows in (("hidden", batch.hidden, None), ("out", batch.out, num_rows)):
            fits = found.dim() == 2 and found.shape[1] == self.hidden and rows in (None, found.shape[0])
            if not fits or found.dtype != torch.bfloat16 or found.is_cuda or not found.is_contiguous():
                raise ProfileError(
                    f"{name} of a batch is {list(found.shape)} of {found.dtype} on {found.device}, must be "
                    f"[{rows or 'T'}, {self.hidden}] of torch.bfloat16 in a row on the host"
                )
        if num_rows and not (batch.rows.min() >= 0 and batch.rows.max() < len(batch.hidden)):
            raise ProfileError(f"rows of a batch must be from 0 to {len(batch.hidden) - 1}, found {batch.rows}")

    def _work(self) -> None:
        run, close = _kernel(self)
        try:
            while (batch := self._asked.get()) is not None:
                try:
                    if batch.experts:
                        run(batch)
                    self._answers.put(None)
                except Exception as error:  # raised again in `wait`, by the thread that can act on it
                    self._answers.put(error)
        finally:
            close()


def _kernel(owner: CpuExperts) -> tuple[Callable[[Batch], None], Callable[[], None]]:
    """What runs a batch in this thread, and what ends it."""
    if owner.kernel == "onednn":
        threads = OneDnn(owner.hidden, owner.intermediate, owner.num_workers)
        return lambda batch: threads.run(*batch), threads.close
    use_threads(owner.num_workers)
    scratch = _Scratch(owner.hidden, owner.intermediate)
    return scratch.run, lambda: None


class _Scratch:
    """Arrays between the matrices, made for the largest batch so far."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        self._hidden, self._intermediate = hidden, intermediate
        self._make(256)

    def _make(self, num_rows: int) -> None:
        self._numbers = np.arange(num_rows)
        self._gate = np.empty((num_rows, self._intermediate), np.float32)
        self._up = np.empty_like(self._gate)
        self._middle = np.empty(self._gate.shape, np.uint16)
        self._wide = np.empty((num_rows, self._hidden), np.float32)
        num_tiles = num_rows // LEAST_PACKED if HAS_AMX else 0  # more than all experts have together
        self._packed_x = np.zeros((num_tiles, self._hidden // 2, TILE), np.uint32)
        self._packed_middle = np.zeros((num_tiles, self._intermediate // 2, TILE), np.uint32)

    def run(self, batch: Batch) -> None:
        if len(batch.rows) > len(self._numbers):
            self._make(2 * len(batch.rows))
        experts = np.array([expert.data_ptr() for expert in batch.experts])
        hidden, out = (x.view(torch.uint16).numpy() for x in (batch.hidden, batch.out))
        scratch = (self._gate, self._up, self._middle, self._wide, self._packed_x, self._packed_middle)
        with _ONE_AT_A_TIME:
            run_batch(experts, batch.ends, batch.rows, self._numbers, hidden, *scratch, _TILES, out)


def instructions() -> str:
    """Which of the CPU's matrix instructions for bfloat16 the kernels use, in words."""
    if HAS_AMX:
        return "AMX"
    return "no AMX, AVX-512 BF16" if HAS_BFLOAT16 else "no AMX and no AVX-512 BF16, float32 arithmetic"
