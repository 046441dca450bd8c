"""The adapters by name."""

from __future__ import annotations

from tracer.adapters.adapter import Adapter
from tracer.adapters.dinfer import DInfer
from tracer.adapters.hf_llada2 import HfLLaDA2
from tracer.adapters.qwen3_moe import Qwen3Moe, Rnd1, Sdar
from tracer.adapters.sglang import SGLangLLaDA2
from tracer.schema import TraceError, choices

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter for adapter in (HfLLaDA2, DInfer, SGLangLLaDA2, Sdar, Rnd1, Qwen3Moe)
}


def find_adapter(name: str) -> type[Adapter]:
    """An adapter's class.

    Raises:
        TraceError: there is none of this name.
    """
    if name not in ADAPTERS:
        raise TraceError(f"adapter {name!r}: {choices(name, ADAPTERS)}")
    return ADAPTERS[name]
