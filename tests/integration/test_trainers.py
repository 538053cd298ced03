"""Under transformers.Trainer, accelerate and Lightning: the examples, checkpoints, what is caught, and exactness.

All cases run in one launch on two ranks; those of a package that is not installed, and `WHOLE` without `--all`, are
left out.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.ranks import run_ranks

SCENARIOS = {
    "trainer_mistakes": "transformers",
    "accelerate_mistakes": "accelerate",
    "accelerate_example": "accelerate",
    "accelerate_features": "accelerate",
    "trainer_example": "transformers",
    "lightning_fit": "lightning",
    "documented_trainer": "transformers",
    "documented_accelerate": "accelerate",
    "documented_lightning": "lightning",
}

WHOLE = {"lightning_fit"}

pytestmark = pytest.mark.long


def missing(scenario):
    """The packages that a scenario lacks here."""
    needed = {SCENARIOS[scenario], "accelerate"} if SCENARIOS[scenario] == "transformers" else {SCENARIOS[scenario]}
    return sorted(name for name in needed if find_spec(name) is None)


@pytest.fixture(scope="module")
def launch(tmp_path_factory, request):
    """What all scenarios found on each rank."""
    folder = tmp_path_factory.mktemp("trainers")
    for name in ("nvme", "pfs"):
        (folder / name).mkdir()
    left_out = set() if request.config.getoption("--all") else WHOLE
    names = [name for name in SCENARIOS if not missing(name) and name not in left_out]
    command = ["-m", "tests.integration.trainers", str(folder / "out"), str(folder), *names]
    outcomes = run_ranks(2, command, timeout_s=200, env={"HF_HUB_OFFLINE": "1"})
    for rank, outcome in enumerate(outcomes):
        assert outcome.finished(folder / f"out.{rank}"), outcome.text[-5000:]
    assert list((folder / "nvme").iterdir()) == list((folder / "pfs").iterdir()) == []
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(2)]


@pytest.fixture
def found(launch, request):
    """What the scenario that a test names found, by rank."""
    return [rank[request.param] for rank in launch]


def scenario(name):
    reason = f"not installed: {', '.join(missing(name))} (pip install 'mlpo-hpc[trainers]')"
    marks = [pytest.mark.skipif(bool(missing(name)), reason=reason)] + [pytest.mark.whole] * (name in WHOLE)
    parameters = [pytest.param(name, marks=marks)]
    return pytest.mark.parametrize("found", parameters, indirect=True)


@scenario("trainer_example")
def test_trainer_trains_as_stock_does_and_resumes_bit_for_bit(found):
    for rank in found:
        assert rank["read"] > 0, "state is streamed"
        assert rank["straight"]["steps"] == rank["straight step"] == rank["resumed step"] == 6
        assert rank["straight"] == rank["stock"] == rank["resumed"]
        assert rank["straight losses"] == rank["stock losses"] == rank["resumed losses"]
        assert len(rank["straight losses"]) == 6


@scenario("trainer_example")
def test_save_total_limit_keeps_the_newest_checkpoints_of_ours(found):
    assert found[0]["straight folders"] == ["checkpoint-4", "checkpoint-6", "model"]


@scenario("trainer_example")
def test_evaluation_afterwards_is_by_the_same_engine(found):
    for rank in found:
        assert 0 < rank["evaluated"] < 6
        assert rank["still ours"]


@scenario("trainer_example")
def test_exported_weights_load_into_the_model_and_give_the_same_loss(found):
    assert found[0]["export"] == "done"
    assert found[0]["export equal"]
    one, other = found[0]["export losses"]
    assert one == other


@scenario("accelerate_example")
def test_accelerate_trains_as_stock_does_and_resumes_bit_for_bit(found):
    for rank in found:
        assert rank["straight"]["steps"] == 5
        assert rank["straight"] == rank["stock"] == rank["second"]
        assert rank["straight losses"] == rank["stock losses"] == rank["first losses"] + rank["second losses"]
    assert found[0]["straight losses"] != found[1]["straight losses"], "the data is split"


@scenario("accelerate_features")
def test_experts_low_rank_training_groups_and_schedules_under_accelerate(found):
    for rank in found:
        assert rank["ours"] == rank["stock"]
        assert rank["ours"]["unwrapped"]
        assert rank["ours"]["saved"]
        first, second = rank["ours"]["lr"]
        assert second == pytest.approx(2 * first)


@scenario("lightning_fit")
def test_lightning_trains_as_stock_does_and_resumes_bit_for_bit(found):
    for rank in found:
        assert rank["straight"]["steps"] == rank["straight step"] == rank["resumed step"] == 6
        assert rank["straight"] == rank["stock"] == rank["resumed"]
        assert rank["straight folders"] == ["step=4.ckpt", "step=6.ckpt"], "its rotation works on our folders"


COPIES = ["the training world has 2 ranks, but accelerate counted 1", "init_distributed()", "use_cpu=True", "gloo"]


@scenario("trainer_mistakes")
def test_mistakes_with_the_trainer_are_errors(found):
    for rank in found:
        assert "nothing was initialised under mlpo_hpc.offload()" in rank["constructor"]
        assert all(text in rank["copies"] for text in COPIES), rank["copies"]
        assert "this training is without DeepSpeed, for ACCELERATE_USE_CPU is set: unset it" in rank["dropped"]


@scenario("accelerate_mistakes")
def test_mistakes_with_accelerate_are_errors(found):
    for rank in found:
        assert all(text in rank["copies"] for text in COPIES), rank["copies"]
        assert "without DeepSpeed, for accelerate is set up as MULTI_CPU: give" in rank["dropped"]


@scenario("documented_trainer")
def test_the_documented_program_of_the_trainer_runs_as_it_stands(found):
    assert [rank["steps"] for rank in found] == [[4], [4]]
    assert found[0]["left"] == ["checkpoints", "model"]


@scenario("documented_accelerate")
def test_the_documented_program_of_accelerate_runs_as_it_stands(found):
    assert [rank["steps"] for rank in found] == [[8], [8]]
    assert found[0]["left"] == ["state"]


@scenario("documented_lightning")
def test_the_documented_program_of_lightning_runs_as_it_stands(found):
    assert [rank["steps"] for rank in found] == [[4], [4]]
