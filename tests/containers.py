"""Stand-in containers: slots in memory, with delays, failures and a log of what happened."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from mlpo_hpc.cluster.node import Node
from mlpo_hpc.errors import CorruptState
from mlpo_hpc.state.containers import open_containers, pick_means
from mlpo_hpc.state.node_file import Slots
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, Container, FileContainer
from mlpo_hpc.storage.contents import Contents
from mlpo_hpc.storage.place import Place


class MemoryContainer(Container):
    """Keeps what is written in a dict; checks that a view does not change while it is written."""

    def __init__(self, num_slots: int, slot_bytes: int = ALIGNMENT_BYTES, delay_s: float = 0.0, seed: int = 0) -> None:
        super().__init__("memory", slot_bytes, num_slots)
        self.stored: dict[int, bytes] = {}
        self.changed_in_flight = 0
        self.fail_at: dict[str, tuple[int, BaseException]] = {}
        self.counts = {"read": 0, "write": 0}
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _note(self, way: str) -> None:
        with self._lock:
            self.counts[way] += 1
            at, error = self.fail_at.get(way, (0, None))
            delay_s = self._delay_s * self._random.random()
            if error is not None and self.counts[way] >= at:
                raise error
        time.sleep(delay_s)

    def _write(self, offset: int, view: memoryview) -> None:
        before = bytes(view)
        self._note("write")
        with self._lock:
            self.stored[offset // self.slot_bytes] = bytes(view)
            self.changed_in_flight += before != bytes(view)

    def _read(self, offset: int, view: memoryview) -> None:
        self._note("read")
        with self._lock:
            stored = self.stored.get(offset // self.slot_bytes)
        if stored is None or len(stored) < view.nbytes:
            raise CorruptState(f"slot {offset // self.slot_bytes} was never written")
        view[:] = stored[: view.nbytes]

    def close(self) -> None:
        self.stored.clear()


@contextmanager
def open_alone(
    places: Sequence[Place], slots: Slots, contents: Contents | None = None, node: Node | None = None
) -> Iterator[list[FileContainer]]:
    """Real containers, as the engine opens them; by default on the only rank that there is."""
    node = node or Node("here", 0, 1, 0, 1)
    with ExitStack() as opening:
        means, wanted = pick_means(places, node), [slots] * len(places)
        found = open_containers(places, means, wanted, contents or Contents("fp32"), node, {}, opening)
        opening.pop_all()
    containers = [container for container in found if container is not None]
    try:
        yield containers
    finally:
        for container in containers:
            container.close()
