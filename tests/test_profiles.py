"""Hardware profiles: costs by hand, presets, and refusal of what is not a profile."""

import dataclasses
import os
import subprocess
import sys

import pytest

from experiments.profiles import (
    changes_of,
    find_profile,
    find_shape,
    load_profile,
    load_shape,
    names,
    profile_from_dict,
    profile_hash,
)
from policies.contract import Estimates
from policies.profile import (
    Costs,
    ProfileError,
    copy_ns,
    cpu_batch_ns,
    estimates_of,
    kernel_ns,
    layer_ns,
    round_half_up,
)

MINIMAL = {
    "name": "mine",
    "provenance": "measured",
    "machine": "a machine",
    "date": "2026-01-01",
    "h2d_latency_ns": 1000,
    "h2d_bytes_per_s": 50e9,
    "cpu_workers": 4,
}
ROOFLINE = {
    "gpu_bytes_per_s": 1e12,
    "gpu_flops_per_s": 1e14,
    "cpu_bytes_per_s": 1e11,
    "cpu_flops_per_s": 1e12,
    "kernel_ns": 1000,
    "kernels_per_layer": 10,
    "kernels_per_tail": 20,
    "cpu_start_ns": 7000,
}

MEASURED = {
    "hidden": 2048,
    "expert_intermediate": 512,
    "expert_bytes": 6 * 2**20,
    "n_ns": [5, 6, 7],
    "g_ns": [1, 2, 3],
    "cpu_a_ns": 1,
    "cpu_b0_ns": 2,
    "cpu_b1_ns": 3,
    "tail_ns": 4,
}


def costs(**changes) -> Costs:
    values = {
        "n_a_ns": 100_000.0,
        "n_b_ns": 10.5,
        "n_c_ns": 0.25,
        "g_a_ns": 20_000.0,
        "g_b_ns": 2_000.0,
        "g_c_ns": 0.5,
        "h2d_latency_ns": 174.08,
        "h2d_bytes_per_s": 50e9,
        "expert_bytes": 6_291_456,
        "cpu_a_ns": 50_000.0,
        "cpu_b0_ns": 150_000.0,
        "cpu_b1_ns": 5_000.0,
        "cpu_roundtrip_ns": 30_000,
        "tail_ns": 0,
        "gate_sync_ns": 0,
        "policy_ns": 0,
        "h2d_slowdown": 1.5,
        "cpu_slowdown": 1.25,
        "transfer_chunk": 4,
    }
    return Costs(**{**values, **changes})


def test_costs_by_hand():
    c = costs()
    assert layer_ns(c, 16, 300) == 100_243  # 100000 + 168 + 75
    assert kernel_ns(c, 2, 3) == 24_002  # 20000 + 4000 + 1.5, halves up
    assert kernel_ns(c, 0, 0) == 0
    assert copy_ns(c, False) == 126_003  # 174.08 + 125829.12 = 126003.2
    assert copy_ns(c, True) == 189_005  # rounded once, after the factor: 189004.8
    assert cpu_batch_ns(c, 3, 6, False) == 530_000  # 50000 + 3 * 150000 + 6 * 5000
    assert cpu_batch_ns(c, 3, 6, True) == 662_500
    assert cpu_batch_ns(c, 0, 0, True) == 0


@pytest.mark.parametrize(("value", "rounded"), [(0.5, 1), (1.5, 2), (2.5, 3), (2.4999, 2), (0.0, 0)])
def test_halves_round_up(value, rounded):
    assert round_half_up(value) == rounded


@pytest.mark.parametrize(
    ("shape", "expert_bytes", "copy_ms"), [("llada2.0-mini", 6 * 2**20, 0.126), ("llada2.0-flash", 24 * 2**20, 0.503)]
)
def test_expert_sizes_and_their_copies_at_50_gb_per_s(shape, expert_bytes, copy_ms):
    sizes = load_shape(shape)
    assert sizes.expert_bytes() == expert_bytes
    assert sizes.expert_bytes("fp8") == expert_bytes // 2
    assert sizes.expert_bytes("int4") == expert_bytes // 4
    profile = profile_from_dict({**MINIMAL, "h2d_latency_ns": 0, "roofline": ROOFLINE}, "mine")
    assert round(copy_ns(profile.costs(sizes, expert_bytes, "lru"), False) / 1e6, 3) == copy_ms


def test_roofline_by_hand():
    profile = profile_from_dict({**MINIMAL, "roofline": ROOFLINE}, "mine")
    mini = load_shape("llada2.0-mini")
    c = profile.costs(mini, mini.expert_bytes(), "lru")
    attention = 2048 * 3072 + 2048 * 2048
    layer = attention + 256 * 2048 + 3 * 2048 * 512
    assert c.n_a_ns == pytest.approx(10 * 1000 + 2 * layer / 1e12 * 1e9)
    assert c.n_b_ns == pytest.approx(2 * layer / 1e14 * 1e9)
    assert c.n_c_ns == pytest.approx(2048 / 1e12 * 1e9)  # 2 x 4 heads x 128 x 2 bytes a position
    assert c.g_b_ns == pytest.approx(6291.456)
    assert c.cpu_b0_ns == pytest.approx(62_914.56)
    dense = attention + 3 * 2048 * 5120
    assert c.tail_ns == round_half_up(20_000 + 2 * (dense + 157184 * 2048) / 1e12 * 1e9)
    assert estimates_of(c) == Estimates(copy_ns(c, False), 62_915, 6_291)


def test_a_measurement_at_the_shape_goes_before_the_roofline():
    mini = load_shape("llada2.0-mini")
    profile = profile_from_dict({**MINIMAL, "roofline": ROOFLINE, "shapes": [MEASURED]}, "mine")
    assert profile.costs(mini, mini.expert_bytes(), "lru")[:3] == (5.0, 6.0, 7.0)
    assert profile.costs(mini, mini.expert_bytes("fp8"), "lru")[0] > 5.0
    only_measured = profile_from_dict({**MINIMAL, "shapes": [MEASURED]}, "mine")
    with pytest.raises(ProfileError, match=r"not measured at 4096x1024 .* measured: 2048x512 at 6291456 bytes"):
        only_measured.costs(load_shape("llada2.0-flash"), 25_165_824, "lru")


def test_policy_time_is_by_name_with_a_default():
    profile = profile_from_dict({**MINIMAL, "roofline": ROOFLINE, "policy_ns": {"default": 5, "oled": 9}}, "mine")
    mini = load_shape("llada2.0-mini")
    assert [profile.costs(mini, 100, name).policy_ns for name in ("oled", "lru")] == [9, 5]


@pytest.mark.parametrize("name", names("hardware"))
def test_presets(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile_hash(profile) == profile_hash(load_profile(name))
    keys = {field.name for field in dataclasses.fields(profile)}
    assert all(key.split(".")[0].split("[")[0] in keys for key in profile.assumed)
    for shape in names("shape"):
        sizes = load_shape(shape)
        assert min(profile.costs(sizes, sizes.expert_bytes(), "lru")) >= 0
    assert (profile.provenance == "datasheet") == bool(profile.assumed and not profile.shapes)


def test_the_h200_preset_is_measured_and_meets_the_probes_of_another_such_machine():
    profile = load_profile("h200")
    assert not profile.provisional
    assert profile.cpu_kernel == "rows"
    assert profile.fit_errors["h2d_max"] < 0.01
    for shape, copy_us, kernel_us in (("llada2.0-mini", 117, 165), ("llada2.0-flash", 458, 550)):
        sizes = load_shape(shape)
        assert profile.provenance_at(sizes, sizes.expert_bytes()) == "measured"
        c = profile.costs(sizes, sizes.expert_bytes(), "lru")
        assert copy_ns(c, False) / 1000 == pytest.approx(copy_us, rel=0.005)
        assert kernel_ns(c, 60, 128) / 1000 == pytest.approx(kernel_us, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"h2d_bytes_per_s": -25e9}, r"mine: h2d_bytes_per_s is -25000000000.0, must be a number above 0"),
        ({"h2d_bytes_per_s": float("nan")}, "h2d_bytes_per_s is nan"),
        ({"h2d_latency_ns": -1}, "h2d_latency_ns is -1, must be a number of at least 0"),
        ({"h2d_slowdown": 0.5}, "h2d_slowdown is 0.5, must be a number of at least 1"),
        ({"provenance": "guess"}, "allowed are measured, datasheet"),
        ({"transfer_chunk": 0}, "mine: transfer_chunk is 0, must be a number of at least 1"),
        ({"transfer_chunk": 1e30}, r"mine: transfer_chunk is 1e\+30, must be at most 65536"),
        ({"cpu_workers": 1.5}, "cpu_workers is 1.5, must be a whole number"),
        ({"h2d_bytes_per_s": 1e308}, r"h2d_bytes_per_s is 1e\+308, must be at most 1e\+30"),
        ({"h2d_latency_ns": 10**400}, "h2d_latency_ns is 10+, must be within"),
        (
            {"policy_ns": {"oledd": 5}},
            r"mine: policy_ns.oledd: no such policy; did you mean oled\? allowed: default, full",
        ),
        ({"h2d_bandwidth": 1}, "unknown key 'h2d_bandwidth'"),
        ({"h2d_latency_nss": 1}, "did you mean h2d_latency_ns?"),
        ({"h2d_latency_ns": "fast"}, "h2d_latency_ns is 'fast', must be a number"),
        ({"roofline": {"gpu_bytes_per_s": 1}}, "mine: roofline: missing gpu_flops_per_s"),
        ({"policy_ns": {"lru": -3}}, "policy_ns.lru is -3"),
        ({"h2d_pageable_bytes_per_s": 0}, "h2d_pageable_bytes_per_s is 0, must be a number above 0"),
        ({"shapes": [{**MEASURED, "g_ns": [1, 2, -3]}]}, r"shapes\[0\].g_ns\[2\] is -3"),
        ({"shapes": [3]}, r"mine: shapes\[0\] is 3, must hold keys and values"),
        ({"shapes": 3}, "mine: shapes is 3, must be a list"),
        ({"policy_ns": 3}, "mine: policy_ns is 3, must hold keys and values"),
        ({"policy_ns": {"lru": "slow"}}, "mine: policy_ns.lru is 'slow', must be a number"),
        ({"assumed": "all"}, "mine: assumed is 'all', must be a list"),
        ({"cpu_workers": float("inf")}, "cpu_workers is inf, must be a whole number"),
        ({"cpu_workers": True}, "cpu_workers is True, must be a whole number"),
        ({"provisional": 1}, "provisional is 1, must be true or false"),
        ({"name": None}, "mine: name is None, must be text"),
        ({"h2d_latency_ns": None}, "h2d_latency_ns is None, must be a number"),
        ({"roofline": {**ROOFLINE, "kernels_per_layer": -5}}, "roofline.kernels_per_layer is -5"),
        ({"shapes": [{**MEASURED, "n_ns": [1, 2]}]}, r"shapes\[0\]: n_ns is \[1, 2\], must be a list of 3"),
        ({"shapes": [{**MEASURED, "tail_ns": -1}]}, r"shapes\[0\].tail_ns is -1, must be a number of at least 0"),
    ],
)
def test_what_is_not_a_profile_is_refused_by_key(changes, message):
    with pytest.raises(ProfileError, match=message):
        profile_from_dict({**MINIMAL, **changes}, "mine")


def test_missing_keys_and_files(tmp_path):
    with pytest.raises(ProfileError, match="mine: missing h2d_bytes_per_s"):
        profile_from_dict({k: v for k, v in MINIMAL.items() if k != "h2d_bytes_per_s"}, "mine")
    with pytest.raises(ProfileError, match=r"'rtx5091': not known; did you mean rtx5090\?"):
        load_profile("rtx5091")
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        load_profile(tmp_path / "none.yaml")
    own = tmp_path / "own.yaml"
    own.write_bytes(b"name: \xff")
    with pytest.raises(ProfileError, match="cannot be read: not a text in UTF-8"):
        load_profile(own)
    for text in ("name: [", "5", "a: &x\n  b: *x\n", "a: !!set {x}", "a: 1\na: 2"):
        own.write_text(text)
        with pytest.raises(ProfileError, match=r"own\.yaml: not YAML that can be read: "):
            load_profile(own)
    own.write_text(
        "\n".join(f"{key}: {value}" for key, value in MINIMAL.items()) + "\nh2d_pageable_bytes_per_s: 15e9\n"
    )
    assert load_profile(own).h2d_pageable_bytes_per_s == 15e9


@pytest.mark.parametrize(
    "size", ["hidden", "expert_intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab", "dense_intermediate"]
)
@pytest.mark.parametrize("way", [{"roofline": ROOFLINE}, {"shapes": [MEASURED]}])
def test_a_size_that_is_not_known_is_not_charged_as_nothing(size, way):
    profile = profile_from_dict({**MINIMAL, **way}, "mine")
    mini = load_shape("llada2.0-mini")
    with pytest.raises(ProfileError, match=rf"does not say {size}, so nothing can be timed; set shape="):
        profile.costs(dataclasses.replace(mini, **{size: 0}), mini.expert_bytes(), "lru")


def test_what_a_model_may_lack_is_no_cost():
    profile = profile_from_dict({**MINIMAL, "roofline": ROOFLINE}, "mine")
    mini = load_shape("llada2.0-mini")
    bare = dataclasses.replace(mini, num_shared_experts=0, num_dense_layers=0, dense_intermediate=0)
    assert (
        profile.costs(bare, mini.expert_bytes(), "lru").tail_ns
        < profile.costs(mini, mini.expert_bytes(), "lru").tail_ns
    )


def test_an_expert_too_large_to_add_up_is_refused():
    profile = profile_from_dict({**MINIMAL, "roofline": ROOFLINE, "h2d_bytes_per_s": 1e30}, "mine")
    with pytest.raises(ProfileError, match=f"an expert takes {10**400} bytes, must be at most {2**40}"):
        profile.costs(load_shape("llada2.0-mini"), 10**400, "lru")


def test_costs_of_a_measured_machine_at_another_shape_are_not_measured():
    mini, flash = load_shape("llada2.0-mini"), load_shape("llada2.0-flash")
    profile = profile_from_dict({**MINIMAL, "roofline": ROOFLINE, "shapes": [MEASURED]}, "mine")
    assert profile.provenance_at(mini, mini.expert_bytes()) == "measured"
    assert profile.provenance_at(mini, mini.expert_bytes("fp8")) == "roofline"
    assert profile.provenance_at(flash, flash.expert_bytes()) == "roofline"
    assert load_profile("rtx5090").provenance_at(mini, mini.expert_bytes()) == "datasheet"


def test_a_given_profile_or_shape_is_held_to_its_types():
    shipped, mini = load_profile("rtx5090"), load_shape("llada2.0-mini")
    assert find_profile(shipped) == find_profile("rtx5090") == shipped
    assert find_shape(mini, None) == find_shape("llada2.0-mini", None) == find_shape("trace", mini) == mini
    for key, value, message in (
        ("transfer_chunk", 2.5, "profile rtx5090: transfer_chunk is 2.5, must be a whole number"),
        ("transfer_chunk", "4", "transfer_chunk is '4', must be a whole number"),
        ("h2d_latency_ns", "5", "h2d_latency_ns is '5', must be a number"),
        ("policy_ns", None, "policy_ns is None, must hold keys and values"),
        ("shapes", None, "shapes is None, must be a list"),
        ("name", None, "name is None, must be text"),
    ):
        with pytest.raises(ProfileError, match=message):
            find_profile(dataclasses.replace(shipped, **{key: value}))
    with pytest.raises(ProfileError, match=r"shape: hidden is 2048.5, must be a whole number"):
        find_shape(dataclasses.replace(mini, hidden=2048.5), mini)
    for value in (None, 5, {}, ["h200"]):
        with pytest.raises(ProfileError, match=r"hardware is .*, must be the name of a profile, a path, or"):
            find_profile(value)
        with pytest.raises(ProfileError, match=r"shape is .*, must be trace, the name of a shape, or"):
            find_shape(value, mini)


@pytest.mark.parametrize("number", ["010", "-017", "1:30", "190:20:30", "1:30.5", "0x10", "0b11", "0_7"])
def test_numbers_that_yaml_reads_in_another_base_are_refused(tmp_path, number):
    own = tmp_path / "own.yaml"
    lines = [f"{key}: {value}" for key, value in MINIMAL.items()]
    own.write_text("\n".join([*lines, f"policy_ns: {{default: {number}}}"]))
    with pytest.raises(ProfileError, match=rf"own.yaml, line 8: {number} is not what it looks like in YAML"):
        load_profile(own)
    own.write_text("\n".join([*lines, f"assumed: ['{number}', v1:30x, 1_000, 0.5, 0]"]))
    assert load_profile(own).assumed == (number, "v1:30x", "1000", "0.5", "0")


def test_profiles_are_utf_8_whatever_the_locale(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("\n".join(f"{k}: {v}" for k, v in (MINIMAL | {"machine": "Größe 箱"}).items()), encoding="utf-8")
    code = f"from experiments.profiles import load_profile; print(ascii(load_profile({str(own)!r}).machine))"
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONWARNDEFAULTENCODING": "1",
    }
    found = subprocess.run(
        [sys.executable, "-W", "error::EncodingWarning:experiments.profiles", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == ascii("Größe 箱")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"h2d_latency_ns": 1e30}, r"mine: a copy takes 1e\+30 ns, must be at most 1e\+15"),
        ({"h2d_bytes_per_s": 1e-3}, "a copy takes"),
        ({"policy_ns": {"default": 1e16}}, "policy_ns takes"),
        ({"cpu_slowdown": 1e12}, "a CPU batch takes"),
        ({"roofline": {**ROOFLINE, "gpu_bytes_per_s": 1e-6}}, "n_ns takes"),
    ],
)
def test_costs_that_no_run_could_add_up_are_refused(changes, message):
    mini = load_shape("llada2.0-mini")
    profile = profile_from_dict({**MINIMAL, "roofline": ROOFLINE, **changes}, "mine")
    with pytest.raises(ProfileError, match=message):
        profile.costs(mini, mini.expert_bytes(), "lru")


def test_changes_of_a_shipped_profile_are_named():
    shipped = load_profile("rtx5090")
    assert changes_of(shipped) == ""
    assert changes_of(dataclasses.replace(shipped, h2d_bytes_per_s=25e9, policy_ns={"default": 15000, "lru": 7.0})) == (
        "h2d_bytes_per_s=2.5e+10, policy_ns.lru=7"
    )
    assert changes_of(dataclasses.replace(shipped, roofline=dataclasses.replace(shipped.roofline, kernel_ns=1))) == (
        "roofline.kernel_ns=1"
    )
    assert changes_of(profile_from_dict(MINIMAL, "mine")) == ""
