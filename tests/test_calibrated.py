"""Profiles of measurements as they would be of a machine whose costs are known, and profiles as YAML."""

import pytest
import yaml
from faked import at

from experiments import calibrate as command
from experiments.calibrate import profile_as_yaml, write_profile
from experiments.profiles import load_profile, load_shape, names, profile_from_dict
from policies.profile import ProfileError
from replay.arena import MIB
from replay.calibrate import Measured, ShapeMeasured
from replay.calibrate_costs import LayerCosts, Slowdowns
from replay.calibrate_cpu import CpuChoice
from replay.calibrate_layers import Layers
from replay.calibrate_link import CopyRate
from replay.calibrate_plans import Design
from replay.calibrated import notes_of, profile_of
from replay.fits import Rate
from replay.link_state import LinkState
from replay.repeats import Repeated


def measured(shapes=("llada2.0-mini", "llada2.0-flash")):
    """Measurements as they would be of a machine whose costs are known."""
    time = at(1000.0, 0.01)

    def rate(*coefficients):
        return Rate(coefficients, 0.01, 0.02, {(1, 1): time})

    found = []
    for name, size in zip(shapes, (6, 24), strict=False):
        costs = LayerCosts(
            layer_ns={},
            gate_sync_ns=12_000.0 + size,
            first_copy_ns=5_000.0,
            kernel=rate(20_000.0, 1.5 * size * MIB / 3000, 1.0),
            hits=rate(50_000.0, size * MIB / 3000, 1.0),
            copy=at(4_000.0 + size * MIB / 50, 0.01),
            cpu=rate(50e3, 1e5 * size, 2e3),
            roundtrip_ns=20_000.0,
            after_cpu_ns=8_000.0,
            slowdowns=Slowdowns(1.5, 0.98),
            tail=Repeated(390_000.0, 0.01, 400_000.0),
            decide_ns=4_000.0,
            errors={Design(16, 0, 8): 0.01, Design(16, 0, 16): -0.03},
        )
        cpu = CpuChoice("rows", 15, {"rows": 6e10}, {15: 6e10})
        layers = Layers(rate(100_000.0, 50.0, 2.0), costs, {size * MIB: costs.copy})
        found.append(ShapeMeasured(load_shape(name), cpu, layers))
    plain = CopyRate(3_333.4, 55.345678e9, 0.01, 0.03, {MIB: time})
    pageable = CopyRate(9_000.0, 8.5e9, 0.1, 0.2, {MIB: time})
    demand = CopyRate(4_000.4, 50.345678e9, 0.01, 0.03, {s * MIB: at(4_000.0 + s * MIB / 50) for s in (6, 12)})
    return Measured("a machine", LinkState(5, 16, 5, 16), 1e11, plain, pageable, demand, 7e14, tuple(found))


def test_a_profile_of_what_was_measured():
    profile = profile_of(measured(), "mine", "2026-01-02", {"default": 9_999.6, "lru": 5_000.0}, 0.05)
    assert profile.provenance == "measured"
    assert not profile.provisional
    assert (profile.h2d_latency_ns, profile.h2d_bytes_per_s) == (4000, 50.35e9)  # of plans, not of plain copies
    assert profile.h2d_pageable_bytes_per_s == 8.5e9
    assert (profile.h2d_slowdown, profile.cpu_slowdown) == (1.5, 1.0)  # 0.98 is noise
    assert profile.gate_sync_ns == 12_015  # mean of 12006 and 12024
    assert profile.cpu_roundtrip_ns == 20_000
    assert profile.transfer_chunk == 4
    assert profile.policy_ns == {"default": 10_000, "lru": 5_000}
    mini = load_shape("llada2.0-mini")
    costs = profile.costs(mini, mini.expert_bytes(), "oled")
    assert costs[:6] == (1e5, 50.0, 2.0, 2e4, 3145.73, 1.0)
    assert (costs.cpu_a_ns, costs.cpu_b0_ns, costs.cpu_b1_ns, costs.tail_ns) == (50e3, 6e5, 2e3, 400_000)
    assert profile.provenance_at(mini, mini.expert_bytes("fp8")) == "roofline"
    assert profile.costs(mini, mini.expert_bytes("fp8"), "oled").cpu_b0_ns == pytest.approx(2.4e6 / 8, rel=1e-3)
    assert profile.fit_errors["shapes[1].cpu_max"] == 0.02
    assert (profile.fit_errors["shapes[0].layer_mean"], profile.fit_errors["shapes[0].layer_max"]) == (0.02, 0.03)
    assert profile.fit_errors["policy_ns_spread"] == 0.05
    assert "policy_ns" in profile_of(measured(), "mine", "2026-01-02", {}).assumed


def with_costs(found, **changes):
    """The same measurements with other costs at all shapes."""
    return found._replace(
        shapes=tuple(
            each._replace(layers=each.layers._replace(costs=each.layers.costs._replace(**changes)))
            for each in found.shapes
        )
    )


def test_rates_for_other_shapes_are_of_the_kernel_alone():
    roofline = profile_of(measured(), "mine", "2026-01-02", {}).roofline
    assert roofline.gpu_bytes_per_s == 3e12
    assert roofline.cpu_bytes_per_s == pytest.approx(24 * MIB / 2.4e-3, rel=1e-3)
    assert roofline.cpu_start_ns == 50_000


def test_arithmetic_that_did_not_show_on_the_cpu_is_charged_next_to_nothing():
    found = measured()
    free = with_costs(found, cpu=Rate((50e3, 1e5, 0.0), 0.0, 0.0, {}))
    assert profile_of(free, "mine", "2026-01-02", {}).roofline.cpu_flops_per_s == 1e15
    assert profile_of(found, "mine", "2026-01-02", {}).roofline.cpu_flops_per_s == 3.146e12  # 6 MiB in 2 us


def test_the_roofline_follows_from_the_shapes_of_a_shipped_profile():
    profile = load_profile("h200")
    shown = max(s.cpu_b1_ns / s.expert_bytes for s in profile.shapes)  # ns a byte, or for each operation of two
    assert profile.roofline.cpu_flops_per_s == pytest.approx(1e9 / shown, rel=1e-3)
    largest = max(profile.shapes, key=lambda s: s.expert_bytes)
    assert profile.roofline.cpu_bytes_per_s == pytest.approx(largest.expert_bytes * 1e9 / largest.cpu_b0_ns, rel=1e-3)
    assert profile.roofline.cpu_start_ns == largest.cpu_a_ns


def test_without_a_rate_of_experts_there_is_no_roofline():
    flat = with_costs(measured(), hits=Rate((20_000.0, 0.0, 1.0), 0.0, 0.0, {}))
    assert profile_of(flat, "mine", "2026-01-02", {}).roofline is None


def test_notes_say_how_plans_copies_stand_to_plain_ones():
    notes = notes_of(measured())
    plain = 3_333.4 + 6 * MIB / 55.345678
    assert f"6 MiB: {plain / (4_000 + 6 * MIB / 50):.1%} of the rate of plain copies." in notes
    assert "2 designs of layers by these costs: off by 2.0% on average, 3.0% at most. Mean error:" in notes
    assert "  with hits alone -1.0%" in notes


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile = profile_of(measured(), "mine", "2026-01-02", {"default": 10_000})
    path = tmp_path / "mine.yaml"
    write_profile(path, profile, notes_of(measured()))
    assert load_profile(path) == profile
    text = path.read_text()
    assert "# Host memory is read at 100.0 GB/s by all cores. Link while busy: PCIe 5.0 x16." in text
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= 140
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", names("hardware"))
def test_shipped_profiles_survive_being_written(name):
    profile = load_profile(name)
    assert profile_from_dict(yaml.safe_load(profile_as_yaml(profile, ["a note"])), name) == profile


def test_what_would_be_read_otherwise_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "profile_as_yaml", lambda *_: profile_as_yaml(load_profile("rtx5090"), []))
    with pytest.raises(ProfileError, match="not written, the text would be read as another profile"):
        write_profile(tmp_path / "mine.yaml", load_profile("h200"), [])
    assert not list(tmp_path.iterdir())
