import zipfile
from collections import Counter, defaultdict
from dataclasses import fields, replace
from io import BytesIO

import numpy as np
import pytest
from strategies import change, random_passes

from tracer import calibration as module
from tracer.calibration import Calibrator
from tracer.calibration_file import load, save
from tracer.schema import Calibration, ModelShape, TraceError


def calibrate(shape, passes, name="proxy:tests"):
    calibrator = Calibrator(shape, name, "abc")
    for pass_ in passes:
        calibrator.add(pass_)
    return calibrator


def assert_equal(a, b, *, importance_ratio=0.0):
    for field in fields(Calibration):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if field.name == "importance":
            np.testing.assert_allclose(left, right, rtol=importance_ratio)
        elif isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, err_msg=field.name)
        else:
            assert left == right, field.name


def by_hand(expert_ids, gates, norms, *, kinds, tokens):
    """One request; forward i has the tokens, kind and routing of entry i."""
    shape, passes = random_passes(np.random.default_rng(0), num_layers=1, num_experts=4, top_k=2, signals=True)
    base = passes[0]
    made = []
    for i, kind in enumerate(kinds):
        num_tokens = len(tokens[i])
        part = slice(0, num_tokens)
        made.append(
            change(
                base,
                pass_id=i,
                requests=np.array([0]),
                blocks=np.array([0]),
                iterations=np.array([i]),
                kinds=np.array([kind]),
                num_tokens=np.array([num_tokens]),
                positions=np.arange(num_tokens),
                token_ids_in=np.array(tokens[i]),
                expert_ids=np.array([expert_ids[i]]),
                gates=np.array([gates[i]]),
                signals=replace(
                    base.signals,
                    score_ids=base.signals.score_ids[:, part],
                    scores=base.signals.scores[:, part],
                    input_norm=np.array([norms[i]]),
                    sketch=base.signals.sketch[part],
                ),
            )
        )
    return shape, made


def test_sums_worked_out_by_hand():
    shape, passes = by_hand(
        kinds=[0, 1, 3],
        tokens=[[7, 8], [7, 9], [7, 9]],
        expert_ids=[[[0, 1], [0, 2]], [[0, 1], [1, 2]], [[0, 1], [0, 1]]],
        gates=[[[0.5, 0.5], [0.5, 0.5]], [[0.75, 0.25], [0.5, 0.5]], [[1.0, 0.0], [0.25, 0.75]]],
        norms=[[1.0, 1.0], [2.0, 4.0], [1.0, 8.0]],
    )
    found = calibrate(shape, passes).finish()
    assert found.num_requests == 1
    assert found.prefill_load.tolist() == [[2, 1, 1, 0]]
    assert found.load.tolist() == [[3, 4, 1, 0]]
    assert found.request_loads.tolist() == [[[3, 4, 1, 0]]]
    assert found.num_activated == 3 + 2
    assert found.importance.tolist() == [[0.75 * 2 + 1 + 0.25 * 8, 0.25 * 2 + 0.5 * 4 + 0.75 * 8, 0.5 * 4, 0.0]]


def test_token_table_worked_out_by_hand(monkeypatch):
    monkeypatch.setattr(module, "MIN_OCCURRENCES", 2)
    shape, passes = by_hand(
        kinds=[0, 1, 2, 2],
        tokens=[[5, 5], [9, 7], [9, 8], [9, 7]],
        expert_ids=[[[0, 1]] * 2, [[3, 1], [0, 2]], [[3, 1], [0, 2]], [[3, 2], [1, 2]]],
        gates=[[[0.5, 0.5]] * 2] * 4,
        norms=[[1.0, 1.0]] * 4,
    )
    found = calibrate(shape, passes).finish()
    assert found.token_ids.tolist() == [7, 9]  # 8 is seen once, 5 in prefill only
    assert found.token_experts.tolist() == [[[2, 0, 1, -1]], [[3, 1, 2, -1]]]
    np.testing.assert_allclose(found.token_shares, [[[1, 1 / 2, 1 / 2, 0]], [[1, 2 / 3, 1 / 3, 0]]])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("signals", [False, True])
def test_everything_against_a_plain_count(batch, signals):
    rng = np.random.default_rng(3)
    shape, passes = random_passes(rng, num_requests=5, num_experts=20, batch=batch, signals=signals)
    found = calibrate(shape, passes).finish()
    load, prefill, importance = (np.zeros((3, 20)) for _ in range(3))
    requests = np.zeros((5, 3, 20))
    activated = 0
    routed, occurrences = defaultdict(Counter), Counter()
    sketches = {}
    for pass_ in passes:
        owners = pass_.token_requests(pass_.requests)
        if not pass_.is_prefill:
            occurrences.update(pass_.token_ids_in.tolist())
        for layer in range(3):
            if not pass_.is_prefill:
                activated += len(np.unique(pass_.expert_ids[layer]))
            for token in range(owners.size):
                for expert, gate in zip(pass_.expert_ids[layer, token], pass_.gates[layer, token], strict=True):
                    if pass_.is_prefill:
                        prefill[layer, expert] += 1
                        continue
                    load[layer, expert] += 1
                    requests[owners[token], layer, expert] += 1
                    importance[layer, expert] += gate * (pass_.signals.input_norm[layer, token] if signals else 1)
                    routed[int(pass_.token_ids_in[token]), layer][int(expert)] += 1
        if signals and not pass_.is_prefill:
            for token in range(owners.size):
                key = pass_.signals.sketch[token].tobytes()
                sketches[key] = (pass_.signals.score_ids[:, token], pass_.signals.scores[:, token])
    np.testing.assert_array_equal(found.load, load)
    np.testing.assert_array_equal(found.prefill_load, prefill)
    np.testing.assert_array_equal(found.request_loads, requests)
    np.testing.assert_allclose(found.importance, importance)
    assert found.num_activated == activated
    assert set(found.token_ids.tolist()) == {token for token, n in occurrences.items() if n >= 4}
    for row, token in enumerate(found.token_ids.tolist()):
        for layer in range(3):
            ranked = sorted(routed[token, layer].items(), key=lambda item: (-item[1], item[0]))[:16]
            width = len(ranked)
            assert found.token_experts[row, layer, :width].tolist() == [expert for expert, _ in ranked]
            assert (found.token_experts[row, layer, width:] == -1).all()
            expected = [n / occurrences[token] for _, n in ranked]
            np.testing.assert_allclose(found.token_shares[row, layer, :width], expected)
    num_tokens = sum(occurrences.values())
    assert len(found.map_ids) == min(num_tokens, module.MAX_MAPS)
    assert found.map_ids.shape[2] == (20 if signals else 4)
    if signals:
        for ids, scores, sketch in zip(found.map_ids, found.map_scores, found.map_sketches, strict=True):
            expected_ids, expected_scores = sketches[sketch.tobytes()]
            np.testing.assert_array_equal(ids, expected_ids)
            np.testing.assert_array_equal(scores, expected_scores)
    else:
        assert np.isnan(found.map_sketches).all()


@pytest.mark.parametrize("max_maps", [1, 13, 10_000])
def test_the_result_does_not_depend_on_how_requests_are_spread(monkeypatch, max_maps):
    monkeypatch.setattr(module, "MAX_MAPS", max_maps)
    monkeypatch.setattr(module, "_MAX_LOOSE_TOKENS", 20)
    shape, passes = random_passes(np.random.default_rng(4), num_requests=6, signals=True)
    whole = calibrate(shape, passes).finish()
    parts = [calibrate(shape, [p for p in passes if p.requests[0] % 3 == part]) for part in (2, 0, 1)]
    merged = Calibrator(shape, "proxy:tests", "abc")
    for part in parts:
        merged.merge(part)
        merged.finish()
    assert_equal(whole, merged.finish(), importance_ratio=1e-12)
    backwards = sorted(passes, key=lambda p: (-p.requests[0], p.pass_id))
    assert_equal(whole, calibrate(shape, backwards).finish(), importance_ratio=1e-12)


def test_maps_are_a_uniform_sample(monkeypatch):
    monkeypatch.setattr(module, "MAX_MAPS", 200)
    shape, passes = random_passes(np.random.default_rng(5), num_requests=15, num_blocks=4)
    passes = [change(p, gates=p.gates * 0 + p.iterations[0]) for p in passes]
    found = calibrate(shape, passes).finish()
    assert sum(p.positions.size for p in passes if not p.is_prefill) > 3 * module.MAX_MAPS
    every = np.concatenate([np.repeat(p.iterations, p.num_tokens) for p in passes if not p.is_prefill])
    sampled = found.map_scores[:, 0, 0]
    assert sampled.size == module.MAX_MAPS
    error = every.std() / np.sqrt(sampled.size)
    assert abs(sampled.mean() - every.mean()) < 4 * error


def test_request_loads_are_evenly_spaced(monkeypatch):
    monkeypatch.setattr(module, "MAX_REQUEST_LOADS", 3)
    shape, passes = random_passes(np.random.default_rng(6), num_requests=7)
    found = calibrate(shape, passes).finish()
    assert found.num_requests == 7
    for row, request in enumerate([0, 2, 4]):
        alone = calibrate(shape, [p for p in passes if p.requests[0] == request]).finish()
        np.testing.assert_array_equal(found.request_loads[row], alone.load)


def test_more_can_be_added_after_finish():
    shape, passes = random_passes(np.random.default_rng(7))
    calibrator = calibrate(shape, passes[:5])
    early = calibrator.finish()
    before = early.load.copy()
    for pass_ in passes[5:]:
        calibrator.add(pass_)
    np.testing.assert_array_equal(early.load, before)
    assert_equal(calibrator.finish(), calibrate(shape, passes).finish())


def test_refusals():
    shape, passes = random_passes(np.random.default_rng(8))
    _, signalled = random_passes(np.random.default_rng(8), signals=True)
    decode = [p for p in passes if not p.is_prefill]
    with pytest.raises(TraceError, match="no decode forward"):
        calibrate(shape, [p for p in passes if p.is_prefill]).finish()
    with pytest.raises(TraceError, match="signals must be in all decode forwards or in none"):
        calibrate(shape, [decode[0], next(p for p in signalled if not p.is_prefill)])
    whole = calibrate(shape, passes)
    with pytest.raises(TraceError, match="request 0 is in both parts"):
        whole.merge(calibrate(shape, passes))
    with pytest.raises(TraceError, match="another model"):
        whole.merge(calibrate(shape, passes, name="model:other"))
    with pytest.raises(TraceError, match="in all parts or in none"):
        whole.merge(calibrate(shape, [change(p, requests=p.requests + 100) for p in signalled]))


@pytest.fixture(params=[False, True], ids=["no-signals", "signals"])
def made(request):
    shape, passes = random_passes(np.random.default_rng(9), num_requests=3, signals=request.param)
    return calibrate(shape, passes).finish()


def test_a_file_gives_back_what_was_saved_up_to_rounding(made, tmp_path):
    save(tmp_path / "new" / "a.npz", made)
    found = load(tmp_path / "new" / "a.npz")
    assert (found.name, found.checkpoint_hash) == ("proxy:tests", "abc")
    for field in fields(Calibration):
        left, right = getattr(made, field.name), getattr(found, field.name)
        if field.name in ("map_scores", "token_shares"):
            assert np.abs(left - right).max() <= 0.5 / 255 + 1e-12
        elif field.name in ("map_sketches", "importance"):
            np.testing.assert_allclose(left, right, rtol=1e-6)
        elif isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right


def test_saving_is_deterministic_and_a_loaded_one_is_saved_without_loss(made, tmp_path):
    save(tmp_path / "a.npz", made)
    save(tmp_path / "b.npz", load(tmp_path / "a.npz"))
    save(tmp_path / "b.npz", load(tmp_path / "b.npz"))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_an_expert_with_a_tiny_share_stays(made, tmp_path):
    shares = np.where(made.token_experts < 0, 0.0, 1e-4)
    save(tmp_path / "a.npz", replace(made, token_shares=shares))
    found = load(tmp_path / "a.npz")
    np.testing.assert_array_equal(found.token_experts, made.token_experts)
    assert set(found.token_shares.ravel()) <= {0.0, 1 / 255}


def test_damaged_files_are_one_line(made, tmp_path):
    path = tmp_path / "a.npz"
    save(path, made)
    whole = path.read_bytes()
    half = len(whole) // 2
    for damaged in (b"", b"no zip", whole[:half], whole[:half] + b"\xff" * 64 + whole[half + 64 :]):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"a\.npz: cannot be read as a calibration") as found:
            load(path)
        assert "\n" not in str(found.value)
    with pytest.raises(TraceError, match="cannot be read"):
        load(tmp_path / "none.npz")
    with pytest.raises(TraceError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("load", None, "no array load"),
        ("load", np.zeros((3, 4), int), "prefill_load has shape"),
        ("load", np.zeros((3, 16)), "load is float64"),
        ("map_sketches", np.zeros(3), "map_sketches is float64"),
        ("map_sketches", np.zeros((3, 4)), "map_sketches has shape"),
        ("format", np.int64(2), "calibration format 2: this version reads format 1"),
        ("name", np.int64(2), "name is int64"),
        ("map_ids", 16, "map_ids holds an expert beyond 0 to 15"),
        ("token_experts", 16, "token_experts holds an expert beyond 0 to 15"),
        ("num_activated", np.int64(-5), "num_activated holds a number beyond 0 to 1000000000000"),
        ("num_activated", np.int64(0), r"num_activated is 0, must be \d+ to \d+ with this load"),
        ("num_activated", np.int64(10**9), r"num_activated is 1000000000, must be \d+ to \d+ with this load"),
        ("num_requests", np.int64(0), "num_requests is 0, must be at least the 3 of request_loads"),
        ("load", 0, "request_loads adds up to more than load"),
        ("load", np.full((3, 16), -1), "load holds a number beyond 0 to"),
        ("load", np.full((3, 16), 2**64 - 1, np.uint64), "load holds a number beyond 0 to"),
        ("prefill_load", np.full((3, 16), -1), "prefill_load holds a number beyond 0 to"),
        ("request_loads", np.full((3, 3, 16), -1), "request_loads holds a number beyond 0 to"),
        ("request_loads", np.zeros((0, 3, 16), int), "request_loads is empty"),
        ("importance", np.full((3, 16), np.nan), "importance must be finite, 0 or more"),
        ("importance", np.full((3, 16), -1.0), "importance must be finite, 0 or more"),
        ("token_ids", lambda ids: ids[::-1], "token_ids must ascend"),
        ("token_ids", lambda ids: -1 - ids.astype(int), "token_ids holds a number beyond 0 to"),
        ("map_ids", 3, "map_ids holds an expert twice in one map and layer"),
        ("map_ids", lambda ids: ids[:0], "map_scores has shape"),
        ("map_scores", lambda scores: np.full(scores.shape, 60000), "map_scores holds a number beyond 0 to 255"),
        ("map_scores", lambda scores: np.full(scores.shape, -5), "map_scores holds a number beyond 0 to 255"),
        (
            "map_sketches",
            lambda sketches: np.full_like(sketches, np.inf),
            "map_sketches must be finite, or NaN for all",
        ),
        ("token_shares", lambda shares: np.full(shares.shape, 256), "token_shares holds a number beyond 0 to 255"),
        ("token_shares", lambda shares: np.sort(shares.astype(int)), "token_experts holds an expert twice|must fall"),
        ("content_hashes", np.zeros(2), "content_hashes is float64"),
    ],
)
def test_files_of_wrong_content_are_refused(made, tmp_path, name, values, message):
    path = tmp_path / "a.npz"
    save(path, made)
    with np.load(path) as file:
        arrays = dict(file)
    if values is None:
        del arrays[name]
    elif callable(values):
        arrays[name] = values(arrays[name])
    elif isinstance(values, int):
        arrays[name] = np.full_like(arrays[name], values)
    else:
        arrays[name] = values
    np.savez(path, **arrays)
    with pytest.raises(TraceError, match=message):
        load(path)


def test_sketches_are_known_for_all_maps_or_for_none(tmp_path):
    shape, passes = random_passes(np.random.default_rng(9), signals=True)
    made = calibrate(shape, passes).finish()
    made.map_sketches[2, 3] = np.nan
    save(tmp_path / "a.npz", made)
    with pytest.raises(
        TraceError, match=r"a\.npz: map_sketches must be finite, or NaN for all maps where none is known"
    ):
        load(tmp_path / "a.npz")


def test_a_record_without_its_traces_is_read_and_one_with_them_keeps_them(made, tmp_path):
    assert load(saved(tmp_path / "a.npz", made)).content_hashes == ()
    named = replace(made, content_hashes=("ab", "cdef"))
    assert load(saved(tmp_path / "b.npz", named)).content_hashes == ("ab", "cdef")


def saved(path, calibration):
    save(path, calibration)
    return path


def test_any_damaged_byte_is_one_line_or_without_effect(made, tmp_path):
    path = tmp_path / "a.npz"
    save(path, made)
    expected, messages = load(path), []
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    directory = whole.index(b"PK\x01\x02")  # the central directory, where each byte asks for something
    places = np.concatenate([np.arange(30), rng.integers(0, len(whole), 150), np.arange(directory, directory + 60)])
    for place in places.tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ int(rng.integers(1, 256))]) + whole[place + 1 :])
        try:
            found = load(path)
        except TraceError as error:
            messages.append(str(error))
        else:
            assert_equal(found, expected)
    assert messages
    assert not any("\n" in message for message in messages)


def test_an_array_too_large_for_any_memory_is_one_line(made, tmp_path):
    path = tmp_path / "a.npz"
    save(path, made)
    with np.load(path) as file:
        arrays = dict(file)
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**13,)})
    for name in arrays:
        np.savez(path, **{key: values for key, values in arrays.items() if key != name})
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(f"{name}.npy", header.getvalue())
        with pytest.raises(TraceError, match=r"a\.npz: cannot be read as a calibration: ."):
            load(path)


def test_a_calibration_of_the_real_shape_is_about_two_megabytes(tmp_path):
    rng = np.random.default_rng(10)
    shape = ModelShape(layer_ids=tuple(range(1, 20)), num_experts=256, top_k=8, hidden=512, expert_intermediate=64)
    ids = rng.permuted(np.broadcast_to(np.arange(256), (1000, 19, 256)), axis=-1)
    shares = -np.sort(-rng.random((1000, 19, 16)), axis=-1)
    calibration = Calibration(
        name="proxy:x",
        num_requests=210,
        num_activated=210 * 40 * 19 * 70,
        load=rng.poisson(2000, (19, 256)),
        prefill_load=rng.poisson(500, (19, 256)),
        importance=rng.random((19, 256)),
        request_loads=rng.poisson(20, (120, 19, 256)),
        map_ids=ids[..., :32],
        map_scores=-np.sort(-rng.random((1000, 19, 32)), axis=-1),
        map_sketches=rng.standard_normal((1000, 16)),
        token_ids=np.arange(1000),
        token_experts=ids[..., :16],
        token_shares=shares,
    )
    assert shape.num_layers == 19
    save(tmp_path / "a.npz", calibration)
    assert (tmp_path / "a.npz").stat().st_size < 2_500_000
