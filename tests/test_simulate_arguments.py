"""`simulate` holds its arguments to their types, as the command line does, before anything is written."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from strategies import metadata_for, random_passes

from experiments.errors import ConfigError
from experiments.profiles import load_profile, load_shape
from experiments.run import simulate
from experiments.table import describe
from policies.contract import PolicyError
from policies.profile import ProfileError
from tracer.schema import TraceError
from tracer.store import TraceReader, TraceWriter

REFUSED = (ConfigError, PolicyError, ProfileError, TraceError)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3)
    path = tmp_path_factory.mktemp("t") / "x.trace"
    with TraceWriter(path, metadata_for(shape)) as writer:
        for pass_ in passes:
            writer.write(pass_)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trace": None}, "simulate: trace is None, must be a path"),
        ({"trace": b"x"}, "simulate: trace is b'x', must be a path"),
        ({"policy": None}, "simulate: policy is None, must be text"),
        ({"policy": ["lru"]}, "policy is .*, must be text"),
        ({"policy": "LRUU"}, "no policy 'LRUU'"),
        ({"cache_gib": 1}, "simulate: slots_per_layer and cache_gib both say"),
        ({"slots_per_layer": None, "cache_gib": "1"}, "simulate: cache_gib is '1', must be a number"),
        ({"slots_per_layer": None, "cache_gib": float("nan")}, "cache.gib is nan, must be"),
        ({"slots_per_layer": None, "cache_gib": float("inf")}, "cache.gib is inf, must be"),
        ({"slots_per_layer": None, "cache_gib": -1}, "cache.gib is -1, must be"),
        ({"slots_per_layer": "4"}, "slots_per_layer is '4', must be a whole number"),
        ({"slots_per_layer": 4.5}, "slots_per_layer is 4.5, must be a whole number"),
        ({"slots_per_layer": True}, "slots_per_layer is True, must be a whole number"),
        ({"slots_per_layer": float("nan")}, "slots_per_layer is nan, must be a whole number"),
        ({"warmup_requests": 1.5}, "warmup_requests is 1.5, must be a whole number"),
        ({"warmup_requests": True}, "warmup_requests is True"),
        ({"staging_slots": "8"}, "staging_slots is '8', must be a whole number"),
        ({"staging_slots": float("inf")}, "staging_slots is inf, must be a whole number"),
        ({"seed": None}, "seed is None, must be a whole number"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"decisions": "no"}, "decisions is 'no', must be true or false"),
        ({"per_layer": "false"}, "per_layer is 'false', must be true or false"),
        ({"progress": None}, "progress is None, must be true or false"),
        ({"overwrite": 0}, "overwrite is 0, must be true or false"),
        ({"expert_dtype": ["fp8"]}, r"expert_dtype is \['fp8'\], must be text"),
        ({"knobs": "x"}, "knobs is 'x', must hold keys and values"),
        ({"knobs": []}, "knobs is .*, must hold keys and values"),
        ({"knobs": {5: 1}}, "lru has no knob '5'"),
        ({"config": 5}, "config is 5, must hold keys and values"),
        ({"overrides": "a=b"}, "overrides is 'a=b', must be a list"),
        ({"output": 5}, "simulate: output is 5, must be a path"),
        ({"hardware": 5}, "hardware is 5, must be the name of a profile, a path, or a HardwareProfile"),
        ({"hardware": {"name": "x"}}, "hardware is .*, must be the name"),
        ({"hardware": dataclasses.replace(load_profile("h200"), transfer_chunk=2.5)}, "transfer_chunk is 2.5"),
        ({"shape": None}, "shape is None, must be trace, the name of a shape, or a ModelShape"),
        ({"shape": Path("llada2.0-mini")}, "shape is .*, must be trace"),
        ({"shape": dataclasses.replace(load_shape("llada2.0-mini"), vocab=0)}, "the shape does not say vocab"),
    ],
)
def test_an_argument_of_another_type_is_refused(trace, tmp_path, arguments, message):
    given = {"trace": trace, "policy": "lru", "slots_per_layer": 6, "output": tmp_path / "out", **arguments}
    with pytest.raises(REFUSED, match=message):
        simulate(**given)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_and_whole_floats_are_what_they_say(trace):
    expected = simulate(TraceReader(trace), "lru", 6, "h200", shape="llada2.0-mini", staging_slots=8).summary
    found = simulate(
        trace, "lru", np.int64(6), load_profile("h200"), shape=load_shape("llada2.0-mini"), staging_slots=8.0
    ).summary
    assert found == expected
    assert type(found["slots_per_layer"]) is int


def test_the_summary_says_where_costs_come_from(trace):
    for hardware, dtype, provenance, caption in (
        ("h200", None, "measured", "hardware h200"),
        ("h200", "fp8", "roofline", "hardware h200 (not measured at these sizes)"),
        ("rtx5090", None, "datasheet", "hardware rtx5090 (from data sheets, never validated on this GPU)"),
    ):
        summary = simulate(trace, "lru", 6, hardware, shape="llada2.0-mini", expert_dtype=dtype).summary
        assert summary["provenance"] == provenance
        assert caption in describe(summary)
