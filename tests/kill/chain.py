"""One run that is killed again and again and resumed each time, against one that was never killed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlpo_hpc.checkpoint.find import find_tag
from tests.kill.contents import checksums, committed_steps, surplus
from tests.kill.moments import PHASES, Moment, Note
from tests.kill.programs import PROGRAMS, Place
from tests.kill.world import Death, Program, live, phase_of

NUM_RANKS = 2
WHO = {"one": (1,), "all": (0, 1), "root": (0,)}
"""One rank, the whole world, and the one that leads the node."""
CYCLE = ("update", "save", "commit", "load", "save", "update", "start")
"""Phases to kill in, one after the other; with the victims in turn all pairs come up."""
MOST_DELAY_S = 0.004
KEPT = 2
"""Older checkpoints are removed as a user would do it."""


@dataclass(frozen=True)
class Killed:
    """One death and what came after it."""

    who: str
    phase: str
    step: int
    """The newest one that was committed."""
    survived_s: float
    """How long the others took to end by themselves; 0 if there were none."""


def draw(seed: int, count: int) -> list[tuple[str, Moment]]:
    """Moments of a seed: all phases and all victims in turn, at random places in them, in random order."""
    generator = random.Random(seed)
    drawn = []
    for number in range(count):
        who = list(WHO)[number % len(WHO)]
        drawn.append((who, _moment(generator, WHO[who], CYCLE[number % len(CYCLE)])))
    generator.shuffle(drawn)
    return drawn


def _moment(generator: random.Random, victims: tuple[int, ...], phase: str) -> Moment:
    rank = 0 if phase == "commit" else generator.choice(victims)
    visit = 1 if phase in ("start", "load") else generator.choice((1, 2))
    delay_s = generator.choice((0.0, generator.uniform(0, MOST_DELAY_S)))
    return Moment(victims, rank, phase, visit, generator.random(), delay_s)


class Chain:
    """A run that is killed at moments.

    Parameters
    ----------
    place : Place
        Where; its number of steps is set to what the moments need.
    program : str
        One of `PROGRAMS`.
    moments : list
        Whom to kill and when.
    say : callable
        Is told of each death.
    """

    def __init__(
        self, place: Place, program: str, moments: list[tuple[str, Moment]], say: Callable[[str], None]
    ) -> None:
        steps = 2 + sum(moment.most_steps for _, moment in moments)
        self._moments, self._say, self._lives = moments, say, 0
        self.run = replace(place, folder=place.folder / "killed", steps=steps)
        self.reference = replace(place, folder=place.folder / "undisturbed", steps=steps)
        self._program = PROGRAMS[program]
        self.faults: list[str] = []
        self._wanted: dict[int, dict[str, str]] = {}

    def go(self) -> list[Killed]:
        """All moments, one after the other, and the end; what is wrong is in `faults`."""
        self.run.make()
        self.reference.make()
        self._counts = self._undisturbed()
        found = [self._kill(who, moment) for who, moment in self._moments]
        self._finish()
        return found

    def _undisturbed(self) -> list[list[int]]:
        """Operations of each rank in each phase, and what each of its checkpoints holds."""
        place = self.reference
        run = self._live(place, None)
        again = self._live(place, None)  # there is nothing left to do: it tells how much loading is
        self._check(run.codes == again.codes == [0] * NUM_RANKS, f"the undisturbed run ended with {run.codes}", run)
        self._wanted = {s: checksums(place.checkpoints / f"global_step{s}") for s in committed_steps(place.checkpoints)}
        load = PHASES.index("load")
        return [
            [(b if phase == load else a).operations[phase] for phase in range(len(PHASES))]
            for a, b in zip(run.notes, again.notes, strict=True)
        ]

    def _live(self, place: Place, moment: Moment | None) -> Death:
        operation = int(moment.fraction * self._counts[moment.rank][PHASES.index(moment.phase)]) if moment else 0
        self._lives += 1
        program: Program = partial(self._program, place)
        return live(program, NUM_RANKS, place.folder.parent / f"log.{self._lives}", moment, operation)

    def _check(self, good: bool, what: str, death: Death) -> None:
        if not good:
            self.faults.append(f"life {self._lives}: {what}\n{death.text[-3000:]}")

    def _kill(self, who: str, moment: Moment) -> Killed:
        before = self._newest()
        death = self._live(self.run, moment)
        expected = [-9 if rank in moment.victims else None for rank in range(NUM_RANKS)]
        for code, wanted in zip(death.codes, expected, strict=True):
            good = code == wanted if wanted else code not in (0, -9, -6)
            self._check(good, f"exit codes {death.codes}: {who} should have been killed in {moment.phase}, and the "
                        "others end by themselves with an error", death)  # fmt: skip
        phase = self._phase(death.at or death.notes[moment.rank])
        resumed = {note.resumed for note in death.notes if phase_of(note) not in ("start", "load")}
        self._check(resumed <= {before}, f"resumed from {resumed}, not from {before}", death)
        newest = self._newest()
        promised = max(note.committed for note in death.notes)
        self._check(newest >= max(promised, before), f"{promised} was committed, but the newest is {newest}", death)
        self._check_newest(newest, death)
        self._remove_older()
        others = set(range(NUM_RANKS)) - set(moment.victims)
        killed = Killed(who, phase, newest, death.survived_s if others else 0.0)
        self._say(f"life {self._lives}: {who:4} killed in {phase}, step {newest} is committed")
        return killed

    def _phase(self, at: Note) -> str:
        """By where the rank was, and by what is on storage."""
        phase = phase_of(at)
        if phase in ("start", "load"):
            return phase
        if at.saving and at.saving not in committed_steps(self.run.checkpoints):
            return "save, before the commit"
        return "after the commit" if phase in ("save", "commit") else "update"

    def _newest(self) -> int:
        return max(committed_steps(self.run.checkpoints), default=0)

    def _check_newest(self, newest: int, death: Death) -> None:
        """It is what would be loaded, and holds what that of the undisturbed run holds."""
        if not newest:
            return
        tag = find_tag(self.run.checkpoints, None)
        self._check(tag == f"global_step{newest}", f"{tag} would be loaded, but {newest} is committed", death)
        found, wanted = checksums(self.run.checkpoints / f"global_step{newest}"), self._wanted[newest]
        other = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
        self._check(not other, f"step {newest} is not that of the undisturbed run: {other[:5]}", death)

    def _remove_older(self) -> None:
        for step in committed_steps(self.run.checkpoints)[:-KEPT]:
            shutil.rmtree(self.run.checkpoints / f"global_step{step}")

    def _finish(self) -> None:
        """To the end, which must be the same; and nothing of the dead is left."""
        last = self._live(self.run, None)
        self._check(last.codes == [0] * NUM_RANKS, f"the last life ended with {last.codes}", last)
        self._check(self._newest() == self.run.steps, f"it ended with step {self._newest()}", last)
        self._check_newest(self._newest(), last)
        other = sorted(self.run.losses() ^ self.reference.losses())
        self._check(not other, f"losses differ: {other[:4]}", last)
        left = [str(path) for tier in self.run.tiers for path in tier.iterdir()] + surplus(self.run.checkpoints)
        self._check(not left, f"left behind: {left}", last)


def tally(killed: list[Killed]) -> dict[str, Any]:
    """How many of whom, in which phase."""
    table: dict[str, Any] = {who: dict(Counter(each.phase for each in killed if each.who == who)) for who in WHO}
    return {"killed": len(killed), "by_victim": table, "longest_survival_s": max(k.survived_s for k in killed)}
