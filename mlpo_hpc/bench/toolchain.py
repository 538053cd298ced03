"""What stock DeepSpeed compiles once, and whether it can."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from mlpo_hpc.errors import ConfigError

OPS = {"nvme": ("cpu_adam", "pin_memory", "async_io"), "cpu": ("cpu_adam",)}
"""Of each stock system."""
STALE_S = 180.0
"""A lock that nobody has open is left over if it is older."""
TEST_S = 60.0
AIO_TEST = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def ops_of(systems: Sequence[str]) -> list[str]:
    """What these systems compile, each once."""
    return list(dict.fromkeys(op for system in systems for op in OPS.get(system, ())))


def require(systems: Sequence[str]) -> None:
    """See that the stock systems among these can be compiled.

    Raises
    ------
    ConfigError
        If something is missing, or a lock of a compilation that was interrupted would make them wait for ever.
    """
    ops = ops_of(systems)
    if ops:
        _require_tools("async_io" in ops)
    for lock in locks(ops):
        if is_stale(lock, time.time()):
            raise ConfigError(
                f"{lock} is left over from an interrupted compilation of stock DeepSpeed, which would wait for it for "
                f"ever: remove that file (and all of {lock.parent} if compiling fails then)"
            )


def _require_tools(libaio: bool) -> None:
    compiler = os.environ.get("CXX", "c++")
    way_out = "or leave the stock systems out (--systems paper,ours)"
    if shutil.which(compiler) is None:
        raise ConfigError(f"stock DeepSpeed compiles its operators, and there is no {compiler}: install g++, {way_out}")
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        raise ConfigError(f"stock DeepSpeed compiles with ninja, which is missing: pip install ninja, {way_out}")
    if libaio and not _has_libaio(compiler):
        raise ConfigError(
            f"stock DeepSpeed's NVMe offload needs libaio and its headers: install libaio-dev (Debian) or "
            f"libaio-devel, or say where they are in CFLAGS and LDFLAGS, {way_out}"
        )


def _has_libaio(compiler: str) -> bool:
    """Whether it compiles and links, as DeepSpeed will."""
    flags = [*os.environ.get("CFLAGS", "").split(), "-x", "c++", "-", "-o", os.devnull]
    command = [compiler, *flags, *os.environ.get("LDFLAGS", "").split(), "-laio"]
    done = subprocess.run(command, input=AIO_TEST, text=True, capture_output=True, timeout=TEST_S)
    return done.returncode == 0


def to_compile(systems: Sequence[str]) -> list[str]:
    """Operators that these systems will compile, for they were not before."""
    return [op for op in ops_of(systems) if not any(_built(op))]


def _built(op: str) -> Iterator[Path]:
    """Files of an operator that was built, just in time or with DeepSpeed itself."""
    for folder in _folders(op):
        yield from folder.glob(f"{op}.so")
    found = importlib.util.find_spec("deepspeed")
    for place in (found and found.submodule_search_locations) or ():
        yield from Path(place, "ops").glob(f"*/{op}_op*.so")


def locks(ops: Sequence[str]) -> list[Path]:
    """Lock files that are there now."""
    return [folder / "lock" for op in ops for folder in _folders(op) if (folder / "lock").exists()]


def is_stale(lock: Path, now_s: float) -> bool:
    """Whether it is old and no process of this host has it open.

    Parameters
    ----------
    lock : Path
        That is there, or was a moment ago.
    now_s : float
        `time.time()`.
    """
    try:
        age_s = now_s - lock.stat().st_mtime
    except FileNotFoundError:  # just released
        return False
    return age_s > STALE_S and not _is_open(lock)


def _is_open(path: Path) -> bool:
    """Whether any process that we may look into has it open."""
    wanted = str(path.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == wanted for file in process.open_files()):
                return True
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue
    return False


def _folders(op: str) -> list[Path]:
    """Where torch builds an operator: below a folder for each version, unless a folder was named."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return [Path(named, op)]
    return sorted(Path.home().glob(f".cache/torch_extensions/*/{op}"))


@contextmanager
def no_new_locks(systems: Sequence[str]) -> Iterator[None]:
    """Locks that were made inside and are nobody's are removed on leaving by an error: the next run would wait."""
    ops = ops_of(systems)
    before = set(locks(ops))
    try:
        yield
    except BaseException:
        for lock in set(locks(ops)) - before:
            if not _is_open(lock):
                lock.unlink(missing_ok=True)
        raise
