"""Wear: what is written to the drives of a node, and how long they bear it."""

from __future__ import annotations

from dataclasses import dataclass

DAY_S = 86400
RATED_DRIVE_WRITES = 1.0
"""A day, in units of its capacity: drives for data centres are rated for 1 to 3, for five years."""
RATED_DAYS = 5 * 365


@dataclass(frozen=True)
class Wear:
    """Of one tier with drives of the node's own."""

    tier: str
    written_bytes: float
    """A day."""
    drive_writes: float | None
    """A day, in units of the capacity; None: that is not known."""

    @property
    def rated_days(self) -> float | None:
        """Until all writes are used up that a drive of one drive-write a day is rated for."""
        return RATED_DAYS * RATED_DRIVE_WRITES / self.drive_writes if self.drive_writes else None

    @property
    def warning(self) -> str | None:
        """What to say of it, if it is too much."""
        if self.drive_writes is None or self.rated_days is None or self.drive_writes <= RATED_DRIVE_WRITES:
            return None
        return (
            f"{self.tier}: {self.drive_writes:.0f} drive writes a day; a drive rated for one, over five years, "
            f"is worn out after {self.rated_days:.0f} days of training"
        )
