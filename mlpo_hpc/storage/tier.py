"""A storage tier at work: container, free slots, and a lane for each direction."""

from __future__ import annotations

from mlpo_hpc.storage.base import Container, Slots
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
        For reading and for writing.
    checksum : bool
        Whether chunks are checked.
    """

    def __init__(
        self, name: str, container: Container, tokens: tuple[Token, Token] | None = None, checksum: bool = True
    ) -> None:
        read_token, write_token = tokens or (FreeToken(), FreeToken())
        self.name = name
        self.container = container
        self.slots = Slots(container.num_slots)
        self.reads = ReadLane(f"{name}-read", container, Turn(read_token), checksum)
        self.writes = WriteLane(f"{name}-write", container, Turn(write_token), checksum)

    def figures(self) -> dict[str, Figures]:
        """Totals of both directions."""
        return {"read": self.reads.meter.figures(), "write": self.writes.meter.figures()}

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
