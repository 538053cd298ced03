"""What is killed: the state engine under a small model, and the whole example. Each is a run that resumes by itself."""

from __future__ import annotations

import importlib
import os
import random
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlpo_hpc.telemetry.progress import StepProgress
from tests.integration import worker
from tests.ranks import ROOT

for name in (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "h5py",
    "torch._inductor.compile_fx",
):
    importlib.import_module(name)  # the first engine of a process does it, for seconds: not in each life


@dataclass(frozen=True)
class Place:
    """Where a run works.

    Parameters
    ----------
    folder : Path
        Its own: tiers, checkpoints, losses and logs are in it.
    steps : int
        After which it ends.
    section : dict
        What is put into ``mlp_offload``, such as ``{"checkpoint": {"commit": ...}}``.
    dtype : str
        ``bf16`` or ``fp16``.
    container : str
        Of the second tier: ``raw``, or ``hdf5``, whose file has a name while it is laid out.
    """

    folder: Path
    steps: int
    section: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    container: str = "raw"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def tiers(self) -> list[Path]:
        return [self.folder / "nvme", self.folder / "pfs"]

    def make(self) -> None:
        for path in self.tiers:
            path.mkdir(parents=True)

    def note_loss(self, rank: int, step: int, loss: float) -> None:
        with open(self.folder / f"losses.{rank}", "a") as file:
            file.write(f"{step} {loss.hex()}\n")

    def losses(self) -> set[str]:
        """Rank, step and loss of every step that was done, by however many lives."""
        return {f"{path.suffix} {line}" for path in self.folder.glob("losses.*") for line in path.open()}


def seed(rank: int) -> None:
    """All generators of a process."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def state_engine(place: Place, rank: int) -> None:
    """Train a small model, save after every step."""
    rates = {"read_bps": 1e8, "write_bps": 1e8}
    tiers = [{"name": path.name, "dir": str(path), **rates} for path in place.tiers]
    tiers[-1]["container"] = place.container
    args = {"dirs": [], "dtype": place.dtype, "section": {"tiers": tiers, **place.section}}
    engine = worker.start(args)
    seed(rank)  # what follows is as random as the generators that a checkpoint brings back
    path, client = engine.load_checkpoint(str(place.checkpoints))
    for step in range(client["step"] if path else 0, place.steps):
        x = torch.randn(2, worker.HIDDEN).to(next(engine.module.parameters()).dtype)
        loss = (engine(x).float() ** 2).mean()
        engine.backward(loss)
        engine.step()
        place.note_loss(rank, step + 1, loss.item())
        engine.save_checkpoint(str(place.checkpoints), client_state={"step": step + 1})
    engine.destroy()


def example(place: Place, rank: int) -> None:
    """As a user starts it, and again after it was killed."""
    seed(rank)
    os.environ["MLPO_HPC_TOKENS__BACKEND"] = "flock"  # 'auto' would take a few seconds to measure, each time
    real = StepProgress.step

    def noted(progress: StepProgress, loss: float, *args: Any) -> None:
        real(progress, loss, *args)
        place.note_loss(rank, progress._first_step + len(progress.history), loss)

    StepProgress.step = noted  # type: ignore[method-assign]
    tiers = [text for path in place.tiers for text in ("--tier", f"{path.name}={path}")]
    sys.argv = [
        "pretrain_gpt.py", "--size", "tiny", "--context", "32", "--micro-batch", "1", "--host-memory", "24MB", *tiers,
        "--steps", str(place.steps), "--checkpoint", str(place.checkpoints), "--save-every", "1",
        "--out", str(place.folder / "out"),
    ]  # fmt: skip
    runpy.run_path(str(ROOT / "examples/pretrain_gpt.py"), run_name="__main__")


PROGRAMS = {"engine": state_engine, "example": example}
