"""A real Slurm with two nodes on this machine: ``python -m tests.slurm.bed`` starts one and a shell in it. Needs root.

Each node is a slurmd in a mount and UTS namespace of its own, so that it has its own host name,
``/dev/shm`` and scratch disk (ext4 on a loop device). Everything lies in one folder, its munge key
and socket too; nothing else of this machine is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlpo_hpc.cluster.network import first_free_port

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare", "mkfs.ext4", "losetup")
SCRATCH_BYTES = 512 * 2**20
START_S = 60.0

CONF = """
ClusterName=bed
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
TmpFS={folder}/scratch
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
KillWait=5
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""

START_NODE = """
set -e
hostname {node}
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -o loop {folder}/{node}.img {folder}/scratch
chmod 1777 {folder}/scratch
exec slurmd -D -N {node} -f {folder}/slurm.conf
"""


def missing() -> str:
    """Why the bed cannot be made here; empty if it can."""
    if os.geteuid() != 0:
        return "Slurm nodes in namespaces need root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {lacking} (Debian: slurm-wlm munge)" if lacking else ""


@dataclass(frozen=True)
class Bed:
    """A running Slurm."""

    folder: Path

    @property
    def scratch(self) -> Path:
        """Node-local: another disk on each node, under the same path."""
        return self.folder / "scratch"

    @property
    def shared(self) -> Path:
        """The parallel file system: the same on both nodes."""
        return self.folder / "pfs"

    @property
    def environ(self) -> dict[str, str]:
        """For commands of Slurm; MPI talks over the loopback device."""
        return {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }

    def run(
        self, *command: str, timeout_s: float = 240, cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's; one that hangs is ended, and what it printed until then is told."""
        env = {**self.environ, **environ}
        try:
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, cwd=cwd)
        except subprocess.TimeoutExpired as error:
            printed = b"".join(filter(None, (error.stdout, error.stderr))).decode(errors="replace")
            raise AssertionError(f"{command} did not end within {timeout_s:.0f} s\n{printed[-6000:]}") from None


@contextmanager
def slurm_bed() -> Iterator[Bed]:
    """Start Slurm; stop it and remove everything at the end.

    Raises
    ------
    RuntimeError
        If it did not come up, with the logs.
    """
    with ExitStack() as endings:
        folder = Path(endings.enter_context(tempfile.TemporaryDirectory(prefix="slurm-bed-")))
        folder.chmod(0o755)
        bed = Bed(folder)
        _write_files(folder)
        endings.callback(_stop_all, folder)
        _start_munge(folder)
        for node in NODES:
            script = START_NODE.format(folder=folder, node=node)
            _start(folder, node, ["unshare", "-m", "-u", "sh", "-c", script], bed.environ)
        _start(folder, "ctld", ["slurmctld", "-D", "-f", str(folder / "slurm.conf")], bed.environ)
        _wait_until_idle(bed)
        yield bed


def _write_files(folder: Path) -> None:
    for name in ("munge", "scratch", "state", "pfs"):
        (folder / name).mkdir()
    port = first_free_port()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=[port, port + 1, port + 2]))
    (folder / "hosts").write_text("127.0.0.1 localhost n1 n2\n")
    for node in NODES:
        with (folder / f"{node}.img").open("wb") as image:
            image.truncate(SCRATCH_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(folder / f"{node}.img")], check=True)


def _start_munge(folder: Path) -> None:
    private = folder / "munge"
    (private / "key").write_bytes(os.urandom(128))
    (private / "key").chmod(0o400)
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    subprocess.run(["munged", "--force", *[f"--{key}={private / name}" for key, name in names.items()]], check=True)


def _start(folder: Path, name: str, command: list[str], environ: dict[str, str]) -> None:
    log = (folder / f"{name}.out").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    (folder / f"{name}.started").write_text(str(process.pid))


def _wait_until_idle(bed: Bed) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        states = bed.run("sinfo", "-h", "-N", "-o", "%T", timeout_s=30).stdout.split()
        if states == ["idle", "idle"]:
            return
        time.sleep(0.3)
    logs = "\n".join(
        f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(bed.folder.glob("*.[lo][ou][gt]"))
    )
    raise RuntimeError(f"Slurm did not start within {START_S:.0f} s: {states}\n{logs}")


def _stop_all(folder: Path) -> None:
    """End what was started, jobs included: all that runs with our configuration in its environment."""
    pids = [int(path.read_text()) for path in (*folder.glob("*.started"), *folder.glob("munge/pid"))]
    _end(pids, signal.SIGTERM, wait_s=10)
    _end(_of_bed(folder), signal.SIGKILL, wait_s=10)


def _of_bed(folder: Path) -> list[int]:
    """Processes whose environment or command line names the bed's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            if str(folder).encode() in text and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def _end(pids: list[int], kind: signal.Signals, wait_s: float) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
    deadline = time.monotonic() + wait_s
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def main() -> None:
    if reason := missing():
        sys.exit(reason)
    with slurm_bed() as bed:
        print(f"Slurm with nodes {', '.join(NODES)}; scratch {bed.scratch}, shared {bed.shared}; 'exit' stops it")
        subprocess.run([os.environ.get("SHELL", "/bin/sh")], env=bed.environ)


if __name__ == "__main__":
    main()
