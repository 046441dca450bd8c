"""What a machine costs: the hardware profile, and the costs it gives for one model shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import floor
from typing import Any, NamedTuple

from policies.contract import Estimates
from policies.jit import jit
from tracer.schema import ModelShape

LONGEST_NS = 1e15  # of one cost, eleven days: sums over a run stay exact
NON_EXPERT_BYTES = 2  # attention, gate, shared experts and head stay in bfloat16 whatever the experts are


# Least values, where 0 is not one
LEAST = {"h2d_slowdown": 1, "cpu_slowdown": 1, "transfer_chunk": 1, "cpu_workers": 1}
LARGEST_COUNT = 65536  # of experts in a chunk, and of workers
LARGEST = 1e30  # of any number: products stay finite
LARGEST_EXPERT_BYTES = 2**40  # sums over a run stay within 64 bits

# Sizes that every model has; a trace that does not know one says 0, and would be charged too little
SIZES = ("hidden", "expert_intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab")


class ProfileError(ValueError):
    """A hardware profile is incomplete, impossible, or says nothing of the asked shape."""


def staging_of(transfer_chunk: int, staging_slots: int | None) -> int:
    """Slots beyond the cache for transfers; None is twice the transfer chunk.

    Raises:
        ProfileError: fewer than a chunk of transfers has.
    """
    staging = 2 * transfer_chunk if staging_slots is None else staging_slots
    if staging < transfer_chunk:
        raise ProfileError(f"staging_slots is {staging}, must be at least {transfer_chunk}, one chunk of transfers")
    return staging


class Costs(NamedTuple):
    """Everything an engine charges, for one profile, shape, expert size and policy. Times in ns."""

    n_a_ns: float  # non-expert part of one layer: a + b * tokens + c * kv_len
    n_b_ns: float
    n_c_ns: float
    g_a_ns: float  # grouped expert kernel: a + b * experts + c * tokens
    g_b_ns: float
    g_c_ns: float
    h2d_latency_ns: float  # one copy: latency + bytes / bandwidth
    h2d_bytes_per_s: float
    expert_bytes: int
    cpu_a_ns: float  # batch of experts on the CPU: a + sum of (b0 + b1 * load)
    cpu_b0_ns: float
    cpu_b1_ns: float
    cpu_roundtrip_ns: int
    tail_ns: int  # dense layers, embedding, head and sampling, once a forward
    gate_sync_ns: int
    policy_ns: int
    h2d_slowdown: float
    cpu_slowdown: float
    transfer_chunk: int


@jit
def round_half_up(value):
    """The one rounding of every cost: to whole ns, halves up."""
    return floor(value + 0.5)


@jit
def layer_ns(costs, tokens, kv_len):
    """Non-expert part of one layer: attention, gate, shared expert."""
    return round_half_up(costs.n_a_ns + costs.n_b_ns * tokens + costs.n_c_ns * kv_len)


@jit
def kernel_ns(costs, experts, tokens):
    """One grouped expert kernel; an empty group costs nothing."""
    if experts == 0:
        return 0
    return round_half_up(costs.g_a_ns + costs.g_b_ns * experts + costs.g_c_ns * tokens)


@jit
def copy_ns(costs, slowed):
    """One expert from pinned host memory to the GPU, `slowed` while the CPU batch runs."""
    factor = costs.h2d_slowdown if slowed else 1.0
    return round_half_up((costs.h2d_latency_ns + costs.expert_bytes * 1e9 / costs.h2d_bytes_per_s) * factor)


@jit
def cpu_batch_ns(costs, experts, tokens, slowed):
    """One batch of experts on the CPU; `tokens` is the sum of their loads. An empty batch costs nothing."""
    if experts == 0:
        return 0
    factor = costs.cpu_slowdown if slowed else 1.0
    return round_half_up((costs.cpu_a_ns + costs.cpu_b0_ns * experts + costs.cpu_b1_ns * tokens) * factor)


@dataclass(frozen=True)
class ShapeCosts:
    """Costs measured at one shape: non-expert layer, expert kernel, CPU batch and tail."""

    hidden: int
    expert_intermediate: int
    expert_bytes: int
    n_ns: tuple[float, float, float]  # a, per token, per committed position
    g_ns: tuple[float, float, float]  # a, per expert, per token
    cpu_a_ns: float
    cpu_b0_ns: float
    cpu_b1_ns: float
    tail_ns: float


@dataclass(frozen=True)
class Roofline:
    """Rates from which costs at any shape follow: time = launches + bytes / bandwidth + operations / rate."""

    gpu_bytes_per_s: float
    gpu_flops_per_s: float
    cpu_bytes_per_s: float
    cpu_flops_per_s: float
    kernel_ns: float  # launch and drain of one kernel
    kernels_per_layer: int = 10  # non-expert part
    kernels_per_tail: int = 20
    cpu_start_ns: float = 20_000.0


@dataclass(frozen=True)
class HardwareProfile:
    """One machine, measured or from data sheets (`provenance`); `assumed` names the keys that are guesses."""

    name: str
    provenance: str
    machine: str
    date: str
    h2d_latency_ns: float
    h2d_bytes_per_s: float
    cpu_workers: int  # that the rates of the CPU are for; to change it alone changes no time
    gate_sync_ns: float = 0.0
    cpu_roundtrip_ns: float = 0.0
    policy_ns: Mapping[str, float] = field(default_factory=dict)  # by policy name; `default` for the rest
    h2d_slowdown: float = 1.0
    cpu_slowdown: float = 1.0
    transfer_chunk: int = 4
    h2d_pageable_bytes_per_s: float | None = None
    roofline: Roofline | None = None
    shapes: tuple[ShapeCosts, ...] = ()
    provisional: bool = False
    assumed: tuple[str, ...] = ()
    cpu_kernel: str = ""  # with which experts on the CPU were measured; changes no time
    fit_errors: Mapping[str, float] = field(default_factory=dict)  # of what was measured, as shares; changes no time

    def __post_init__(self) -> None:
        if self.provenance not in ("measured", "datasheet"):
            raise ProfileError(f"provenance {self.provenance!r}: allowed are measured, datasheet")
        for key, value in _numbers(asdict(self)):
            name = key.rpartition(".")[2]
            least = LEAST.get(name, 0)
            is_rate = name.endswith("_per_s")
            if not (least <= value < float("inf") and (value > 0 or not is_rate)):
                allowed = "above 0" if is_rate else f"of at least {least}"
                raise ProfileError(f"{key} is {value}, must be a number {allowed}")
            most = LARGEST_COUNT if name in ("transfer_chunk", "cpu_workers") else LARGEST
            if value > most:
                raise ProfileError(f"{key} is {value:g}, must be at most {most:g}")

    def costs(self, shape: ModelShape, expert_bytes: int, policy: str) -> Costs:
        """Costs of running `policy` on this machine with experts of this shape and size.

        A measurement at exactly this shape is used where the profile has one, else the roofline.

        Raises:
            ProfileError: the profile has neither, a size of the shape is not known, or a cost is beyond what can be
                added up.
        """
        names = SIZES + (("dense_intermediate",) if shape.num_dense_layers else ())
        if unknown := [name for name in names if not getattr(shape, name)]:
            raise ProfileError(
                f"the shape does not say {', '.join(unknown)}, so nothing can be timed; set shape=llada2.0-mini or another"
            )
        if expert_bytes > LARGEST_EXPERT_BYTES:
            raise ProfileError(f"an expert takes {expert_bytes} bytes, must be at most {LARGEST_EXPERT_BYTES}")
        entry = self._measured(shape, expert_bytes) or self._from_roofline(shape, expert_bytes)
        policy_ns = self.policy_ns.get(policy, self.policy_ns.get("default", 0.0))
        times = {
            "n_ns": max(entry.n_ns),
            "g_ns": max(entry.g_ns),
            "a CPU batch": (entry.cpu_a_ns + entry.cpu_b0_ns + entry.cpu_b1_ns) * self.cpu_slowdown,
            "tail_ns": entry.tail_ns,
            "a copy": (self.h2d_latency_ns + expert_bytes * 1e9 / self.h2d_bytes_per_s) * self.h2d_slowdown,
            "policy_ns": policy_ns,
            "gate_sync_ns": self.gate_sync_ns,
            "cpu_roundtrip_ns": self.cpu_roundtrip_ns,
        }
        for what, time_ns in times.items():
            if not time_ns <= LONGEST_NS:
                raise ProfileError(f"{self.name}: {what} takes {time_ns:g} ns, must be at most {LONGEST_NS:g}")
        n_a_ns, n_b_ns, n_c_ns = map(float, entry.n_ns)
        g_a_ns, g_b_ns, g_c_ns = map(float, entry.g_ns)
        return Costs(
            n_a_ns=n_a_ns,
            n_b_ns=n_b_ns,
            n_c_ns=n_c_ns,
            g_a_ns=g_a_ns,
            g_b_ns=g_b_ns,
            g_c_ns=g_c_ns,
            h2d_latency_ns=float(self.h2d_latency_ns),
            h2d_bytes_per_s=float(self.h2d_bytes_per_s),
            expert_bytes=int(expert_bytes),
            cpu_a_ns=float(entry.cpu_a_ns),
            cpu_b0_ns=float(entry.cpu_b0_ns),
            cpu_b1_ns=float(entry.cpu_b1_ns),
            cpu_roundtrip_ns=round_half_up(float(self.cpu_roundtrip_ns)),
            tail_ns=round_half_up(float(entry.tail_ns)),
            gate_sync_ns=round_half_up(float(self.gate_sync_ns)),
            policy_ns=round_half_up(float(policy_ns)),
            h2d_slowdown=float(self.h2d_slowdown),
            cpu_slowdown=float(self.cpu_slowdown),
            transfer_chunk=int(self.transfer_chunk),
        )

    def provenance_at(self, shape: ModelShape, expert_bytes: int) -> str:
        """Where `costs` come from: `measured` at this very shape, `roofline` of measured rates, or `datasheet`."""
        if self.provenance == "measured" and self._measured(shape, expert_bytes) is None:
            return "roofline"
        return self.provenance

    def _measured(self, shape: ModelShape, expert_bytes: int) -> ShapeCosts | None:
        wanted = (shape.hidden, shape.expert_intermediate, expert_bytes)
        return next((s for s in self.shapes if (s.hidden, s.expert_intermediate, s.expert_bytes) == wanted), None)

    def _from_roofline(self, shape: ModelShape, expert_bytes: int) -> ShapeCosts:
        rates = self.roofline
        if rates is None:
            known = (
                ", ".join(f"{s.hidden}x{s.expert_intermediate} at {s.expert_bytes} bytes" for s in self.shapes)
                or "none"
            )
            raise ProfileError(
                f"{self.name}: not measured at {shape.hidden}x{shape.expert_intermediate} with {expert_bytes} bytes an expert; measured: {known}"
            )
        layer, expert = layer_weights(shape), 3 * shape.hidden * shape.expert_intermediate
        dense = shape.num_dense_layers * (_attention_weights(shape) + 3 * shape.hidden * shape.dense_intermediate)
        kv_bytes = 2 * shape.num_kv_heads * shape.head_dim * NON_EXPERT_BYTES
        gpu_byte_ns, gpu_flop_ns = 1e9 / rates.gpu_bytes_per_s, 1e9 / rates.gpu_flops_per_s
        return ShapeCosts(
            hidden=shape.hidden,
            expert_intermediate=shape.expert_intermediate,
            expert_bytes=expert_bytes,
            n_ns=(
                rates.kernels_per_layer * rates.kernel_ns + layer * NON_EXPERT_BYTES * gpu_byte_ns,
                2 * layer * gpu_flop_ns,
                kv_bytes * gpu_byte_ns,
            ),
            g_ns=(rates.kernel_ns, expert_bytes * gpu_byte_ns, 2 * expert * gpu_flop_ns),
            cpu_a_ns=rates.cpu_start_ns,
            cpu_b0_ns=expert_bytes * 1e9 / rates.cpu_bytes_per_s,
            cpu_b1_ns=2 * expert * 1e9 / rates.cpu_flops_per_s,
            tail_ns=rates.kernels_per_tail * rates.kernel_ns
            + (dense + shape.vocab * shape.hidden) * NON_EXPERT_BYTES * gpu_byte_ns,
        )


def layer_weights(shape: ModelShape) -> int:
    """Numbers that a layer reads beside its routed experts: attention, gate and shared experts."""
    shared = shape.num_shared_experts * 3 * shape.hidden * shape.expert_intermediate
    return _attention_weights(shape) + shape.num_experts * shape.hidden + shared


def _attention_weights(shape: ModelShape) -> int:
    return shape.hidden * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)


def _numbers(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, float]]:
    """Every number of nested records, with its key."""
    for name, value in values.items():
        key = f"{group}{name}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{key}.")
        elif isinstance(value, tuple):
            yield from _numbers({f"{key}[{i}]": item for i, item in enumerate(value)})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, value


def estimates_of(costs: Costs) -> Estimates:
    """The policy's belief, read from the same profile: integers, so that dispatch compares exact times."""
    return Estimates(copy_ns(costs, False), round_half_up(costs.cpu_b0_ns), round_half_up(costs.cpu_b1_ns))
