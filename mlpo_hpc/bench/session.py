"""A benchmark from start to end: measure the tiers, tune the stock system, then let all take turns."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mlpo_hpc.bench import toolchain
from mlpo_hpc.bench.conditions import BenchTier, Conditions
from mlpo_hpc.bench.crew import Team, team
from mlpo_hpc.bench.progress import Display
from mlpo_hpc.bench.rates import measure_tier
from mlpo_hpc.bench.result import Outcome, Sample, losses_differ, merge
from mlpo_hpc.bench.room import require_memory, require_space
from mlpo_hpc.bench.systems import STOCK, Swap, ds_config, swaps_to_try, tiers_of
from mlpo_hpc.errors import ConfigError
from mlpo_hpc.storage.folder import private_folder

COUNTED_A_TURN = 2
SETTLING = 1
"""Iterations at the beginning of a turn that do not count: the others have used the storage since."""
START_S = 1800.0
"""Longest start of a system that compiles nothing: it writes all its state."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def check(conditions: Conditions, systems: Sequence[str]) -> None:
    """What can be told before any storage is made or looked at.

    Raises
    ------
    ConfigError
        If the systems cannot run here.
    """
    toolchain.require(systems)
    require_memory(conditions, systems)
    if "nvme" in systems:
        swaps, left_out = swaps_to_try(conditions)
        if not swaps:
            raise ConfigError("; ".join(left_out) + ": give more --host-memory, or a smaller --sub-group-size")


class Session:
    """Measures systems under common conditions.

    Parameters
    ----------
    conditions : Conditions
        With tiers that were not measured yet.
    systems : sequence of str
        Those to compare.
    compile_timeout_s : float
        Longest start of a system that compiles.
    display : Display
        Told what goes on.
    """

    def __init__(
        self, conditions: Conditions, systems: Sequence[str], compile_timeout_s: float, display: Display
    ) -> None:
        self._outcome = Outcome(conditions, tuple(systems))
        self._compile_timeout_s = compile_timeout_s
        self._display = display
        self._folders: list[Path] = []
        self._logs = Path()

    def run(self) -> Outcome:
        """All of it; nothing is left behind.

        Raises
        ------
        MlpoError
            If there is not enough space, before anything is started, or a system failed.
        """
        outcome = self._outcome
        require_space(outcome.conditions, outcome.systems)
        with toolchain.no_new_locks(outcome.systems), self._scratch(), ExitStack() as teams:
            self._measure_tiers()
            self._announce_compiling()
            if "nvme" in outcome.systems:
                self._tune()
            crew = {system: teams.enter_context(self._started(system, outcome.swap)) for system in outcome.systems}
            self._play(crew)
        if losses_differ(outcome):
            outcome.notes.append("the losses of the systems differ: they did not all do the same work")
        return outcome

    @contextmanager
    def _scratch(self) -> Iterator[None]:
        """A folder on each tier, and one for logs."""
        with ExitStack() as folders:
            self._logs = Path(folders.enter_context(private_folder(tempfile.gettempdir())))
            self._folders = [
                Path(folders.enter_context(private_folder(tier.dir))) for tier in self._outcome.conditions.tiers
            ]
            yield

    def _measure_tiers(self) -> None:
        measured = tuple(self._measure(tier) for tier in self._outcome.conditions.tiers)
        self._outcome.conditions = dataclasses.replace(self._outcome.conditions, tiers=measured)

    def _measure(self, tier: BenchTier) -> BenchTier:
        measured = measure_tier(tier)
        read, written = (f"{bps / 1e6:,.0f} MB/s" for bps in (measured.read_bps, measured.write_bps))
        self._display.say(f"tier {tier.name} at {tier.dir}: {read} read, {written} written")
        if not measured.direct:
            self._outcome.notes.append(f"tier {tier.name} has no O_DIRECT: its rates went through the page cache")
        return measured

    def _announce_compiling(self) -> None:
        ops = toolchain.to_compile(self._outcome.systems)
        if ops:
            self._display.say(
                f"stock DeepSpeed compiles {', '.join(ops)} now, once on this machine: some 10 minutes on 2 cores "
                f"(given up after --compile-timeout, {self._compile_timeout_s:.0f} s)"
            )

    def _tune(self) -> None:
        """The best of a few settings of the stock system, in short runs."""
        outcome = self._outcome
        swaps, left_out = swaps_to_try(outcome.conditions)
        outcome.notes += left_out
        for swap in swaps if len(swaps) > 1 else ():
            with self._started("nvme", swap) as nvme:
                ranks = nvme.turn(outcome.conditions.warm, COUNTED_A_TURN, 1)
            samples = _merge_all("nvme", 1, 0, ranks)
            seconds = min(sample.iteration_s for sample in samples)
            outcome.tuning.append({**dataclasses.asdict(swap), "iteration_s": seconds})
            self._display.say(
                f"nvme with queue depth {swap.queue_depth}, sub_group_size {swap.sub_group_size:,}: {seconds:.2f} s"
            )
        best = min(range(len(swaps)), key=lambda n: outcome.tuning[n]["iteration_s"] if outcome.tuning else 0.0)
        outcome.swap = swaps[best]

    @contextmanager
    def _started(self, system: str, swap: Swap | None) -> Iterator[Team]:
        """A system that is ready, in folders of its own that go with it."""
        conditions = self._outcome.conditions
        compiles = toolchain.to_compile([system])
        with ExitStack() as ending:
            folders = [folder / system for folder in self._folders]
            for folder in folders:
                folder.mkdir()
                ending.callback(shutil.rmtree, folder)
            tiers = [
                dataclasses.replace(tier, dir=str(folder))
                for tier, folder in zip(conditions.tiers, folders, strict=True)
            ][: len(tiers_of(system, conditions))]
            self._display.say(f"starting {system}" + (f", which compiles {', '.join(compiles)}" if compiles else ""))
            spec = _spec(system, conditions, ds_config(system, conditions, tiers, swap))
            started = ending.enter_context(team(system, spec, conditions.ranks, self._logs, conditions.threads))
            ready = started.hear(self._compile_timeout_s if system in STOCK else START_S)
            self._outcome.built[system] = ready[0]["ready"]
            yield started

    def _play(self, crew: dict[str, Team]) -> None:
        """Rounds in which each system has a turn at each accumulation; another one begins each round."""
        conditions, names = self._outcome.conditions, list(crew)
        num_rounds = math.ceil(conditions.iterations / COUNTED_A_TURN)
        orders = [names[n % len(names) :] + names[: n % len(names)] for n in range(num_rounds)]
        plan = [(n, s, ga) for n, order in enumerate(orders) for ga in conditions.accumulations for s in order]
        self._display.plan([(system, accumulation) for _, system, accumulation in plan])
        met: set[str] = set()
        for number, system, accumulation in plan:
            what = f"round {number + 1}/{num_rounds}: {system}, {accumulation} micro-batches"
            self._drop_caches()
            with self._display.turn((system, accumulation), what):
                settling = SETTLING if system in met else max(SETTLING, conditions.warm)
                ranks = crew[system].turn(settling, COUNTED_A_TURN, accumulation)
            met.add(system)
            self._keep(system, accumulation, number, ranks)

    def _keep(self, system: str, accumulation: int, number: int, ranks: list[dict[str, Any]]) -> None:
        self._outcome.samples += _merge_all(system, accumulation, number, ranks)
        if accumulation == min(self._outcome.conditions.accumulations):
            self._outcome.timelines[system] = ranks[0]["timeline"]

    def _drop_caches(self) -> None:
        """Nobody's late writes or cached pages are the next one's."""
        os.sync()
        if os.access(DROP_CACHES, os.W_OK):
            DROP_CACHES.write_text("1")
            return
        note = "the page cache could not be dropped between turns (not root): what goes through it looks faster"
        if note not in self._outcome.notes:
            self._outcome.notes.append(note)


def _merge_all(system: str, accumulation: int, number: int, ranks: list[dict[str, Any]]) -> list[Sample]:
    return [merge(system, accumulation, number, of_all) for of_all in zip(*(r["samples"] for r in ranks), strict=True)]


def _spec(system: str, conditions: Conditions, config: dict[str, Any]) -> dict[str, Any]:
    """What a worker is told."""
    used = tiers_of(system, conditions)
    return {
        "stock": system in STOCK,
        "ds_config": config,
        "tier": used[0].name if used else None,
        "blocks": conditions.blocks,
        "hidden": conditions.hidden,
        "rows": conditions.rows,
        "seed": conditions.seed,
    }
