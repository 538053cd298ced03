"""What a checkpoint in the background costs training, how soon it is committed, how large it is, how fast it loads.

Each is compared with the iterations right before it. The kernel lets bytes through to a capped disk in slices of 0.1 s:
by a few bytes more an update may wait for one more slice, or not. So each is made at other caps, up to 4 % off on both
sides, that one may see in the mean what bytes cost. Processors and their memory are shared by passes and what moves
beside them: what that costs passes on this machine, whoever moves it, a plain program tells that writes as much.

Two cases of the same training: all tiers *shared*, the checkpoint beside the first one; and the first tier
*node-local*, the checkpoint beside the last one, so that all that lies on the first must be copied.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mlpo_hpc.bench.conditions import STATE_ITEM_BYTES, BenchTier, Conditions
from mlpo_hpc.bench.crew import team
from mlpo_hpc.bench.progress import Display
from mlpo_hpc.bench.rates import measure_tier
from mlpo_hpc.bench.systems import ds_config
from mlpo_hpc.config import SECTION
from mlpo_hpc.storage.folder import private_folder

CASES = {
    "shared": "all tiers shared, checkpoint beside the first tier",
    "node_local": "first tier node-local, checkpoint beside the last tier",
}
PHASES = ("save_s", "forward_s", "backward_s", "update_s")
PASSES = ("forward_s", "backward_s")
KEYS = ("plain", "save", "writer", "committed_s")
"""Of what a worker answers."""
START_S = 600.0
SETTLING = 3
"""Iterations that do not count before each one: the first trains, the caps changed, a checkpoint was removed."""
CAP_WIDTH = 0.08
GOLDEN = 0.618034
"""Multiples of it are spread evenly, however many there are."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What was measured of one case.

    Parameters
    ----------
    plain : list of list of dict
        For each checkpoint iterations before it, in which nothing was saved; seconds of each phase.
    saves : list of list of dict
        For each checkpoint the iterations from its save to its commit, the commit's included.
    writers : list of list of dict
        For each checkpoint iterations after it, in whose passes a plain program writes what was copied into it.
    committed_s : list of float
        From each call of `save_checkpoint` to its commit, as training saw it.
    checkpoint_bytes : int
        Space of the last checkpoint.
    load_s : float
        Of `load_checkpoint` alone.
    load_floor_s : float
        To read the checkpoint once at the rate of its storage.
    """

    plain: list[list[dict[str, float]]]
    saves: list[list[dict[str, float]]]
    writers: list[list[dict[str, float]]]
    committed_s: list[float]
    checkpoint_bytes: int
    load_s: float
    load_floor_s: float


def measure(
    conditions: Conditions,
    cases: list[str],
    accumulation: int,
    saves: int,
    display: Display,
    cap: Callable[[float], None] = lambda _: None,
) -> dict[str, Case]:
    """Measure some cases, one after the other; nothing is left behind.

    Parameters
    ----------
    conditions : Conditions
        Of training; with tiers.
    cases : list of str
        Of `CASES`.
    accumulation : int
        Micro-batches an iteration.
    saves : int
        Checkpoints of each case.
    display : Display
        Told what goes on.
    cap : callable
        Sets the speed of the disks, where that can be, in units of what it is.

    Raises
    ------
    MlpoError
        If training fails.
    """
    tiers = tuple(measure_tier(tier) for tier in conditions.tiers)
    for tier in tiers:
        display.say(f"tier {tier.name}: {tier.read_bps / 1e6:,.0f} MB/s read, {tier.write_bps / 1e6:,.0f} written")
    found = {}
    for case in cases:
        display.say(f"{case}: {CASES[case]}; {saves} checkpoints")
        found[case] = _measure(case, dataclasses.replace(conditions, tiers=tiers), accumulation, saves, display, cap)
    return found


def _measure(
    case: str,
    conditions: Conditions,
    accumulation: int,
    saves: int,
    display: Display,
    cap: Callable[[float], None],
) -> Case:
    with _folders(conditions.tiers) as (tiers, logs):
        beside = tiers[0] if case == "shared" else tiers[-1]
        config = ds_config("ours", conditions, tiers, None)
        kinds = ["shared" if case == "shared" or tier is not tiers[0] else "node_local" for tier in tiers]
        for entry, kind in zip(config[SECTION]["tiers"], kinds, strict=True):
            entry["kind"] = kind
        config[SECTION]["checkpoint"] = {"commit": "background"}
        model = {"blocks": conditions.blocks, "hidden": conditions.hidden, "rows": conditions.rows}
        spec = {"stock": False, "ds_config": config, "tier": None, **model, "seed": conditions.seed}
        with team(case, spec, conditions.ranks, logs, conditions.threads) as workers:
            workers.hear(START_S)
            folder = Path(beside.dir).parent / "checkpoints"
            paths, turns = [None, *(str(folder / f"save{number}") for number in range(saves))], []
            for number, (before, path) in enumerate(itertools.pairwise(paths)):
                cap(1 + CAP_WIDTH * (number * GOLDEN % 1 - 0.5))
                order = {"save": path, "before": before, "settling": SETTLING, "accumulation": accumulation}
                turns.append(workers.order(order)[0])
                display.say(f"{case}: {number + 1} of {saves} checkpoints, {turns[-1]['committed_s']:.1f} s")
            cap(1.0)
            loaded = workers.order({"load": paths[-1]})[0]
    floor_s = STATE_ITEM_BYTES * conditions.numel / beside.read_bps
    plain, found, writers, committed_s = zip(*[[turn[key] for key in KEYS] for turn in turns], strict=True)
    return Case(list(plain), list(found), list(writers), list(committed_s), **loaded, load_floor_s=floor_s)


@contextmanager
def _folders(tiers: tuple[BenchTier, ...]) -> Iterator[tuple[tuple[BenchTier, ...], Path]]:
    """A folder for state on each tier, beside which checkpoints may lie; and one for logs."""
    with ExitStack() as folders:
        logs = Path(folders.enter_context(private_folder(tempfile.gettempdir())))
        made = []
        for tier in tiers:
            state = Path(folders.enter_context(private_folder(tier.dir))) / "state"
            state.mkdir()
            made.append(dataclasses.replace(tier, dir=str(state)))
        yield tuple(made), logs


def figures(case: Case, conditions: Conditions) -> dict[str, Any]:
    """What follows from a case: stalls in parts of an iteration without a checkpoint."""
    iteration_s = statistics.median(each["iteration_s"] for plain in case.plain for each in plain)
    numbers = range(len(case.saves))
    parts = {phase: [_lost_s(case, n, phase, case.saves) / iteration_s for n in numbers] for phase in PHASES}
    beside_writer = [sum(_lost_s(case, n, phase, case.writers) for phase in PASSES) / iteration_s for n in numbers]
    bytes_per_parameter = case.checkpoint_bytes / conditions.numel
    return {
        "iteration_s": iteration_s,
        "stall": _mean([sum(of_one) for of_one in zip(*parts.values(), strict=True)]),
        "stall_by_phase": {phase: statistics.fmean(found) for phase, found in parts.items()},
        "stall_of_passes": _mean([sum(of_one) for of_one in zip(*(parts[name] for name in PASSES), strict=True)]),
        "plain_writer_of_passes": _mean(beside_writer),
        "committed_within_iterations": _spread([float(len(save)) for save in case.saves]),
        "committed_s": _spread(case.committed_s),
        "bytes_per_parameter": bytes_per_parameter,
        "load_s": case.load_s,
        "load_vs_floor": case.load_s / case.load_floor_s,
    }


def _lost_s(case: Case, number: int, phase: str, iterations: list[list[dict[str, float]]]) -> float:
    """In some iterations, against those before the save; passes, which caps do not change, also against later ones.

    Of updates the mean is usual, for their slices; of passes the median, for what else the machine does.
    """
    is_update = phase == "update_s"
    beside = case.plain[number : number + (1 if is_update else 2)]
    usual_s = (statistics.fmean if is_update else statistics.median)(
        [each[phase] for plain in beside for each in plain]
    )
    return sum(each[phase] - usual_s for each in iterations[number])


def _mean(values: list[float]) -> dict[str, float]:
    """With its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "error": error, **_spread(values)}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
