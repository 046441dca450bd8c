"""Figures of locality draw each trace once, leave out what there is not, and say what the numbers are of."""

from dataclasses import replace

import numpy as np
import pytest

from experiments import locality_figures as figures
from tracer.statistics import Overlap, statistics_of

ALL = (
    figures.plot_layers,
    figures.plot_overlap,
    figures.plot_boundaries,
    figures.plot_working_sets,
    figures.plot_stability,
    figures.plot_heat,
    figures.plot_block_lengths,
)


@pytest.fixture(scope="module")
def tiny():
    return statistics_of("proxy-tiny")


@pytest.fixture
def two(tiny):
    return [
        replace(tiny, trace="proxy-a-code", block_length=32),
        replace(tiny, trace="proxy-a-prose", num_accepted=320),
    ]


def note(figure):
    return " ".join(figure.get_supxlabel().split())


@pytest.mark.parametrize("plot", ALL)
def test_every_figure_says_what_it_is_of(plot, tiny, two, tmp_path):
    alone, both = plot([tiny]), plot(two)
    assert note(alone).startswith("proxy-tiny, hidden 128, 4.45 minutes of training, 5.53 tokens per forward")
    start = "proxy-tiny, hidden 128, 4.45 minutes of training; tokens per forward: code 5.53, prose 2.00"
    assert note(both).startswith(start)
    both.savefig(tmp_path / "both.png")
    assert 5_000 < (tmp_path / "both.png").stat().st_size < 100_000
    if plot is not figures.plot_block_lengths:
        assert [text.get_text() for text in both.legends[0].get_texts()] == ["code", "prose"]


def test_traces_of_several_models_are_told_apart(tiny):
    real = replace(tiny, trace="mine", source="model:LLaDA2.0-mini", hidden=2048, training_minutes=None)
    assert note(figures.plot_heat([tiny, real])).startswith(
        "proxy-tiny, hidden 128, 4.45 minutes of training; tokens per forward: proxy-tiny 5.53; "
        "model:LLaDA2.0-mini, hidden 2048; tokens per forward: mine 5.53; "
    )


def test_layers(tiny):
    activated, overlap, cosine = figures.plot_layers([tiny]).axes
    assert activated.lines[0].get_xydata().tolist() == [[layer.layer_id, layer.mean] for layer in tiny.activated]
    assert list(overlap.lines[0].get_ydata()) == list(tiny.overlap_by_layer)
    assert list(cosine.lines[0].get_ydata()) == list(tiny.cos_router_input)


def test_overlap_by_gap_and_by_tokens_accepted(tiny):
    by_gap, by_accepted = figures.plot_overlap([tiny], max_gap=2).axes
    assert list(by_gap.lines[0].get_xdata()) == [1, 2]
    assert list(by_accepted.lines[0].get_xdata()) == list(tiny.by_accepted)
    assert list(by_accepted.lines[0].get_ydata()) == [group.overlap for group in tiny.by_accepted.values()]
    assert list(by_gap.lines[1].get_ydata()) == [tiny.floor.overlap] * 2


def test_boundaries(two):
    sizes, bars = figures.plot_boundaries(two).axes
    assert sizes.lines[0].get_xydata().tolist() == [[i, size] for i, size in two[0].by_iteration.items()]
    wanted = [two[0].by_gap[1].overlap, two[0].after_last.overlap, two[0].after_first.overlap]
    assert [bar.get_height() for bar in bars.patches[:3]] == wanted
    floors = [two[0].floor.overlap, two[0].after_last_floor.overlap, two[0].after_first_floor.overlap]
    assert [lines.get_segments()[0][0][1] for lines in bars.collections[:3]] == floors
    none = replace(two[0], by_gap={}, floor=Overlap(0, None, None))
    texts = [text.get_text() for text in figures.plot_boundaries([none]).axes[1].texts]
    assert texts[0] == "none"


def test_working_sets_and_the_band_of_lru(tiny):
    sets, hits = figures.plot_working_sets([tiny]).axes
    assert sets.lines[0].get_xydata().tolist() == [[window, size] for window, size in tiny.working_sets.items()]
    assert list(hits.lines[0].get_ydata()) == list(tiny.lru_lowest)
    assert list(hits.lines[1].get_ydata()) == list(tiny.lru_highest)


def test_stability_has_a_point_for_each_bin_that_has_tokens(tiny):
    panels = figures.plot_stability([tiny]).axes
    for state, axes in zip(("masked", "accepted", "decoded"), panels, strict=True):
        bins = [kept for kept in tiny.kept if kept.state == state]
        assert list(axes.lines[0].get_ydata()) == [kept.ratio for kept in bins]
    assert panels[0].lines[0].get_xdata()[0] == 1.5  # from 0.1 to 0.2


def test_block_lengths_are_in_order_and_need_no_pairs(two):
    alone = replace(two[1], block_length=1, by_gap={})
    tokens, _, overlap = figures.plot_block_lengths([two[0], alone]).axes
    assert tokens.lines[0].get_xydata().tolist() == [[1, 2.0], [32, pytest.approx(5.53, abs=0.01)]]
    assert list(overlap.lines[0].get_xdata()) == [32]
    assert np.array_equal(tokens.get_xticks(), [1, 32])
