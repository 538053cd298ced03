"""A trace of one rank: what moved, waited and computed when, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Events are written as they come, in the array form of the Trace Event Format, which may end anywhere: a file
cut short by a kill still opens.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mlpo_hpc.errors import storage_error
from mlpo_hpc.telemetry.log import logger

Tell = Callable[[str, float, float, int], None]
"""Takes name, begin and end (seconds of `time.perf_counter`) and bytes of something that happened."""


class Trace:
    """Spans on named tracks; those that overlap on a track get rows of their own. Safe to use from several threads.

    Parameters
    ----------
    path : str
        The file, written anew.
    world_rank : int
        Whose trace it is.
    host : str
        Where it runs.

    Raises
    ------
    StorageError
        If the file cannot be made.
    """

    def __init__(self, path: str, world_rank: int, host: str) -> None:
        self.path = path
        self._rank = world_rank
        self._lock = threading.Lock()
        self._spans: list[tuple[float, float, str, str, int]] = []
        self._row_ends_s: dict[str, list[float]] = {}
        self._numbers: dict[str, int] = {}
        # One clock for all ranks of all nodes, as far as their clocks agree.
        self._epoch_s = time.time() - time.perf_counter()
        try:
            self._file = open(path, "w", buffering=2**16)  # noqa: SIM115
            self._file.write("[\n")
            self._write("M", "process_name", 0, {"args": {"name": f"rank {world_rank} on {host}"}})
            self._file.flush()
        except OSError as error:
            raise storage_error("making a trace", path, error) from error

    def track(self, name: str) -> Tell:
        """What adds spans to a track."""
        return partial(self._add, name)

    def _add(self, track: str, name: str, begin_s: float, end_s: float, nbytes: int = 0) -> None:
        with self._lock:
            self._spans.append((begin_s, end_s, track, name, nbytes))

    def flush(self) -> None:
        """Write what happened since the last call. Training goes on without a trace if that fails."""
        with self._lock:
            spans, self._spans = sorted(self._spans), []
        if self._file.closed:
            return
        try:
            for span in spans:
                self._write_span(*span)
            self._file.flush()
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self.path, error)
            self.close()

    def _write_span(self, begin_s: float, end_s: float, track: str, name: str, nbytes: int) -> None:
        args = {"bytes": nbytes, "GB/s": round(nbytes / max(1e-9, end_s - begin_s) / 1e9, 3)} if nbytes else {}
        times = {"ts": round((self._epoch_s + begin_s) * 1e6, 1), "dur": round((end_s - begin_s) * 1e6, 1)}
        self._write("X", name, self._row(track, begin_s, end_s), {**times, "args": args})

    def _row(self, track: str, begin_s: float, end_s: float) -> int:
        """Number of the first row of a track that is free then."""
        ends = self._row_ends_s.setdefault(track, [])
        row = next((row for row, end in enumerate(ends) if end <= begin_s), len(ends))
        ends[row : row + 1] = [end_s]
        name = track if row == 0 else f"{track} {row + 1}"
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers) + 1
            self._write("M", "thread_name", self._numbers[name], {"args": {"name": name}})
        return self._numbers[name]

    def _write(self, kind: str, name: str, row: int, more: dict[str, Any]) -> None:
        self._file.write(json.dumps({"ph": kind, "name": name, "pid": self._rank, "tid": row, **more}) + ",\n")

    def close(self) -> None:
        """End the file. Idempotent."""
        if self._file.closed:
            return
        try:
            self._file.close()
        except OSError as error:
            logger.warning("the trace %s is not whole: %s", self.path, error)


def open_trace(directory: str, world_rank: int, host: str) -> Trace:
    """Begin the trace of a rank, ``trace.<rank>.json`` in a directory that is made if it is missing.

    Raises
    ------
    StorageError
        If it cannot be made.
    """
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise storage_error("making the telemetry directory", directory, error) from error
    return Trace(os.path.join(directory, f"trace.{world_rank}.json"), world_rank, host)
