"""Options and rules for all tests."""

from __future__ import annotations

import os

import pytest

NOTHING_SKIPPED = "TEST_NOTHING_SKIPPED"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run whole products of cases instead of a choice")
    parser.addoption("--long", action="store_true", help="run those that take long, and only those")


def pytest_collection_modifyitems(config, items):
    """The products of `--all` take longer than any test's timeout; their launches have one of their own."""
    if config.getoption("--all"):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))
        return
    long = config.getoption("--long")
    wanted = [i for i in items if not i.get_closest_marker("whole") and bool(i.get_closest_marker("long")) == long]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where nothing may be skipped for lack of a part, a skip is a failure (a GPU excepted)."""
    report = yield
    if report.skipped and os.environ.get(NOTHING_SKIPPED) and "gpu" not in str(item.path):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def _private_environment(monkeypatch, tmp_path):
    """No batch job, no settings and no temporary files of the machine that runs the tests."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "LSB_", "FLUX_", "OMPI_", "PMI", "PMIX")):
            monkeypatch.delenv(name)
        if name.startswith("MLPO_HPC_"):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
