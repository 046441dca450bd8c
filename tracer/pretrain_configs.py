"""What is trained: the shape of each model, its corpus and its schedule, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracer.corpus import WORKLOADS
from tracer.llada2_config import LLaDA2Config
from tracer.schema import TraceError

BLOCK_LENGTHS = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class PretrainConfig:
    """One training, up to its time limit and device.

    `model` holds the keys of `LLaDA2Config` that the tokenizer does not decide. `shares` are the workloads' parts of
    every batch and `num_documents` how many documents of each are drawn at most.

    Raises:
        TraceError: a workload is unknown, or lengths do not fit each other.
    """

    name: str
    model: Mapping[str, Any]
    vocab_size: int
    shares: Mapping[str, float]
    num_documents: Mapping[str, int]
    context: int  # tokens of a training sequence
    batch_size: int  # sequences of a step
    learning_rate: float
    bias_rate: float  # step of the expert biases
    warmup_ratio: float = 0.02
    final_learning_rate_ratio: float = 0.02
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    given_prompt_ratio: float = 0.9  # documents whose prompt is never masked
    max_token_weight: float = 4.0
    confidence_weight: float = 0.0  # of the entropy of tokens that are predicted right
    confidence_from: float = 1.0  # share of the time after which that joins the loss
    packages: tuple[str, ...] = ()  # installed ones whose sources join the standard library's
    max_problems: int = 1  # of an arithmetic document
    seed: int = 0

    def __post_init__(self) -> None:
        for workload in (*self.shares, *self.num_documents):
            if workload not in WORKLOADS:
                raise TraceError(f"{self.name}: workload {workload!r}: allowed are {', '.join(WORKLOADS)}")
        if self.context % max(BLOCK_LENGTHS):
            raise TraceError(f"{self.name}: context {self.context}: must be a multiple of {max(BLOCK_LENGTHS)}")
        if self.batch_size < len(self.shares):
            raise TraceError(
                f"{self.name}: batch_size {self.batch_size}: must be at least {len(self.shares)}, one sequence for each workload"
            )

    def model_config(self, vocab_size: int, eos_id: int) -> LLaDA2Config:
        """Complete the model's configuration with what the tokenizer decides."""
        return LLaDA2Config(**self.model, vocab_size=vocab_size, pad_token_id=eos_id)


_TINY_MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}

_MODEL_19X256 = {
    "hidden_size": 512,
    "num_hidden_layers": 20,
    "first_k_dense_replace": 1,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 128,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "initializer_range": 0.03,
}

_PACKAGES = (
    "torch",
    "transformers",
    "sympy",
    "scipy",
    "sklearn",
    "pandas",
    "statsmodels",
    "networkx",
    "jax",
    "skimage",
    "numba",
    "numpy",
    "flax",
    "optax",
    "gpytorch",
    "botorch",
    "hypothesis",
    "pygments",
    "torch_geometric",
    "timm",
    "lightning",
    "torchmetrics",
    "torchvision",
    "peft",
    "accelerate",
    "huggingface_hub",
    "numpyro",
    "e3nn",
    "xarray",
    "seaborn",
    "fontTools",
    "mpmath",
    "tensorboard",
    "cupy",
    "triton",
    "onnxscript",
    "onnx",
    "aiohttp",
    "werkzeug",
    "rich",
    "setuptools",
    "pip",
    "PIL",
    "h5py",
    "equinox",
    "diffrax",
    "linear_operator",
    "chex",
    "joblib",
    "imageio",
    "jinja2",
    "click",
    "urllib3",
    "tqdm",
)

CONFIGS = {
    config.name: config
    for config in (
        PretrainConfig(
            name="proxy-tiny",
            model=_TINY_MODEL,
            vocab_size=768,
            shares={"arithmetic": 0.9, "code": 0.1},
            num_documents={"arithmetic": 200_000, "code": 10_000},
            context=128,
            batch_size=96,
            learning_rate=2e-3,
            bias_rate=1e-3,
        ),
        PretrainConfig(
            name="proxy-19x256",
            model=_MODEL_19X256,
            vocab_size=4096,
            shares={"code": 0.45, "prose": 0.28, "arithmetic": 0.27},
            num_documents={"code": 10_000_000, "prose": 10_000_000, "arithmetic": 100_000},
            context=384,
            batch_size=96,
            learning_rate=1e-3,
            bias_rate=1e-3,
            confidence_weight=1.5,
            confidence_from=0.6,
            max_problems=6,
            packages=_PACKAGES,
        ),
    )
}


def find_config(name: str) -> PretrainConfig:
    """Return the training of this name.

    Raises:
        TraceError: there is none.
    """
    if name not in CONFIGS:
        raise TraceError(f"config {name!r}: allowed are {', '.join(CONFIGS)}")
    return CONFIGS[name]
