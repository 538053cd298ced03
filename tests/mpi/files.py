"""Bodies of the MPI tests of containers and transports: MPI-IO, parallel HDF5."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from mlpo_hpc.config import load
from mlpo_hpc.state import containers
from mlpo_hpc.state.node_file import Slots
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, FileContainer
from mlpo_hpc.storage.contents import Contents, Piece, RecordForm
from mlpo_hpc.storage.generations import Generations
from mlpo_hpc.storage.hdf5 import has_parallel_hdf5
from mlpo_hpc.storage.owner import PREFIX
from mlpo_hpc.storage.place import find_places
from tests import conformance
from tests.containers import open_alone
from tests.mpi.bodies import folder_for_all, place_of, remove, step_again, train

if TYPE_CHECKING:
    from mpi4py import MPI

SLOT_BYTES = 4 * ALIGNMENT_BYTES
KINDS = [("raw", "posix"), ("raw", "mpiio"), ("hdf5", "posix"), ("hdf5", "mpiio")]


@contextmanager
def opened(
    world: MPI.Intracomm,
    folder: str,
    slots: Slots,
    parallel: bool = True,
    contents: Contents | None = None,
    **tier: Any,
) -> Iterator[list[FileContainer]]:
    """Containers as the engine opens them."""
    node = place_of(world)
    places = find_places(load({"mlp_offload": {"tiers": [{"name": "pfs", "dir": folder, **tier}]}}))
    built = patch.object(containers, "_parallel_hdf5", lambda: parallel and has_parallel_hdf5())
    with built, open_alone(places, slots, contents, node) as found:
        yield found


def visible(folder: str) -> list[str]:
    """What is in a folder but state files of an engine at work: on shared storage they have a name in one of ours."""
    return [name for name in os.listdir(folder) if not name.startswith(PREFIX)]


def ways() -> list[tuple[str, str, bool]]:
    """Container, transport, and whether HDF5 lays out in parallel."""
    serial = [(container, transport, False) for container, transport in KINDS]
    parallel = [("hdf5", transport, True) for transport in ("posix", "mpiio")]
    return serial + (parallel if has_parallel_hdf5() else [])


def test_every_container_over_every_transport(world: MPI.Intracomm) -> None:
    folder = folder_for_all(world)
    for container, transport, parallel in ways():
        tier = {"container": container, "transport": transport}
        with opened(world, folder, Slots(SLOT_BYTES, 8), parallel, **tier) as (found,):
            assert str(found) == f"{container} over {transport} in {folder}"
            conformance.check_container(found, seed=1000 * world.rank)
            conformance.fill(found, seed=1000 * world.rank)
            world.Barrier()
            conformance.check_filled(found, seed=1000 * world.rank)
            world.Barrier()
            assert os.listdir(folder) == [], "it has no name any more"
        world.Barrier()
    remove(world, folder)


def test_ranks_may_want_different_slots_or_none(world: MPI.Intracomm) -> None:
    folder = folder_for_all(world)
    first = world.rank == 0 and world.size > 1
    slots = Slots(SLOT_BYTES * (1 + world.rank), 0 if first else 2 * world.rank + 3)
    for container, transport, parallel in ways():
        with opened(world, folder, slots, parallel, container=container, transport=transport) as found:
            assert len(found) == (0 if first else 1)
            for mine in found:
                conformance.fill(mine, seed=world.rank)
            world.Barrier()
            for mine in found:
                conformance.check_filled(mine, seed=world.rank)
        world.Barrier()
    remove(world, folder)


def contents_of(rank: int, size: int) -> Contents:
    """A parameter of 10 x 10, cut into as many pieces as there are ranks, the last ones padded."""
    part = -(-100 // size)
    first = min(100, rank * part)
    piece = Piece("block/0.weight", (10, 10), first, min(part, 100 - first), 0, 0)
    return Contents("fp32", (RecordForm(part, 64, ("fp32", "exp_avg")),), (piece,))


def test_a_kept_file_is_the_same_whoever_laid_it_out(world: MPI.Intracomm) -> None:
    """Read back with h5py, by one rank, while the others still have it open."""
    from mlpo_hpc.storage.hdf5 import open_for_reading

    found: list[dict[str, Any]] = []
    for parallel in {False, has_parallel_hdf5()}:
        folder = folder_for_all(world)
        tier = {"container": "hdf5", "transport": "mpiio", "keep": True}
        slots = Slots(SLOT_BYTES, 4)
        with opened(world, folder, slots, parallel, contents_of(world.rank, world.size), **tier) as (mine,):
            conformance.fill(mine, seed=world.rank)
            world.Barrier()
            if world.rank == 0:
                ranks = []
                for name in sorted(os.listdir(folder)):
                    with open_for_reading(os.path.join(folder, name)) as file:
                        found.append(describe(file))
                        ranks += list(file["ranks"])
                        for rank, group in file["ranks"].items():
                            data = group["slots"][2].tobytes()
                            assert data == bytes(conformance.pattern(int(rank) + 2, SLOT_BYTES))
                assert sorted(map(int, ranks)) == list(range(world.size)), "each in the file of its node"
            world.Barrier()
        remove(world, folder)
    half = len(found) // 2 if has_parallel_hdf5() else 0
    assert found[:half] == found[len(found) - half :]


def describe(file: Any) -> dict[str, Any]:
    names: dict[str, Any] = {}
    file.visititems(
        lambda name, item: names.update({name: (getattr(item, "shape", None), str(getattr(item, "dtype", "")))})
    )
    names["rows"] = file["parameters/block/0.weight"][:].tolist()
    names["attributes"] = {key: value for key, value in file.attrs.items() if key != "created"}
    return {key: str(value) for key, value in names.items()}


def test_a_rank_that_ends_waits_for_nobody(world: MPI.Intracomm) -> None:
    folder = folder_for_all(world)
    with ExitStack() as endings:
        tier = {"container": "hdf5", "transport": "mpiio"}
        (mine,) = endings.enter_context(opened(world, folder, Slots(SLOT_BYTES, 2), **tier))
        if world.rank == 0:
            mine.close()
            mine.close()
        world.Barrier()
        if world.rank:
            conformance.check_any_size_comes_back(mine, seed=world.rank)
    remove(world, folder)


def test_large_counts_are_cut_and_counted(world: MPI.Intracomm) -> None:
    """https://github.com/open-mpi/ompi/issues/7045 and its kind; offsets beyond 2^32 lie in a sparse file."""
    from mlpo_hpc.storage import mpiio

    folder = folder_for_all(world)
    with opened(world, folder, Slots(2**30, 6), container="raw", transport="mpiio") as (mine,):
        view = conformance.pattern(world.rank, 3 * 2**20 + 4096)
        with patch.object(mpiio, "WRITE_BYTES", 2**20):
            mine.write(5, view)
        assert conformance.read(mine, 5, view.nbytes) == view
    if world.size == 1:
        large = patch.multiple(mpiio, WRITE_BYTES=2**30, READ_BYTES=2**30)
        with large, opened(world, folder, Slots(2**31 + 8192, 1), container="hdf5", transport="mpiio") as (mine,):
            view = conformance.aligned(2**31 + 8192)
            view[-8:] = view[2**31 - 4 : 2**31 + 4] = b"the end!"
            mine.write(0, view)
            back = conformance.read(mine, 0, view.nbytes)
            assert (bytes(back[-8:]), bytes(back[2**31 - 4 : 2**31 + 4])) == (b"the end!", b"the end!")
    remove(world, folder)


def test_faults_of_mpi_io_are_ours(world: MPI.Intracomm) -> None:
    """Never an abort from inside: each rank gets an exception that says what, where and what to do."""
    from mlpo_hpc.errors import CorruptState, StorageError
    from mlpo_hpc.storage.mpiio import MpiFile, create

    folder = folder_for_all(world)
    path = os.path.join(folder, f"file.{world.rank}")
    with pytest.raises(StorageError, match="ENOENT.*create the directory"):
        MpiFile(path)
    with pytest.raises(StorageError, match=r"creating a state file failed.*missing"):
        create(os.path.join(folder, "missing", "file"), {})
    create(path, {}, 8192)
    file = MpiFile(path)
    try:
        with pytest.raises(CorruptState, match="ends at byte 8192"):
            file.read(4096, conformance.aligned(8192))
        os.truncate(path, 4096)
        with pytest.raises(CorruptState, match="ends at byte 4096"):
            file.read(4096, conformance.aligned(4096))
    finally:
        file.close()
        file.close()
    with pytest.raises(StorageError, match="creating"):
        create(path, {})
    remove(world, folder)


def test_a_full_file_system_is_said(world: MPI.Intracomm) -> None:
    """During layout, and during a step; the transport's errno may be lost in MPI, its meaning not."""
    from mlpo_hpc.errors import TierFull
    from tests import testbed

    if len(set(world.allgather(place_of(world).key))) > 1:
        return  # a disk that the first node mounts is not seen on the other
    if reason := testbed.missing():
        print(f"test_a_full_file_system_is_said: skipped, {reason}", flush=True)
        assert "TEST_NOTHING_SKIPPED" not in os.environ
        return
    folder = folder_for_all(world)
    with ExitStack() as disks:
        if world.rank == 0:
            disks.enter_context(testbed.capped_disk(Path(folder), "small", 16 * 2**20))
        world.Barrier()
        small = os.path.join(folder, "small")
        for container, transport, parallel in ways():
            with opened(world, small, Slots(2**20, 40), parallel, container=container, transport=transport) as (mine,):
                with pytest.raises(TierFull, match="free space"):
                    for slot in range(40):
                        mine.write(slot, conformance.pattern(slot, 2**20))
                world.Barrier()
            world.Barrier()
        fill_up(world, small)
        for container, transport, parallel in ways()[2:]:
            with pytest.raises(TierFull, match=r"no room|ENOSPC"):
                opened(world, small, Slots(2**20, 4), parallel, container=container, transport=transport).__enter__()
            world.Barrier()
        names = os.listdir(small)
        assert sorted(names) == ["lost+found", "stuffing"], "nothing is left behind"
        world.Barrier()
    remove(world, folder)


def fill_up(world: MPI.Intracomm, folder: str) -> None:
    if world.rank == 0:
        with open(os.path.join(folder, "stuffing"), "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                os.fsync(file.fileno())
    world.Barrier()


def test_hints_that_mpi_ignores_are_said_once(world: MPI.Intracomm) -> None:
    from mlpo_hpc.state import node_file

    folder = folder_for_all(world)
    said: list[str] = []
    tier = {"container": "hdf5", "transport": "mpiio", "hints": {"cb_nodes": 7919, "striping_factor": 4}}
    with (
        patch.object(node_file, "warn", lambda text, *values: said.append(text % values)),
        opened(world, folder, Slots(SLOT_BYTES, 2), **tier) as (mine,),
    ):
        used = mine.transport.get_hints()
        conformance.check_any_size_comes_back(mine, seed=world.rank)
    for key, value in (("cb_nodes", "7919"), ("striping_factor", "4")):
        named = any(f"{key} = {value}" in text for text in said)
        assert named == (used.get(key) != value), (said, used)
    assert len(said) <= 1
    remove(world, folder)


def test_without_threads_bytes_go_by_posix(world: MPI.Intracomm) -> None:
    """What is so on one rank alone decides for all of them."""
    from mpi4py import MPI as mpi

    folder = folder_for_all(world)
    said: list[str] = []
    level = mpi.THREAD_FUNNELED if world.rank == world.size - 1 else mpi.THREAD_MULTIPLE
    with (
        patch.object(mpi, "Query_thread", lambda: level),
        patch.object(containers, "say", lambda text, *values: said.append(text % values)),
        opened(world, folder, Slots(SLOT_BYTES, 4), container="hdf5", transport="mpiio") as (mine,),
    ):
        assert str(mine) == f"hdf5 over posix in {folder}"
        assert "THREAD_MULTIPLE" in said[0]
        conformance.check_any_size_comes_back(mine, seed=world.rank)
    remove(world, folder)


def test_training_is_the_same_in_every_file(world: MPI.Intracomm) -> None:
    import torch

    folder = folder_for_all(world)
    weights = []
    for container, transport in KINDS:
        tier = {"name": "disk", "dir": folder, "container": container, "transport": transport}
        engine, flat = train(world, folder, "off", 3, tiers=[tier])
        weights.append(flat)
        engine.destroy()
    assert all(torch.equal(weights[0], other) for other in weights[1:])
    world.Barrier()
    assert os.listdir(folder) == []
    remove(world, folder)


def test_a_kept_file_holds_the_moments_of_every_parameter(world: MPI.Intracomm) -> None:
    """What examples/read_moments.py reads from two tiers is what DeepSpeed's API says."""
    import h5py
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from examples.read_moments import read

    folder = folder_for_all(world)
    dirs = [os.path.join(folder, name) for name in ("nvme", "pfs")]
    if world.rank == 0:
        for path in dirs:
            os.mkdir(path)
    world.Barrier()
    tiers = [
        {"name": os.path.basename(path), "dir": path, "keep": True, "read_bps": 1, "write_bps": 1} for path in dirs
    ]
    engine, _ = train(world, folder, "off", 3, tiers=tiers)
    expected = {}
    for name, param in engine.module.named_parameters():
        expected[name] = {
            "fp32": safe_get_full_fp32_param(param),
            **{key: safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")},
        }
    engine.destroy()
    num_nodes = len(set(world.allgather(place_of(world).key)))
    if world.rank == 0:
        paths = [os.path.join(path, name) for path in dirs for name in os.listdir(path)]
        assert len(paths) == 2 * num_nodes
        files = [h5py.File(path) for path in paths]
        assert set(files[0]["parameters"]) == set(expected)
        for name, vectors in expected.items():
            found = read(name, files)
            assert set(found) == set(vectors)
            assert all(torch.equal(torch.from_numpy(found[key]), vectors[key]) for key in vectors), name
        for file in files:
            file.close()
    remove(world, folder)


def test_an_altered_chunk_is_found_and_named(world: MPI.Intracomm) -> None:
    """A bit flips in the PFS file between two steps."""
    from mlpo_hpc.errors import CorruptState

    folder = folder_for_all(world)
    tier = {"name": "disk", "dir": folder, "container": "hdf5", "transport": "mpiio", "keep": True}
    engine, _ = train(world, folder, "off", 2, tiers=[tier])
    pipeline = engine.optimizer._store.pipeline
    pipeline.flush()
    container = pipeline.tiers[0].container
    with open(container.path, "r+b") as file:
        for slot in pipeline.held(0):
            file.seek(container.base_bytes + slot * container.slot_bytes + 77)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    text = ""
    pipeline.begin(list(range(len(pipeline.table))))
    try:
        for subgroup in range(len(pipeline.table)):
            pipeline.get(subgroup)
            pipeline.put(subgroup, dirty=False)
    except CorruptState as error:
        text = str(error)
    texts = [text for text in world.allgather(text) if text]
    assert texts, "a rank alone on its node may have all of its state in memory, the others have not"
    for text in texts:
        assert "is not what was written there" in text
        assert "state of subgroup" in text
        assert ".weight" in text or ".bias" in text
        assert "slot" in text
    engine.optimizer._store.close()
    remove(world, folder)


def test_the_gate_passes_with_hdf5_over_mpiio(world: MPI.Intracomm) -> None:
    """Bit for bit stock DeepSpeed's, in each type, with clipping, accumulation, and overflow skips."""
    from tests.integration import cases, gate
    from tests.pairwise import pairwise

    if world.size > 2:
        return  # the gate's models are for one and two ranks
    place_of(world)
    folder = folder_for_all(world)
    dirs = [os.path.join(folder, name) for name in "abc"]
    if world.rank == 0:
        for path in dirs:
            os.mkdir(path)
    world.Barrier()
    fitting = [case for case in pairwise(cases.FACTORS) if case["files"] == "hdf5" and case["budget"] != "all"]
    chosen = [next(case for case in fitting if case["dtype"] == dtype) for dtype in cases.DTYPES]
    for case in chosen:
        with gate.any_type_and_nothing_to_compile():
            found = gate.run_case(case, dirs)
        assert found["differs"] == [], (case, found)
        assert found["files"][-1].startswith("hdf5 over mpiio"), found
    remove(world, folder)


def test_whole_state_goes_out_and_comes_back(world: MPI.Intracomm) -> None:
    """Collective and independent hyperslabs with parallel HDF5, each rank by itself without."""
    import h5py
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from mlpo_hpc.engine import state_file

    folder = folder_for_all(world)
    tier = {"name": "disk", "dir": folder}
    engine, _ = train(world, folder, "off", 2, tiers=[tier])
    params = dict(engine.module.named_parameters())
    path = os.path.join(folder, "whole.h5")
    steps = 2
    for parallel in {False, has_parallel_hdf5()}:
        for collective in {False, parallel}:
            with patch.object(state_file, "has_parallel_hdf5", lambda parallel=parallel: parallel):
                step_again(engine)
                steps += 1
                engine.optimizer.save_hdf5(path, collective)
                expected = {name: safe_get_full_optimizer_state(param, "exp_avg") for name, param in params.items()}
                master = safe_get_full_fp32_param(params["2.weight"])
                with h5py.File(path) as file:
                    for name, moments in expected.items():
                        assert torch.equal(torch.from_numpy(file[f"state/{name}/exp_avg"][...]), moments), name
                    assert file["state/2.weight"].attrs["step"] == steps, "what was loaded goes on from its own step"
                world.Barrier()
                step_again(engine)
                assert not torch.equal(safe_get_full_fp32_param(params["2.weight"]), master)
                engine.optimizer.load_hdf5(path, collective)
                assert torch.equal(safe_get_full_fp32_param(params["2.weight"]), master)
                assert visible(folder) == ["whole.h5"]
                world.Barrier()
    engine.destroy()
    remove(world, folder)


def test_whole_state_beside_transfers_that_take_turns(world: MPI.Intracomm) -> None:
    """ROMIO holds one lock in a collective call: a transfer that has a tier's token would wait for it for ever."""
    import torch

    folder = folder_for_all(world)
    tier = {"name": "disk", "dir": folder, "container": "hdf5", "transport": "mpiio"}
    engine, _ = train(world, folder, "mpi", 2, tiers=[tier])
    path = os.path.join(folder, "whole.h5")
    for collective in (False, has_parallel_hdf5()):
        for _ in range(3):
            step_again(engine)
            engine.optimizer.save_hdf5(path, collective)
            before = [t.clone() for t in engine.optimizer.fp16_partitioned_groups_flat]
            step_again(engine)
            engine.optimizer.load_hdf5(path, collective)
            after = engine.optimizer.fp16_partitioned_groups_flat
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "16-bit weights too"
    engine.destroy()
    remove(world, folder)


def cannot_write(*_: Any) -> None:
    from mlpo_hpc.errors import StorageError

    raise StorageError("the disk is full")


def test_a_rank_that_fails_in_a_bulk_call_leaves_nobody_waiting(world: MPI.Intracomm) -> None:
    """Its record cannot be had, or a write of the last records fails: all raise, and the file before is whole."""
    import h5py

    from mlpo_hpc.engine import state_file
    from mlpo_hpc.errors import StorageError

    folder = folder_for_all(world)
    path = os.path.join(folder, "whole.h5")
    last = world.rank == world.size - 1
    for collective in {False, has_parallel_hdf5()}:
        engine, _ = train(world, folder, "off", 2, tiers=[{"name": "disk", "dir": folder}])
        engine.optimizer.save_hdf5(path, collective)
        real, calls = state_file._Records.values, []

        def fail(self: Any, *arguments: Any, real: Any = real, calls: list[int] = calls) -> Any:
            calls.append(1)
            if last and len(calls) == 4:
                raise StorageError("no luck")
            return real(self, *arguments)

        for call in (engine.optimizer.save_hdf5, engine.optimizer.load_hdf5):
            calls.clear()
            with patch.object(state_file._Records, "values", fail), pytest.raises(StorageError, match="no luck"):
                call(path, collective)
        engine.optimizer.load_hdf5(path, collective)  # nothing is broken by it
        # The first rank: one alone on its node may have all of its state in memory.
        writing = patch.object(FileContainer, "_write", cannot_write) if world.rank == 0 else ExitStack()
        with writing, pytest.raises(StorageError, match="the state was not loaded(.|\n)*disk is full"):
            engine.optimizer.load_hdf5(path, collective)
        engine.destroy()
        world.Barrier()
        assert visible(folder) == ["whole.h5"]
        with h5py.File(path) as file:
            assert file["state/2.weight/exp_avg"].shape == (64, 64)
        world.Barrier()
    remove(world, folder)


def test_h5py_built_with_mpi_does_not_start_it(world: MPI.Intracomm) -> None:
    """Under torchrun and on login nodes nobody may."""
    code = (
        "import sys; from mlpo_hpc.storage.hdf5 import lay_out; lay_out(sys.argv[1], [], {}, 4096); "
        "m = sys.modules.get('mpi4py.MPI'); print(m is None or not m.Is_initialized())"
    )
    if world.rank == 0:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PMIX", "SLURM_"))}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", code, os.path.join(folder, "state.h5")]
            done = subprocess.run(command, capture_output=True, text=True, env=clean, close_fds=False)
        assert done.stdout.strip() == "True", done.stdout + done.stderr
    world.Barrier()


def test_hints_that_nobody_takes_are_said(world: MPI.Intracomm) -> None:
    from mlpo_hpc.state import node_file

    folder = folder_for_all(world)
    for tier in ({"container": "raw"}, {"container": "raw", "transport": "mpiio"}):
        said: list[str] = []
        tell = patch.object(node_file, "warn", lambda text, *values, said=said: said.append(text % values))
        with tell, opened(world, folder, Slots(SLOT_BYTES, 2), hints={"nobody_knows": 1}, **tier) as (mine,):
            expected = 0 if mine.facts()["transport"] == "mpiio" and "nobody_knows" in mine.transport.get_hints() else 1
            assert len(said) == expected, said
    remove(world, folder)


def leave_without_destroy(world: MPI.Intracomm) -> Any:
    """An engine whose writes by MPI-IO are still under way when the interpreter ends: the exit must wait for them."""
    folder = folder_for_all(world)
    if world.rank == 0:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tier = {"name": "disk", "dir": folder, "container": "hdf5", "transport": "mpiio"}
    engine, _ = train(world, folder, "off", 2, tiers=[tier], order="sequential", host_memory=300_000)
    tiers = engine.optimizer._store.pipeline.tiers
    for container in [tier.container for tier in tiers]:
        transport = (container.member(container.last) if isinstance(container, Generations) else container).transport
        real = transport.write
        transport.write = lambda *piece, real=real: (time.sleep(0.5), real(*piece))
    step_again(engine)
    return engine


def test_ranks_that_do_not_see_one_directory_get_files_of_their_own(world: MPI.Intracomm) -> None:
    """Containers of one host name; what is to be kept is an error on all of them."""
    from mlpo_hpc.errors import ConfigError

    folder = folder_for_all(world)
    blind = patch.object(containers.os.path, "isdir", lambda path: world.rank != world.size - 1)
    said: list[str] = []
    tell = patch.object(containers, "say", lambda text, *values: said.append(text % values))
    places = find_places(load({"mlp_offload": {"tiers": [{"name": "pfs", "dir": folder, "container": "hdf5"}]}}))
    node = place_of(world)
    with blind, tell:
        assert containers.pick_means(places, node)["pfs"].container == "raw"
    assert "do not see the same files" in said[0]
    keep = [replace(place, tier=place.tier.model_copy(update={"keep": True})) for place in places]
    with blind, tell, pytest.raises(ConfigError, match="do without 'keep'"):
        containers.pick_means(keep, node)
    world.Barrier()
    assert os.listdir(folder) == []
    remove(world, folder)
