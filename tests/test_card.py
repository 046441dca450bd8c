"""Model cards: their tables are what the shipped traces give, for every trace that is shipped."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from commands import command

from tracer.card import card, main, traces_of, update
from tracer.locality import activated_per_layer, denoise_sets, within_blocks
from tracer.schema import TraceError
from tracer.shipped import DATA_DIRECTORY, find_trace
from tracer.statistics import statistics_of
from tracer.store import TraceReader

CARDS = sorted(DATA_DIRECTORY.glob("*/README.md"))


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_the_tables_of_a_card_are_what_its_traces_give(path):
    text = path.read_text()
    assert traces_of(text)
    assert update(text) == text


def test_every_shipped_trace_is_in_the_card_of_its_model():
    shipped = {path.stem: path for path in DATA_DIRECTORY.glob("*.trace")}
    described = {path.parent.name: traces_of(path.read_text()) for path in CARDS}
    assert {name for names in described.values() for name in names} == set(shipped)
    for name, path in shipped.items():
        source = TraceReader(path).metadata.source
        assert name in described[source.removeprefix("proxy:")]


@pytest.fixture(scope="module")
def tiny():
    return statistics_of("proxy-tiny")


def test_statistics_agree_with_the_functions_behind_them(tiny):
    denoise = list(denoise_sets(TraceReader(find_trace("proxy-tiny")), 64))
    assert [layer.mean for layer in tiny.activated] == pytest.approx(activated_per_layer(denoise))
    assert tiny.by_gap[1].overlap == within_blocks(denoise).mean_overlap
    assert tiny.overlap_by_layer == pytest.approx(within_blocks(denoise).overlap.mean(axis=0))
    assert sum(group.num_pairs for group in tiny.by_accepted.values()) == tiny.by_gap[1].num_pairs
    assert sum(kept.num_tokens for kept in tiny.kept) == 16 * tiny.by_gap[1].num_pairs
    assert tiny.tokens_per_denoise == pytest.approx(tiny.num_accepted / len(denoise))
    assert len(tiny.lru_lowest) == len(tiny.lru_highest) == 65  # 0 to 64 slots
    assert len(tiny.cos_router_input) == len(tiny.cos_layer_output) == 3
    assert list(tiny.sorted_heat) == sorted(tiny.sorted_heat, reverse=True)


def test_a_card_names_source_and_paper(tiny):
    text = card([tiny, tiny])
    assert text.startswith("Source `proxy:proxy-tiny`: hidden 128, 3 MoE layers of 64 experts, top 8, trained 4.45 ")
    assert text.count("Source") == 1
    assert re.search(r"\| overlap of adjacent forwards \| (0\.\d{3}) \| \1 \| 0\.85 to 0\.90 \|", text)
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {4, 5}  # the paper's column is in the first table only


def test_tables_can_be_chosen(tiny):
    text = card([tiny], ["layers"])
    assert text.count("\n| --- |") == 1
    assert re.findall(r"^\| (\w+) \| [\d.]+ ± [\d.]+ \|$", text, re.MULTILINE) == ["1", "2", "3"]


def test_what_there_is_not_is_left_out(tiny):
    alone = replace(tiny, block_length=1, by_gap={}, by_accepted={}, kept=(), cos_router_input=())
    text = card([alone])
    assert "accepted between" not in text
    assert "confidence" not in text
    assert "| overlap of adjacent forwards | — | 0.85 to 0.90 |" in text
    assert "| cosine of router inputs | — |" in text
    assert "at gap" not in text


def test_a_table_pools_pairs_by_their_number(tiny):
    row = next(line for line in card([tiny], ["accepted"]).splitlines() if line.startswith("| 9 to 16"))
    groups = [group for num, group in tiny.by_accepted.items() if 9 <= num <= 16]
    pooled = np.average([g.overlap for g in groups], weights=[g.num_pairs for g in groups])
    assert f"{pooled:.3f} ({sum(g.num_pairs for g in groups)})" in row


def test_json_holds_every_number(capsys):
    assert main(["proxy-tiny", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["source"] == "proxy:proxy-tiny"
    assert len(found["activated"]) == found["num_layers"] == 3
    assert found["by_gap"]["1"]["num_pairs"] == 30
    assert {kept["state"] for kept in found["kept"]} == {"masked", "accepted", "decoded"}


def test_update_makes_tables_anew_and_leaves_the_rest(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Some\n<!-- python -m tracer.card proxy-tiny --tables layers -->\nstale\n<!-- end -->\nmore\n")
    assert main(["--update", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("# Some\n<!-- python -m tracer.card proxy-tiny --tables layers -->\n\nSource `proxy:")
    assert text.endswith("|\n\n<!-- end -->\nmore\n")
    assert "stale" not in text
    assert update(text) == text
    assert traces_of(text) == ["proxy-tiny"]


def test_what_cannot_be_read_is_one_line():
    finished = command(lambda: sys.exit(main(["proxy-tony"])))
    assert finished.code == 2
    assert finished.err.startswith("tracer.card: error: trace 'proxy-tony': no such directory")
    assert finished.err.count("\n") == 1
    assert command(main).code == 2
    with pytest.raises(TraceError, match="proxy-tony"):
        update("<!-- python -m tracer.card proxy-tony -->\n<!-- end -->")
