"""Figures of our own in docs/comparison.md are those that were measured."""

from __future__ import annotations

import json

import pytest

from tests.ranks import ROOT

TEXT = " ".join((ROOT / "docs/comparison.md").read_text().split())
MEASURED = json.loads((ROOT / "docs/bench/bench.json").read_text())
RATIOS = MEASURED["ratios"]
SECONDS = {(row["system"], row["accumulation"]): row for row in MEASURED["rows"]}


def seconds(system: str, part: str = "iteration_s", accumulation: int = 1) -> float:
    return SECONDS[system, accumulation][part]["median"]


@pytest.mark.parametrize(("name", "key"), [("update", "update_vs_nvme"), ("iteration", "iteration_vs_nvme")])
def test_ratios_are_those_of_the_benchmark(name, key):
    found = RATIOS[key]
    assert f"| {name} | {found['median']:.2f} ({found['min']:.2f} - {found['max']:.2f}) |" in TEXT


def test_so_is_the_ratio_to_the_paper_s_policies():
    assert f"(update: {RATIOS['update_vs_paper_policies']['median']:.2f} times ours)" in TEXT


def test_so_are_seconds():
    in_memory, ours = seconds("cpu", "update_s"), seconds("ours", "update_s")
    assert f"Its update took {in_memory:.2f} s where ours took {ours:.2f} s with storage" in TEXT
    stock, mine = seconds("nvme", accumulation=8), seconds("ours", accumulation=8)
    assert f"an iteration took {stock:.2f} s with stock NVMe offload and {mine:.2f} s with ours" in TEXT
    stock_of_one, mine_of_one = seconds("nvme"), seconds("ours")
    assert f"where it was {stock_of_one:.2f} s and {mine_of_one:.2f} s with one" in TEXT
    assert f"{stock / mine:.1f} instead of {stock_of_one / mine_of_one:.1f} times" in TEXT
