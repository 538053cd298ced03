"""Where the ranks tell the first one what they saw: one TCP connection each, for MPI is what is looked at."""

from __future__ import annotations

import contextlib
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pydantic import BaseModel, ValidationError

from mlpo_hpc.cluster.launch import first_host, job_step
from mlpo_hpc.cluster.network import port_of_job
from mlpo_hpc.doctor.finding import Finding
from mlpo_hpc.doctor.start import Start
from mlpo_hpc.doctor.storage import Room
from mlpo_hpc.errors import MlpoError

RETRY_S = 0.1
CONNECT_S = 2.0
MOST_BYTES = 2**20
BACKLOG = 1024


class Greeting(BaseModel):
    """What the first rank says to each other one.

    Parameters
    ----------
    job : str
        Of the first rank: another job's may have come to the same port.
    marks : dict
        By tier: name of a folder that it made there, which a rank of another node sees if they share the directory.
    """

    job: str
    marks: dict[str, str] = {}


class Answer(BaseModel):
    """What one rank tells the first one.

    Parameters
    ----------
    job : str
        As in the greeting.
    rank : int
        Whose.
    local_size : int
        Ranks of its node.
    host, machine : str
        Where it is; `machine` tells hosts of one name apart.
    cores : list of int
        That it may run on.
    threads : int, optional
        ``OMP_NUM_THREADS``, if it is set.
    findings : list of Finding
        Of its node if it is the first there, and its own.
    rooms : dict
        By tier, of a node's first rank.
    budget_bytes : int
        Host memory for state, of a node's first rank.
    versions : str
        Of a node's first rank.
    marks : dict
        By tier, whether it sees what the first rank made.
    """

    job: str
    rank: int
    local_size: int
    host: str
    machine: str
    cores: list[int]
    threads: int | None
    findings: list[Finding]
    rooms: dict[str, Room] = {}
    budget_bytes: int = 0
    versions: str = ""
    marks: dict[str, bool] = {}


def find_point(start: Start, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Address and port that all ranks can tell by themselves; None where only MPI can."""
    if start.launcher == "srun":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
        return first_host(nodes), port_of_job(f"doctor {job_step(environ)}")
    if start.launcher == "torchrun" and "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], port_of_job(f"doctor {environ.get('MASTER_PORT')}")
    return None


class Reception(socketserver.ThreadingTCPServer):
    """The first rank's ear. Others stay connected until it is closed.

    Parameters
    ----------
    port : int
        To hear at, on all interfaces.
    greeting : Greeting
        For everybody.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def __init__(self, port: int, greeting: Greeting) -> None:
        super().__init__(("", port), _Visit)
        self.greeting = greeting
        self.answers: queue.Queue[Answer] = queue.Queue()
        self.closing = threading.Event()

    def collect(self, count: int, deadline: float) -> list[Answer]:
        """That many answers, or as many as came until the deadline (`time.monotonic`)."""
        found: dict[int, Answer] = {}
        while len(found) < count and (rest_s := deadline - time.monotonic()) > 0:
            try:
                answer = self.answers.get(timeout=rest_s)
            except queue.Empty:
                break
            found[answer.rank] = answer
        return list(found.values())


class _Visit(socketserver.StreamRequestHandler):
    server: Reception

    def handle(self) -> None:
        try:
            self.wfile.write(self.server.greeting.model_dump_json().encode() + b"\n")
            answer = Answer.model_validate_json(self.rfile.readline(MOST_BYTES))
        except (ValidationError, OSError):  # a stranger: the rank that we wait for is missed in time
            return
        if answer.job == self.server.greeting.job:
            self.server.answers.put(answer)
            self.server.closing.wait()


@contextmanager
def reception(port: int, greeting: Greeting) -> Iterator[Reception]:
    """Hear the other ranks; on leaving they are let go.

    Raises
    ------
    OSError
        If the port is in use.
    """
    with Reception(port, greeting) as server:
        threading.Thread(target=server.serve_forever, args=(RETRY_S,), daemon=True).start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()


def report(point: tuple[str, int], job: str, tell: Callable[[Greeting], Answer], deadline: float) -> None:
    """Tell the first rank what this one saw, and wait until it has heard all.

    Parameters
    ----------
    point : tuple of str and int
        Where it hears.
    job : str
        Of this rank.
    tell : callable
        Makes the answer.
    deadline : float
        `time.monotonic` after which it is given up.

    Raises
    ------
    MlpoError
        If it cannot be reached.
    """
    connection, greeting = _connect(point, job, deadline)
    with connection:
        connection.sendall(tell(greeting).model_dump_json().encode() + b"\n")
        connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
        with contextlib.suppress(OSError):  # however it ends, the first rank needs nothing more
            connection.recv(1)


def _connect(point: tuple[str, int], job: str, deadline: float) -> tuple[socket.socket, Greeting]:
    """Try until the first rank hears, for it may start later."""
    reason = "no time was left"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(point, CONNECT_S)
        except OSError as error:
            reason = str(error)
            time.sleep(RETRY_S)
            continue
        try:
            greeting = Greeting.model_validate_json(_line(connection))
        except (ValidationError, OSError) as error:
            reason = f"another program answers there ({type(error).__name__})"
        else:
            if greeting.job == job:
                return connection, greeting
            reason = f"another job's doctor answers there ({greeting.job})"
        connection.close()
        time.sleep(RETRY_S)
    raise MlpoError(f"the first rank was not reached at {point[0]}, port {point[1]}: {reason}")


def _line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.readline(MOST_BYTES)
