"""A process of our own that looks at what may hang or end it: MPI_Init, a GPU's driver, a dead file system."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from pydantic_core import from_json

PREFIX = "mlpo_hpc.doctor answers: "
"""Before the answer on standard output, which MPI libraries write to as well."""
POLL_S = 0.02
END_S = 2.0
SHOWN_CHARACTERS = 300


class Child:
    """One look, in a process started at once.

    Parameters
    ----------
    name : str
        Of a look of `mlpo_hpc.doctor.looks`.
    arguments : str
        For it.

    Notes
    -----
    A child that does not answer is left alone until `end`: where PMIx started the job, it takes the end of one
    of its clients for the death of the job, and nobody would see a report.
    """

    def __init__(self, name: str, *arguments: str) -> None:
        self._out = os.memfd_create("mlpo_hpc.doctor")
        # MPICH's launcher hands an open file down (PMI_FD).
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlpo_hpc.doctor.looks", name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            close_fds=False,
        )

    def answer(self, deadline: float) -> tuple[Any, str]:
        """What it answered, or None and why it did not.

        Parameters
        ----------
        deadline : float
            `time.monotonic` to wait for, at most.
        """
        while (ended := self._process.poll()) is None and self._told() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        told = self._told()
        if told is not None:
            return from_json(told), ""
        if ended is None:
            return None, f"gave no answer in time{self._printed()}"
        how = f"signal {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"
        return None, f"ended without an answer ({how}){self._printed()}"

    def end(self) -> None:
        """Let it end if it has answered, else end it; one that hangs in the kernel is left to the system."""
        if self._told() is not None:
            self._wait()
        if self._process.poll() is None:
            self._process.kill()
            self._wait()
        os.close(self._out)

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def _text(self) -> str:
        # Seeking would move the child's place in the file too: it is the same one.
        return os.pread(self._out, os.fstat(self._out).st_size, 0).decode(errors="replace")

    def _told(self) -> str | None:
        lines = self._text().splitlines(keepends=True)
        return next((line[len(PREFIX) :] for line in lines if line.startswith(PREFIX) and line.endswith("\n")), None)

    def _printed(self) -> str:
        """The end of what it printed, for there may be the reason; without numbers that differ between processes."""
        text = re.sub(r"0x[0-9a-f]+|(?<=:)[0-9]+(?=\])", "#", " ".join(self._text().split()))
        return f": ...{text[-SHOWN_CHARACTERS:]}" if text else ""
