"""The picture of docs/how-it-works.md can be drawn, and shows what the text says."""

from __future__ import annotations

import runpy

import pytest

from tests.ranks import ROOT


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs/how_it_works.py"))


@pytest.fixture(scope="module")
def rank(script):
    return script["watch"]()


def test_the_picture_is_drawn(script, rank, tmp_path):
    script["draw"](rank, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_it_shows_an_order_and_the_same_turned_round(script, rank):
    first, end = script["SHOWN"]
    updates = [span.subgroup for span in rank.spans if span.way == "update"]
    shown = [updates[12 * number : 12 * number + 12] for number in range(first, end)]
    assert shown == [list(range(12)), list(range(11, -1, -1))]


def test_what_was_updated_last_moves_neither_way(script, rank):
    last = script["SHOWN"][1] - 1
    begins = script["_begins"](rank)
    begin_s = begins[last] + script["SHARE"].forward_s + rank.times[last].backward_s
    moved = {span.subgroup for span in rank.spans if span.way != "update" and begins[last] < span.end_s < begin_s}
    assert moved.isdisjoint(range(7, 12))
    parts = min((abs(time - begin_s), parts) for time, parts in rank.samples)[1]
    assert parts[7:] == [1.0] * 5
