"""Tries the released code of LLaDA2.x, in a directory of your own, against the tracer's model: `python -m tracer.adapters.trial`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tracer.adapters.session import attach
from tracer.checkpoint import save
from tracer.llada2 import LLaDA2, block_causal_mask
from tracer.llada2_config import LLaDA2Config
from tracer.observe import Observation
from tracer.schema import TraceError
from tracer.store import TraceReader

TOLERANCE = 1e-5  # of logits, in float32
CODE = ("configuration_llada2_moe.py", "modeling_llada2_moe.py")
MASK_ID, BLOCK_LENGTH, NUM_TOKENS = 95, 16, 64
TINY = LLaDA2Config(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=48,
    num_experts_per_tok=4,
    num_shared_experts=1,
    moe_intermediate_size=12,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    rope_theta=600000,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    initializer_range=0.02,
    pad_token_id=0,
)


class Difference(NamedTuple):
    """How far two models are apart on the same windows."""

    logits: float  # largest absolute difference
    num_rows: int  # tokens of all windows, in each MoE layer
    num_differing: int  # rows in which the ids are not the same

    @property
    def is_none(self) -> bool:
        """Logits are within the tolerance, and all ids the same."""
        return self.logits <= TOLERANCE and not self.num_differing


def tiny_model(seed: int, config: LLaDA2Config = TINY) -> LLaDA2:
    """A model in which every weight and bias is random, and one that bfloat16 holds, so that a checkpoint keeps it."""
    rng = np.random.default_rng(seed)
    model = LLaDA2(config)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.1 if "bias" in name else 0.2)
            tensor.copy_(torch.from_numpy(rng.normal(mean, spread, tensor.shape)).bfloat16())
    return model


@torch.no_grad()
def compare(model: nn.Module, ours: LLaDA2, num_windows: int, seed: int = 0) -> Difference:
    """Run random windows, their last block partly masked, through both, the other one under its adapter."""
    rng = np.random.default_rng(seed)
    mask = block_causal_mask(NUM_TOKENS, BLOCK_LENGTH)
    additive = torch.zeros(1, 1, *mask.shape).masked_fill(~mask, -torch.inf)
    positions = torch.arange(NUM_TOKENS)
    observation = Observation(ours, False)
    worst, expected = 0.0, []
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trial.trace"
        with attach(model, "hf_llada2", path, name="trial", gate_dtype="float32") as session:
            for _ in range(num_windows):
                tokens = torch.from_numpy(rng.integers(0, MASK_ID, (1, NUM_TOKENS)))
                tokens[0, -BLOCK_LENGTH // 2 :] = MASK_ID
                with session.request(mask_id=MASK_ID, block_length=BLOCK_LENGTH):
                    theirs = model(tokens, attention_mask=additive, position_ids=positions[None]).logits[0]
                    observation.clear()
                    mine = ours(tokens, positions, mask=mask, observer=observation)[0]
                    tokens[0, -BLOCK_LENGTH // 2 :] = 0  # as a loop would write what it accepts
                worst = max(worst, float((theirs - mine).abs().max()))
                expected.append(torch.stack([layer.ids for layer in observation.layers]).sort(dim=-1).values.numpy())
        found = [item.expert_ids for item in TraceReader(path)]
    differs = (np.stack(found) != np.stack(expected)).any(axis=-1)
    return Difference(worst, differs.size, int(differs.sum()))


def load_released(code: Path, ours: LLaDA2, directory: Path) -> nn.Module:
    """The weights of our model in the released code, by way of a checkpoint, as a user would load it.

    Raises:
        TraceError: the code is not there, or transformers is not.
    """
    missing = [name for name in CODE if not (code / name).is_file()]
    if missing:
        raise TraceError(f"{code}: no {' and no '.join(missing)}; name a directory with the released code of LLaDA2.x")
    os.environ["HF_MODULES_CACHE"] = str(directory / "modules")  # where transformers copies code before it runs
    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError:
        raise TraceError("transformers is not installed; pip install 'transformers>=4.54,<5' brings it") from None
    checkpoint = directory / "checkpoint"
    save(ours, checkpoint)
    for name in CODE:
        shutil.copy(code / name, checkpoint)
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(checkpoint, trust_remote_code=True, dtype=torch.float32).eval()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 where both are the same, 1 where they are not."""
    parser = argparse.ArgumentParser(prog="tracer.adapters.trial", description=__doc__)
    parser.add_argument("code", type=Path, help="directory of the released code, which will be run")
    parser.add_argument("--windows", type=int, default=20, help=f"of {NUM_TOKENS} tokens each")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    options = parser.parse_args(arguments)
    if options.windows < 1:
        parser.error(f"--windows {options.windows}: must be at least 1")
    ours = tiny_model(options.seed)
    with TemporaryDirectory() as directory:
        try:
            model = load_released(options.code, ours, Path(directory))
            found = compare(model, ours, options.windows, options.seed)
        except TraceError as error:
            print(f"tracer.adapters.trial: error: {error}", file=sys.stderr)
            return 2
    print(f"logits differ by at most {found.logits:.1e}, ids in {found.num_differing} of {found.num_rows} rows")
    return 0 if found.is_none else 1


if __name__ == "__main__":
    raise SystemExit(main())
