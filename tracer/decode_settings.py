"""What is chosen about decoding: the loop, its thresholds and limits, and which of them each loop has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from tracer.schema import TraceError, choices

MAX_BATCH = 32
UNSET: Any = None  # by the caller; no reader finds it where the loop has the setting
SAMPLERS = ("greedy", "stock")
MASK_MODES = ("strict", "soft01")

# Settings that not every loop has, and what each loop takes for them when nothing else is asked for.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "dinfer": {"threshold": 0.9},
    "hf20": {"threshold": 0.95, "sampler": "greedy", "steps": 32, "minimal_topk": 1},
    "hf21": {
        "threshold": 0.95,
        "edit_threshold": 0.9,
        "max_post_steps": 16,
        "num_to_transfer": 1,
        "mask_mode": "strict",
    },
    "sglang_low_confidence": {"threshold": 0.95},
    "sglang_joint_threshold": {
        "threshold": 0.5,
        "edit_threshold": 0.0,
        "max_post_steps": 16,
        "penalty": 0.0,
        "always_commit": True,
    },
}
LOOP_NAMES = tuple(OWN_SETTINGS)
GREEDY_LOOPS = ("sglang_low_confidence", "sglang_joint_threshold")


class DecodeError(TraceError):
    """A request cannot be decoded to its end; the message says which one, in which block, and why."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How prompts are answered; `gen_length` counts new tokens, before rounding up to whole blocks.

    What is None becomes the default of the loop, and stays None where the loop has no such setting.

    Raises:
        TraceError: a value is out of range, no loop has this name, or the loop lacks a setting that is given.
    """

    mask_id: int
    eos_id: int
    loop: str = "dinfer"
    block_length: int = 16
    threshold: float = UNSET  # of the probability from which on a mask becomes a token
    gen_length: int = 128
    early_stop: bool = True  # at the end of text
    temperature: float = 0.0  # 0 takes the likeliest token
    seed: int = 0  # of what is drawn
    batch: int = 1  # requests that run side by side
    sampler: str = UNSET  # of hf20 at temperature 0: greedy, or stock, which draws at temperature 1
    steps: int = UNSET  # of hf20: most forwards of a block
    minimal_topk: int = UNSET  # of hf20: steps are at most gen_length // minimal_topk
    edit_threshold: float = UNSET  # above which a token is replaced by a likelier one
    max_post_steps: int = UNSET  # forwards of a block without masks that may still edit
    num_to_transfer: int = UNSET  # of hf21: masks that become tokens in a forward at least
    mask_mode: str = UNSET  # of hf21: strict, or soft01, the mask that the released loop passes by mistake
    penalty: float = UNSET  # of sglang_joint_threshold: off the logit of the token before
    always_commit: bool = UNSET  # of sglang_joint_threshold: also where the last forward changed nothing

    def __post_init__(self) -> None:
        if self.loop not in LOOP_NAMES:
            raise TraceError(f"decode loop {self.loop!r}: {choices(self.loop, LOOP_NAMES)}")
        self._take_defaults()
        if self.mask_id == self.eos_id:
            raise TraceError(f"mask and end of text have the same id {self.mask_id}: must be different tokens")
        self._check_counts()
        self._check_numbers()
        self._check_words()

    @property
    def is_greedy(self) -> bool:
        """Nothing is drawn: the same forward always gives the same tokens."""
        return self.temperature == 0 and self.sampler != "stock"

    def num_positions(self, prompt_length: int) -> int:
        """Positions of a prompt and its new tokens, rounded up to whole blocks."""
        num_blocks = -(-(prompt_length + self.gen_length) // self.block_length)
        return num_blocks * self.block_length

    def facts(self) -> dict[str, Any]:
        """What a trace says of its decoding: every setting that the loop has; ids and seed stand elsewhere there."""
        names = [field.name for field in fields(self) if field.name not in ("mask_id", "eos_id", "seed")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _take_defaults(self) -> None:
        own = OWN_SETTINGS[self.loop]
        for name in {name for settings in OWN_SETTINGS.values() for name in settings}:
            value = getattr(self, name)
            if name in own:
                object.__setattr__(self, name, own[name] if value is None else value)
            elif value is not None:
                having = [loop for loop, settings in OWN_SETTINGS.items() if name in settings]
                raise TraceError(f"{name} {value}: the loop {self.loop} has no such setting, only {', '.join(having)}")

    def _check_counts(self) -> None:
        for name, least in (
            ("block_length", 1),
            ("gen_length", 1),
            ("steps", 1),
            ("minimal_topk", 1),
            ("max_post_steps", 0),
            ("num_to_transfer", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise TraceError(f"{name} {value}: must be at least {least}")
        if not 1 <= self.batch <= MAX_BATCH:
            raise TraceError(f"batch {self.batch}: must be from 1 to {MAX_BATCH}")
        if self.minimal_topk is not None and self.minimal_topk > self.gen_length:
            raise TraceError(
                f"minimal_topk {self.minimal_topk}: must be at most gen_length {self.gen_length}, or no forward is run"
            )

    def _check_numbers(self) -> None:
        for name in ("threshold", "edit_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise TraceError(f"{name} {value}: must be from 0 to 1")
        for name in ("temperature", "penalty"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise TraceError(f"{name} {value}: must be a number, 0 or more")
        if self.temperature > 0 and self.loop in GREEDY_LOOPS:
            raise TraceError(f"temperature {self.temperature}: must be 0, the loop {self.loop} draws nothing")

    def _check_words(self) -> None:
        for name, allowed in (("sampler", SAMPLERS), ("mask_mode", MASK_MODES)):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise TraceError(f"{name} {value!r}: {choices(value, allowed)}")
