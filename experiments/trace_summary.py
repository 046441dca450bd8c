"""What a trace is like, in lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tracer import locality
from tracer.schema import ForwardKind, ModelShape, Pass


class Summary(NamedTuple):
    """Counts and means over the passes of a trace."""

    num_forwards: Counter[ForwardKind]
    num_accepted: int
    activated: Sequence[float]  # [L] mean experts of each layer, denoise forwards
    overlap: float | None
    floor: float | None

    @property
    def tokens_per_forward(self) -> float:
        """Accepted tokens over decode forwards."""
        return self.num_accepted / (self.num_forwards.total() - self.num_forwards[ForwardKind.PREFILL])


def summarise(passes: Iterable[Pass], shape: ModelShape) -> Summary:
    """Count forwards and accepted tokens, and measure activation and overlap, in one reading."""
    num_forwards: Counter[ForwardKind] = Counter()
    num_accepted = 0
    denoised = []
    for item in passes:
        num_forwards.update(ForwardKind(kind) for kind in item.kinds)
        num_accepted += int(item.num_accepted.sum())
        denoised += locality.denoise_sets([item], shape.num_experts)
    return Summary(
        num_forwards,
        num_accepted,
        locality.activated_per_layer(denoised).tolist(),
        locality.within_blocks(denoised).mean_overlap,
        locality.between_requests(denoised).mean_overlap,
    )


def format_summary(summary: Summary, shape: ModelShape, path: Path, source: str) -> str:
    """The summary in lines for a terminal."""
    kinds = ", ".join(f"{kind.name.lower()} {summary.num_forwards[kind]}" for kind in sorted(summary.num_forwards))
    by_layer = ", ".join(
        f"{layer_id}: {count:.1f}" for layer_id, count in zip(shape.layer_ids, summary.activated, strict=True)
    )
    activated = sum(summary.activated) / len(summary.activated)
    overlap = "none, no block has two denoise forwards" if summary.overlap is None else f"{summary.overlap:.3f}"
    floor = "needs two requests" if summary.floor is None else f"{summary.floor:.3f}"
    lines = {
        "trace": f"{path} ({source})",
        "forwards": f"{summary.num_forwards.total()}: {kinds}",
        "tokens per forward": f"{summary.tokens_per_forward:.2f} ({summary.num_accepted} accepted, prefill not counted)",
        "activated experts": f"{activated:.1f} of {shape.num_experts} in a denoise forward (layer {by_layer})",
        "adjacent overlap": f"{overlap}; floor between unrelated requests: {floor}",
    }
    return "\n".join(f"{name:<20}{text}" for name, text in lines.items())
