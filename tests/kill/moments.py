"""Inside a rank: where its run is, and word to the harness when it is where it is to be killed."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

PHASES = ("start", "load", "update", "save", "commit")
"""``commit`` begins with the rename that commits, and ends with the next step."""
OPERATIONS = (
    "open", "pread", "preadv", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate", "mkdir", "rename", "link",
    "unlink",
)  # fmt: skip
STOPPED_S = 600.0


@dataclass(frozen=True)
class Moment:
    """When to kill whom.

    Parameters
    ----------
    victims : tuple of int
        World ranks.
    rank : int
        Whose operations are counted.
    phase : str
        One of `PHASES`.
    visit : int
        In its first or its second time in this life.
    fraction : float
        Of the storage operations that the rank does in such a phase: after so many.
    delay_s : float
        From there to the kill, while the rank goes on; 0: it is held right before the operation.
    """

    victims: tuple[int, ...]
    rank: int
    phase: str
    visit: int
    fraction: float
    delay_s: float

    @property
    def most_steps(self) -> int:
        """By which the newest checkpoint may be newer when it comes."""
        return {"start": 0, "load": 0, "update": self.visit - 1}.get(self.phase, self.visit)


class Note(ctypes.Structure):
    """Of one rank, in memory that it shares with the harness, which outlives it."""

    _fields_ = [
        ("phase", ctypes.c_int),
        ("resumed", ctypes.c_int),
        ("saving", ctypes.c_int),
        ("committed", ctypes.c_int),
        ("operations", ctypes.c_int * len(PHASES)),
    ]


class Watch:
    """Stands between a program and storage.

    Parameters
    ----------
    note : Note
        Of this rank.
    moment : Moment, optional
        The one at which the harness is told, if it is in this rank's operations.
    operation : int
        Before which one of its phase.
    tell : int
        File descriptor that the harness reads.
    """

    def __init__(self, note: Note, moment: Moment | None, operation: int, tell: int) -> None:
        self._note, self._moment, self._operation, self._tell = note, moment, operation, tell
        self._lock = threading.Lock()
        self._visits = dict.fromkeys(PHASES, 0)
        self._count = 0
        self._visits["start"] = 1

    def install(self) -> None:
        """Stand before the operations, and before what an engine saves and loads by; only in a process of our own."""
        from mlpo_hpc.engine.loading import Loading
        from mlpo_hpc.engine.saving import Saving

        for name in OPERATIONS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        Saving.save = self._saved(Saving.save)  # type: ignore[method-assign]
        Loading.load = self._loaded(Loading.load)  # type: ignore[method-assign]

    def _counted(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "rename" and os.path.basename(args[1]) == "manifest.json":
                self._enter("commit")
            self._before_operation()
            return real(*args, **kwargs)

        return call

    def _saved(self, real: Any) -> Any:
        def save(owner: Any, *args: Any, **kwargs: Any) -> Any:
            step, before = owner._engine.global_steps, self._note.saving
            self._note.saving = step
            self._enter("save")
            result = real(owner, *args, **kwargs)
            in_background = owner._engine.optimizer._config.checkpoint.commit == "background"
            self._note.committed = before if in_background else step  # the one before was waited for
            self._enter("update")
            return result

        return save

    def _loaded(self, real: Any) -> Any:
        def load(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self._enter("load")
            result = real(owner, *args, **kwargs)
            self._note.resumed = owner._engine.global_steps
            self._enter("update")
            return result

        return load

    def _enter(self, phase: str) -> None:
        if self._is_there() and self._count <= self._operation:
            self._report()  # there were fewer operations than expected
        with self._lock:
            self._note.phase = PHASES.index(phase)
            self._visits[phase] += 1
            self._count = self._note.operations[self._note.phase] = 0

    def _before_operation(self) -> None:
        with self._lock:
            due = self._is_there() and self._count == self._operation
            self._count += 1
            self._note.operations[self._note.phase] = self._count
        if due:
            self._report()

    def _is_there(self) -> bool:
        phase, moment = PHASES[self._note.phase], self._moment
        return moment is not None and (moment.phase, moment.visit) == (phase, self._visits[phase])

    def _report(self) -> None:
        assert self._moment is not None
        os.write(self._tell, b".")
        if not self._moment.delay_s and self._moment.rank in self._moment.victims:
            time.sleep(STOPPED_S)
