"""The published runs of MLP-Offload beside what the simulator makes of them, all from one set of constants."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from mlpo_hpc.planner.comparison import COLUMNS, Comparison
from mlpo_hpc.planner.job import Job
from mlpo_hpc.planner.machine import Machine, PlanTier
from mlpo_hpc.planner.model import find_model
from mlpo_hpc.planner.policy import MLP, ZERO3, Policy
from mlpo_hpc.planner.simulate import simulate


@cache
def facts() -> dict[str, Any]:
    """The contents of ``published.toml``."""
    return tomllib.loads(files("mlpo_hpc.planner").joinpath("published.toml").read_text())


def published_job(model: str) -> Job:
    """A published run as a job: host memory is what others leave, gradients among them."""
    known = facts()
    tiers = tuple(PlanTier(name, shared=name == "pfs", **known[name]) for name in ("nvme", "pfs"))
    keys = ("gpus", "gpu_bytes", "node_bytes", "gpu_flops", "gpu_link_bps", "update_items_ps")
    machine = Machine(tiers, **{key: known[key] for key in keys})
    job = Job(find_model(model), machine, known["sequence"], sub_group_size=known["sub_group_size"])
    taken = known["idle_bytes"] + known["other_bytes"] + job.gradient_bytes
    return replace(job, host_bytes=int(machine.node_bytes - taken))


def published_policy(system: str) -> Policy:
    """As it was set in those runs."""
    return ZERO3 if system == ZERO3.name else replace(MLP, ratio=tuple(facts()["ratio"]))


def compare() -> list[Comparison]:
    """All ten runs, simulated."""
    found = []
    for model, systems in facts()["rows"].items():
        job = published_job(model)
        for system, seconds in systems.items():
            policy = published_policy(system)
            forecast = simulate(policy, job.machine.local_tiers, job.work(policy))
            found.append(Comparison(model, system, dict(zip(COLUMNS, seconds, strict=True)), forecast))
    return found
