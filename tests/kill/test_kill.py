"""A run that is killed again and again, at moments of a seed: ``python -m tests.kill``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kill.moments import PHASES
from tests.ranks import ROOT

BACKGROUND = {"checkpoint": {"commit": "background"}}
VARIANTS = {
    "background": ["--section", json.dumps(BACKGROUND)],
    "bf16": [],
    "fp16": ["--dtype", "fp16", "--container", "hdf5", "--section", '{"order": "sequential"}'],
}


def kill(tmp_path, program, moments, *arguments, timeout_s):
    """Kill, resume, ...; return the tally."""
    file = tmp_path / "kill.json"
    command = [sys.executable, "-m", "tests.kill", program, "--moments", str(moments), "--json", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    print(done.stdout)
    found = json.loads(file.read_text())
    assert found["killed"] == moments
    assert found["faults"] == []
    return found


def test_a_run_that_is_killed_20_times_ends_as_one_that_was_not(tmp_path):
    found = kill(tmp_path, "engine", 20, timeout_s=240)
    phases = {phase for phases in found["by_victim"].values() for phase in phases}
    assert len(phases) == len(PHASES), found["by_victim"]
    assert all(sum(phases.values()) >= 6 for phases in found["by_victim"].values()), "all kinds of victims"


def test_one_that_saves_beside_training_is_killed_12_times(tmp_path):
    kill(tmp_path, "engine", 12, "--section", json.dumps(BACKGROUND), timeout_s=240)


def test_the_example_is_killed_3_times_and_ends_as_if_it_was_not(tmp_path):
    found = kill(tmp_path, "example", 3, timeout_s=240)
    assert all(sum(phases.values()) == 1 for phases in found["by_victim"].values())


@pytest.mark.whole
@pytest.mark.parametrize("name", VARIANTS)
def test_100_kills_of_each_kind(name, tmp_path):
    kill(tmp_path, "engine", 100, "--seed", "2", *VARIANTS[name], timeout_s=1200)


@pytest.mark.whole
def test_the_example_is_killed_12_times(tmp_path):
    kill(tmp_path, "example", 12, "--seed", "2", timeout_s=600)
