"""The exactness gate and the demo on a GPU; skipped, with the reason, where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.integration.cases import FACTORS
from tests.pairwise import pairwise
from tests.ranks import ROOT, run_ranks

GPUS = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU that torch can use")
ENV = {"DS_ACCELERATOR": "", "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_gate_on_a_gpu(num_ranks, tmp_path):
    if num_ranks > GPUS:
        pytest.skip(f"{GPUS} GPU, {num_ranks} ranks need one each")
    cases = pairwise(FACTORS)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    dirs = [str(tmp_path / name) for name in "abc"]
    for path in dirs:
        os.mkdir(path)
    command = ["-m", "tests.integration.gate", str(tmp_path / "cases.json"), str(tmp_path / "results"), *dirs]
    outcomes = run_ranks(num_ranks, command, timeout_s=280, env=ENV)
    for rank in range(num_ranks):
        file = tmp_path / f"results.{rank}"
        assert file.exists(), outcomes[rank].text[-4000:]
        for case, found in zip(cases, json.loads(file.read_text()), strict=True):
            assert found["differs"] == [], case


def test_the_demo_on_a_gpu(tmp_path):
    command = [sys.executable, "examples/pretrain_gpt.py", "--steps", "10", "--host-memory", "300MB", "--out"]
    command += [str(tmp_path), "--tier", f"disk={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["bytes_read"] > 0
