"""What one rank sees by itself: everything on its node if it is the first there, else MPI alone."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from mlpo_hpc.cluster.network import INTERFACE, address_of
from mlpo_hpc.doctor import gpu, hdf5, memory, mpi, software
from mlpo_hpc.doctor.child import Child
from mlpo_hpc.doctor.finding import Finding, split_advice
from mlpo_hpc.doctor.plan import Plan
from mlpo_hpc.doctor.start import Start
from mlpo_hpc.doctor.storage import Room, TierFacts
from mlpo_hpc.errors import ConfigError

Facts = TypeVar("Facts", bound=BaseModel)


@dataclass
class Seen:
    """What this rank saw by itself."""

    findings: list[Finding]
    rooms: dict[str, Room] = field(default_factory=dict)
    mpi: mpi.MpiFacts | None = None


class Looks:
    """Of one rank.

    Parameters
    ----------
    start : Start
        How it was started.
    plan : Plan
        What it is to be fit for.
    num_nodes : int
        That will train.
    deadline : float
        `time.monotonic` after which what hangs is given up.
    endings : ExitStack
        Gets what must be done when the report is out.
    """

    def __init__(self, start: Start, plan: Plan, num_nodes: int, deadline: float, endings: ExitStack) -> None:
        self._start = start
        self._plan = plan
        self._num_nodes = num_nodes
        self._deadline = deadline
        self._endings = endings

    def look(self, port: int) -> Seen:
        """Collective over the MPI world, if there is one. Start all that may hang at once, look at the rest meanwhile.

        Parameters
        ----------
        port : int
            At which this rank hears the others, if it is the first one.
        """
        start, plan = self._start, self._plan
        first = start.local_rank == 0
        mpi_child = self._child("mpi", str(start.size), str(port)) if start.by_mpi else None
        if mpi_child is None and first:
            mpi_child = self._child("mpi", "0", "0")
        seen = self._look_at_node() if first else Seen([])
        if mpi_child is not None:
            answer, trouble = mpi_child.answer(self._deadline)
            seen.mpi = None if answer is None else mpi.MpiFacts.model_validate(answer)
            seen.findings += mpi.judge(seen.mpi, trouble, start, plan.needs_mpi)
        return seen

    def _look_at_node(self) -> Seen:
        """What is the same for all ranks of a node."""
        start, plan = self._start, self._plan
        tiers = {tier.name: self._child("tier", tier.model_dump_json(), str(self._num_nodes)) for tier in plan.tiers}
        places = self._child("places") if not plan.tiers and not plan.path else None
        h5py_child = self._child("h5py")
        signs = gpu.signs_of_gpus(os.environ)
        gpu_child = self._child("gpu") if signs and os.environ.get("DS_ACCELERATOR") != "cpu" else None
        seen = Seen([*plan.findings, *software.judge_versions(), software.judge_locks(), *_network()])
        seen.findings += [memory.judge_memory(plan.config), memory.judge_memlock(), memory.judge_shm(start.local_size)]
        seen.findings.append(hdf5.judge(*_validated(h5py_child.answer(self._deadline), hdf5.Hdf5Facts)))
        if gpu_child is None:
            seen.findings.append(gpu.without_gpu(os.environ, start))
        else:
            facts, trouble = _validated(gpu_child.answer(self._deadline), gpu.GpuFacts)
            seen.findings.append(gpu.judge(facts, trouble, signs, os.environ, start))
        for name, child in [*tiers.items(), *([("", places)] if places else [])]:
            self._look_at_tier(name, child, seen)
        return seen

    def _look_at_tier(self, name: str, child: Child, seen: Seen) -> None:
        facts, trouble = _validated(child.answer(self._deadline), TierFacts)
        if facts is None:
            advice = "see whether its file system answers on that node (df, ls); if not, tell the support"
            finding = Finding(
                check="tier", verdict="fail", seen=f"its directory {trouble}", advice=advice, subject=name
            )
            seen.findings.append(finding)
            return
        seen.findings += [self._as_from_here(finding) for finding in facts.findings]
        if facts.room is not None:
            seen.rooms[name] = facts.room

    def _as_from_here(self, finding: Finding) -> Finding:
        """What a login node lacks the nodes may have."""
        tier = next((tier for tier in self._plan.tiers if tier.name == finding.subject), None)
        if finding.verdict != "fail" or tier is None or tier.kind == "shared" or not self._start.is_login:
            return finding
        advice = f"look in a job ('srun mlpo doctor'); if it is the same there: {finding.advice}"
        return finding.model_copy(update={"verdict": "skipped", "advice": advice})

    def _child(self, name: str, *arguments: str) -> Child:
        child = Child(name, *arguments)
        self._endings.callback(child.end)
        return child


def _validated(answer: tuple[Any, str], model: type[Facts]) -> tuple[Facts | None, str]:
    told, trouble = answer
    return (None if told is None else model.model_validate(told)), trouble


def _network() -> list[Finding]:
    """Finding ``network``, where an interface was named."""
    if INTERFACE not in os.environ:
        return []
    name = os.environ[INTERFACE]
    try:
        return [Finding(check="network", verdict="ok", seen=f"{name} has the address {address_of(name)}")]
    except ConfigError as error:
        advice = f"correct {INTERFACE}: 'ip -br address' shows the interfaces of a node"
        return [Finding(check="network", verdict="fail", seen=split_advice(str(error))[0], advice=advice)]
