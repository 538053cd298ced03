"""What the integration tests run on each rank: ``python -m tests.integration.worker SCENARIO JSON``.

A scenario gets a dict of arguments and returns a dict that rank R writes to ``<out>.R``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import xxhash
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

import mlpo_hpc
from mlpo_hpc.checkpoint import folder as folders
from mlpo_hpc.checkpoint.write import ShardWriter
from mlpo_hpc.engine import own_checkpoint
from mlpo_hpc.errors import storage_error
from mlpo_hpc.state import node_file
from mlpo_hpc.storage.base import FileContainer

Args = dict[str, Any]

HIDDEN = 64


def model(layers: int = 6, hidden: int = HIDDEN) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*[torch.nn.Linear(hidden, hidden) for _ in range(layers)])


def config(args: Args, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 1500, "stage3_param_persistence_threshold": 10},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "mlp_offload": {
            "tiers": [
                {"name": f"t{i}", "dir": d, "read_bps": 1e8, "write_bps": 1e8} for i, d in enumerate(args["dirs"])
            ],
            "host_memory": args.get("host_memory", 150_000 * int(os.environ["WORLD_SIZE"])),
            "chunk_bytes": 8192,
            "tokens": {"backend": "flock"},  # 'auto' would take a few seconds to measure, each time
        },
    }
    made["mlp_offload"].update(args.get("section", {}))
    made.update(changes)
    return made


def start(args: Args, **changes: Any) -> Any:
    if args.get("dtype") == "fp16":
        get_accelerator().is_fp16_supported = lambda: True
        changes["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
        changes["bf16"] = {"enabled": False}
        changes["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}
    net = model()
    return mlpo_hpc.initialize(model=net, model_parameters=net.parameters(), config=config(args, **changes))[0]


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        x = torch.randn(2, HIDDEN, generator=generator).to(next(engine.module.parameters()).dtype)
        loss = (engine(x).float() ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def fingerprint(engine: Any) -> list[float]:
    """Weights and moments as exact sums of their bits."""
    sums = []
    for param in engine.module.parameters():
        for value in (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
            safe_get_full_optimizer_state(param, "exp_avg_sq"),
        ):
            sums.append(value.view(torch.int32).to(torch.int64).sum().item())
    return sums


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mlpo-")]


def open_state_files(dirs: list[str]) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if any(target.startswith(path) for path in dirs):
            found.append(target)
    return found


# ---- scenarios ----------------------------------------------------------------------------


def lifecycle(args: Args) -> Args:
    """destroy() leaves no thread, file, lock; a second engine in the same process works."""
    engine = start(args)
    train(engine, 3)
    during = {"threads": our_threads(), "files": open_state_files(args["dirs"])}
    listing = [name for path in args["dirs"] for name in os.listdir(path)]
    beside = start(args)  # a second model of the same process, on the same tiers
    train(beside, 1)
    beside.destroy()
    train(engine, 1, first=3)
    engine.destroy()
    after = {"threads": our_threads(), "files": open_state_files(args["dirs"])}
    again = start(args)
    losses = train(again, 2)
    again.destroy()
    return {"during": during, "after": after, "listing": listing, "losses": losses}


def leave_without_destroy(args: Args) -> Args:
    """Nothing is called at the end: the interpreter's exit must clean up."""
    train(start(args), 2)
    return {"done": True}


def killed_while_laid_out(args: Args) -> Args:
    """The first rank is killed in the moment in which its node's file has a name."""
    first = os.environ["RANK"] == "0"
    with patch.object(node_file, "_settle", lambda *_: os.kill(os.getpid(), signal.SIGKILL if first else 0)):
        start(args)
    return {"survived": True}


def debug_api(args: Args) -> Args:
    """safe_get_*/safe_set_* between steps, through the cache, and a change that lasts."""
    engine = start(args)
    train(engine, 2)
    params = list(engine.module.parameters())
    first, last = params[0], params[-2]
    local = safe_get_local_fp32_param(first)
    before = local.clone()
    for param in engine.module.parameters():  # walks the buffers that `local` came from
        safe_get_full_fp32_param(param)
    kept = torch.equal(local, before)
    wanted = torch.full(first.ds_shape, 0.25)
    for param in (first, last):
        safe_set_full_fp32_param(param, wanted)
        safe_set_full_optimizer_state(param, wanted * 2, "exp_avg")
    exact = [torch.equal(safe_get_full_fp32_param(p), wanted) for p in (first, last)]
    exact += [torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), wanted * 2) for p in (first, last)]
    try:
        safe_get_full_optimizer_state(first, "no such key")
    except KeyError:
        refused = True
    x = torch.randn(2, HIDDEN).bfloat16()
    engine.backward((engine(x).float() ** 2).mean())
    gradient = safe_get_full_grad(first)
    engine.step()
    followed = safe_get_full_optimizer_state(first, "exp_avg")
    near = torch.allclose(followed, 0.9 * 0.5 + 0.1 * gradient, rtol=1e-5)  # the step went on from what was set
    # A gradient set by hand does not bring back the old one of a neighbour that this window does not use.
    bias, neighbour = params[1], params[2]
    before = safe_get_full_optimizer_state(neighbour, "exp_avg")
    engine.module.forward = lambda y: engine.module[0](y)
    engine.backward((engine(x).float() ** 2).mean())
    safe_set_full_grad(bias, torch.ones(bias.ds_shape))
    engine.step()
    after = safe_get_full_optimizer_state(neighbour, "exp_avg")
    alone = torch.allclose(after, 0.9 * before, rtol=1e-5) and bool(before.any())
    engine.destroy()
    return {
        "alone": alone,
        "kept": kept,
        "exact": exact,
        "near": near,
        "refused": refused,
        "gradient": bool(gradient.abs().sum() > 0),
    }


def changed_weights(args: Args) -> Args:
    """16-bit weights of a layer are changed between two steps, when what the next step begins with was read already."""
    engine = start(args)
    train(engine, 3)
    params = dict(engine.module.named_parameters())
    optimizer = engine.optimizer
    found: Args = {"codec": optimizer._state.records.codec}
    # At the ends of the order and in the middle; subgroups too small for the codec are left as they are.
    subgroups = {n: optimizer.grad_position[optimizer.get_param_id(p)][0] for n, p in params.items() if "weight" in n}
    short = [name for name, subgroup in subgroups.items() if optimizer._state.records.form(subgroup) is not None]
    found["names"] = [short[0], short[len(short) // 2], short[-1]]
    for name in found["names"]:
        others = {n: safe_get_full_fp32_param(p).clone() for n, p in params.items() if n != name}
        with deepspeed.zero.GatheredParameters(params[name], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                params[name].data.mul_(torch.arange(HIDDEN) % 2)  # every second column is pruned
        with deepspeed.zero.GatheredParameters(params[name]):
            expected = params[name].detach().float().clone()
        master = safe_get_full_fp32_param(params[name])
        found[f"{name} is master"] = bool(torch.equal(master, expected))
        found[f"{name} alone"] = all(torch.equal(safe_get_full_fp32_param(params[n]), v) for n, v in others.items())
        before = safe_get_full_fp32_param(params[name]).clone()
        train(engine, 1, first=3)
        after = safe_get_full_fp32_param(params[name])
        found[f"{name} went on"] = bool(after.isfinite().all()) and 0 < (after - before).abs().max().item() < 0.1
    with deepspeed.zero.GatheredParameters(params[found["names"][1]], modifier_rank=0):
        params[found["names"][1]].data.add_(0.25)
    engine.save_checkpoint(args["checkpoint"], tag="changed")  # before anybody has looked at the records
    wanted = {n: safe_get_full_fp32_param(p).clone() for n, p in params.items()}
    again = start(args)
    again.load_checkpoint(args["checkpoint"])
    loaded = {n: safe_get_full_fp32_param(p) for n, p in again.module.named_parameters()}
    found["saved and loaded"] = all(torch.equal(loaded[n], wanted[n]) for n in wanted)
    found["one training"] = train(engine, 2, first=4) == train(again, 2, first=4)
    engine.destroy()
    again.destroy()
    return found


def resume(args: Args) -> Args:
    """7 steps straight, against 4 + save + a new engine + load + 3."""
    if not args.get("spare_memory", True):
        own_checkpoint.SPARE_FACTOR = 10**9
    straight = start(args)
    losses = train(straight, 7)
    wanted = fingerprint(straight)
    straight.destroy()
    first = start(args)
    begun = train(first, 4)
    first.save_checkpoint(args["checkpoint"], tag="four", client_state={"where": 4})
    first.save_checkpoint(args["checkpoint"], tag="four", client_state={"where": 4})  # the same tag again
    if args.get("looked_at"):  # which changes records in place, while they are saved
        first.optimizer.save_hdf5(f"{args['checkpoint']}.h5")
    kept_on = train(first, 3, first=4)
    unharmed = fingerprint(first) == wanted
    first.destroy()
    linked = [path.stat().st_nlink for path in Path(args["checkpoint"]).glob("*/sealed*")]
    assert linked == [1] * len(linked), "they are the checkpoint's alone: whoever removes it frees its space"
    torch.distributed.barrier()
    folder = taken_away(args)
    second = start(args)
    _, state = second.load_checkpoint(folder)
    went_on = train(second, 3, first=4)
    found = fingerprint(second)
    second.load_checkpoint(folder, load_optimizer_states=False)
    second.destroy()
    return {
        "losses": [losses, begun + kept_on, begun + went_on],
        "equal": found == wanted,
        "unharmed": unharmed,
        "where": state["where"],
    }


def taken_away(args: Args) -> str:
    """Where the checkpoints are now: in an archive, if one is given, to which they were copied file by file."""
    archive = args.get("archive", args["checkpoint"])
    if archive != args["checkpoint"] and torch.distributed.get_rank() == 0:
        shutil.copytree(args["checkpoint"], archive)
        shutil.rmtree(args["checkpoint"])
    torch.distributed.barrier()
    return archive


class WithFrozen(torch.nn.Module):
    """Layers of which one is not trained, and a buffer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(layers)])
        self.layers[1].requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def elsewhere(args: Args) -> Args:
    """Save; or load what others saved."""

    def make(seed: int, layers: int = 6) -> Any:
        torch.manual_seed(seed)
        net = WithFrozen(layers)
        changes = {"zero_optimization": config(args)["zero_optimization"]}
        changes["zero_optimization"]["sub_group_size"] = args.get("sub_group_size", 2500)
        trained = [param for param in net.parameters() if param.requires_grad]
        return mlpo_hpc.initialize(model=net, model_parameters=trained, config=config(args, **changes))[0]

    def look(engine: Any) -> list[Any]:
        params = list(engine.module.parameters())
        sums = [param_sum(param) for param in params]
        for param in params:
            if param.requires_grad:
                values = [safe_get_full_fp32_param(param)]
                values += [safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
                sums += [value.view(torch.int32).to(torch.int64).sum().item() for value in values]
        return [sums, engine.module.scale.tolist(), engine.global_steps]

    engine = make(1 if args["saves"] else 2)
    train(engine, 3 if args["saves"] else 1)
    found: Args = {}
    if args["saves"]:
        engine.module.scale.fill_(5.0)
        client = {"where": (3, None), 7: torch.arange(4)}
        engine.save_checkpoint(args["checkpoint"], tag="three", client_state=client)
        found["refused"], found["there"] = [], look(engine)
        other = make(1, layers=4)
        for call in (
            lambda: engine.save_checkpoint(args["checkpoint"], client_state={"x": {"bad": {1, 2}}}),
            lambda: other.load_checkpoint(args["checkpoint"]),
        ):
            try:
                call()
            except mlpo_hpc.MlpoError as error:
                found["refused"].append(str(error))
        other.destroy()
        found["unharmed"] = look(engine) == found["there"]
    else:
        path, client = engine.load_checkpoint(args["checkpoint"])
        assert Path(path) == Path(args["checkpoint"]) / "three"
        assert client["where"] == (3, None)
        assert client[7].tolist() == [0, 1, 2, 3]
        found["there"] = look(engine)
    before = train(engine, 1, first=9)
    assert all(math.isfinite(loss) for loss in before)
    engine.destroy()
    return found


def failing_save(args: Args) -> Args:
    """The device is full or fails while something is saved: all raise, and what was saved before is as it was."""
    engine = start(args)
    train(engine, 2)
    engine.save_checkpoint(args["checkpoint"], tag="one")
    wanted = fingerprint(engine)
    train(engine, 1, first=2)
    found: Args = {}
    for what, failing in FAILING_SAVES.items():
        try:
            with failing():
                engine.save_checkpoint(args["checkpoint"], tag="one")
        except mlpo_hpc.MlpoError as failure:
            found[what] = str(failure)
        torch.distributed.barrier()
        found[f"{what}: files"] = sorted(os.listdir(Path(args["checkpoint"]) / "one"))
    engine.load_checkpoint(args["checkpoint"])
    unharmed = fingerprint(engine) == wanted
    train(engine, 1, first=2)
    wanted = fingerprint(engine)
    try:
        with after_commit_eio():
            engine.save_checkpoint(args["checkpoint"], tag="two")
    except mlpo_hpc.MlpoError as failure:
        found["after the commit"] = str(failure)
    train(engine, 1, first=3)
    path, _ = engine.load_checkpoint(args["checkpoint"])
    found |= {"unharmed": unharmed, "path": path, "whole": fingerprint(engine) == wanted}
    engine.destroy()
    return found


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def full_shard() -> Any:
    """One rank has no room after its first chunk."""
    real, on_rank_1 = os.pwrite, torch.distributed.get_rank() == 1

    def full(fd: int, data: Any, offset: int) -> int:
        if offset > 0 and on_rank_1:
            raise failure(errno.ENOSPC)
        return real(fd, data, offset)

    return patch("mlpo_hpc.checkpoint.write.os.pwrite", full)


def eio_of_sync() -> Any:
    """The device tells at the end only what it did not write."""
    return patch("mlpo_hpc.checkpoint.write.os.fsync", side_effect=failure(errno.EIO))


def full_manifest() -> Any:
    real = folders.write_whole

    def full(path: Path, data: bytes) -> None:
        if path.name == "latest.partial":
            raise storage_error("writing a file of the checkpoint", str(path), failure(errno.EDQUOT))
        real(path, data)

    return patch.object(folders, "write_whole", full)


def after_commit_eio() -> Any:
    """The manifest has its name, but whether that lasts nobody knows."""
    real = folders.put_in_place

    def put(path: Path) -> None:
        real(path)
        if path.name.startswith("shard-"):
            return
        raise storage_error("syncing the folder of the checkpoint", str(path.parent), failure(errno.EIO))

    return patch.object(folders, "put_in_place", put)


FAILING_SAVES = {"ENOSPC": full_shard, "EIO": eio_of_sync, "EDQUOT": full_manifest}


def failing_in_background(args: Args) -> Args:
    """The device is full while one rank saves beside training: that goes on, and the checkpoint before it is whole."""
    engine = start(args)
    train(engine, 2)
    engine.save_checkpoint(args["checkpoint"], tag="one")
    wanted = fingerprint(engine)
    assert engine.checkpoint_committed(wait=True)
    real = ShardWriter._move

    def move(writer: ShardWriter, piece: memoryview) -> None:
        if torch.distributed.get_rank() == 1:
            raise storage_error("writing the checkpoint", str(writer._path), failure(errno.ENOSPC))
        real(writer, piece)

    found: Args = {}
    with patch.object(ShardWriter, "_move", move):
        engine.save_checkpoint(args["checkpoint"], tag="two")
        found["losses"] = train(engine, 2, first=2)
        try:
            engine.checkpoint_committed("two", wait=True)
        except mlpo_hpc.MlpoError as error:
            found["error"] = str(error)
    found["one"] = engine.checkpoint_committed("one")
    engine.save_checkpoint(args["checkpoint"], tag="three")
    found["files"] = sorted(os.listdir(args["checkpoint"]))
    found["three"] = engine.checkpoint_committed("three", wait=True)
    engine.load_checkpoint(args["checkpoint"], tag="one")
    found["back"] = fingerprint(engine) == wanted
    engine.save_checkpoint(args["checkpoint"], tag="one")
    assert engine.checkpoint_committed(wait=True), "the last one is that of an earlier tag"
    try:
        engine.checkpoint_committed("four")
    except mlpo_hpc.MlpoError as error:
        found["unknown"] = str(error)
    with patch.object(ShardWriter, "_move", move):
        engine.save_checkpoint(args["checkpoint"], tag="last")
        try:
            engine.destroy()
        except mlpo_hpc.MlpoError as error:
            found["at the end"] = str(error)
    return found


def damaged(args: Args) -> Args:
    """Loading what is damaged says what is wrong, and what else there is."""
    engine = start(args)
    train(engine, 1)
    engine.save_checkpoint(args["checkpoint"], tag="one")
    wanted = fingerprint(engine)
    train(engine, 1, first=1)
    engine.save_checkpoint(args["checkpoint"], tag="two")
    folder, good = Path(args["checkpoint"]) / "two", Path(args["checkpoint"]).parent / "good"
    first = torch.distributed.get_rank() == 0
    if first:
        shutil.copytree(folder, good)
    found: Args = {}
    for what, spoil in SPOILED.items():
        if first:
            spoil(folder)
        torch.distributed.barrier()
        try:
            engine.load_checkpoint(args["checkpoint"])
        except mlpo_hpc.MlpoError as error:
            found[what] = str(error)
        torch.distributed.barrier()
        if first:
            shutil.rmtree(folder)
            shutil.copytree(good, folder)
        torch.distributed.barrier()
    engine.load_checkpoint(args["checkpoint"], tag="one")
    found["one"] = fingerprint(engine) == wanted
    engine.destroy()
    return found


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def other_version(folder: Path) -> None:
    path = folder / "manifest.json"
    body = path.read_bytes().partition(b", ")[2].replace(b'"version": 1', b'"version": 2')
    path.write_bytes(b'{"checksum": "%s", %s' % (xxhash.xxh3_64_hexdigest(body).encode(), body))


SPOILED: dict[str, Any] = {
    "chunk": lambda folder: flip(next(folder.glob("state-00001-*")), -1),
    "manifest": lambda folder: flip(folder / "manifest.json", 200),
    "shard": lambda folder: next(folder.glob("shard-00001-*")).unlink(),
    "state": lambda folder: next(folder.glob("state-00000-*")).unlink(),
    "version": other_version,
}


def whole_state(args: Args) -> Args:
    """Save as one HDF5 file, go on, go back by loading it, go on again; or only load what others saved."""
    engine = start(args)
    if args["saves"]:
        train(engine, 3)
        engine.optimizer.save_hdf5(args["file"])
    else:
        train(engine, 2, first=50)
        engine.optimizer.load_hdf5(args["file"])
    found: Args = {"there": fingerprint(engine), "weights": [param_sum(param) for param in engine.module.parameters()]}
    if args["saves"]:
        found["went_on"] = [train(engine, 2, first=3), fingerprint(engine)]
        engine.optimizer.load_hdf5(args["file"])
        found["back"] = [fingerprint(engine), [param_sum(param) for param in engine.module.parameters()]]
        found["again"] = [train(engine, 2, first=3), fingerprint(engine)]
        found |= refuse_wrong_files(engine, args)
    engine.destroy()
    return found


def param_sum(param: torch.nn.Parameter) -> int:
    """The bits of the 16-bit weights, as every rank gathers them."""
    with deepspeed.zero.GatheredParameters(param):
        return int(param.detach().view(torch.int16).to(torch.int64).sum())


def refuse_wrong_files(engine: Any, args: Args) -> Args:
    """A file of another model, a folder that is missing: an error on all ranks, and nothing is changed."""
    before = fingerprint(engine)
    said = []
    other = mlpo_hpc.initialize(model=(net := model(5)), model_parameters=net.parameters(), config=config(args))[0]
    other.optimizer.save_hdf5(f"{args['file']}.other")
    other.destroy()
    for call, path in (
        (engine.optimizer.load_hdf5, f"{args['file']}.other"),
        (engine.optimizer.save_hdf5, "/nowhere/x.h5"),
    ):
        try:
            call(path)
        except mlpo_hpc.MlpoError as error:
            said.append(str(error))
    return {"said": said, "same": fingerprint(engine) == before}


def monitored(args: Args) -> Args:
    """DeepSpeed's CSV monitor gets our figures beside its own."""
    monitor = {"enabled": True, "output_path": args["logs"], "job_name": "job"}
    engine = start(args, csv_monitor=monitor)
    train(engine, 3)
    report = engine.optimizer.offload_report()
    engine.destroy()
    return {"bytes_read": report["bytes_read"]}


def stock_reads_ours(args: Args) -> Args:
    """DeepSpeed itself goes on from a checkpoint of ours, and we from one of its own."""
    first = start(args)
    train(first, 3)
    first.save_checkpoint(args["checkpoint"], tag="ours")
    wanted = train(first, 2, first=3)
    first.destroy()
    net = model()
    stock_config = config(args)
    del stock_config["mlp_offload"]
    stock_config["zero_force_ds_cpu_optimizer"] = False
    stock_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    stock_config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    stock = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=stock_config)[0]
    stock.load_checkpoint(args["checkpoint"])
    by_stock = train(stock, 2, first=3)
    stock.save_checkpoint(args["checkpoint"], tag="stock")
    further = train(stock, 2, first=5)
    stock.destroy()
    second = start(args)
    second.load_checkpoint(args["checkpoint"], tag="stock")
    by_us = train(second, 2, first=5)
    second.destroy()
    return {"to_stock": by_stock == wanted, "from_stock": by_us == further}


def other_cut(args: Args) -> Args:
    """A checkpoint cut into other subgroups is refused with the value to set."""
    first = start(args)
    train(first, 1)
    first.save_checkpoint(args["checkpoint"], tag="a")
    first.destroy()
    zero = {"stage": 3, "sub_group_size": 9000, "stage3_param_persistence_threshold": 10}
    second = start(args, zero_optimization=zero)
    try:
        second.load_checkpoint(args["checkpoint"])
    except mlpo_hpc.MlpoError as error:
        return {"error": str(error)}
    finally:
        second.destroy()
    return {"error": ""}


def bad_input(args: Args) -> Args:
    """Whatever is wrong, every rank raises the same error."""
    errors = []
    for case in args["cases"]:
        mine = case | case.get("by_rank", {}).get(os.environ["RANK"], {})
        os.environ.update(mine.get("env", {}))
        version, mlpo_hpc.__version__ = mlpo_hpc.__version__, mine.get("version", mlpo_hpc.__version__)
        if "tier" in mine:
            mine["dirs"] = [mine["tier"]]
        extra = {key: mine[key] for key in ("capacity", "kind") if key in mine}
        if extra:
            mine["section"] = {"tiers": [{"name": f"t{i}", "dir": d, **extra} for i, d in enumerate(mine["dirs"])]}
        host = socket.gethostname
        if "host" in mine:
            socket.gethostname = partial(str, mine["host"])
        try:
            start(mine, **mine.get("changes", {})).destroy()
            errors.append("")
        except mlpo_hpc.MlpoError as error:
            errors.append(str(error))
        mlpo_hpc.__version__, socket.gethostname = version, host
        for name in mine.get("env", {}):
            del os.environ[name]
    return {"errors": errors, "left": our_threads()}


def fault_in_step(args: Args) -> Args:
    """After two good steps a transfer of one rank fails; it must not hang, and must say why."""
    engine = start(args)
    train(engine, 2)
    if torch.distributed.get_rank() == args["rank"]:
        print("breaking", args["what"], flush=True)
        break_storage(engine, args["what"])
    train(engine, 20, first=2)
    return {"survived": True}


def break_storage(engine: Any, what: str) -> None:
    generations = [tier.container for tier in engine.optimizer._store.pipeline.tiers]
    containers = [container.member(container.last) for container in generations]
    if what == "truncated":
        for container in containers:
            os.ftruncate(container.transport.fd, 4096)
    elif what == "altered":
        for container in containers:
            for slot in range(container.num_slots):
                os.pwrite(
                    os.open(f"/proc/self/fd/{container.transport.fd}", os.O_RDWR),
                    b"\xff" * 64,
                    slot * container.slot_bytes,
                )
    else:
        code = getattr(errno, what)

        def fail(self: Any, *_: Any) -> None:
            raise __import__("mlpo_hpc.errors", fromlist=["x"]).storage_error(
                "writing state", self.path, OSError(code, os.strerror(code))
            )

        FileContainer._write = fail  # type: ignore[method-assign]


def partial_use(args: Args) -> Args:
    """Layers used in some micro-steps or steps only, against plain torch AdamW on the true gradients."""
    return {"worst": [partial_case(args, case["windows"], case["clip"]) for case in args["cases"]]}


def partial_case(args: Args, windows: list[list[list[int]]], clip: float) -> float:
    """Largest difference of a weight after all windows."""
    accumulation, world = len(windows[0]), int(os.environ["WORLD_SIZE"])
    net, reference = model(), model()
    changes: dict[str, Any] = {"bf16": {"enabled": False}, "gradient_accumulation_steps": accumulation}
    made = config(args, gradient_clipping=clip, **changes)
    made["optimizer"]["params"] |= {"eps": 1e-3, "weight_decay": 0.1}
    engine = mlpo_hpc.initialize(model=net, model_parameters=net.parameters(), config=made)[0]
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    for step, window in enumerate(windows):
        for param in reference.parameters():
            param.grad = torch.zeros_like(param)
        for micro, used in enumerate(window):
            for rank in range(world):
                (partial_loss(reference, data(step, micro, rank), used) / (accumulation * world)).backward()
            engine.backward(partial_loss(engine.module, data(step, micro, torch.distributed.get_rank()), used, engine))
            engine.step()
        if clip:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
    worst = 0.0
    for param, true in zip(net.parameters(), reference.parameters(), strict=True):
        worst = max(worst, (safe_get_full_fp32_param(param) - true.detach()).abs().max().item())
    engine.destroy()
    return worst


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def partial_loss(net: torch.nn.Module, x: torch.Tensor, used: list[int], engine: Any = None) -> torch.Tensor:
    """Only some of the layers take part."""
    if engine is not None:
        engine.module.forward = lambda y: apply(net, y, used)
        return (engine(x) ** 2).mean()
    return (apply(net, x, used) ** 2).mean()


def apply(net: Any, x: torch.Tensor, used: list[int]) -> torch.Tensor:
    for index in used:
        x = net[index](x)
    return x


def main() -> None:
    torch.set_num_threads(1)
    scenario, text = sys.argv[1:]
    args = json.loads(text)
    result = globals()[scenario](args)
    Path(f"{args['out']}.{os.environ['RANK']}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
