"""A batch script from a machine and a job: a pure function over ``job.sbatch.jinja``."""

from __future__ import annotations

import shlex
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

import mlpo_hpc
from mlpo_hpc.batch.machine import GENERIC, Fact, Machine

if TYPE_CHECKING:
    from jinja2 import Template

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@+-]+$")]
"""Of an account or a partition: one word."""
Time = Annotated[str, StringConstraints(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$")]
"""As ``sbatch --time`` takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
OPTIONS = {"nodes": "--nodes", "time": "--time", "account": "--account", "partition": "--partition", "gpus": "--gpus"}


class BatchJob(BaseModel):
    """What is to run.

    Parameters
    ----------
    kind : str
        ``train``: once; ``requeue``: saves and requeues itself before the time limit until all steps are done
        (docs/requeue.md); ``bench``: ``mlpo bench`` on one node.
    nodes : int
    time : str
        Limit, as ``sbatch`` takes it.
    account, partition : str, optional
        Instead of what is known of the machine.
    gpus : int, optional
        Of a node, and tasks of it; default: all that the machine has, 1 task where that is not known.
    command : str, optional
        What each task runs, as one line of bash; default: the example.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["train", "requeue", "bench"] = "train"
    nodes: int = Field(default=1, ge=1)
    time: Time = "00:30:00"
    account: Name | None = None
    partition: Name | None = None
    gpus: int | None = Field(default=None, ge=1)
    command: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.kind == "bench" and (self.command is not None or self.nodes > 1):
            raise ValueError("the benchmark runs mlpo bench, on one node")
        if self.command is not None:
            _check_command(self.command)
        return self


def _check_command(command: str) -> None:
    try:
        words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    except ValueError as error:
        raise ValueError(f"bash does not read the command {command!r}: {error}") from error
    if not words or not command.isprintable() or any(set(word) <= set(";&|") for word in words):
        raise ValueError(
            f"srun starts one program with its arguments, on one line, not {command!r}: put more into a script"
        )


def render(machine: Machine, job: BatchJob) -> str:
    """Write the script.

    Returns
    -------
    str
        For ``sbatch``; what is not known of the machine is a comment in it that says what to do.
    """
    return _template().render(
        machine=machine,
        job=job,
        requests=requests(machine, job),
        left=left_to_the_user(machine, job),
        written_by=command_line(machine, job),
        requeue_status=mlpo_hpc.REQUEUE_EXIT_CODE,
    )


def requests(machine: Machine, job: BatchJob) -> list[Fact]:
    """What to ask Slurm for, in the order of the script."""
    num_tasks = job.gpus or (machine.gpus.count if machine.gpus else 1)
    found: list[Fact] = []
    if job.account:
        found.append(Fact(value=f"--account={job.account}"))
    for name in ("partition", "constraint", "qos"):
        fact = Fact(value=job.partition) if name == "partition" and job.partition else getattr(machine, name)
        if fact:
            found.append(fact.model_copy(update={"value": f"--{name}={fact.value}"}))
    found += [Fact(value=f"--nodes={job.nodes}"), Fact(value=f"--ntasks-per-node={num_tasks}")]
    if machine.gpus:
        found.append(machine.gpus.model_copy(update={"value": f"{machine.gpus.value}{num_tasks}"}))
    elif job.gpus:
        found.append(Fact(value=f"--gpus-per-node={job.gpus}"))
    if machine.cpus_per_task:
        fact = machine.cpus_per_task
        found.append(fact.model_copy(update={"value": f"--cpus-per-task={fact.value}"}))
    return found


def left_to_the_user(machine: Machine, job: BatchJob) -> list[str]:
    """What a script for this machine may still need, a line for each."""
    known = {
        "--account=PROJECT, which pays" + (f": {machine.account}" if machine.account else ""): job.account,
        "--partition=NAME": job.partition or machine.partition or machine.qos,
        "--gpus-per-node=N and --ntasks-per-node=N, one task a GPU": job.gpus or machine.gpus,
        "--cpus-per-task=N: without it tasks share the CPUs that the job has on a node": machine.cpus_per_task,
        "MLPO_NVME=DIR, a disk of the nodes' own: without it the parallel file system serves alone": machine.node_local,
    }
    return [text for text, value in known.items() if value is None]


def command_line(machine: Machine, job: BatchJob) -> str:
    """The command that writes this very script."""
    words = ["mlpo", "sbatch", "--site", machine.name]
    if job.kind != "train":
        words.append(f"--{job.kind}")
    for name, option in (OPTIONS | {"command": "--script"}).items():
        value = getattr(job, name)
        if value != BatchJob.model_fields[name].default:
            words += [option, str(value)]
    return shlex.join(words)


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    text = files("mlpo_hpc.batch").joinpath("job.sbatch.jinja").read_text()
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(text, globals={"GENERIC": GENERIC})
