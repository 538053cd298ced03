"""Find the striping that suits this job: write and read with a few layouts and compare.

Each writer has a file of its own, as state files have; with the ranks of a job all of them write at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from mlpo_hpc.cluster.crowd import Ranks, each
from mlpo_hpc.errors import StorageError
from mlpo_hpc.storage.folder import private_folder
from mlpo_hpc.storage.probe import Probe, open_probe
from mlpo_hpc.storage.striping import Component, StripeLayout, set_layout

COUNTS = (1, 2, 4, 8, 16)
SIZE_BYTES = 4 * 2**20
BETTER = 1.05
"""A layout is recommended if it is faster than the inherited one by more than this factor."""


@dataclass(frozen=True)
class Result:
    """What one layout gives; bytes per second of all writers and of all readers."""

    layout: StripeLayout | None
    """None: what the directory has already."""
    write_bps: float = 0.0
    read_bps: float = 0.0
    error: str = ""

    @property
    def round_trip_bps(self) -> float:
        """Bytes per second that are written and then read again."""
        return 1 / (1 / self.write_bps + 1 / self.read_bps) if self.write_bps and self.read_bps else 0.0

    @property
    def name(self) -> str:
        """The layout as options of ``lfs setstripe``."""
        return str(self.layout) if self.layout else "as it is"


def candidates(is_lustre: bool) -> list[StripeLayout | None]:
    """What is worth trying: what is there already, and on Lustre some numbers of stripes."""
    layouts: list[StripeLayout | None] = [None]
    return layouts + [StripeLayout((Component(count, SIZE_BYTES),)) for count in COUNTS] if is_lustre else layouts


def recommend(results: Sequence[Result]) -> Result:
    """The fastest round trip, unless what is there already is as good."""
    best = max(results, key=lambda result: result.round_trip_bps)
    return best if best.round_trip_bps > BETTER * results[0].round_trip_bps else results[0]


def try_layout(
    directory: str, layout: StripeLayout | None, ranks: Ranks, num_writers: int, seconds: float, room_bytes: int
) -> Result:
    """Collective over `ranks`. Write and read files of a folder with this layout; nothing is left.

    Parameters
    ----------
    directory : str
        Where; the folder is made in it.
    layout : StripeLayout or None
        None: what the directory has.
    ranks : Ranks
        Those that write at once.
    num_writers : int
        Files that each rank writes at once.
    seconds : float
        About how long to write, and to read.
    room_bytes : int
        Space that all ranks together may take.
    """
    try:
        with ExitStack() as endings:
            made = each(ranks, lambda: endings.enter_context(_folder(directory, layout)) if ranks.rank == 0 else "")
            path, room = str(ranks.bcast(made)), room_bytes // ranks.size
            try:
                with ExitStack() as files:
                    probes = each(ranks, lambda: _open(path, num_writers, room, files))
                    return _measure(layout, ranks, probes, seconds)
            finally:
                ranks.allgather(None)  # all have closed their files: the folder can go
    except StorageError as error:
        return Result(layout, error=str(error))


@contextmanager
def _folder(directory: str, layout: StripeLayout | None) -> Iterator[str]:
    with private_folder(directory) as path:
        if layout is not None:
            set_layout(path, layout)
        yield path


def _open(folder: str, num_writers: int, room_bytes: int, endings: ExitStack) -> list[Probe]:
    return [endings.enter_context(open_probe(folder, room_bytes // num_writers)) for _ in range(num_writers)]


def _measure(layout: StripeLayout | None, ranks: Ranks, probes: list[Probe], seconds: float) -> Result:
    def fill() -> float:
        begin = time.perf_counter()
        _all(probes, Probe.fill)
        return time.perf_counter() - begin

    filled_s = each(ranks, fill)
    count = max(probe.num_filled for probe in probes)
    pieces = max(count, round(count * seconds / max(1e-3, max(ranks.allgather(filled_s)))))
    rates = []
    for reads, writes in ((0, pieces), (pieces, 0)):
        took_s = each(ranks, lambda reads=reads, writes=writes: _timed(probes, reads, writes))  # type: ignore[misc]
        nbytes = sum(ranks.allgather(sum(pieces * probe.chunk_bytes for probe in probes)))
        rates.append(nbytes / max(ranks.allgather(took_s)))
    return Result(layout, rates[0], rates[1])


def _timed(probes: list[Probe], reads: int, writes: int) -> float:
    begin = time.perf_counter()
    _all(probes, lambda probe: probe.move(reads, writes, probe.chunk_bytes))
    return time.perf_counter() - begin


def _all(probes: list[Probe], action: Callable[[Probe], Any]) -> None:
    with ThreadPoolExecutor(len(probes)) as pool:
        list(pool.map(action, probes))
