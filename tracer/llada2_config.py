"""The config.json of LLaDA2.0 and LLaDA2.1, read without defaults."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from typing import Any

from tracer.schema import ModelShape, TraceError

# Keys that must be there, since the class defaults of the released code differ from the released models.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "model_type": ("llada2_moe", "llada2_moe_veomni"),
    "moe_router_enable_expert_bias": (True,),
    "norm_topk_prob": (True,),
    "rope_scaling": (None,),
    "router_dtype": ("fp32",),
    "score_function": ("sigmoid",),
    "tie_word_embeddings": (False,),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
    "use_rmsnorm": (True,),
}
# Keys that some releases leave out, and whose absence means the value given here.
_FIXED_IF_PRESENT: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0,),
    "dtype": ("bfloat16",),
    "embedding_dropout": (0.0,),
    "norm_head": (False,),
    "norm_softmax": (False,),
    "output_dropout": (0.0,),
    "torch_dtype": ("bfloat16",),
    "use_qk_norm": (True,),
    "use_sliding_window": (False,),
    "using_split_qkv_in_self_attention": (False,),
}
# Keys without a say in the forward pass, and the values that a saved config.json gives them.
_WITHOUT_EFFECT: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "max_window_layers": 28,
    "output_router_logits": False,
    "sliding_window": 4096,
    "transformers_version": "4.57.1",
    "use_cache": False,
}
# Keys that some files have; the ids are the tokenizer's, with which `tracer.special_ids` compares them.
SPECIAL_IDS: dict[str, str] = {"mask_token_id": "mask", "mask_id": "mask", "eos_token_id": "eos"}
MOST_EXPERTS = 10**6  # a hundred times those of any model; all are named before a checkpoint is read
_BLOCK_ROUTING = ("block_size", "expert_capacity")


@dataclass(frozen=True)
class LLaDA2Config:
    """Sizes and constants of one LLaDA2.x model, under the names of its config.json.

    Nothing is defaulted: the class defaults of the released code are wrong for the released models.

    Raises:
        TraceError: A value has the wrong type, is out of range, or does not fit another.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int  # dense layers, before the first MoE layer
    intermediate_size: int  # of a dense layer
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int  # of one expert
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    rope_theta: float
    partial_rotary_factor: float  # share of the head dimensions that rotate
    rms_norm_eps: float
    max_position_embeddings: int
    initializer_range: float  # standard deviation of a fresh model's weights
    pad_token_id: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                least = 0 if field.name in ("first_k_dense_replace", "pad_token_id") else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise TraceError(f"{field.name} {value!r}: must be an integer of at least {least}")
            elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise TraceError(f"{field.name} {value!r}: must be a finite number above 0")
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.num_hidden_layers * self.num_experts > MOST_EXPERTS:
            raise TraceError(
                f"num_hidden_layers {self.num_hidden_layers} and num_experts {self.num_experts}: must make at most {MOST_EXPERTS} experts"
            )
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise TraceError(
                f"first_k_dense_replace {self.first_k_dense_replace}: must leave an MoE layer among num_hidden_layers {self.num_hidden_layers}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise TraceError(
                f"num_key_value_heads {self.num_key_value_heads}: must divide num_attention_heads {self.num_attention_heads}"
            )
        rotary = self.head_dim * self.partial_rotary_factor
        if not (rotary == int(rotary) and int(rotary) % 2 == 0 and rotary <= self.head_dim):
            raise TraceError(
                f"partial_rotary_factor {self.partial_rotary_factor}: must rotate an even number of the {self.head_dim} dimensions of a head"
            )
        if self.num_experts % self.n_group or self.num_experts // self.n_group < 2:
            raise TraceError(
                f"n_group {self.n_group}: must divide num_experts {self.num_experts} into groups of at least 2"
            )
        if self.topk_group > self.n_group:
            raise TraceError(f"topk_group {self.topk_group}: must be at most n_group {self.n_group}")
        reachable = self.topk_group * (self.num_experts // self.n_group)
        if self.num_experts_per_tok > reachable:
            raise TraceError(
                f"num_experts_per_tok {self.num_experts_per_tok}: must be at most {reachable}, the experts of topk_group {self.topk_group} groups"
            )

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """True numbers of the MoE layers, ascending."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> LLaDA2Config:
        """Read the contents of a config.json.

        Args:
            values: The parsed file.
            where: What to name in errors, usually the file's path.

        Raises:
            TraceError: A key is missing or unknown, or its value is none that this architecture honours; LLaDA2.2,
                which routes by block, is refused by its keys.
        """
        for key in _BLOCK_ROUTING:
            if key in values:
                raise TraceError(
                    f"{where}: key {key} is block-level routing (LLaDA2.2); only LLaDA2.0 and 2.1 are read"
                )
        sizes = [field.name for field in fields(cls)]
        _list_keys(where, "missing", [key for key in (*sizes, *_FIXED) if key not in values])
        known = {*sizes, *_FIXED, *_FIXED_IF_PRESENT, *_WITHOUT_EFFECT, *SPECIAL_IDS, "bos_token_id", "rotary_dim"}
        _list_keys(where, "unknown", [key for key in values if key not in known])
        for key, allowed in (_FIXED | _FIXED_IF_PRESENT).items():
            if key in values and not any(values[key] == value and _alike(values[key], value) for value in allowed):
                choices = " or ".join(repr(value) for value in allowed)
                raise TraceError(f"{where}: {key} {values[key]!r}: this architecture allows only {choices}")
        try:
            config = cls(**{key: values[key] for key in sizes})
        except TraceError as error:
            raise TraceError(f"{where}: {error}") from None
        if values.get("rotary_dim", config.rotary_dim) != config.rotary_dim:
            raise TraceError(
                f"{where}: rotary_dim {values['rotary_dim']!r}: head_dim and partial_rotary_factor give {config.rotary_dim}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Contents of a complete config.json, keys in alphabetical order."""
        fixed = {key: allowed[0] for key, allowed in (_FIXED | _FIXED_IF_PRESENT).items() if key != "torch_dtype"}
        values = asdict(self) | fixed | deepcopy(_WITHOUT_EFFECT) | {"rotary_dim": self.rotary_dim}
        return dict(sorted(values.items()))

    def shape(self) -> ModelShape:
        """The sizes that caching and its cost depend on."""
        return ModelShape(
            layer_ids=self.moe_layer_ids,
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            hidden=self.hidden_size,
            expert_intermediate=self.moe_intermediate_size,
            weight_dtype="bfloat16",
            gate_scale=self.routed_scaling_factor,
            num_shared_experts=self.num_shared_experts,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab=self.vocab_size,
            dense_intermediate=self.intermediate_size,
            num_dense_layers=self.first_k_dense_replace,
        )


def _alike(found: object, allowed: object) -> bool:
    """Whether both are truth values or neither is: in Python True equals 1 and False equals 0.0."""
    return isinstance(found, bool) == isinstance(allowed, bool)


def _list_keys(where: str, fault: str, keys: list[str]) -> None:
    if keys:
        raise TraceError(f"{where}: {fault} key{'s' if len(keys) > 1 else ''} {', '.join(sorted(keys))}")
