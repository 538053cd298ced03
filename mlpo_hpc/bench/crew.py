"""Worker processes: started, given turns, ended. Whatever happens, none is left behind and no wait is unbounded."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from mlpo_hpc.cluster.network import first_free_port
from mlpo_hpc.config import ENV_OF_OTHERS, ENV_PREFIX
from mlpo_hpc.errors import MlpoError

TURN_S = 1800.0
"""Longest turn."""
END_S = 30.0
"""Longest wait for a process to end, by itself and after it was killed."""
LAST_WORDS_S = 2.0
"""Between the end of its socket and its own."""
TAIL_LINES = 15
LAUNCHERS = ("SLURM_", "PMI", "OMPI_", "PALS_", "MPI_LOCAL", "FLUX_", "PBS_", "LSB_", "TORCHELASTIC_")
"""Beginnings of variables by which a launcher speaks to its tasks: a worker is none."""


class BenchError(MlpoError):
    """A system could not be measured."""


class Worker:
    """One rank of a system, as a process.

    Parameters
    ----------
    name : str
        Of system and rank, in messages.
    spec : dict
        See `mlpo_hpc.bench.worker.Rank`.
    environ : mapping
        Its environment.
    log : Path
        Gets all that it prints.
    """

    def __init__(self, name: str, spec: dict[str, Any], environ: Mapping[str, str], log: Path) -> None:
        self._name = name
        self._log = log
        self._received = b""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "mlpo_hpc.bench.worker", str(theirs.fileno()), json.dumps(spec)]
        with theirs, log.open("wb") as output:
            # A session of its own: Ctrl-C is for the coordinator, and what it compiles with can be killed with it.
            self._process = subprocess.Popen(
                command,
                env=dict(environ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def send(self, order: dict[str, Any]) -> None:
        """Give an order; `receive` has the answer."""
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise self.failed("ended") from error

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def receive(self) -> dict[str, Any] | None:
        """What came in; None if that is not a whole answer yet. Blocks until something comes.

        Raises
        ------
        BenchError
            If the process ended, with its last lines.
        """
        piece = self._read()
        if not piece:
            raise self.failed("ended")
        self._received += piece
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return cast("dict[str, Any]", json.loads(line))

    def _read(self) -> bytes:
        try:
            return self._socket.recv(2**16)
        except ConnectionResetError:
            return b""

    def failed(self, what: str) -> BenchError:
        """An error that says so, with its last lines."""
        code = self._exit_code(LAST_WORDS_S)
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        ending = "" if code is None else f" with exit code {code}"
        return BenchError("\n  ".join([f"{self._name} {what}{ending}. Its last lines:", *lines]))

    def let_go(self) -> None:
        """Nothing more is wanted of it: it ends by itself."""
        self._socket.close()

    def wait(self) -> bool:
        """Wait a while for its end; whether it came."""
        return self._exit_code(END_S) is not None

    def _exit_code(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it and all that it started, at once."""
        self.let_go()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            if not self.wait():
                raise BenchError(f"{self._name} (process {self._process.pid}) does not end: its storage may hang")


class Team:
    """All ranks of one system.

    Parameters
    ----------
    workers : list of Worker
        By rank.
    """

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def hear(self, timeout_s: float) -> list[dict[str, Any]]:
        """One answer of each rank, by rank.

        Raises
        ------
        BenchError
            If one ended, whichever it is, or gave no answer in time.
        """
        deadline = time.monotonic() + timeout_s
        answers: dict[Worker, dict[str, Any]] = {}
        while waiting := [worker for worker in self._workers if worker not in answers]:
            left_s = deadline - time.monotonic()
            if left_s < 0:
                raise waiting[0].failed(f"gave no answer for {timeout_s:.0f} s")
            for worker in select.select(waiting, [], [], left_s)[0]:
                if (answer := worker.receive()) is not None:
                    answers[worker] = answer
        return [answers[worker] for worker in self._workers]

    def turn(self, settling: int, counted: int, accumulation: int) -> list[dict[str, Any]]:
        """Let it work; what each rank answers."""
        return self.order({"settling": settling, "counted": counted, "accumulation": accumulation})

    def order(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """Give an order to all; what each rank answers."""
        for worker in self._workers:
            worker.send(what)
        return self.hear(TURN_S)


@contextmanager
def team(system: str, spec: dict[str, Any], ranks: int, logs: Path, threads: int | None = None) -> Iterator[Team]:
    """Start the ranks of a system; they are ended on leaving, and killed if that is by an error.

    Parameters
    ----------
    system : str
        Its name.
    spec : dict
        See `mlpo_hpc.bench.worker.Rank`.
    ranks : int
        How many.
    logs : Path
        Existing folder for what they print.
    threads : int, optional
        With which each computes; by default all its cores.
    """
    workers: list[Worker] = []
    port = first_free_port()
    try:
        for rank in range(ranks):
            name, log = f"system '{system}', rank {rank},", logs / f"{system}.{rank}.log"
            workers.append(Worker(name, spec, worker_environment(os.environ, rank, ranks, port, threads), log))
        yield Team(workers)
        for worker in workers:
            worker.let_go()
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.kill()


def worker_environment(
    environ: Mapping[str, str], rank: int, ranks: int, port: int, threads: int | None = None
) -> dict[str, str]:
    """What a rank needs to find the others, without launchers and without settings of ours."""
    settings = {name for name in environ if name.startswith(ENV_PREFIX)} - {ENV_PREFIX + name for name in ENV_OF_OTHERS}
    kept = {key: value for key, value in environ.items() if not key.startswith(LAUNCHERS) and key not in settings}
    cores = len(os.sched_getaffinity(0))
    # DeepSpeed compiles with the ninja beside this interpreter, which need not be on PATH.
    path = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])
    return kept | {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads or max(1, cores // ranks)),
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
    }
