"""The laptop part of docs/quickstart.md, as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlpo_hpc.config import load
from tests.ranks import ROOT

TEXT = (ROOT / "docs/quickstart.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.+?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_configurations_are_valid():
    assert [[tier.name for tier in load(json.loads(text)).tiers] for text in blocks("json")] == [
        ["disk"],
        ["nvme", "pfs"],
    ]


@pytest.mark.long
def test_the_laptop_part_works_as_it_stands(tmp_path):
    (tmp_path / "ds_config.json").write_text(blocks("json")[0])
    (tmp_path / "train.py").write_text(blocks("python")[0])
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-e", "-c", *blocks("sh")],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **where},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [int(step) for step in re.findall(r"^(\d+) loss", done.stdout, re.M)] == list(range(10))
    assert " 0 MB read from disk" not in done.stdout, "state does not fit into memory"
    assert "global_step10 is sound" in done.stdout
    assert "8,404,992 trained parameters" in done.stdout
    assert "84.2 MB of state" in done.stderr
    assert (tmp_path / "runs/first/report.html").exists()
    assert list((tmp_path / "state").iterdir()) == []
