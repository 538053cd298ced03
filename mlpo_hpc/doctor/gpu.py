"""The accelerators of a node, as torch sees them."""

from __future__ import annotations

import glob
from collections.abc import Mapping

from pydantic import BaseModel

from mlpo_hpc.doctor.finding import Finding
from mlpo_hpc.doctor.start import Start

DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd")
"""Of NVIDIA and AMD; those of others belong to displays too."""
PROMISES = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
"""Set where Slurm gave the job GPUs."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


class GpuFacts(BaseModel):
    """What a child saw."""

    torch: str
    kind: str = ""
    count: int = 0
    error: str = ""


def look() -> GpuFacts:
    """Count accelerators and use the first one, as a rank does."""
    import torch

    facts = GpuFacts(torch=torch.__version__)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return facts
    facts = facts.model_copy(update={"kind": device.type, "count": torch.accelerator.device_count()})
    try:
        torch.ones(8, device=device).sum().item()
    except RuntimeError as error:
        return facts.model_copy(update={"error": str(error).splitlines()[0]})
    return facts


def signs_of_gpus(environ: Mapping[str, str], patterns: tuple[str, ...] = DEVICE_FILES) -> list[str]:
    """What tells that this node has accelerators, or that the job asked for some."""
    files = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    return [*files[:1], *(f"{name}={environ[name]}" for name in PROMISES if environ.get(name, "0") != "0")]


def without_gpu(environ: Mapping[str, str], start: Start) -> Finding:
    """Finding ``gpu`` where there is none to be looked at."""
    if environ.get("DS_ACCELERATOR") == "cpu":
        return Finding(check="gpu", verdict="ok", seen="DS_ACCELERATOR=cpu: training runs on the CPUs")
    if not start.launcher:
        seen = f"this host has none{', it is a login node' if start.is_login else ''}"
        return Finding(check="gpu", verdict="skipped", seen=seen)
    return Finding(
        check="gpu",
        verdict="warn",
        seen="this node has none: training runs on the CPUs",
        advice="ask for GPUs (--gpus-per-node=N), or set DS_ACCELERATOR=cpu if it is meant",
    )


def judge(facts: GpuFacts | None, trouble: str, signs: list[str], environ: Mapping[str, str], start: Start) -> Finding:
    """Finding ``gpu``.

    Parameters
    ----------
    facts : GpuFacts or None
        What the child saw.
    trouble : str
        Why it saw nothing.
    signs : list of str
        Why there should be some.
    environ : mapping
        Of this process.
    start : Start
        Of this process.
    """
    if facts is None:
        advice = "look at the driver on that node (nvidia-smi, rocm-smi, dmesg) and tell the support"
        return Finding(check="gpu", verdict="fail", seen=f"torch's look at the GPUs {trouble}", advice=advice)
    if facts.error:
        advice = "another process may hold it, or the driver failed: see nvidia-smi or rocm-smi on that node"
        return Finding(
            check="gpu", verdict="fail", seen=f"a {facts.kind} device cannot be used: {facts.error}", advice=advice
        )
    if not facts.count:
        hidden = [f"{name}={environ[name]!r}" for name in VISIBLE if name in environ]
        seen = f"torch {facts.torch} sees none, though there is {', '.join(signs)}"
        advice = "install the torch build that fits the driver"
        advice += f", or correct {', '.join(hidden)}" if hidden else ""
        return Finding(check="gpu", verdict="fail", seen=seen, advice=advice)
    if 1 < facts.count < start.local_size:
        seen = f"{start.local_size} ranks of the node see {facts.count} GPUs"
        advice = "start one rank a GPU: --gpus-per-node equal to --ntasks-per-node"
        return Finding(check="gpu", verdict="fail", seen=seen, advice=advice)
    return Finding(
        check="gpu", verdict="ok", seen=f"{facts.count} {facts.kind} seen by torch {facts.torch}, the first one works"
    )
