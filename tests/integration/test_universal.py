"""``mlpo ckpt export --to universal`` against DeepSpeed's own converter and loader, of the same training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mlpo_hpc.cli import main
from tests.integration.cases import FACTORS
from tests.ranks import ROOT, run_ranks

USUAL = {name: values[0] for name, values in FACTORS.items()}
CASES = {
    "frozen": USUAL | {"feature": "frozen", "clipping": 0.05, "tiers": 2},
    "groups": USUAL | {"feature": "two_groups", "dtype": "fp16", "optimizer": "adamw"},
    "fp32": USUAL | {"dtype": "fp32", "accumulation": 4},
}
REFUSED = {"momentum": USUAL | {"optimizer": "sgd_momentum"}, "amsgrad": USUAL | {"optimizer": "adamw_amsgrad"}}
KEPT = {"momentum": "['momentum_buffer']", "amsgrad": "['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step']"}

pytestmark = pytest.mark.long


def launch(do: str, num_ranks: int, folder: Path, cases: dict[str, Any]) -> None:
    dirs = [folder / name for name in "ab"]
    for path in dirs:
        path.mkdir(exist_ok=True)
    args = {"cases": cases, "folder": str(folder), "dirs": [*map(str, dirs)], "out": str(folder / f"{do}{num_ranks}")}
    outcomes = run_ranks(num_ranks, ["-m", "tests.integration.universal", do, json.dumps(args)], timeout_s=200)
    for rank, outcome in enumerate(outcomes):
        assert outcome.finished(folder / f"{do}{num_ranks}.{rank}"), outcome.text[-5000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """On two ranks: stock and ours, and what is exported of ours."""
    folder = tmp_path_factory.mktemp("universal")
    launch("save", 2, folder, CASES | REFUSED)
    for name in CASES:
        done = CliRunner().invoke(main, ["ckpt", "export", f"{folder}/{name}/ours", *target(folder, name)])
        assert done.exit_code == 0, done.output
    return folder


def target(folder: Path, name: str) -> list[str]:
    return [f"{folder}/{name}/ours/one_universal", "--to", "universal"]


def convert(source: Path) -> Path:
    """By DeepSpeed."""
    made = source.with_name("one_universal")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers=1"]
    paths = [f"--input_folder={source}", f"--output_folder={made}", "--num_merge_workers=1"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([*command, *paths], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return made


def differences(stock: Any, ours: Any, where: str) -> Iterator[str]:
    """Down to the bits, and to what a tensor says of itself; names may have another order."""
    if type(stock) is not type(ours):
        yield f"{where}: {type(stock)}, {type(ours)}"
    elif torch.is_tensor(stock):
        forms = [(x.dtype, x.shape, x.stride(), x.requires_grad, x.untyped_storage().nbytes()) for x in (stock, ours)]
        if forms[0] != forms[1] or not torch.equal(stock, ours):
            yield f"{where}: {stock}, {ours}"
    elif isinstance(stock, dict):
        if set(stock) != set(ours):
            yield f"{where}: {set(stock) ^ set(ours)}"
        for key in set(stock) & set(ours):
            yield from differences(stock[key], ours[key], f"{where}/{key}")
    elif isinstance(stock, list | tuple) and len(stock) == len(ours):
        for number, (one, other) in enumerate(zip(stock, ours, strict=True)):
            yield from differences(one, other, f"{where}/{number}")
    elif hasattr(stock, "loss_scale"):
        yield from differences(vars(stock), vars(ours), where)
    elif stock != ours:
        yield f"{where}: {stock}, {ours}"


def loaded(path: Path) -> Any:
    """What is in a file; the configurations differ by our section, padding of frozen partitions is of any value."""
    found = torch.load(path, weights_only=False)
    if path.name.endswith("_model_states.pt"):
        del found["ds_config"]
        rank = int(path.name.split("_")[3])
        for name, part in found["frozen_param_fragments"].items():
            part[max(0, found["frozen_param_shapes"][name].numel() - rank * part.numel()) :] = 0
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_deepspeed_s_own_converter_makes(saved, name):
    stock, ours = convert(saved / name / "stock/one"), saved / name / "ours/one_universal"
    files = [{path.relative_to(folder) for path in folder.rglob("*.*")} for folder in (stock, ours)]
    assert files[0] == files[1]
    assert len(files[0]) > 40
    for path in sorted(path for path in files[0] if path.suffix == ".pt"):
        assert list(differences(loaded(stock / path), loaded(ours / path), str(path))) == []
    assert (stock.parent / "latest_universal").read_text() == (ours.parent / "latest_universal").read_text()


@pytest.mark.parametrize("num_ranks", [*(pytest.param(n, marks=pytest.mark.whole) for n in (1, 2)), 3])
def test_stock_deepspeed_loads_it_on_any_number_of_ranks(saved, num_ranks):
    launch("load", num_ranks, saved, CASES)


@pytest.mark.parametrize("name", REFUSED)
def test_the_state_of_other_optimizers_is_refused_before_anything_is_written(saved, name):
    done = CliRunner().invoke(main, ["ckpt", "export", f"{saved}/{name}/ours", *target(saved, name)])
    assert done.exit_code == 1
    assert f"the optimizer keeps {KEPT[name]}" in done.output
    assert sorted(path.name for path in (saved / name / "ours").iterdir()) == ["latest", "one"]
