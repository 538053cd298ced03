"""A commit in the background: each rank publishes its shard as a file, rank 0 looks for all of them and commits.

Nothing in it is collective: training goes on in the main thread, in which all collective calls are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from mlpo_hpc.checkpoint.documents import read_manifest
from mlpo_hpc.checkpoint.files import read_whole, replace_whole
from mlpo_hpc.checkpoint.manifest import FileEntry
from mlpo_hpc.checkpoint.save import Save
from mlpo_hpc.errors import CorruptState, StorageError, StorageTimeout, here
from mlpo_hpc.telemetry.log import logger

EXIT_S = 20.0
"""Longest time without progress in a process that is about to end: whom it waits for may have ended before it."""
FIRST_POLL_S, LAST_POLL_S = 0.02, 5.0


class Attempt:
    """One saving of all ranks, as its files tell.

    Parameters
    ----------
    folder : Path
        Of the checkpoint.
    unique : str
        A part of the names of its files.
    world_size : int
        How many shards there will be.
    timeout_s : float
        Longest time without any progress of any rank.
    """

    def __init__(self, folder: Path, unique: str, world_size: int, timeout_s: float) -> None:
        self.folder = folder
        self._unique = unique
        self._world_size = world_size
        self._timeout_s = timeout_s

    def shards(self) -> list[FileEntry]:
        """Wait for the shards of all ranks.

        Raises
        ------
        StorageError
            If a rank failed; `StorageTimeout` if there is no progress.
        """
        names = [self._name("shard", rank) for rank in range(self._world_size)]
        self._wait(lambda found: all(name in found for name in names), "the shards of all ranks")
        entries = [(name, read_whole(self.folder / name)) for name in names]
        return [
            FileEntry(file=name, nbytes=len(data), checksum=xxhash.xxh3_64_hexdigest(data)) for name, data in entries
        ]

    def wait_committed(self) -> None:
        """Wait until rank 0 has committed it; the same errors."""
        self._wait(lambda _: self.is_committed(), "the commit by rank 0")

    def is_committed(self) -> bool:
        """Whether the manifest in the folder is this attempt's."""
        try:
            manifest = read_manifest(self.folder)
        except CorruptState:  # there is none
            return False
        return manifest.shards[0].file == self._name("shard", 0)

    def fail(self, rank: int, error: BaseException) -> None:
        """Tell the other ranks that it will not be."""
        replace_whole(self.folder / self._name("failed", rank), f"rank {rank} on {here()}: {error}".encode())

    def _name(self, kind: str, rank: int) -> str:
        return f"{kind}-{rank:05d}-{self._unique}.json"

    def _wait(self, is_there: Callable[[dict[str, int]], bool], what: str) -> None:
        """Look again and again, less and less often, as long as any file of this attempt grows or comes."""
        pause_s, before, since = FIRST_POLL_S, dict[str, int](), time.monotonic()
        while not is_there(found := self._files()):
            failed = sorted(name for name in found if name.startswith("failed-") and name.endswith(".json"))
            if failed:
                raise StorageError(read_whole(self.folder / failed[0]).decode(errors="replace"))
            if found != before:
                before, since = found, time.monotonic()
            elif time.monotonic() - since > (self._timeout_s if threading.main_thread().is_alive() else EXIT_S):
                raise StorageTimeout(f"waiting for {what} for {self._timeout_s:.0f} s: {here(self.folder)}")
            time.sleep(pause_s)
            pause_s = min(LAST_POLL_S, 1.5 * pause_s)

    def _files(self) -> dict[str, int]:
        """Names and sizes of the files of this attempt."""
        found = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if self._unique in entry.name:
                    with suppress(FileNotFoundError):  # it just got its name
                        found[entry.name] = entry.stat().st_size
        return found

    def remove(self) -> None:
        """Take away what is left of it, when no rank is at it any more. Not if it was committed for all that."""
        if self.is_committed():
            return
        for name in self._files():
            with suppress(FileNotFoundError):
                (self.folder / name).unlink()
        with suppress(OSError):  # another checkpoint of this name is in it
            self.folder.rmdir()


class Background(threading.Thread):
    """The thread of one rank that brings one checkpoint to its commit. Exit of the process waits for it.

    Parameters
    ----------
    tag : str
        Of the checkpoint.
    save : Save
        This rank's part.
    attempt : Attempt
        The whole.
    rank : int
        This one.
    commit : callable
        On rank 0: makes the checkpoint exist, given the shards of all ranks.
    """

    def __init__(
        self,
        tag: str,
        save: Save,
        attempt: Attempt,
        rank: int,
        commit: Callable[[list[FileEntry]], None],
    ) -> None:
        super().__init__(name=f"mlpo-checkpoint-{tag}")
        self.tag = tag
        self.save = save
        self._attempt = attempt
        self._rank = rank
        self._commit = commit
        self._error: BaseException | None = None
        self._written = threading.Event()

    def run(self) -> None:
        """Write the shard; on rank 0 wait for the others and commit."""
        try:
            self.save.run()
            self._written.set()
            if self._rank == 0:
                self._commit(self._attempt.shards())
        except BaseException as error:  # raised when somebody asks: training goes on
            self._error = error
            self._written.set()
            logger.error("the checkpoint %s was not saved: %s", self._attempt.folder, error)
            self._tell_others(error)

    def remove(self) -> None:
        """Take away what all ranks left of it, after it failed and all have ended."""
        self._attempt.remove()

    def _tell_others(self, error: BaseException) -> None:
        try:
            self._attempt.fail(self._rank, error)
        except StorageError as another:
            logger.error("the other ranks could not be told: %s", another)

    def is_committed(self) -> bool:
        """Whether the checkpoint exists.

        Raises
        ------
        StorageError
            If it never will.
        """
        if self._error is not None:
            raise self._error
        return not self.is_alive() and (self._rank == 0 or self._attempt.is_committed())

    def wait_written(self) -> BaseException | None:
        """Wait until this rank has done its part; what went wrong."""
        self.save.hurry()
        self._written.wait()
        return self._error

    def wait_ended(self) -> BaseException | None:
        """Wait until this rank has nothing to do for it any more; what went wrong."""
        self.save.hurry()
        self.join()
        return self._error

    def wait(self) -> None:
        """Wait until the checkpoint is committed; the same errors."""
        error = self.wait_ended()
        if error is not None:
            raise error
        if self._rank != 0:
            self._attempt.wait_committed()
