"""A universal checkpoint: the truth bit for bit, in files that torch loads; what DeepSpeed could not use is refused.

`tests/integration/test_universal.py` compares it with what DeepSpeed's own converter makes.
"""

from __future__ import annotations

import json
import math
import pickle
import tempfile
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpo_hpc.checkpoint import torch_file
from mlpo_hpc.checkpoint.export_universal import export_universal
from mlpo_hpc.checkpoint.read import Reader
from mlpo_hpc.checkpoint.torch_file import Foreign, Streamed
from mlpo_hpc.cli import main
from mlpo_hpc.cluster.crowd import Alone
from tests import checkpoints
from tests.checkpoints import RUNS, cut, save, usual
from tests.unit.test_ckpt_read import rewrite, same


class Unpickler(pickle.Unpickler):
    """Without DeepSpeed."""

    def find_class(self, module, name):
        if module.startswith("deepspeed."):
            return type(name, (int,) if name == "ZeroStageEnum" else (), {"__module__": module})
        return super().find_class(module, name)


def load(path: Path):
    without = types.SimpleNamespace(Unpickler=Unpickler, __name__="without")
    return torch.load(path, weights_only=False, pickle_module=without)


def export(saved, target: Path):
    reader = Reader(saved.folder)
    try:
        return export_universal(reader, target, Alone(), lambda *_: None)
    finally:
        reader.close()


def mlpo(*arguments) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["ckpt", "export", *map(str, arguments), "--to", "universal"])
    return done.exit_code, done.output


def check_universal(folder: Path, saved) -> None:
    """Everything in it."""
    run, world_size = saved.run, saved.run.world_size
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["zero", *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world_size))]
    )
    assert {path.name for path in (folder / "zero").iterdir()} == {*run.shapes, "optimizer_state.pt"}
    for name, vectors in saved.vectors.items():
        assert {path.name for path in (folder / "zero" / name).iterdir()} == {f"{vector}.pt" for vector in vectors}
        for vector, values in vectors.items():
            path = folder / "zero" / name / f"{vector}.pt"
            for found in (torch.load(path), torch.load(path, mmap=True)):
                assert found.requires_grad == (vector == "fp32")
                assert found.shape == values.shape
                assert same(found.detach().numpy(), values)
    check_optimizer(load(folder / "zero/optimizer_state.pt"), saved)
    for rank in range(world_size):
        check_engine(torch.load(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"), saved, rank)
    assert (folder.parent / "latest_universal").read_text() == folder.name


def check_optimizer(found, saved) -> None:
    """Of the first rank, by subgroup."""
    run, numbers = saved.run, range(len(found["fp32_flat_groups"]))
    groups = checkpoints._groups({name: math.prod(shape) for name, shape in run.shapes.items()}, run)
    assert len(groups) == len(numbers) == len(found["optimizer_state_dict"]["state"])
    for names, number in zip(groups, numbers, strict=True):
        state = found["optimizer_state_dict"]["state"][number]
        assert set(state) == {"step", *checkpoints.VECTORS}
        assert (state["step"].item(), state["step"].shape) == (run.step, ())
        for vector, values in {**state, "fp32": found["fp32_flat_groups"][number]}.items():
            if vector != "step":
                parts = [cut(torch.from_numpy(saved.vectors[n][vector]), 0, run.world_size) for n in names]
                assert same(values.detach().numpy(), torch.cat(parts).numpy())
    assert [group["params"] for group in found["param_groups"]] == [[*numbers[:-1]], [numbers[-1]]]
    assert found["param_groups"] == found["optimizer_state_dict"]["param_groups"]
    assert [(group["lr"], group["betas"]) for group in found["param_groups"]] == [
        (0.1, (0.9, 0.95)),
        (0.2, (0.9, 0.95)),
    ]
    assert (found["zero_stage"], found["overflow"], found["partition_count"]) == (3, False, run.world_size)
    adapts = run.weight_type == "float16"
    assert type(found["loss_scaler"]).__name__ == ("DynamicLossScaler" if adapts else "LossScaler")
    assert type(found["loss_scaler"]).__module__ == "deepspeed.runtime.fp16.loss_scaler"
    more = {"dtype": torch.float16} if adapts else {}
    assert vars(found["loss_scaler"]) == {"cur_scale": 2.0**run.step, "dynamic": adapts, **more}


def check_engine(found, saved, rank: int) -> None:
    run = saved.run
    shapes = {name: shape for some in found["param_shapes"] for name, shape in some.items()}
    assert shapes == {name: torch.Size(shape) for name, shape in run.shapes.items()}
    assert sorted(found["buffer_names"]) == sorted(run.buffers)
    for name, tensor in run.buffers.items():
        assert found["module"][name].dtype == tensor.dtype
        assert torch.equal(found["module"][name], tensor)
    empty = {name: tensor.dtype for name, tensor in found["module"].items() if name not in run.buffers}
    kinds = {name: tensor.dtype for name, tensor in run.frozen.items()}
    assert empty == dict.fromkeys(run.shapes, getattr(torch, run.weight_type)) | kinds
    for name, tensor in run.frozen.items():
        assert found["frozen_param_shapes"][name] == tensor.shape
        assert torch.equal(found["frozen_param_fragments"][name], cut(tensor, rank, run.world_size))
    assert (found["global_steps"], found["global_samples"]) == (run.step, 8 * run.step)
    assert found["dp_world_size"] == run.world_size


@settings(deadline=None, max_examples=25)
@given(run=RUNS)
def test_it_is_the_truth_however_it_was_cut(run):
    with tempfile.TemporaryDirectory() as directory:
        saved = save(Path(directory), run)
        export(saved, Path(directory) / "one_universal")
        check_universal(Path(directory) / "one_universal", saved)


@pytest.mark.parametrize("weight_type", ["bfloat16", "float16"])
def test_frozen_parameters_and_buffers_are_in_it_and_large_tensors_go_in_pieces(tmp_path, monkeypatch, weight_type):
    monkeypatch.setattr("mlpo_hpc.checkpoint.universal.PIECE_ITEMS", 100)
    monkeypatch.setattr("mlpo_hpc.checkpoint.universal.PIECE_BYTES", 50)
    saved, steps = save(tmp_path, usual(world_size=3, weight_type=weight_type)), []
    nbytes = export_universal(Reader(saved.folder), tmp_path / "x", Alone(), lambda *told: steps.append(told))
    check_universal(tmp_path / "x", saved)
    assert max(done for done, _ in steps) <= 400
    assert [done for done, _ in steps if not done] == [0], "it begins once"
    assert sum(done for done, _ in steps) == steps[0][1] == nbytes


def test_the_next_export_is_the_latest_one(tmp_path):
    save(tmp_path, usual(step=1), "one")
    save(tmp_path, usual(step=2), "two")
    for tag in ("one", "two"):
        assert mlpo(tmp_path / tag, tmp_path / f"{tag}_universal")[0] == 0
        assert (tmp_path / "latest_universal").read_text() == f"{tag}_universal"
    assert (tmp_path / "latest").read_text() == "two"
    assert not list(tmp_path.rglob("*.partial"))


# ---- what DeepSpeed could not go on from -----------------------------------------------------


def refused(tmp_path) -> str:
    code, text = mlpo(tmp_path, tmp_path / "x")
    assert code == 1
    assert "Traceback" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "tmp"], "nothing is left"
    return text


@pytest.mark.parametrize(
    "vectors", [("momentum_buffer", "other"), ("exp_avg",), (*checkpoints.VECTORS, "max_exp_avg_sq")]
)
def test_the_state_of_other_optimizers_is_refused_by_what_it_is(tmp_path, monkeypatch, vectors):
    monkeypatch.setattr(checkpoints, "VECTORS", vectors)
    save(tmp_path, usual(codec="fp32"))
    text = refused(tmp_path)
    assert f"the optimizer keeps {[*vectors, 'step']}" in text
    assert "--to hdf5" in text


def other_scalars(monkeypatch, scalars) -> None:
    real = checkpoints.RecordEntry
    monkeypatch.setattr(checkpoints, "RecordEntry", lambda **values: real(**values | {"scalars": scalars}))


def test_more_scalars_and_none_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        other_scalars(patch, {"step": 1.0, "mu_product": 0.5})
        save(tmp_path, usual())
    assert "'mu_product'] of embed.w" in refused(tmp_path)
    with monkeypatch.context() as patch:
        other_scalars(patch, None)
        save(tmp_path, usual(), attempt="0000000b")
    assert "had no state of embed.w yet" in refused(tmp_path)


def test_a_step_that_was_no_tensor_is_none(tmp_path, monkeypatch):
    """DeepSpeed's CPU Adam counts in plain integers, and cannot count on in tensors."""
    other_scalars(monkeypatch, {"step": 7})
    export(save(tmp_path, usual()), tmp_path / "x")
    state = load(tmp_path / "x/zero/optimizer_state.pt")["optimizer_state_dict"]["state"]
    assert {repr(each["step"]) for each in state.values()} == {"7"}


@pytest.mark.parametrize("key", ["shared_params", "group_of_subgroup", "overflow"])
def test_a_checkpoint_of_an_earlier_version_says_what_to_do(tmp_path, key):
    saved = save(tmp_path, usual())
    rewrite(saved.folder, lambda text: text.replace(f'"{key}"', '"other"'))
    assert f"lacks ['{key}']" in refused(tmp_path)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ""])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, monkeypatch, name):
    real = checkpoints.PieceEntry
    monkeypatch.setattr(checkpoints, "PieceEntry", lambda **v: real(**v | {"name": name} if v["name"] == "norm" else v))
    save(tmp_path, usual())
    assert f"{name!r} cannot be the name of a parameter's folder" in refused(tmp_path)


def test_plain_values_that_nobody_wrote_are_an_error_that_names_the_file(tmp_path):
    saved = save(tmp_path, usual())
    rewrite(saved.folder, lambda text: text.replace('"client": {"dict": []}', '"client": {"dict": [3]}'))
    text = refused(tmp_path)
    assert "a value that nobody wrote" in text
    assert str(saved.folder / "manifest.json") in text


# ---- the files of torch ----------------------------------------------------------------------

KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool, "C64": torch.complex64}
KINDS |= {"U16": torch.uint16, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "F64": torch.float64}


def streamed(kind: str, shape: tuple[int, ...], piece_bytes: int) -> tuple[torch.Tensor, Streamed]:
    nbytes = math.prod(shape) * KINDS[kind].itemsize
    data = np.random.default_rng(nbytes).integers(0, 2, nbytes, np.uint8)
    tensor = torch.empty(shape, dtype=KINDS[kind])
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
    pieces = [data[begin : begin + piece_bytes] for begin in range(0, nbytes, piece_bytes)]
    return tensor, Streamed(kind, shape, nbytes, lambda: pieces)


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=4),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    stem=st.text("abcü x.", min_size=1, max_size=70),
    piece_bytes=st.integers(1, 100),
)
def test_what_is_streamed_is_what_torch_loads(kinds, shape, stem, piece_bytes):
    pairs = [streamed(kind, shape, piece_bytes) for kind in kinds]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"_{stem}.pt"
        value = {"plain": (1, None, torch.Size(shape)), "tensors": [each for _, each in pairs]}
        told: list[int] = []
        torch_file.write(path, value, told.append)
        assert sum(told) == sum(each.nbytes for each in torch_file.tensors_in(value))
        for mmap in (False, True):
            found = torch.load(path, mmap=mmap)
            assert found["plain"] == (1, None, torch.Size(shape))
            for (truth, _), tensor in zip(pairs, found["tensors"], strict=True):
                assert (tensor.dtype, tensor.shape, tensor.stride()) == (truth.dtype, truth.shape, truth.stride())
                assert torch.equal(tensor.reshape(-1).view(torch.uint8), truth.reshape(-1).view(torch.uint8))
                assert not mmap or not tensor.numel() or tensor.data_ptr() % 64 == 0
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_pickle_is_the_one_that_torch_makes(tmp_path):
    tensor, each = streamed("F32", (3, 4), 7)
    torch.save(tensor, tmp_path / "theirs.pt")
    torch_file.write(tmp_path / "ours.pt", each, lambda _: None)
    theirs, ours = (zipfile.ZipFile(tmp_path / f"{name}.pt").read(f"{name}/data.pkl") for name in ("theirs", "ours"))
    assert ours == theirs


def test_a_class_that_is_not_imported_is_named(tmp_path):
    value = Foreign("SomeClass", (), {"__module__": "json.decoder"})()
    vars(value)["a"] = 1
    torch_file.write(tmp_path / "x.pt", value, lambda _: None)
    with pytest.raises(AttributeError, match="SomeClass"):
        torch.load(tmp_path / "x.pt", weights_only=False)
    vars(type(value))  # the stand-in has no file of its own
    real = Foreign("JSONDecodeError", (), {"__module__": "json.decoder"})
    torch_file.write(tmp_path / "y.pt", [real, real], lambda _: None)
    assert torch.load(tmp_path / "y.pt", weights_only=False) == [json.JSONDecodeError] * 2
