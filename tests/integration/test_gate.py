"""The exactness gate: weights and optimizer state equal stock DeepSpeed's bit for bit."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.integration.cases import CORE, FACTORS
from tests.pairwise import pairwise, product
from tests.ranks import run_ranks


def pytest_generate_tests(metafunc):
    if "case_index" in metafunc.fixturenames:
        chosen = [(ranks, i, case) for ranks in (1, 2) for i, case in enumerate(chosen_cases(metafunc.config, ranks))]
        cases = [(ranks, index) for ranks, index, _ in chosen]
        metafunc.parametrize(("num_ranks", "case_index"), cases, ids=[name_of(case) for *_, case in chosen])


def chosen_cases(config, num_ranks):
    cases = product(FACTORS, CORE) if config.getoption("--all") else pairwise(FACTORS)
    return [case for case in cases if case["ranks"] == num_ranks]


def name_of(case):
    return "-".join(str(value) for value in case.values())


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """All cases of a number of ranks in one launch: importing DeepSpeed takes longer than a case."""

    @cache
    def launch(num_ranks):
        folder = tmp_path_factory.mktemp(f"gate{num_ranks}")
        cases = chosen_cases(request.config, num_ranks)
        dirs = [folder / name for name in "abc"]
        for path in dirs:
            path.mkdir()
        (folder / "cases.json").write_text(json.dumps(cases))
        arguments = [str(folder / "cases.json"), str(folder / "results"), *map(str, dirs)]
        outcomes = run_ranks(num_ranks, ["-m", "tests.integration.gate", *arguments], timeout_s=30 + 15 * len(cases))
        files = [folder / f"results.{rank}" for rank in range(num_ranks)]
        for outcome, file in zip(outcomes, files, strict=True):
            assert outcome.finished(file), outcome.text[-5000:]
        return cases, [json.loads(file.read_text()) for file in files]

    return launch


def test_state_and_weights_are_those_of_stock_deepspeed(num_ranks, case_index, results):
    cases, by_rank = results(num_ranks)
    case = cases[case_index]
    for rank, found in enumerate(entry[case_index] for entry in by_rank):
        assert found["finite"]
        assert found["differs"] == [], f"rank {rank}"
        assert found["peak_bytes"] <= found["budget_bytes"]
        assert found["codec"] == ("split" if case["dtype"] == "bf16" and case["format"] == "auto" else "fp32")
        if case["dtype"] == "fp16":
            assert found["skipped"] > 0, "the case is there for its overflow skips"
        if found["files"]:
            assert found["bytes_read"] > 0
            assert found["misses"] > 0
        else:
            assert found["misses"] == 0
