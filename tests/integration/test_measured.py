"""What is promised of bytes, bandwidth and memory, measured from outside the engine."""

from __future__ import annotations

import json
import statistics

import pytest

from tests import testbed
from tests.ranks import run_ranks

MB = 10**6


def measure(scenario, num_ranks, folder, **args):
    args["out"] = str(folder / "out")
    outcomes = run_ranks(num_ranks, ["-m", "tests.integration.measure", scenario, json.dumps(args)], timeout_s=200)
    files = [folder / f"out.{rank}" for rank in range(num_ranks)]
    for file, outcome in zip(files, outcomes, strict=True):
        assert outcome.finished(file), outcome.text[-4000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """A run over two tiers of 100 and 50 MB/s each way; host memory for a quarter of the state."""
    reason = testbed.missing()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("capped")
    fast, slow = (testbed.capped_disk(folder, name, 10**9, cap) for name, cap in (("a", 100 * MB), ("b", 50 * MB)))
    with fast as a, slow as b:
        args = {"dirs": [str(a.path), str(b.path)], "devices": [a.device, b.device], "steps": 6, "hidden": 1024}
        return measure("speed", 1, folder, layers=24, sub_group_size=10**6, host_memory=75 * MB, **args)[0]


def test_reported_bytes_are_those_of_the_block_layer(capped):
    assert min(capped["counted"]) > 200 * MB
    for counted, moved in zip(capped["counted"], capped["moved"], strict=True):
        assert counted == pytest.approx(moved, rel=0.01)


def test_every_tier_moves_bytes_both_ways_nearly_all_the_time(capped):
    """At least 80 % of the tenths of an update, in the median update after the first."""
    assert statistics.median(capped["tenths"][1:]) >= 8, capped["tenths"]


def test_slower_tiers_get_less(capped):
    tiers = capped["report"]["tiers"]
    assert 1.6 < tiers["t0"]["bytes_written"] / tiers["t1"]["bytes_written"] < 2.5


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_memory_stays_within_the_budget_from_start_to_end(num_ranks, tmp_path):
    dirs = [tmp_path / name for name in "ab"]
    for path in dirs:
        path.mkdir()
    common = {"dirs": list(map(str, dirs)), "steps": 4}
    tiny = measure(
        "memory", num_ranks, tmp_path, hidden=64, layers=4, sub_group_size=5000, host_memory=10 * MB, **common
    )
    large = {"hidden": 1024, "layers": 48, "sub_group_size": 10**6, "host_memory": 80 * MB * num_ranks}
    for small, found in zip(tiny, measure("memory", num_ranks, tmp_path, **large, **common), strict=True):
        state = 12 * found["local"]
        assert found["subgroups"] >= 16
        assert found["peak_pool"] <= found["share"] < state / 3, "most of the state is really streamed"
        allowed = found["share"] + 4 * found["local"] + small["peak_rss"] + 64 * MB
        assert found["peak_rss"] <= allowed
