"""Being asked to stop, by a signal or by a file: all ranks stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from mlpo_hpc.cluster.verdict import any_rank, gather, world_rank
from mlpo_hpc.errors import MlpoError, here
from mlpo_hpc.telemetry.log import say, warn

STOP_FILE = "MLPO_HPC_STOP_FILE"
"""Names the stop file."""

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""What the batch script sends before the time limit (NCCL may use USR1), and what Slurm sends at a preemption."""

LOOK_S = 1.0
"""A parallel file system is asked for the stop file no more often."""


class StopRequest:
    """Tells, at a step boundary, whether this job was asked to stop.

    From when it is made until `close`, USR2 and TERM do nothing but note that they came, and then
    call the handler that was there before, if there was one. A second signal does no harm. Make it
    first of all: a signal that comes earlier ends the process.

    Parameters
    ----------
    stop_file : path, optional
        A file that asks to stop by being there; nothing removes it. By default what
        ``MLPO_HPC_STOP_FILE`` names, if anything.

    Raises
    ------
    MlpoError
        Outside of the main thread, where Python takes no signals.
    """

    def __init__(self, stop_file: str | os.PathLike[str] | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MlpoError(f"StopRequest takes signals, which only the main thread can ({here()}): make it there")
        path = os.environ.get(STOP_FILE, "") if stop_file is None else os.fspath(stop_file)
        self.reason = ""
        """What asked to stop; empty until `requested` says so."""
        self._file = Path(path) if path else None
        self._looked_s = -LOOK_S
        self._signal = 0
        self._previous: dict[int, Any] = {}
        for number in SIGNALS:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._note)
            # What waits in a system call goes on: not every library in C knows EINTR.
            signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=self._let_child_go)

    def requested(self) -> bool:
        """Collective over the training world. Whether to stop here; all ranks get the same answer.

        Once it was yes it remains so. It costs one reduction of a number, which every step can afford.
        """
        if not self.reason and any_rank(bool(own := self._own_reason())):
            self.reason = next(filter(None, gather(own)))
            say("asked to stop by %s: all ranks stop after this step", self.reason)
        return bool(self.reason)

    def close(self) -> None:
        """Put back the handlers that were there before, unless somebody else has put others since."""
        for number, previous in self._previous.items():
            # None is a handler that was not set from Python, which cannot put it back.
            if signal.getsignal(number) == self._note and previous is not None:
                signal.signal(number, previous)

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handler: nothing is logged here, for it may come in the middle of a log line."""
        self._signal = self._signal or number
        if callable(previous := self._previous[number]):
            previous(number, frame)

    def _let_child_go(self) -> None:
        """Forked workers (of a data loader) end by TERM as ever; USR2, which may reach them too, is not for them."""
        noting = signal.getsignal(signal.SIGUSR2) == self._note
        self.close()
        if noting:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _own_reason(self) -> str:
        if self._signal:
            return signal.Signals(self._signal).name
        return f"the file {self._file}" if world_rank() == 0 and self._sees_file() else ""

    def _sees_file(self) -> bool:
        if self._file is None or time.monotonic() - self._looked_s < LOOK_S:
            return False
        self._looked_s = time.monotonic()
        try:
            return self._file.exists()
        except OSError as error:
            warn("the stop file cannot be looked at and is left alone: %s, on %s", error, here(self._file))
            self._file = None
            return False
