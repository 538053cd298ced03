"""Bodies of the MPI tests of exports: ranks share the work, and one that fails ends all with its message."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlpo_hpc.checkpoint.export_hdf5 import export_hdf5
from mlpo_hpc.checkpoint.export_safetensors import export_safetensors
from mlpo_hpc.checkpoint.export_universal import export_universal
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.errors import StorageError
from tests.checkpoints import Saved, save, usual
from tests.mpi.bodies import folder_for_all, remove
from tests.unit.test_ckpt import bits, check_hdf5, exported, files_of, flip, truth
from tests.unit.test_universal import check_universal

if TYPE_CHECKING:
    from mpi4py import MPI


def export(world: MPI.Intracomm, form: str, saved: Saved, target: Path) -> list[int]:
    """Bytes that this rank wrote, piece by piece."""
    told: list[int] = []
    reader = Reader(saved.folder)
    arguments: Any = (reader, target, world, lambda done, _: told.append(done))
    try:
        if form == "hdf5":
            export_hdf5(*arguments)
        elif form == "safetensors":
            export_safetensors(*arguments, None, 8000)
        else:
            export_universal(*arguments)
    finally:
        reader.close()
    return told


def check(form: str, target: Path, saved: Saved) -> None:
    if form == "hdf5":
        check_hdf5(target, saved)
    elif form == "safetensors":
        assert {n: bits(t) for n, t in exported(target).items()} == {n: bits(t) for n, t in truth(saved, False).items()}
    else:
        check_universal(target, saved)


def saved_for_all(world: MPI.Intracomm, folder: str) -> Saved:
    return world.bcast(save(Path(folder), usual(world_size=3)) if world.rank == 0 else None)


def test_ranks_share_every_export(world: MPI.Intracomm) -> None:
    folder = folder_for_all(world)
    saved = saved_for_all(world, folder)
    for form in ("hdf5", "safetensors", "universal"):
        told = export(world, form, saved, Path(folder) / form)
        busy = [sum(some) > 0 for some in world.allgather(told)]
        assert sum(busy) >= min(2, world.size), "a large parameter may leave a rank idle, never all others"
        if world.rank == 0:
            check(form, Path(folder) / form, saved)
        world.Barrier()
    remove(world, folder)


def test_what_one_rank_finds_wrong_ends_every_export_with_its_message(world: MPI.Intracomm) -> None:
    folder = folder_for_all(world)
    saved = saved_for_all(world, folder)
    if world.rank == 0:
        path, record = files_of(saved, "state")[1], Reader(saved.folder).shards[1].records[-1]
        for chunk in (record.chunks[0], record.weights[-1]):
            flip(path, chunk.offset)
    world.Barrier()
    for form in ("hdf5", "safetensors", "universal"):
        with pytest.raises(StorageError, match=r"w is not what was saved.*state-00001") as raised:
            export(world, form, saved, Path(folder) / form)
        assert len(set(world.allgather(str(raised.value)))) == 1
        left = sorted(path.name for path in Path(folder).iterdir())
        assert left == ["latest", "one"], left
        world.Barrier()
    remove(world, folder)
