"""mlpo ckpt list, verify and export: what is wrong is found and named, what is exported is the truth bit for bit."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import stat
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

from mlpo_hpc.checkpoint import export_safetensors, verify
from mlpo_hpc.checkpoint.export_hdf5 import export_hdf5
from mlpo_hpc.checkpoint.export_universal import export_universal
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.target import share
from mlpo_hpc.checkpoint.tensors_file import Tensor, read_header
from mlpo_hpc.cli import main
from mlpo_hpc.cluster.crowd import Alone, run_together
from mlpo_hpc.errors import StorageError
from tests.checkpoints import save, usual
from tests.unit.test_ckpt_read import rewrite, same
from tests.unit.test_universal import check_universal

FORMS = ["hdf5", "safetensors", "universal"]
SOME_FORMS = ["hdf5", pytest.param("safetensors", marks=pytest.mark.whole), "universal"]


def mlpo(*arguments) -> tuple[int, str]:
    """Exit code and output."""
    done = CliRunner().invoke(main, ["ckpt", *map(str, arguments)], catch_exceptions=False)
    return done.exit_code, done.output


def as_json(*arguments):
    done = CliRunner().invoke(main, ["ckpt", *map(str, arguments), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def names(directory: Path) -> list[str]:
    """What is in a directory, but for the tests' own folder for temporary files."""
    return sorted(path.name for path in directory.iterdir() if path.name != "tmp")


def files_of(saved, kind: str) -> list[Path]:
    return sorted(saved.folder.glob(f"{kind}-*"))


# ---- list -----------------------------------------------------------------------------------


def test_the_list_says_what_is_what(tmp_path):
    save(tmp_path, usual(step=1), "one")
    save(tmp_path, usual(step=12, world_size=3), "two")
    assert as_json("list", tmp_path)["latest"] == "two"
    code, text = mlpo("list", tmp_path)
    assert code == 0
    lines = text.splitlines()
    assert lines[1].split()[:2] == ["two", "12"]
    assert lines[1].rstrip().endswith("committed, latest")
    assert f"{100 * 64 + 33 * 77 + 64 + 1 + 5000:,}" in lines[1]

    shutil.copytree(tmp_path / "one", tmp_path / "cut")
    (tmp_path / "cut/manifest.json").unlink()
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock/zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "other").mkdir()
    states = {each["tag"]: each["state"] for each in as_json("list", tmp_path)["checkpoints"]}
    assert states == {"two": "committed", "one": "committed", "cut": "unfinished", "stock": "deepspeed"}
    assert mlpo("list", tmp_path)[0] == 0, "a save may be going on"


@pytest.mark.parametrize("hint", [b"", b"nowhere", b"../one", b"\xff\xfe"])
def test_a_torn_latest_is_told_and_the_newest_is_offered(tmp_path, hint):
    save(tmp_path, usual(step=1), "one")
    save(tmp_path, usual(step=2), "two")
    (tmp_path / "latest").write_bytes(hint)
    code, text = mlpo("list", tmp_path)
    assert code == 1
    assert "warning: the file does not name a checkpoint" in text
    assert "latest" in next(line for line in text.splitlines() if line.startswith("two"))
    assert mlpo("verify", tmp_path) == (0, mlpo("verify", tmp_path / "two")[1])


def test_the_list_names_what_is_damaged_without_reading_state(tmp_path):
    saved = save(tmp_path, usual(), "one")
    files_of(saved, "shard")[1].unlink()
    code, text = mlpo("list", tmp_path)
    assert code == 1
    assert "damaged" in text
    assert f"one: a file of the checkpoint is missing: host {os.uname().nodename}" in text


def test_an_empty_directory_has_none(tmp_path):
    assert mlpo("list", tmp_path) == (1, "there is no checkpoint to load\n")
    code, text = mlpo("verify", tmp_path)
    assert code == 1
    assert "no checkpoint of mlpo_hpc" in text
    assert mlpo("list", tmp_path / "nowhere")[0] == 2


# ---- verify ---------------------------------------------------------------------------------


def test_a_flipped_bit_of_any_chunk_is_found_and_its_parameter_named(tmp_path):
    saved = save(tmp_path, usual(), "one")
    shards = Reader(saved.folder).shards
    chunks = [chunk for s in shards for r in s.records for chunk in (*r.chunks, *r.weights)]
    assert len(chunks) > 40
    for chunk in chunks:
        path = saved.folder / chunk.file
        for offset in (chunk.offset, chunk.offset + chunk.nbytes - 1):
            flip(path, offset)
            (fault,) = verify.verify(saved.folder, lambda *_: None).faults
            flip(path, offset)
            assert fault.file == chunk.file
            assert f"bytes {chunk.offset} to {chunk.offset + chunk.nbytes} of" in fault.text
            assert set(fault.parameters) <= set(saved.run.shapes)
            assert fault.parameters
    assert verify.verify(saved.folder, lambda *_: None).faults == []


def test_exactly_the_parameters_of_a_chunk_are_named(tmp_path):
    """Those that cannot be read any more: of a short record's exceptions all of the subgroup, of padding none."""
    saved = save(tmp_path, usual(chunk_bytes=1024), "one")
    chunks = [chunk for s in Reader(saved.folder).shards for r in s.records for chunk in (*r.chunks, *r.weights)]
    for chunk in chunks:
        flip(saved.folder / chunk.file, chunk.offset)
        (fault,) = verify.verify(saved.folder, lambda *_: None).faults
        lost = {name for name in saved.run.shapes if not readable(saved, name)}
        flip(saved.folder / chunk.file, chunk.offset)
        assert lost == set(fault.parameters), chunk


def readable(saved, name) -> bool:
    reader = Reader(saved.folder)
    numel = math.prod(saved.run.shapes[name])
    try:
        reader.weights(name, 0, numel)
        return all(same(reader.values(name, v, 0, numel), saved.vectors[name][v]) for v in saved.vectors[name])
    except StorageError:
        return False
    finally:
        reader.close()


@pytest.mark.parametrize("kind", ["shard", "tensors", "manifest"])
def test_a_flipped_bit_of_any_small_file_is_found(tmp_path, kind):
    saved = save(tmp_path, usual(), "one")
    paths = [saved.folder / "manifest.json"] if kind == "manifest" else files_of(saved, kind)
    for path in paths:
        for offset in range(0, path.stat().st_size, max(1, path.stat().st_size // 25)):
            flip(path, offset)
            faults = verify.verify(saved.folder, lambda *_: None).faults
            flip(path, offset)
            assert path.name in {fault.file for fault in faults}


@pytest.mark.parametrize("kind", ["state", "shard", "tensors"])
@pytest.mark.parametrize("how", ["missing", "short", "link"])
def test_files_that_are_missing_short_or_links(tmp_path, kind, how):
    saved = save(tmp_path, usual(), "one")
    path = files_of(saved, kind)[1]
    if how == "short":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.rename(tmp_path / "away")
    if how == "link":
        path.symlink_to(tmp_path / "away")
    found = as_json("verify", tmp_path)
    assert found["sound"] is False
    assert path.name in {fault["file"] for fault in found["faults"]}
    lost = {name for fault in found["faults"] for name in fault["parameters"]}
    assert lost, "parameters are named"
    code, text = mlpo("verify", tmp_path / "one")
    assert code == 1
    assert path.name in text
    assert "there is no older checkpoint that is sound" in text


def test_a_link_or_a_way_out_in_the_manifests_place_is_refused(tmp_path):
    saved = save(tmp_path, usual(), "one")
    shard = files_of(saved, "shard")[0].name
    rewrite(saved.folder, lambda text: text.replace(shard, f"../one/{shard}"))
    assert "is not the name of a file in the checkpoint" in mlpo("verify", tmp_path)[1]
    (saved.folder / "manifest.json").rename(tmp_path / "away")
    (saved.folder / "manifest.json").symlink_to(tmp_path / "away")
    code, text = mlpo("verify", tmp_path)
    assert code == 1
    assert "a symbolic link" in text


def test_the_newest_older_one_that_is_sound_is_offered(tmp_path):
    for step, tag in enumerate(["one", "two", "three", "four"], start=1):
        save(tmp_path, usual(step=step, seed=step), tag)
    for tag in ("two", "three"):
        flip(next((tmp_path / tag).glob("state-*")), 5)
    assert as_json("verify", tmp_path)["sound"] is True
    found = as_json("verify", tmp_path / "three")
    assert found["newest_sound"] == "one", "two is damaged, four is newer"
    code, text = mlpo("verify", tmp_path / "three")
    assert code == 1
    assert text.rstrip().endswith(f"the newest older checkpoint that is sound: {tmp_path / 'one'}")


def test_a_newer_version_and_an_unfinished_one(tmp_path):
    save(tmp_path, usual(), "one")
    newer = save(tmp_path, usual(step=2), "two")
    rewrite(newer.folder, lambda text: text.replace('"version": 1', '"version": 7'))
    code, text = mlpo("verify", tmp_path)
    assert code == 1
    assert "version 7 of the checkpoint format, this library knows 1: install a newer mlpo_hpc" in text
    assert text.rstrip().endswith(str(tmp_path / "one"))
    (newer.folder / "manifest.json").unlink()
    assert "a file of the checkpoint is missing" in mlpo("verify", newer.folder)[1]


def test_items_that_are_missing_or_twice(tmp_path, monkeypatch):
    """A writer that is wrong: all checksums are right."""
    import tests.checkpoints as generator

    real = generator.PieceEntry

    def shifted(**values):
        return real(**values | ({"first": values["first"] - 1} if values["name"] == "norm" and values["first"] else {}))

    monkeypatch.setattr(generator, "PieceEntry", shifted)
    save(tmp_path, usual(), "one")
    found = as_json("verify", tmp_path)
    assert [fault["parameters"] for fault in found["faults"]] == [["norm"], ["norm"]]
    assert "items 31 to 31 of norm are there twice" in found["faults"][0]["text"]
    assert "items 63 to 63 of norm are in no shard" in found["faults"][1]["text"]


def test_a_device_that_fails_is_a_fault_with_file_and_parameter(tmp_path, monkeypatch):
    save(tmp_path, usual(), "one")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(verify.os, "pread", fail)
    faults = verify.verify(tmp_path / "one", lambda *_: None).faults
    assert all("EIO" in fault.text for fault in faults if fault.file.endswith(".bin"))
    assert {name for fault in faults for name in fault.parameters} >= set(usual().shapes)


# ---- export ---------------------------------------------------------------------------------


def exported(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        tensors |= load_file(path)
    return tensors


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def truth(saved, fp32: bool) -> dict[str, torch.Tensor]:
    """Everything as the model has it."""
    if fp32:
        trained = {n: torch.from_numpy(saved.vectors[n]["fp32"]).reshape(s) for n, s in saved.run.shapes.items()}
    else:
        trained = dict(saved.weights)
    frozen = {name: tensor.float() if fp32 else tensor for name, tensor in saved.run.frozen.items()}
    return {**trained, **frozen, **saved.run.buffers}


@pytest.mark.parametrize("kind", [None, "bf16", "fp32"])
@pytest.mark.parametrize("max_bytes", ["5GB", "8kB", "1B"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_safetensors_are_the_truth(tmp_path, kind, max_bytes, world_size):
    saved = save(tmp_path, usual(world_size=world_size), "one")
    arguments = ["--to", "safetensors", "--max-file-bytes", max_bytes, *(["--type", kind] if kind else [])]
    code, text = mlpo("export", tmp_path, tmp_path / "model", *arguments)
    assert code == 0, text
    wanted = truth(saved, kind == "fp32")
    found = exported(tmp_path / "model")
    assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(t) for name, t in wanted.items()}
    written = set(names(tmp_path / "model"))
    if max_bytes == "5GB":
        assert written == {"model.safetensors"}
    else:
        index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
        assert set(index["weight_map"]) == set(wanted)
        assert set(index["weight_map"].values()) == written - {"model.safetensors.index.json"}
        for name, file in index["weight_map"].items():
            assert name in read_header(tmp_path / "model" / file)
    assert names(tmp_path) == ["latest", "model", "one"]


@pytest.mark.parametrize("weight_type", ["float16", "float32"])
def test_models_in_other_types(tmp_path, weight_type):
    saved = save(tmp_path, usual(weight_type=weight_type), "one")
    code, text = mlpo("export", tmp_path, tmp_path / "wrong", "--to", "safetensors", "--type", "bf16")
    assert code == 1
    assert f"the model's weights are {weight_type}" in text
    assert mlpo("export", tmp_path, tmp_path / "model", "--to", "safetensors")[0] == 0
    found = exported(tmp_path / "model")
    assert all(bits(found[name]) == bits(weights) for name, weights in saved.weights.items())


def test_large_tensors_go_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("mlpo_hpc.checkpoint.weights.PIECE_ITEMS", 100)
    monkeypatch.setattr("mlpo_hpc.checkpoint.export_hdf5.PIECE_ITEMS", 100)
    saved = save(tmp_path, usual(), "one")
    steps = []
    export_safetensors.export_safetensors(
        Reader(saved.folder), tmp_path / "model", Alone(), lambda *told: steps.append(told), "F32", 10**9
    )
    wanted = truth(saved, True)
    assert {name: bits(tensor) for name, tensor in exported(tmp_path / "model").items()} == {
        name: bits(tensor) for name, tensor in wanted.items()
    }
    assert max(done for done, _ in steps) <= 400
    assert sum(done for done, _ in steps) == steps[0][1] == sum(tensor.nbytes for tensor in wanted.values())
    export_hdf5(Reader(saved.folder), tmp_path / "state.h5", Alone(), lambda *_: None)
    check_hdf5(tmp_path / "state.h5", saved)


def check_hdf5(path: Path, saved) -> None:
    import h5py

    from mlpo_hpc.storage.bulk import SlabFile

    with h5py.File(path) as file:
        for name, shape in saved.run.shapes.items():
            assert dict(file[f"state/{name}"].attrs) == {"step": saved.run.step}
            assert set(file[f"state/{name}"]) == set(saved.vectors[name])
            for vector, values in saved.vectors[name].items():
                found = file[f"state/{name}/{vector}"]
                assert found.shape == shape
                assert same(np.asarray(found[()], np.float32).reshape(-1), values)
    slabs = SlabFile(str(path))
    assert set(slabs.parameters()) == set(saved.run.shapes), "an engine loads it"
    slabs.close()


@pytest.mark.parametrize("shapes", [None, {"a": (3, 0), "b": (4,), "c.d": ()}])
def test_hdf5_is_the_truth(tmp_path, shapes):
    saved = save(tmp_path, usual(**({"shapes": shapes} if shapes else {})), "one")
    code, text = mlpo("export", tmp_path / "one", tmp_path / "state.h5", "--to", "hdf5")
    assert code == 0, text
    check_hdf5(tmp_path / "state.h5", saved)
    assert names(tmp_path) == ["latest", "one", "state.h5"]


def _export_together(form, source, target, ranks):
    if form == "hdf5":
        return export_hdf5(Reader(source), target, ranks, lambda *_: None)
    if form == "universal":
        return export_universal(Reader(source), target, ranks, lambda *_: None)
    return export_safetensors.export_safetensors(Reader(source), target, ranks, lambda *_: None, None, 8000)


@pytest.mark.parametrize("form", SOME_FORMS)
def test_processes_share_the_work(tmp_path, form):
    saved = save(tmp_path, usual(), "one")
    target = tmp_path / "target"
    run_together(3, partial(_export_together, form, saved.folder, target))
    if form == "hdf5":
        check_hdf5(target, saved)
    elif form == "universal":
        check_universal(target, saved)
    else:
        assert {n: bits(t) for n, t in exported(target).items()} == {n: bits(t) for n, t in truth(saved, False).items()}


@pytest.mark.parametrize("form", SOME_FORMS)
def test_what_one_process_finds_wrong_ends_all_and_nothing_is_left(tmp_path, form):
    saved = save(tmp_path, usual(), "one")
    path = files_of(saved, "state")[1]
    record = Reader(saved.folder).shards[1].records[-1]  # of parameters that other processes than the first have
    for chunk in (record.chunks[0], record.weights[-1]):
        flip(path, chunk.offset)
    with pytest.raises(StorageError, match=rf"(block\.0|head)\.w is not what was saved.*{path.name}"):
        run_together(3, partial(_export_together, form, saved.folder, tmp_path / "target"))
    assert names(tmp_path) == ["latest", "one"]


class Rank(Alone):
    """Which of how many."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("sizes", [[], [0], [5], [1, 1, 1, 1], [100, 1, 1], [0, 0, 7, 0], list(range(50))])
@pytest.mark.parametrize("num_ranks", [1, 2, 7])
def test_each_piece_of_work_is_done_by_one(sizes, num_ranks):
    shares = [share(sizes, Rank(rank, num_ranks)) for rank in range(num_ranks)]
    assert [number for mine in shares for number in mine] == list(range(len(sizes)))
    ideal = sum(sizes) / num_ranks
    assert all(sum(sizes[n] for n in mine) <= ideal + max(sizes, default=0) for mine in shares)


@pytest.mark.parametrize("form", FORMS)
def test_exports_are_private_and_replace_nothing(tmp_path, form):
    save(tmp_path, usual(), "one")
    target = tmp_path / "target"
    assert mlpo("export", tmp_path, target, "--to", form)[0] == 0
    for path in [target, *target.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    for existing in ("target", "dangling", "empty"):
        if existing == "dangling":
            (tmp_path / existing).symlink_to(tmp_path / "nowhere")
        elif existing == "empty":
            (tmp_path / existing).mkdir()
        code, text = mlpo("export", tmp_path, tmp_path / existing, "--to", form)
        assert code == 1
        assert f"give another name than host {os.uname().nodename}" in text
    assert not list(tmp_path.glob("*.partial"))
    (tmp_path / "new.partial").mkdir()
    code, text = mlpo("export", tmp_path, tmp_path / "new", "--to", form)
    assert code == 1
    assert "another export to new goes on, or was killed" in text
    assert (tmp_path / "new.partial").exists(), "it is not ours"


@pytest.mark.parametrize("form", FORMS)
def test_damage_names_file_and_parameter_and_the_older_one_and_leaves_nothing(tmp_path, form):
    save(tmp_path, usual(step=1), "one")
    saved = save(tmp_path, usual(step=2), "two")
    record = Reader(saved.folder).shards[0].records[0]
    flip(saved.folder / record.weights[0].file, record.weights[0].offset)
    flip(saved.folder / record.chunks[0].file, record.chunks[0].offset)
    code, text = mlpo("export", tmp_path, tmp_path / "target", "--to", form)
    assert code == 1
    assert "embed.w is not what was saved" in text
    assert record.chunks[0].file in text
    assert "There are also: one" in text
    assert names(tmp_path) == ["latest", "one", "two"]


@pytest.mark.parametrize("form", ["safetensors", "universal"])
def test_a_damaged_frozen_parameter_is_not_exported(tmp_path, form):
    saved = save(tmp_path, usual(), "one")
    path = files_of(saved, "tensors")[1]
    flip(path, path.stat().st_size - 1)
    code, text = mlpo("export", tmp_path, tmp_path / "target", "--to", form)
    assert code == 1
    assert path.name in text
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("form", FORMS)
def test_a_full_or_failing_file_system_leaves_nothing(tmp_path, monkeypatch, form, number):
    save(tmp_path, usual(), "one")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("mlpo_hpc.storage.bulk.os.pwrite" if form == "hdf5" else "os.fsync", fail)
    code, text = mlpo("export", tmp_path, tmp_path / "target", "--to", form)
    assert code == 1
    assert errno.errorcode[number] in text
    assert "target.partial" in text
    assert names(tmp_path) == ["latest", "one"]


@pytest.mark.parametrize("form", FORMS)
def test_an_export_that_is_ended_leaves_nothing(tmp_path, monkeypatch, form):
    save(tmp_path, usual(), "one")
    real, reads = Reader._read, []

    def ended(self, source, *arguments):
        reads.append(source)
        if len(reads) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, source, *arguments)

    monkeypatch.setattr(Reader, "_read", ended)
    kind = [] if form == "universal" else ["--type", "fp32"]
    assert mlpo("export", tmp_path, tmp_path / "target", "--to", form, *kind)[0] == 1
    assert len(reads) == 3
    assert names(tmp_path) == ["latest", "one"]


def test_wrong_usage(tmp_path):
    save(tmp_path, usual(), "one")
    for arguments in (
        ["--to", "hdf5", "--type", "bf16"],
        ["--to", "universal", "--type", "bf16"],
        ["--to", "safetensors", "--max-file-bytes", "much"],
        ["--to", "pickle"],
        [],
    ):
        assert mlpo("export", tmp_path, tmp_path / "x", *arguments)[0] == 2
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock/zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"x")
    code, text = mlpo("export", tmp_path / "stock", tmp_path / "x", "--to", "hdf5")
    assert code == 1
    assert "DeepSpeed's own format" in text


@pytest.mark.parametrize(
    "header", [b"", b"{}", b"[]", b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}', b"\xff"]
)
def test_files_that_are_no_safetensors(tmp_path, header):
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    if header == b"{}":
        assert read_header(path) == {}
    else:
        with pytest.raises(StorageError, match="x"):
            read_header(path)


def test_files_are_cut_by_size_and_aligned():
    tensors = {"a": Tensor("BOOL", (3,), 3), "b": Tensor("F32", (2,), 8), "c": Tensor("F32", (9,), 36)}
    files = export_safetensors.cut(tensors, 12)
    assert [list(some) for some in files.values()] == [["b", "a"], ["c"]]
    assert list(files) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


# ---- the docs -------------------------------------------------------------------------------

DOCS = Path(__file__).parent.parent.parent / "docs/checkpoints.md"


def test_the_commands_of_the_docs_and_the_help_do_what_they_say(tmp_path, monkeypatch):
    save(tmp_path / "run/checkpoints", usual(step=1000), "global_step1000")
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    helps = [mlpo(name, "--help")[1] for name in ("list", "verify", "export")]
    lines = [line.strip() for text in (DOCS.read_text(), *helps) for line in text.splitlines()]
    commands = [line.removeprefix("srun -n8 ").split("  ")[0].split() for line in lines if "mlpo ckpt" in line[:20]]
    commands = [
        words[2:] for words in commands if words[:2] == ["mlpo", "ckpt"] and words[2] in ("list", "verify", "export")
    ]
    assert len(commands) >= 15
    for words in commands:
        for path in (tmp_path / "model", tmp_path / "universal", tmp_path / "state.h5"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (tmp_path / "universal").mkdir()
        code, text = mlpo(*map(os.path.expandvars, words))
        assert code == 0, (words, text)


def test_the_programs_of_the_docs_read_what_is_there(tmp_path, monkeypatch, capsys):
    saved = save(tmp_path, usual(step=1000), "global_step1000")
    mlpo("export", tmp_path, tmp_path / "state.h5", "--to", "hdf5")
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    found: dict = {}
    for program in programs:
        exec(program, found)
    assert len(programs) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "1000.0"
    assert found["weights"] == saved.weights["embed.w"].reshape(-1).view(torch.uint8).numpy().tobytes()
