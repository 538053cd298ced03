"""What killed processes of ours left in a directory: found, judged, and removed where it is certain that they are gone.

Only what is ours by name and by content goes: a folder with our mark, or an empty file, of this user. No link is
followed, no other file system is entered, and what somebody may use is kept.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from mlpo_hpc.cluster.job import Slurm
from mlpo_hpc.errors import storage_error
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.folder import MARK, lock_mark, mark_text, open_folder, remove_contents, remove_mark
from mlpo_hpc.storage.owner import NO_MACHINE, PREFIX, Owner, read_name

NODE_LOCAL = {"ext4", "xfs", "btrfs", "zfs"}
"""Mounted by one machine at a time, whatever shares there are: who made something there was on this machine."""
UNLOCKED_AGE_S = 3600.0
"""Where no lock tells, a thing must be so old: containers do not see each other's processes."""
MOST_MARK_BYTES = 4096

Outcome = Literal["removed", "dead", "in use", "unknown", "not ours", "young", "failed"]


@dataclass(frozen=True)
class Rule:
    """What may be removed.

    Parameters
    ----------
    slurm : Slurm, optional
        Whom to ask for jobs; None: nobody is asked.
    older_than_s : float
        Younger things are kept.
    unknown : bool
        Also what nobody can tell of whether it is in use, unless it is locked.
    dry_run : bool
        Remove nothing.
    """

    slurm: Slurm | None = None
    older_than_s: float = 0.0
    unknown: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Leftover:
    """Something in the directory whose name begins as ours do, and what became of it."""

    path: str
    outcome: Outcome
    """``dead``: would be removed if this were no dry run."""
    reason: str
    owner: Owner | None = None
    size_bytes: int = 0
    """What it takes on the device."""
    age_s: float = 0.0


def clean(directory: str, rule: Rule) -> Iterator[Leftover]:
    """Remove what dead jobs left in a directory; not in directories below it.

    Parameters
    ----------
    directory : str
        Of a tier, or where else something of ours was.
    rule : Rule
        What may be removed.

    Yields
    ------
    Leftover
        Each thing whose name begins as ours do, when it was treated.

    Raises
    ------
    StorageError
        If the directory cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(PREFIX))
        is_local = bool(names) and describe(directory).type in NODE_LOCAL
    except OSError as error:
        raise storage_error("looking for leftovers", directory, error) from error
    for name in names:
        try:
            found = _treat(os.path.join(directory, name), is_local, rule)
        except FileNotFoundError:  # its owner, or another one who cleans, removed it meanwhile
            continue
        except OSError as error:
            found = Leftover(os.path.join(directory, name), "failed", error.strerror or str(error))
        yield found


def _treat(path: str, is_local: bool, rule: Rule) -> Leftover:
    owner, status = read_name(os.path.basename(path)), os.lstat(path)
    age_s = time.time() - status.st_mtime
    if owner is None:
        return Leftover(path, "not ours", "mlpo_hpc gives no such name", age_s=age_s)
    if status.st_uid != os.geteuid():
        return Leftover(path, "not ours", f"belongs to user {status.st_uid}", owner, age_s=age_s)
    with ExitStack() as looking, ExitStack() as locking:
        is_folder = stat.S_ISDIR(status.st_mode)
        inside = _look_into(path, looking, locking) if is_folder else _look_at_file(status)
        outcome, reason = _judge(owner, inside, age_s, is_local, rule)
        if outcome == "dead" and not rule.dry_run:
            _remove(path, inside.folder, locking) if is_folder else os.unlink(path)
            outcome = "removed"
    return Leftover(path, outcome, reason, owner, inside.size_bytes, age_s)


def _remove(path: str, folder: int, locking: ExitStack) -> None:
    """Remove the very folder that was looked at, whatever has its name by now."""
    remove_contents(folder)
    locking.close()  # on NFS the mark would stay while it is open
    remove_mark(folder, path)


# ---- whether it is ours, and locked ---------------------------------------------------------


@dataclass(frozen=True)
class Inside:
    """What was found in it."""

    fault: str = ""
    """Why it is none of ours; empty if it is."""
    is_free: bool | None = None
    """Whether nobody has it locked; None where there is no lock to look at."""
    size_bytes: int = 0
    folder: int = -1
    """Descriptor."""


def _look_at_file(status: os.stat_result) -> Inside:
    """Files of ours lose their name before anything is written to them."""
    if not stat.S_ISREG(status.st_mode):
        return Inside("is neither a folder nor a file")
    return Inside(f"is a file with {status.st_size:,} bytes in it" if status.st_size else "")


def _look_into(path: str, looking: ExitStack, locking: ExitStack) -> Inside:
    """Open a folder, lock its mark, and look whether all that is in it is ours."""
    folder = open_folder(path)
    looking.callback(os.close, folder)
    names = os.listdir(folder)
    text, is_free = _lock_mark_of(folder, locking) if MARK in names else (b"", None)
    unfinished = not text and set(names) <= {MARK}  # killed before it was marked: there is nothing in it
    if text != mark_text(os.path.basename(path)) and not unfinished:
        return Inside("has no mark of mlpo_hpc in it", is_free)
    fault, size_bytes = _walk(folder)
    return Inside(fault, is_free, size_bytes, folder)


def _lock_mark_of(folder: int, locking: ExitStack) -> tuple[bytes, bool | None]:
    """What the mark says, and whether nobody else has it locked."""
    if not stat.S_ISREG(os.stat(MARK, dir_fd=folder, follow_symlinks=False).st_mode):
        return b"no file", None
    # For writing, or NFS does not lock.
    fd = os.open(MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    locking.callback(os.close, fd)
    text = os.read(fd, MOST_MARK_BYTES)
    # Who just makes it locks it before he writes: he must not find it locked.
    return text, lock_mark(fd) if text else None


def _walk(folder: int) -> tuple[str, int]:
    """Why it must stay, if it must, and the bytes that it takes."""
    top, size_bytes = os.fstat(folder), 0
    for where, folders, files, fd in os.fwalk(dir_fd=folder, follow_symlinks=False):
        for name in [*folders, *files]:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if status.st_dev != top.st_dev:
                return f"another file system is mounted in it, at {os.path.join(where, name)}: unmount that first", 0
            if status.st_uid != top.st_uid:
                return f"{os.path.join(where, name)} in it belongs to user {status.st_uid}", 0
            size_bytes += status.st_blocks * 512
    return "", size_bytes


# ---- whether its owner is gone --------------------------------------------------------------


def _judge(owner: Owner, inside: Inside, age_s: float, is_local: bool, rule: Rule) -> tuple[Outcome, str]:
    if inside.fault:
        return "not ours", inside.fault
    if inside.is_free is False:
        return "in use", "somebody has it locked"
    settled = inside.is_free is True or age_s >= UNLOCKED_AGE_S
    is_gone, reason = _ask_about(owner, settled, is_local, rule.slurm)
    if is_gone is False:
        return "in use", reason
    if age_s < rule.older_than_s:
        return "young", reason
    return ("dead" if is_gone or rule.unknown else "unknown"), reason


def _ask_about(owner: Owner, settled: bool, is_local: bool, slurm: Slurm | None) -> tuple[bool | None, str]:
    """Whether the owner is gone, and how that is known; None if nobody can tell."""
    here, job, silence = Owner.this(), owner.job, ""
    if job is not None and here.job is not None and job.identity == here.job.identity:
        if job.restart_count < here.job.restart_count:
            return True, f"job {job.number} was started again since"
    elif job is not None and slurm is not None:
        is_over, reason = slurm.is_over(job)
        if is_over is not None:
            return is_over, reason
        silence = f"; {reason}"
    is_gone, reason = _look_for_process(owner, here, settled, is_local)
    return is_gone, reason if is_gone is not None else reason + silence


def _look_for_process(owner: Owner, here: Owner, settled: bool, is_local: bool) -> tuple[bool | None, str]:
    if owner.host != here.host or NO_MACHINE in (owner.machine, here.machine):
        return None, f"made on host {owner.host}, which cannot be asked from here"
    if owner.machine == here.machine:
        if owner.is_alive:
            return False, f"process {owner.pid} runs"
        if settled:
            return True, f"process {owner.pid} of this host is gone"
        return None, f"process {owner.pid} is not seen here, but no lock tells that it is gone: wait an hour"
    if is_local:
        return True, f"made before {here.host} was started again"
    return None, f"made on a host {owner.host} that was started again since, or is another one"
