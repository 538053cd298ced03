"""A storage tier at work: container, free slots, and a lane for each direction."""

from __future__ import annotations

from dataclasses import replace

from mlpo_hpc.storage.base import Container, FileContainer, Slots
from mlpo_hpc.storage.generations import Generations
from mlpo_hpc.storage.lane import ReadLane, WriteLane
from mlpo_hpc.telemetry.log import logger
from mlpo_hpc.telemetry.metrics import Figures
from mlpo_hpc.tokens.base import FreeToken, Token, Turn


class StorageTier:
    """One tier of one rank.

    Parameters
    ----------
    name : str
        As in the configuration.
    container : Container
        Owned: closed with the tier.
    tokens : tuple of Token
        For reading and for writing; the same one twice lets a rank do both in one turn.
    checksum : bool
        Whether chunks are checked.
    """

    def __init__(
        self, name: str, container: Container, tokens: tuple[Token, Token] | None = None, checksum: bool = True
    ) -> None:
        read_token, write_token = tokens or (FreeToken(), FreeToken())
        self.name = name
        self.container = container
        emptied = container.drop if isinstance(container, Generations) else None
        self.slots = Slots(container.num_slots, *([emptied] if emptied else []))
        reading = Turn(read_token)
        writing = reading if write_token is read_token else Turn(write_token)
        self._turns = {"read": reading} if writing is reading else {"read": reading, "write": writing}
        self.reads = ReadLane(f"{name}-read", container, reading, checksum)
        self.writes = WriteLane(f"{name}-write", container, writing, checksum)

    def succeed(self, following: FileContainer) -> None:
        """Write to another file from now on."""
        assert isinstance(self.container, Generations)
        self.container.succeed(following)
        self.slots.renew()

    def figures(self) -> dict[str, Figures]:
        """Totals of both directions; turns taken for both count as read."""
        taken = {way: turn.taken for way, turn in self._turns.items()}
        meters = {"read": self.reads.meter, "write": self.writes.meter}
        return {way: replace(meter.figures(), taken=taken.get(way, 0)) for way, meter in meters.items()}

    def begin_step(self, is_new: bool = False) -> None:
        """A step begins: what was moved long before, or anything if it `is_new`, does not count in `recent_bps` now."""
        for lane in (self.reads, self.writes):
            lane.meter.begin_step(is_new)

    def recent_bps(self) -> float | None:
        """Bytes per second of the slower way, in this step and the one before; None if too few chunks were moved."""
        read_bps, write_bps = self.reads.meter.recent_bps(), self.writes.meter.recent_bps()
        return None if read_bps is None or write_bps is None else min(read_bps, write_bps)

    def status(self) -> str:
        """What is queued and who holds the tokens, for messages."""
        who = "; ".join(f"token for {way}: {turn.who()}" for way, turn in self._turns.items())
        return f"{self.name} {self.reads.queued()} to read, {self.writes.queued()} to write ({who})"

    def close(self) -> None:
        """End the threads and drop the file. Idempotent."""
        ended = [lane.close() for lane in (self.reads, self.writes)]
        if all(ended):
            self.container.close()
        else:
            # The kernel frees the unnamed file with the process; closing it now could hand its
            # number to another file under the stuck transfer.
            path = self.container.path
            logger.warning("tier %s: a transfer on %s is stuck; it ends with the process", self.name, path)
