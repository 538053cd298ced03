"""mlpo plan: models, tiers as users give them, what fits, what is told, and that the docs say what comes out."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from mlpo_hpc.bench.predict import predict
from mlpo_hpc.cli import main
from mlpo_hpc.cli.probe import Finding, Wish
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.planner.job import Job
from mlpo_hpc.planner.machine import Machine, PlanTier
from mlpo_hpc.planner.model import find_model, guess
from mlpo_hpc.planner.needs import fitting_weights, gpu_bytes
from mlpo_hpc.planner.plan import foresee, make_plan
from mlpo_hpc.planner.policy import MLP, OURS
from mlpo_hpc.planner.published import compare
from mlpo_hpc.planner.read_tiers import read_probe, read_tiers
from mlpo_hpc.planner.table import comparison_table
from mlpo_hpc.planner.weak_scaling import update_seconds
from mlpo_hpc.storage.bandwidth import CROWDS, Bandwidth
from mlpo_hpc.storage.filesystem import FileSystem

ROOT = Path(__file__).parent.parent.parent
TIERS = ("--tier", "nvme=6.9/5.3,half,capacity=3.84TB", "--tier", "pfs=3.6/3.6,shared,total=100")
NVME = PlanTier("nvme", 6.9e9, 5.3e9, full_duplex=False, capacity_bytes=3840 * 10**9)
PFS = PlanTier("pfs", 3.6e9, 3.6e9, shared=True, total_bps=100e9)
JOB = Job(find_model("llama-2-13b"), Machine((NVME, PFS)), host_bytes=40 * 10**9)


# ---- models -------------------------------------------------------------------------------

KNOWN = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_of_presets_are_those_of_the_weights(name):
    assert find_model(name).numel == KNOWN[name]


GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_inner": None}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(("shape", "numel"), [(GPT2, 124_439_808), (LLAMA, 1_235_814_400)], ids=["gpt2", "llama"])
def test_a_config_of_hugging_face_is_read(tmp_path, shape, numel):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for place in (tmp_path, tmp_path / "config.json"):
        assert find_model(str(place)).numel == pytest.approx(numel, rel=0.01)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"hidden_size": 4}', "num_hidden_layers: Field required"),
        (json.dumps(LLAMA | {"num_local_experts": 8}), "mixture of experts"),
        ("[]", "a JSON object is needed"),
        ("{", "cannot read"),
    ],
)
def test_a_config_that_tells_no_shape_is_refused(tmp_path, text, fault):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        find_model(str(path))


@pytest.mark.parametrize("text", ["1.3B", "13B", "70e9", "1T"])
def test_a_number_of_parameters_will_do(text):
    wanted = {"1.3B": 1.3e9, "13B": 13e9, "70e9": 70e9, "1T": 1e12}[text]
    assert find_model(text).numel == pytest.approx(wanted, rel=0.01)


def test_no_shape_is_guessed_for_small_models():
    with pytest.raises(ConfigError, match="give a config.json"):
        guess(125e6)
    with pytest.raises(ConfigError, match="presets: paper-40b"):
        find_model("no-such-model")


# ---- tiers --------------------------------------------------------------------------------


def test_tiers_by_hand():
    assert read_tiers(TIERS[1::2]) == (NVME, PFS)
    assert read_tiers(["a=1/2,at-once=0.5"]) == (PlanTier("a", 1e9, 2e9, at_once=0.5),)


@pytest.mark.parametrize(
    "spec", ["nvme", "nvme=1", "nvme=0/1", "=1/1", "a=1/1,hlf", "a=1/1,capacity=x", "a=1/1,at-once=2", "a=1/1,total=-1"]
)
def test_tiers_that_cannot_be_read(spec):
    with pytest.raises(ConfigError):
        read_tiers([spec])


def probed():
    rates = {"read": (3e9, 2.9e9), "write": (2e9, 1.9e9), "both": (1e9, 0.8e9)}
    rounds = {(crowd, load): [bps] for load, pair in rates.items() for crowd, bps in zip(CROWDS, pair, strict=True)}
    found = Finding(Wish("pfs", "/s"), FileSystem("/s", "/s", "lustre", 1, 1), 4, Bandwidth(rounds))
    return json.dumps({"mlp_offload": {"tiers": [found.tier()]}, "measured": [found.details()]})


def test_what_was_probed_is_read_and_can_be_added_to():
    measured = PlanTier("pfs", 3e9, 2e9, full_duplex=False, at_once=0.8, shared=True)
    assert read_probe(probed()) == [measured]
    assert read_tiers(["pfs,total=50"], [measured]) == (replace(measured, total_bps=50e9),)
    for text in ("{}", "x", json.dumps({"measured": [{"name": "a"}]})):
        with pytest.raises(ConfigError, match="mlpo probe"):
            read_probe(text)


def test_nodes_share_a_shared_tier():
    assert PFS.for_nodes(10) == PFS
    assert PFS.for_nodes(50).read_bps == 2e9
    assert NVME.for_nodes(50) == NVME


# ---- what fits ----------------------------------------------------------------------------


def test_a_job_that_fits_has_no_problems():
    plan = make_plan(JOB)
    assert plan.problems == []
    assert set(plan.outlooks) == {"zero3", "mlp", "ours"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sequence": 2**20}, "each accelerator needs"),
        ({"host_bytes": 600 * 10**9}, "each node needs"),
        ({"host_bytes": 10**9}, "state needs"),
        ({"machine": Machine((replace(NVME, capacity_bytes=10**10),))}, "tiers, which have room for 10"),
    ],
)
def test_what_does_not_fit_is_said(changes, problem):
    plan = make_plan(replace(JOB, **changes))
    assert any(problem in text for text in plan.problems), plan.problems


def test_a_small_tier_leaves_the_rest_to_the_other():
    small = replace(NVME, capacity_bytes=30 * 10**9)
    job = replace(JOB, machine=Machine((small, PFS)))
    ours = foresee(job, OURS)
    assert ours.tier_bytes["nvme"] <= 30e9 < ours.tier_bytes["pfs"]
    assert fitting_weights(job, MLP, [2.0, 1.0]) is None, "a ratio set by hand is not changed"
    assert ours.forecast.update_s > foresee(JOB, OURS).forecast.update_s


def test_memory_of_an_accelerator():
    parts = gpu_bytes(JOB)
    assert parts["weights, its part"] == 2 * JOB.model.numel / 4
    assert sum(parts.values()) < sum(gpu_bytes(replace(JOB, micro_batch=2)).values())
    twice = replace(JOB, machine=replace(JOB.machine, nodes=2))
    assert gpu_bytes(twice)["weights, its part"] == parts["weights, its part"] / 2


def test_computation_grows_with_micro_batches_and_the_update_does_not():
    once, often = (foresee(replace(JOB, accumulation=count), OURS).forecast for count in (1, 4))
    assert often.forward_s == 4 * once.forward_s
    assert often.update_s == pytest.approx(once.update_s, rel=0.05)


# ---- what is told -------------------------------------------------------------------------


def test_wear_is_counted_and_warned_of():
    plan = make_plan(JOB)
    (drive,) = plan.wear
    moved = plan.outlooks["ours"].forecast
    assert drive.written_bytes == pytest.approx(moved.moved_bytes["nvme"]["write"] * 86400 / moved.iteration_s)
    assert drive.drive_writes == drive.written_bytes / NVME.capacity_bytes
    assert any(text.startswith("nvme: ") and "drive writes a day" in text for text in plan.warnings)


def test_advice_is_what_gains_most():
    gains = [gain for _, gain in make_plan(JOB).advice]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    alone = make_plan(replace(JOB, machine=Machine((NVME,))))
    assert any("second tier" in what for what, _ in alone.advice)


def test_weak_scaling():
    found = update_seconds(JOB, (1, 32, 256))
    assert found["zero3"][0] == found["zero3"][2], "its drive is its own"
    assert found["mlp, as on one node"][2] > 2 * found["mlp, as on one node"][0]
    for one, many in ((found["mlp"], found["mlp, as on one node"]), (found["ours"], found["mlp"])):
        assert all(mine <= other for mine, other in zip(one, many, strict=True))
    assert found["ours"] == sorted(found["ours"])


def run(*arguments, code=0, stdin=None):
    done = CliRunner().invoke(main, ["plan", *arguments], input=stdin)
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_answers_first():
    first, second, *_ = run("llama-2-13b", *TIERS, "--host-memory", "40GB").splitlines()
    assert first == "13.0 B parameters on 1 x 4 accelerators: fits"
    assert second.startswith("an iteration of 8,192 text tokens takes ")


def test_the_command_for_programs():
    told = json.loads(run("llama-2-13b", *TIERS, "--json", "--host-memory", "40GB"))
    assert told["fits"] is True
    assert told["parameters"] == KNOWN["llama-2-13b"]
    assert told["systems"]["ours"]["update_s"] == make_plan(JOB).outlooks["ours"].forecast.update_s


def test_what_does_not_fit_is_exit_code_1():
    told = json.loads(run("llama-3-405b", "--tier", "nvme=6.9/5.3,capacity=1TB", "--json", code=1))
    assert told["fits"] is False
    assert len(told["problems"]) >= 2


def test_the_command_takes_a_probe():
    told = json.loads(run("13B", "--probe", "-", "--json", stdin=probed()))
    assert told["machine"]["tiers"][0]["at_once"] == 0.8


WRONG = [(), ("13B",), ("13B", "--published"), ("nothing", *TIERS), ("13B", "--tier", "x"), ("13B", "--gpus", "0")]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_is_exit_code_2(arguments):
    run(*arguments, code=2)


def test_the_picture_is_drawn(tmp_path):
    told = json.loads(run("llama-2-7b", *TIERS, "--weak-scaling", str(tmp_path / "w.png"), "--json"))
    assert len(told["nodes"]) == len(told["update_s"]["ours"])
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    run("llama-2-7b", *TIERS, "--weak-scaling", str(tmp_path / "none" / "w.png"), code=2)


def lines_of(comparisons):
    console = Console(color_system=None, width=200, file=io.StringIO())
    console.print(comparison_table(comparisons))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line.startswith("| ")]


def test_the_docs_say_what_comes_out():
    docs = (ROOT / "docs/plan.md").read_text()
    assert all((ROOT / "docs" / link).exists() for link in re.findall(r"\]\((?!http)([^)#]+)\)", docs))
    text = [" ".join(line.split()) for line in docs.splitlines()]
    lines = lines_of([*compare(), *predict((ROOT / "docs/bench/bench.json").read_text())])
    assert len(lines) == 1 + 10 + 12
    for line in lines:
        assert line in text, (
            f"mlpo plan --published --against docs/bench/bench.json prints what docs/plan.md has not: {line}"
        )


def test_what_is_no_benchmark_is_refused(tmp_path):
    (tmp_path / "b.json").write_text('{"rows": []}')
    assert "not what mlpo bench --json writes" in run("--against", str(tmp_path / "b.json"), code=2)


def test_state_that_fits_into_memory_is_not_decoded():
    """The advice then is to have no tiers, and without them nothing is short."""
    job = replace(JOB, host_bytes=400 * 10**9)
    assert "tiers" in " ".join(make_plan(job).warnings)
    ours, mlp = (foresee(job, policy).forecast for policy in (OURS, MLP))
    assert ours.update_s == pytest.approx(mlp.update_s, rel=1e-3)
