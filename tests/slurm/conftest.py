"""One Slurm for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.slurm import bed as slurm


@pytest.fixture(scope="session")
def bed():
    reason = slurm.missing()
    if reason:
        pytest.skip(reason)
    with slurm.slurm_bed() as running:
        yield running
