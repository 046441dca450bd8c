import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import answers, run
from reference_oled import priorities
from strategies import random_passes, traces

from policies.lru import ORDERS
from tracer.schema import ForwardKind
from tracer.shipped import find_trace
from tracer.store import TraceReader

COOP_ALONE = {"priority": False, "layer_adapt": False}


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=15)
@given(traces(), st.data())
def test_lru_with_split_misses_is_oled_with_coop_alone(order, trace, data):
    shape, passes = trace
    slots = data.draw(st.integers(1, shape.num_experts))
    lru = answers(run("lru", {"misses": "oled", "lru_order": order}, shape, passes, slots))
    assert lru == answers(run("oled", {**COOP_ALONE, "lru_order": order}, shape, passes, slots))


@pytest.mark.parametrize("slots", [8, 24, 64])
def test_lru_with_split_misses_is_oled_with_coop_alone_on_the_shipped_trace(slots):
    reader = TraceReader(find_trace("proxy-tiny"))
    shape, passes = reader.metadata.shape, list(reader)
    decisions = run("lru", {"misses": "oled"}, shape, passes, slots)
    assert any(len(decision.plan.on_cpu) for decision in decisions)
    assert answers(decisions) == answers(run("oled", COOP_ALONE, shape, passes, slots))


def test_split_misses_are_issued_by_priority_in_prefill_too():
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3)
    kinds = set()
    for decision in run("lru", {"misses": "oled"}, shape, passes, 6):
        step = decision.step
        p = priorities(step.expert_ids.tolist(), step.gates.tolist(), step.confidence.tolist())
        transfers = decision.plan.transfers.tolist()
        assert transfers == sorted(transfers, key=lambda expert: (-p[expert], expert))
        if transfers != sorted(transfers):
            kinds.add(ForwardKind(step.kind))
    assert {ForwardKind.PREFILL, ForwardKind.DENOISE} <= kinds
