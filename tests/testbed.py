"""Storage with a known speed, for tests; see `mlpo_hpc.bench.testbed`."""

from __future__ import annotations

from mlpo_hpc.bench.testbed import CappedDisk, capped_disk, missing

__all__ = ["CappedDisk", "capped_disk", "missing"]
