"""Ranks that measure together: those of the launcher, or processes of our own on this host."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar, cast

from mlpo_hpc.cluster.launch import find_launcher
from mlpo_hpc.errors import MlpoError, here

T = TypeVar("T")

ANSWER_S = 600.0
"""Longest wait for another rank's part."""
END_S = 10.0


class Ranks(Protocol):
    """What is used of a communicator; `Alone`, `Local` or one of MPI."""

    rank: int
    size: int

    def bcast(self, value: Any) -> Any: ...

    def allgather(self, value: Any) -> list[Any]: ...


class Alone:
    """One process."""

    rank = 0
    size = 1

    def bcast(self, value: Any) -> Any:
        """The value itself."""
        return value

    def allgather(self, value: Any) -> list[Any]:
        """Just the one."""
        return [value]


class Local:
    """One of several processes of this host; the first one collects what the others send.

    Parameters
    ----------
    rank, size : int
        Which of how many.
    pipes : sequence of Connection
        To all others for the first one, to the first one for the others.
    """

    def __init__(self, rank: int, size: int, pipes: Sequence[Connection]) -> None:
        self.rank = rank
        self.size = size
        self._pipes = pipes

    def bcast(self, value: Any) -> Any:
        """The first one's value."""
        return self.allgather(value)[0]

    def allgather(self, value: Any) -> list[Any]:
        """The values of all, by rank.

        Raises
        ------
        MlpoError
            If another process ended, or does not answer.
        """
        if self.rank:
            self._pipes[0].send(value)
            return cast("list[Any]", self._receive(self._pipes[0]))
        values = [value, *map(self._receive, self._pipes)]
        for pipe in self._pipes:
            pipe.send(values)
        return values

    def _receive(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(ANSWER_S):
                return pipe.recv()
        except (EOFError, OSError) as error:
            raise MlpoError(f"another process of the measurement ended, on {here()}: see what it printed") from error
        raise MlpoError(f"another process of the measurement did not answer for {ANSWER_S:.0f} s, on {here()}")


def launched_ranks() -> Ranks:
    """Under srun or mpirun its ranks; MPI is started for that alone, so that login nodes never see it."""
    launcher = find_launcher(os.environ)
    size = int(os.environ[launcher.size]) if launcher else 1
    if size == 1:
        return Alone()
    from mlpo_hpc.cluster.node import start_mpi

    return cast(Ranks, start_mpi(size))


def run_together(num_ranks: int, action: Callable[[Ranks], T]) -> T:
    """Run an action on the launcher's ranks, or on that many processes of our own; what the first one returns.

    Parameters
    ----------
    num_ranks : int
        Processes, where no launcher started several.
    action : callable
        Takes the ranks; must be importable, for other processes run it too.

    Raises
    ------
    MlpoError
        If one of our own processes ended early.
    """
    ranks = launched_ranks()
    if ranks.size > 1 or num_ranks == 1:
        return action(ranks)
    with ExitStack() as endings:
        pipes = [endings.enter_context(_other(rank, num_ranks, action)) for rank in range(1, num_ranks)]
        return action(Local(0, num_ranks, pipes))


@contextmanager
def _other(rank: int, size: int, action: Callable[[Ranks], Any]) -> Any:
    """Another process at work; it is not left behind."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(rank, size, theirs, action), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


def _work(rank: int, size: int, pipe: Connection, action: Callable[[Ranks], Any]) -> None:
    try:
        action(Local(rank, size, [pipe]))
    except MlpoError:
        if rank == 0:
            raise  # of the others the first one tells


def each(ranks: Ranks, action: Callable[[], T]) -> T:
    """Collective over `ranks`. What this rank did.

    Raises
    ------
    MlpoError
        If one failed: the first failing rank's, on all.
    """
    result, failure = None, None
    try:
        result = action()
    except MlpoError as error:
        failure = error
    failed = [theirs for theirs in ranks.allgather(failure) if theirs is not None]
    if failed:
        raise failed[0]
    return cast(T, result)
