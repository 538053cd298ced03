"""A plain program that writes: what any traffic beside training costs it. ``python -m ... DIRECTORY NBYTES PARENT``

A process of its own, of which the training one sees nothing but what it takes of the machine: processors, memory, and
the device. It is stopped and continued by signals, so that it works in the passes alone, as the traffic of a save does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from mlpo_hpc.errors import StorageError, here
from mlpo_hpc.storage.posix import open_raw

PIECE_BYTES = 2**22
NUM_SLOTS = 16
"""It writes over them again and again: what it costs is not a matter of space."""
PR_SET_PDEATHSIG = 1


class PlainWriter:
    """Writes some bytes while it is let.

    Parameters
    ----------
    directory : str
        Where, into a file without a name.
    nbytes : int
        How many, rounded up.

    Raises
    ------
    StorageError
        If it cannot, also by `is_done`.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        self._where = here(directory)
        self._child = subprocess.Popen([sys.executable, "-m", __name__, directory, str(nbytes), str(os.getpid())])
        _, status = os.waitpid(self._child.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._child.returncode = os.waitstatus_to_exitcode(status)
            self._look(self._child.returncode)

    def __enter__(self) -> PlainWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.wait()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """It goes on meanwhile; what was begun comes to its end."""
        self._child.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._child.send_signal(signal.SIGSTOP)

    def is_done(self) -> bool:
        """Whether all is written."""
        return self._look(self._child.poll())

    def _look(self, code: int | None) -> bool:
        if code:
            raise StorageError(f"the plain writer of the benchmark ended with {code}: {self._where}")
        return code is not None


def main() -> None:
    """Stop; when continued, write."""
    directory, nbytes, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would stay for ever
    if os.getppid() != parent:  # it ended before that
        return
    container = open_raw(directory, PIECE_BYTES, NUM_SLOTS)
    piece = memoryview(mmap.mmap(-1, PIECE_BYTES))
    os.kill(os.getpid(), signal.SIGSTOP)
    for number in range(-(-nbytes // PIECE_BYTES)):
        container.write(number % NUM_SLOTS, piece)


if __name__ == "__main__":
    main()
