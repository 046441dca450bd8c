"""The rules of the engines over one block: which masks a forward turns into tokens, and how many forwards are run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TIE = np.float32(1e-5)  # dInfer accepts what is this close to the best
TOKENS_PER_FORWARD = 8  # what dInfer expects when it decides how many forwards to unroll
MIN_UNROLL, MAX_UNROLL = 2, 4


def accept_threshold(
    confidence: NDArray[np.float32], eligible: NDArray[np.bool_], threshold: float
) -> NDArray[np.bool_]:
    """Accept what reaches the threshold, and in any case the best and all within 1e-5 of it.

    Args:
        confidence: [T], probability of the token that would be written.
        eligible: [T], positions that may be accepted. None eligible, none accepted.
        threshold: compared in float32, equality counts.
    Source:
        dInfer, ThresholdParallelDecoder.
    """
    if not eligible.any():
        return np.zeros_like(eligible)
    best = confidence[eligible].max()
    return eligible & (confidence >= min(np.float32(threshold), best - TIE))


def accept_above(
    confidence: NDArray[np.float32], masked: NDArray[np.bool_], threshold: float, quota: int = 1
) -> NDArray[np.bool_]:
    """Accept what is above the threshold, or, where that is fewer than the quota, the quota's best.

    Args:
        confidence: [T], probability of the token that would be written.
        masked: [T], positions that may be accepted.
        threshold: compared in float32, equality does not count.
        quota: how many are accepted at least, as long as there are masks; among equals those at the lower positions.
    Source:
        LLaDA2.0 and LLaDA2.1, released `generate`; SGLang, LowConfidence and JointThreshold.
    """
    above = masked & (confidence > np.float32(threshold))
    if np.count_nonzero(above) >= quota:
        return above
    order = np.argsort(np.where(masked, -confidence, np.inf), kind="stable")
    accepted = np.zeros_like(masked)
    accepted[order[: min(quota, np.count_nonzero(masked))]] = True
    return accepted


def num_unrolled(num_masked: int) -> int:
    """Forwards that are run before it is looked again whether masks are left.

    Source:
        dInfer, BlockDiffusionRunner.
    """
    return max(min(num_masked // TOKENS_PER_FORWARD, MAX_UNROLL), MIN_UNROLL)


def step_quotas(block_length: int, num_steps: int) -> list[int]:
    """Masks that each step of a block accepts at least: even shares, the rest to the first steps; 0 beyond the block.

    Source:
        LLaDA2.0, released `generate`.
    """
    share, rest = divmod(block_length, num_steps)
    return [share + (step < rest) for step in range(num_steps)]
