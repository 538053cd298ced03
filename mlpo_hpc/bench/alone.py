"""The state engine alone, without training: how close its streams come to what the storage gives.

    python -m mlpo_hpc.bench.alone [--testbed nvme=200,pfs=100[,third=50]] [--slow NAME] [NAME=DIR ...]

The hardest case on purpose: one order again and again, nothing cached, steps back to back, so that everything is
read and written once a step.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from mlpo_hpc.bench.conditions import BenchTier
from mlpo_hpc.bench.rates import measure_tier
from mlpo_hpc.bench.testbed import CappedDisk, capped_disks
from mlpo_hpc.cli.bench import read_caps, read_tiers
from mlpo_hpc.state.cache import Pool
from mlpo_hpc.state.layout import lay_out
from mlpo_hpc.state.pipeline import Pipeline
from mlpo_hpc.state.placement import Adaptive
from mlpo_hpc.state.table import Record, Table
from mlpo_hpc.storage.folder import private_folder
from mlpo_hpc.storage.posix import open_raw
from mlpo_hpc.storage.tier import StorageTier

MB = 10**6
PLAIN_S = 8.0
"""How long plain rates are measured: as long as some steps."""


@dataclass(frozen=True)
class Load:
    """What is streamed."""

    num_records: int = 32
    record_bytes: int = 24 * 2**20
    memory_bytes: int = 268 * MB
    steps: int = 6


@dataclass(frozen=True)
class Stream:
    """What was measured of one run.

    Parameters
    ----------
    step_s : list of float
        From the end of one step to the end of the next.
    nbytes : int
        Read and written by all steps.
    seconds : float
        From the first read to the end of the last write.
    bps : float
        Of all tiers together for a plain sequential reader or writer, the slower way.
    """

    step_s: list[float]
    nbytes: int
    seconds: float
    bps: float

    @property
    def efficiency(self) -> float:
        """Bytes moved, in units of what all tiers could move both ways in that time."""
        return self.nbytes / (2 * self.bps * self.seconds)


def stream(tiers: Sequence[BenchTier], load: Load, before_step: Callable[[int], None] = lambda _: None) -> Stream:
    """Stream a load through the tiers.

    Parameters
    ----------
    tiers : sequence of BenchTier
        With their rates.
    load : Load
        What to stream.
    before_step : callable
        Called before each step with its number.
    """
    rates = [tier.rate_bps for tier in tiers]
    sizes = [load.record_bytes] * load.num_records
    layout = lay_out(sizes, 64 * 2**20, rates, [2 * sum(sizes)] * len(tiers), free=True)
    with ExitStack() as endings:
        opened = [
            StorageTier(tier.name, open_raw(tier.dir, layout.chunk_bytes, num_slots))
            for tier, num_slots in zip(tiers, layout.slots, strict=True)
        ]
        records = [Record(f"record {i}", size) for i, size in enumerate(sizes)]
        pool = Pool(load.memory_bytes)
        placement = Adaptive(rates, opened)
        pipeline = Pipeline(
            Table(records, layout.chunk_bytes), pool, opened, placement, reserve_bytes=pool.budget_bytes
        )
        endings.callback(pipeline.close)
        order = list(range(load.num_records))
        pipeline.plan(order, order)
        for number in order:
            _touch(pipeline.create(number))
            pipeline.put(number)
        pipeline.flush()
        begin, ends = time.perf_counter(), []
        for step in range(load.steps):
            before_step(step)
            pipeline.begin(order, order)
            for number in order:
                _touch(pipeline.get(number))
                pipeline.put(number)
            ends.append(time.perf_counter())
        pipeline.flush()
        lanes = [lane for tier in opened for lane in (tier.reads, tier.writes)]
        spans = [span for lane in lanes for span in lane.meter.spans if span.begin_s >= begin]
    seconds = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    steps_s = [end - start for start, end in zip([begin, *ends], ends, strict=False)]
    return Stream(steps_s, sum(span.nbytes for span in spans), seconds, sum(rates))


def _touch(view: memoryview) -> None:
    """What an update does at least: read and write all of it."""
    np.add(np.frombuffer(view, np.uint8), 1, out=np.frombuffer(view, np.uint8))


def follow(tiers: Sequence[BenchTier], disk: CappedDisk, cap_bps: int, load: Load, runs: int) -> dict[str, Any]:
    """Halve a disk's speed in mid-run; how the third step after that compares with runs that began so, in turns."""
    half = load.steps // 2
    changed, slow = [], []
    for _ in range(runs):
        changed.append(stream(tiers, load, lambda step: disk.cap(cap_bps // 2) if step == half else None).step_s)
        slow.append(stream(tiers, load).step_s)
        disk.cap(cap_bps)
    usual_s = float(np.median([steps[half + 2] for steps in slow]))
    thirds = [steps[half + 2] / usual_s for steps in changed]
    return {
        "steps_s": changed,
        "changed_before_step": half,
        "slow_steps_s": slow,
        "usual_s": usual_s,
        "third_step_vs_usual": {"median": float(np.median(thirds)), "min": min(thirds), "max": max(thirds)},
    }


@click.command()
@click.argument("directories", nargs=-1, metavar="[NAME=]DIR ...")
@click.option(
    "--testbed", callback=read_caps, metavar="NAME=MB/S,...", help="Make disks with this speed instead (root)."
)
@click.option("--slow", metavar="NAME", help="Of --testbed: halve the speed of this disk in the middle.")
@click.option("--steps", type=click.IntRange(6), default=6, show_default=True)
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="With --slow: of each kind.")
def main(directories: tuple[str, ...], testbed: dict[str, int] | None, slow: str | None, steps: int, runs: int) -> None:
    """Measure the state engine alone; prints JSON."""
    load = Load(steps=steps)
    state_bytes = load.num_records * load.record_bytes
    caps = testbed or {}
    if bool(directories) == bool(caps) or (slow is not None and slow not in caps):
        raise click.UsageError("give either directories or --testbed, and --slow the name of a disk of it")
    with ExitStack() as disks:
        made: dict[str, CappedDisk] = {}
        if caps:
            folder = Path(disks.enter_context(private_folder(tempfile.gettempdir())))
            made = disks.enter_context(capped_disks(folder, caps, dict.fromkeys(caps, 2 * state_bytes)))
        laid_out = [BenchTier(name, str(disk.path)) for name, disk in made.items()]
        tiers = [measure_tier(tier, PLAIN_S) for tier in laid_out or read_tiers(directories, None)]
        result: dict[str, Any] = {"rates_bps": {tier.name: [tier.read_bps, tier.write_bps] for tier in tiers}}
        if slow is not None:
            result["follow"] = follow(tiers, made[slow], caps[slow], load, runs)
        else:
            found = stream(tiers, load)
            both_bps = found.nbytes / found.seconds
            result |= {"efficiency": found.efficiency, "both_ways_bps": both_bps, "step_s": found.step_s}
    click.echo(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
