"""The journal of a rank's steps: begun with what the rank is and has, which stays the same while it trains."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mlpo_hpc import __version__
from mlpo_hpc.cluster.job import this_job
from mlpo_hpc.cluster.node import Node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import OffloadConfig, expand
from mlpo_hpc.state.store import Store
from mlpo_hpc.storage.contents import Contents
from mlpo_hpc.storage.place import Place
from mlpo_hpc.telemetry.journal import Journal, open_journal

LIBRARIES = ("torch", "deepspeed", "mpi4py", "h5py")


class Journaling:
    """The part of the optimizer that writes a journal, if ``telemetry.dir`` gives it a place."""

    journal: Journal | None = None
    _config: OffloadConfig
    _node: Node
    _contents: Contents

    def _begin_journal(self, store: Store, numels: Sequence[int]) -> None:
        """Collective over the training world. Begin or continue the journals of all ranks.

        Raises
        ------
        StorageError
            On all ranks, if one of them cannot make its own.
        """
        if self._config.telemetry.dir is None:
            return
        directory = self._config.telemetry.dir
        start = {
            "began_s": gather(round(time.time(), 3))[0],  # tells which journals belong together
            **describe_rank(self._config, self._node, store),
            "model": {"parameters": sum(numels), "subgroups": len(numels), "state_format": self._contents.codec},
        }
        self.journal = together(lambda: open_journal(expand(directory), self._node.world_rank, start))

    def record_loss(self, loss: float | torch.Tensor, text_tokens: int | None = None) -> None:
        """Note the loss of the last step for ``mlpo report``; without ``telemetry.dir`` nothing is done.

        Parameters
        ----------
        loss : float or tensor of one item
            Of this rank or, the same on all of them or given by one, of the whole job.
        text_tokens : int, optional
            Tokens of text that all ranks trained on in the step.

        Raises
        ------
        MlpoError
            Before the first step.
        """
        if self.journal is not None:
            self.journal.loss(float(loss.item() if isinstance(loss, torch.Tensor) else loss), text_tokens)


def describe_rank(config: OffloadConfig, node: Node, store: Store) -> dict[str, Any]:
    """Job, place, versions, configuration and tiers of a rank."""
    job = this_job(os.environ)
    return {
        "job": job and asdict(job),
        "host": node.host,
        "machine": node.machine,
        "world_rank": node.world_rank,
        "world_size": node.world_size,
        "node_rank": node.node_rank,
        "node_size": node.node_size,
        "versions": {"mlpo_hpc": __version__, "python": platform.python_version(), **_versions()},
        "config": config.model_dump(mode="json"),
        "tiers": {
            place.tier.name: {**facts, **_describe_tier(config, node, place, facts["tokens"])}
            for place in store.places
            if (facts := store.facts.get(place.tier.name)) is not None
        },
    }


def _versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # the optional ones
            continue
    return found


def _describe_tier(config: OffloadConfig, node: Node, place: Place, tokens: Mapping[str, Any]) -> dict[str, Any]:
    tier, space = place.tier, os.statvfs(place.path)
    takes_turns = tokens["scope"] != "off" and tokens["backend"] != "local"
    return {
        "path": place.path,
        "filesystem": place.filesystem.type,
        "filesystem_bytes": space.f_blocks * space.f_frsize,
        "shared": place.shared,
        # Ranks of this node that use it at the same time.
        "at_once": min(tier.permits or config.tokens.permits, node.node_size) if takes_turns else node.node_size,
        # Of the node, each way while the other way is used too; null: it was not looked at.
        "measured_bps": tokens.get(f"{tokens['scope'] if takes_turns else 'off'}_bps", tokens.get("off_bps")),
        "read_bps": tier.read_bps,
        "write_bps": tier.write_bps,
    }
