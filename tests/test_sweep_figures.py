import re

import matplotlib.image
import polars as pl
import pytest
from commands import ROW
from matplotlib.figure import Figure

from experiments import sweep_figures as figures

SLOTS, BANDWIDTHS = (8, 16), (6e9, 25e9)


def row(policy, slots, bandwidth, tpot_ms, over=(None, None, None), **changes):
    names = ("over_best_ms", "over_best_low_ms", "over_best_high_ms")
    given = {"hardware_changes": f"h2d_bytes_per_s={bandwidth:g}", "profile_hash": f"{bandwidth:g}", "variant": ""}
    values = {"policy": policy, "slots_per_layer": slots, figures.BANDWIDTH: bandwidth, "tpot_ms": tpot_ms}
    shares = {"exposed_stall_ms_per_token": tpot_ms / 4, "link_busy_ratio": 0.9, "cpu_busy_ratio": 0.1}
    size = {"gpu_expert_bytes": slots * figures.GIB}
    return ROW | given | values | shares | size | dict(zip(names, over, strict=True)) | changes


@pytest.fixture
def table():
    """Two policies and a bound; `oled` is the fastest everywhere but for one cell, and not told apart in another."""
    rows = []
    for bandwidth in BANDWIDTHS:
        rows.append(row("full", 64, bandwidth, 2.0, sized=False))
        for slots in SLOTS:
            lru = 400 / slots * 6e9 / bandwidth
            oled = 10.0 if (slots, bandwidth) == (16, 25e9) else lru / 3
            best, other = sorted([("oled", oled), ("lru", lru)], key=lambda one: one[1])
            low = -1.0 if (slots, bandwidth) == (8, 25e9) else 0.5
            rows.append(row(best[0], slots, bandwidth, best[1], (0.0, 0.0, 0.0)))
            rows.append(row(other[0], slots, bandwidth, other[1], (other[1] - best[1], low, 9.0)))
            rows.append(row("ideal_min", slots, bandwidth, best[1] / 2, (-best[1] / 2, -9.0, -0.1), clairvoyant=True))
    return pl.DataFrame(rows, infer_schema_length=None)


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]


PLOTS = {
    "maps": figures.plot_maps,
    "best": figures.plot_best,
    "knees": lambda table: figures.plot_knees(table, 0.5),
    "pareto": figures.plot_pareto,
    "binding": figures.plot_binding,
}


@pytest.mark.parametrize("name", PLOTS)
def test_every_figure_says_what_it_is_of(table, tmp_path, name):
    figure = PLOTS[name](table)
    assert isinstance(figure, Figure)
    note = " ".join(figure.get_supxlabel().split())
    for text in ("proxy:proxy-tiny", "hidden 128", "4.45 minutes", "5.50 tokens", "never validated", "2048 x 512"):
        assert text in note
    assert "h2d_bytes_per_s" not in note
    figure.savefig(tmp_path / "figure.png")
    assert matplotlib.image.imread(tmp_path / "figure.png").std() > 0.05


@pytest.mark.parametrize("name", PLOTS)
def test_cells_of_two_traces_are_not_one_figure(table, name):
    other = table.with_columns(trace=pl.lit("another"))
    with pytest.raises(ValueError, match="a figure shows one trace and machine"):
        PLOTS[name](pl.concat([table, other]))
    with pytest.raises(ValueError, match=re.escape(figures.BANDWIDTH)):
        PLOTS[name](table.drop(figures.BANDWIDTH))


def test_maps_hold_the_time_of_each_cell(table):
    figure = figures.plot_maps(table)
    assert titles(figure) == ["oled", "lru", "ideal_min"]
    lru = figure.axes[1]
    written = {text.get_position(): text.get_text() for text in lru.texts}
    assert written == {(0, 0): "50", (1, 0): "25", (0, 1): "12", (1, 1): "6"}
    assert [text.get_text() for text in lru.get_xticklabels()] == ["8", "16"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["6", "25"]


def test_the_fastest_policy_is_no_bound_and_names_who_is_like_it(table):
    (axes,) = figures.plot_best(table).axes
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "oled", (1, 0): "oled", (0, 1): "oled\n≈ lru", (1, 1): "lru"}


def test_knees_are_the_smallest_caches_near_full(table):
    assert figures.knees(table, 0.5).rows() == [("ideal_min", 25e9, 8)]
    found = {(policy, gb / 1e9): slots for policy, gb, slots in figures.knees(table, 2.0).iter_rows()}
    assert found == {("ideal_min", 6.0): 16, ("ideal_min", 25.0): 8, ("oled", 25.0): 8, ("lru", 25.0): 16}
    assert figures.relative_to_full(table).filter(policy="full")["over_full"].to_list() == [1.0, 1.0]


def test_the_pareto_front_holds_what_nothing_beats():
    cells = pl.DataFrame({"gpu_expert_bytes": [1, 1, 2, 3, 3, 4], "tpot_ms": [9.0, 8.0, 8.0, 5.0, 4.0, 3.0]})
    assert figures.pareto(cells).rows() == [(1, 8.0), (3, 4.0), (4, 3.0)]
    assert figures.pareto(cells.clear()).is_empty()


def test_what_binds_is_coloured_by_the_busier_one(table):
    table = table.with_columns(
        exposed_stall_ms_per_token=pl.when(slots_per_layer=8).then(pl.col("tpot_ms") * 0.8).otherwise(0.0),
        cpu_busy_ratio=pl.when(pl.col(figures.BANDWIDTH) == 6e9).then(1.0).otherwise(0.1),
    )
    figure = figures.plot_binding(table)
    colors = figure.axes[0].images[0].get_array()
    assert not (colors[0, 0] == colors[1, 0]).all()  # CPU, link
    assert (colors[0, 1] == colors[1, 1]).all()  # the GPU
    assert texts(figure)[:4] == ["80%", "0%", "80%", "0%"]


def test_policies_that_share_a_colour_elsewhere_do_not_here(table):
    both = pl.concat([table, table.filter(policy="lru").with_columns(policy=pl.lit("ktransformers"))])
    figure = figures.plot_pareto(both)
    colors = {tuple(points.get_facecolor()[0]) for points in figure.axes[0].collections}
    assert len(colors) == 4
