"""A simulated rank: its subgroups travel between the tiers and its host memory, chunk by chunk.

It decides as `state.pipeline` does, in a few lines: the orders of this step and of the next are one sequence, what
is used next is read as far as memory goes, and what is on the tiers as well leaves memory when something that is used
sooner needs the room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mlpo_hpc.planner.clock import Clock, Process
from mlpo_hpc.planner.drive import Drive
from mlpo_hpc.planner.host import Host
from mlpo_hpc.planner.policy import GRADIENT_BYTES, Policy
from mlpo_hpc.state.cache import keep_suffix, step_order
from mlpo_hpc.state.placement import choose


@dataclass(frozen=True)
class Share:
    """What one rank has to do in an iteration."""

    num_subgroups: int
    subgroup_items: float
    host_bytes: float
    """For state, all of it."""
    forward_s: float
    backward_s: float
    update_s: float
    """Of one subgroup, by the CPU."""


@dataclass(frozen=True)
class StepTimes:
    """One iteration of one rank."""

    backward_s: float
    update_s: float
    found_share: float
    """Part of the state that was in host memory when the update began."""


class Rank:
    """One rank's iterations as a simulated process.

    Parameters
    ----------
    clock : Clock
        Time.
    drives : sequence of Drive
        The node's tiers.
    weights : sequence of float
        Share of each tier in what is written.
    policy : Policy
        How it offloads.
    share : Share
        What it has to do.
    """

    def __init__(
        self, clock: Clock, drives: Sequence[Drive], weights: Sequence[float], policy: Policy, share: Share
    ) -> None:
        self._clock, self._drives, self._weights = clock, drives, weights
        self._policy, self._share = policy, share
        self._chunk_items = share.subgroup_items / policy.chunks
        self._placed = [0] * len(drives)
        self._tiers = [self._place() for _ in range(share.num_subgroups)]
        self._host = Host(policy.chunks, self._room(), self._next_use)
        self._in_flight = 0
        self.times: list[StepTimes] = []
        self._plan(0)

    def run(self, steps: int, others: Sequence[Rank]) -> Process:
        """Train for so many iterations; ranks wait for each other where training is collective.

        Parameters
        ----------
        steps : int
            How many.
        others : sequence of Rank
            All ranks of the node, this one too.
        """
        for step in range(steps):
            yield self._share.forward_s
            backward_from_s = self._clock.now_s
            if self._policy.gradients == "backward":
                self._write_gradients()
            yield self._share.backward_s
            if self._policy.gradients == "backward":
                yield lambda: not any(other._in_flight for other in others)
            update_from_s = self._clock.now_s
            found_share = self._host.num_present / (self._policy.chunks * self._share.num_subgroups)
            yield from self._update(step)
            update_s = self._clock.now_s - update_from_s
            self.times.append(StepTimes(update_from_s - backward_from_s, update_s, found_share))
            yield partial(have_ended, others, step + 1)

    def _update(self, step: int) -> Process:
        if self._policy.gradients == "update":
            self._write_gradients()
            yield lambda: not self._in_flight
        self._plan(step)
        self._next_read = 0
        self._read_ahead()
        for subgroup in self._order:
            yield partial(self._host.has, subgroup)
            self._host.use(subgroup)
            self._position += 1
            self._read_ahead()
            yield from self._change(subgroup)
        if not self._policy.across_steps:
            yield lambda: not self._in_flight

    def _room(self) -> int:
        """Chunks that memory holds: never less than one subgroup in use and one on its way."""
        policy, share = self._policy, self._share
        scratch_bytes = policy.scratch_bytes * policy.scratch_items(share.subgroup_items)
        memory_bytes = policy.memory_used * share.host_bytes - scratch_bytes
        return max(2 * policy.chunks, int(memory_bytes / (policy.read_bytes * self._chunk_items)))

    def _plan(self, step: int) -> None:
        """The order of a step and the one after it."""
        count, policy = self._share.num_subgroups, self._policy
        self._order = step_order(count, policy.order, flipped=step % 2 == 1)
        following = step_order(count, policy.order, flipped=step % 2 == 0)
        self._upcoming = self._order + (following if policy.across_steps else [])
        self._places = {subgroup: place for place, subgroup in enumerate(self._order)}
        self._places_then = {subgroup: count + place for place, subgroup in enumerate(following)}
        self._position, self._next_read = 0, len(self._upcoming)
        self._placed = [0] * len(self._drives)
        kept = max(0, self._host.room - policy.working_records * policy.chunks) if policy.keeps else 0
        self._keep = keep_suffix(self._order, [policy.chunks] * count, kept)

    def _next_use(self, subgroup: int) -> int:
        """Turns until a subgroup is needed: in this order, or in the following one if it had its turn."""
        place = self._places[subgroup]
        return place if place >= self._position else self._places_then[subgroup]

    # ---- reading --------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Strictly in order, while there is memory; of the next step only what had its turn in this one."""
        depth = len(self._upcoming) if self._policy.prefetch is None else self._policy.prefetch
        while self._next_read < min(len(self._upcoming), self._position + depth):
            subgroup = self._upcoming[self._next_read]
            again = self._next_read >= len(self._order)
            if (again and self._places[subgroup] >= self._position) or not self._bring(subgroup):
                return
            self._next_read += 1

    def _bring(self, subgroup: int) -> bool:
        """Read what is missing of a subgroup; whether all of it is there or on its way."""
        if not self._host.can_read(subgroup):
            return False
        for chunk in self._host.missing(subgroup):
            if not self._host.take(subgroup, chunk):
                return False
            nbytes = self._policy.read_bytes * self._chunk_items
            self._move("read", self._tiers[subgroup][chunk], nbytes, partial(self._host.arrive, subgroup, chunk))
        return True

    # ---- writing --------------------------------------------------------------------------

    def _change(self, subgroup: int) -> Process:
        """Update it part by part, no more of them than there are chunks; it stays in memory, or is written."""
        policy, share = self._policy, self._share
        parts = min(policy.chunks, math.ceil(share.subgroup_items / policy.scratch_items(share.subgroup_items)))
        kept, begun = subgroup in self._keep, 0
        if not kept:
            self._tiers[subgroup] = self._place()
        for part in range(1, parts + 1):
            yield share.update_s / parts
            final = policy.chunks if part == parts else int(policy.early_share * policy.chunks * part / parts)
            if not kept:
                self._write(subgroup, range(begun, final))
            begun = final
            self._read_ahead()
        self._host.put(subgroup)
        self._read_ahead()

    def _write(self, subgroup: int, chunks: range) -> None:
        self._host.write(subgroup, chunks)
        nbytes = self._policy.written_bytes * self._chunk_items
        for chunk in chunks:
            self._move("write", self._tiers[subgroup][chunk], nbytes, partial(self._was_written, subgroup, chunk))

    def _was_written(self, subgroup: int, chunk: int) -> None:
        self._host.settle(subgroup, chunk)
        if not self._policy.keeps:
            self._host.drop(subgroup, chunk)
        self._read_ahead()

    def _write_gradients(self) -> None:
        """32-bit gradients of all subgroups, to where the state is."""
        for tiers in self._tiers:
            for tier in tiers:
                self._move("write", tier, GRADIENT_BYTES * self._chunk_items, lambda: None)

    def _place(self) -> list[int]:
        """Tiers of a subgroup's chunks, each the one whose share is least used up."""
        chunks = self._policy.chunks
        pieces = 1 if self._policy.whole_subgroups else chunks
        tiers: list[int] = []
        for _ in range(pieces):
            tier = choose(self._weights, self._placed, [1] * len(self._weights), 1)
            assert tier is not None  # slots are counted where the plan is made
            self._placed[tier] += 1
            tiers += [tier] * (chunks // pieces)
        return tiers

    def _move(self, way: str, tier: int, nbytes: float, then: Callable[[], None]) -> None:
        self._in_flight += 1
        self._drives[tier].submit(way, nbytes, partial(self._was_moved, then))

    def _was_moved(self, then: Callable[[], None]) -> None:
        self._in_flight -= 1
        then()


def have_ended(ranks: Sequence[Rank], steps: int) -> bool:
    """Whether all ranks have ended so many iterations."""
    return all(len(rank.times) >= steps for rank in ranks)
