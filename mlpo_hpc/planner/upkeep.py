"""Checkpoints over time: how often, which stay, the space that they need, and what they write a day."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from mlpo_hpc.errors import ConfigError
from mlpo_hpc.planner.commit import Commit
from mlpo_hpc.planner.wear import DAY_S

MINUTE_S = 60


@dataclass(frozen=True)
class Schedule:
    """When checkpoints are saved, and which stay; the last three as in the section ``checkpoint``.

    Raises
    ------
    ConfigError
        If it cannot be.
    """

    every: int | None = None
    """Iterations from one to the next."""
    every_s: float | None = None
    """Or seconds; None, both: not known."""
    commit: Literal["wait", "background"] = "wait"
    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_every is not None and self.keep_last is None:
            raise ConfigError("keep_every says what stays beside the last ones: give keep_last too")

    @property
    def is_asked(self) -> bool:
        """Whether anything was said about more than one checkpoint."""
        return (self.every, self.every_s, self.keep_last) != (None, None, None)

    def iterations(self, iteration_s: float) -> int | None:
        """From one to the next."""
        return self.every if self.every_s is None else max(1, int(self.every_s / iteration_s))


def read_interval(text: str) -> dict[str, Any]:
    """``500`` (iterations) or ``30min``, as arguments of `Schedule`.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    match = re.fullmatch(r"(\d+)(min)?", text)
    if match is None or not int(match[1]):
        raise ConfigError(f"{text!r} is no interval, such as 500 (iterations) or 30min")
    return {"every_s": float(MINUTE_S * int(match[1]))} if match[2] else {"every": int(match[1])}


@dataclass(frozen=True)
class Upkeep:
    """What the checkpoints of a schedule need."""

    commit: str
    every: int | None
    """Iterations from one to the next; None: not known, and neither is what is told for a day."""
    slowed_share: float | None
    """Part of the time of training that goes to them."""
    checkpoint_bytes: float
    """Of one."""
    least_count: int
    """At once, where those that are replaced go before the new one is committed."""
    most_count: int
    """And where they go after it. Without those that stay for good."""
    grown_bytes: float | None
    """A day, by those that stay for good."""
    written_bytes: dict[str, float]
    """A day, of one node, by tier."""
    room_bytes: float | None
    """For them, beside state; None: not known."""

    @property
    def full_days(self) -> float | None:
        """Until there is no room for the next one; None: never, or not known."""
        if self.room_bytes is None or not self.grown_bytes:
            return None
        return max(0.0, self.room_bytes - self.most_count * self.checkpoint_bytes) / self.grown_bytes

    def has_room_for(self, count: int) -> bool:
        """Whether so many fit, as far as it is known."""
        return self.room_bytes is None or count * self.checkpoint_bytes <= self.room_bytes


def foresee_upkeep(schedule: Schedule, commit: Commit, iteration_s: float, room_bytes: float | None) -> Upkeep:
    """Apply a schedule to the checkpoints of a job.

    Parameters
    ----------
    schedule : Schedule
        As wished.
    commit : Commit
        One of them.
    iteration_s : float
        Without one.
    room_bytes : float or None
        On their file system, beside state.
    """
    manner, every = commit.manners[schedule.commit], schedule.iterations(iteration_s)
    slowed_share = grown_bytes = None
    written_bytes: dict[str, float] = {}
    if every is not None:
        period_s = every * iteration_s + manner.slowed_s
        slowed_share = manner.slowed_s / period_s
        grown_bytes = commit.nbytes * DAY_S / period_s * _lasting_share(schedule, every)
        written_bytes = {tier: nbytes * DAY_S / period_s for tier, nbytes in manner.written_bytes.items()}
    counts = _counts(schedule.keep_last)
    return Upkeep(schedule.commit, every, slowed_share, commit.nbytes, *counts, grown_bytes, written_bytes, room_bytes)


def _counts(keep_last: int | None) -> tuple[int, int]:
    """Checkpoints at once, the one in the making too: at least, as `rotation.make_room` leaves them, and at most."""
    return (1, 1) if keep_last is None else (max(2, keep_last), keep_last + 1)


def _lasting_share(schedule: Schedule, every: int) -> float:
    """Part of the checkpoints that is never removed."""
    if schedule.keep_last is None:
        return 1.0
    return every / math.lcm(every, schedule.keep_every) if schedule.keep_every else 0.0
