"""One rank of one system: ``python -m mlpo_hpc.bench.worker FD JSON``, told what to do by JSON lines on a socket.

It lives through the whole benchmark and works only in its turns. It answers ``{"ready": ...}`` once it is
built and ``{"samples": [...], "timeline": {...}}`` after each turn; the end of the socket is its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlpo_hpc.bench.conditions import WIDENING
from mlpo_hpc.config import SECTION

if TYPE_CHECKING:
    from mlpo_hpc.bench.plain_writer import PlainWriter

NUM_BATCHES = 8
PLAIN = 3
"""Iterations without a checkpoint before each one."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PHASES = ("forward", "backward", "update")
REPORTED = ("state_bytes", "found_bytes", "reusable_bytes", "host_bytes", "cache_hits", "cache_misses")

Spec = dict[str, Any]


def main() -> None:
    """Build the system, then take turns until the other side closes."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    spec = json.loads(sys.argv[2])
    rank = Rank(spec)
    with sock, sock.makefile("r") as orders, sock.makefile("w") as answers:
        _answer(answers, {"ready": rank.facts()})
        for line in orders:
            order = json.loads(line)
            _answer(answers, rank.answer(order))
    rank.close()


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


class Rank:
    """A model under DeepSpeed, stock or ours.

    Parameters
    ----------
    spec : dict
        ``stock``, ``ds_config``, ``tier`` (name of the one that a stock system uses, or None), and of the model
        ``blocks``, ``hidden``, ``rows``, ``seed``.
    """

    def __init__(self, spec: Spec) -> None:
        _choose_accelerator()
        import torch
        from deepspeed.accelerator import get_accelerator

        self._spec = spec
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        _init_distributed(spec["stock"])
        self._accelerator = get_accelerator()
        model = _build_model(spec)
        self._engine = _initialize(spec, model)
        self._batches = _make_batches(spec, self._engine.device)

    def facts(self) -> dict[str, Any]:
        """What runs here."""
        import deepspeed
        import torch

        return {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "accelerator": self._accelerator.device_name(),
            "optimizer": type(getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)).__name__,
            "threads": torch.get_num_threads(),
        }

    def turn(self, settling: int, counted: int, accumulation: int) -> dict[str, Any]:
        """Some iterations; at the end nothing moves any more.

        Parameters
        ----------
        settling : int
            Iterations that do not count, first.
        counted : int
            Iterations that do.
        accumulation : int
            Micro-batches of each.
        """
        import deepspeed

        engine = self._engine
        engine.set_train_batch_size(self._spec["rows"] * accumulation * deepspeed.comm.get_world_size())
        for _ in range(settling):
            self._iterate(accumulation)
        done = [self._iterate(accumulation) for _ in range(counted)]
        if not self._spec["stock"]:
            engine.optimizer.offload_flush()
        return {"samples": [sample for sample, _ in done], "timeline": self._timeline(done[-1][1]) if done else {}}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what is ordered."""
        if "load" in order:
            return self.load_turn(**order)
        return self.save_turn(**order) if "save" in order else self.turn(**order)

    def save_turn(self, save: str, before: str | None, settling: int, accumulation: int) -> dict[str, Any]:
        """Train, and save in the background; see `mlpo_hpc.bench.checkpoints.Case`.

        Parameters
        ----------
        save, before : str
            Path of the checkpoint, and of one that is to be removed, first.
        settling : int
            Iterations that do not count, after that.
        accumulation : int
            Micro-batches of an iteration.
        """
        import deepspeed

        from mlpo_hpc.checkpoint.rotation import remove

        engine, path = self._engine, Path(save)
        engine.set_train_batch_size(self._spec["rows"] * accumulation * deepspeed.comm.get_world_size())
        if before is not None and deepspeed.comm.get_rank() == 0:
            remove(Path(before))
        for _ in range(settling):
            self._timed(accumulation)
        plain = [self._timed(accumulation) for _ in range(PLAIN)]
        begin, iterations = time.perf_counter(), [self._timed(accumulation, path)]
        while not _everywhere(engine.checkpoint_committed()):
            iterations.append(self._timed(accumulation))
        committed_s = time.perf_counter() - begin
        beside_writer = self._beside_writer(path, accumulation)
        return {"plain": plain, "save": iterations, "committed_s": committed_s, "writer": beside_writer}

    def _beside_writer(self, checkpoint: Path, accumulation: int) -> list[dict[str, float]]:
        """Iterations in whose passes a plain program writes as many bytes as this rank copied into a checkpoint."""
        import deepspeed

        from mlpo_hpc.bench.plain_writer import PlainWriter

        copied = checkpoint.glob(f"state-{deepspeed.comm.get_rank():05d}-*.bin")
        iterations: list[dict[str, float]] = []
        with PlainWriter(str(checkpoint.parent), sum(file.stat().st_size for file in copied)) as writer:
            self._timed(accumulation)  # what the checkpoint leaves behind
            while not _everywhere(writer.is_done()):
                iterations.append(self._timed(accumulation, writer=writer))
        return iterations

    def load_turn(self, load: str) -> dict[str, Any]:
        """Load a checkpoint, and see what space it takes."""
        import deepspeed

        path = Path(load)
        space_bytes = sum(512 * file.stat().st_blocks for file in path.iterdir())
        self._engine.optimizer.offload_flush()
        os.sync()
        _drop_caches(deepspeed.comm.get_rank() == 0)
        begin = time.perf_counter()
        self._engine.load_checkpoint(str(path.parent), tag=path.name)
        return {"checkpoint_bytes": space_bytes, "load_s": time.perf_counter() - begin}

    def _timed(
        self, accumulation: int, save: Path | None = None, writer: PlainWriter | None = None
    ) -> dict[str, float]:
        """Seconds of an iteration and its phases, with a checkpoint before it, or a writer beside its passes."""
        begin = time.perf_counter()
        if save is not None:
            self._engine.save_checkpoint(str(save.parent), tag=save.name)
        save_s = time.perf_counter() - begin
        sample, _ = self._iterate(accumulation, writer)
        return {"save_s": save_s, **{name: sample[name] for name in (*(f"{p}_s" for p in PHASES), "iteration_s")}}

    def _iterate(
        self, accumulation: int, writer: PlainWriter | None = None
    ) -> tuple[dict[str, Any], list[tuple[str, float, float]]]:
        """One optimizer step: its figures, and its phases with begin and end."""
        import deepspeed

        engine, phases = self._engine, []
        deepspeed.comm.barrier()
        before, begin = _moved_bytes(), time.perf_counter()
        for number in range(accumulation):
            marks = [time.perf_counter()]
            with nullcontext() if writer is None else writer.writing():
                loss = engine(self._batches[number % NUM_BATCHES])
                marks.append(self._now())
                engine.backward(loss)
                marks.append(self._now())
            engine.step()
            marks.append(self._now())
            phases += list(zip(PHASES, marks, marks[1:], strict=False))
        sample = {f"{name}_s": sum(end - at for phase, at, end in phases if phase == name) for name in PHASES}
        sample |= {"iteration_s": self._now() - begin, "loss": loss.item(), **self._figures(before)}
        return sample, phases

    def _now(self) -> float:
        """Time when the accelerator has done what it was given."""
        self._accelerator.synchronize()
        return time.perf_counter()

    def _figures(self, before: dict[str, int]) -> dict[str, Any]:
        """Bytes that moved, and what our engine reports besides."""
        if self._spec["stock"]:
            moved = {way: count - before[way] for way, count in _moved_bytes().items()}
            tier = self._spec["tier"]
            return {f"{way}_bytes": {tier: count} if tier else {} for way, count in moved.items()}
        report = self._engine.optimizer.offload_report()
        tiers = report["tiers"].items()
        figures: dict[str, Any] = {key: report.get(key) for key in REPORTED}
        figures["read_bytes"] = {name: tier["bytes_read"] for name, tier in tiers}
        figures["written_bytes"] = {name: tier["bytes_written"] for name, tier in tiers}
        return figures

    def _timeline(self, phases: list[tuple[str, float, float]]) -> dict[str, Any]:
        """Phases of an iteration and the chunks that moved in it, in seconds after it began."""
        begin, end = phases[0][1], phases[-1][2]
        lanes: dict[str, Any] = {}
        if not self._spec["stock"]:
            for tier in self._engine.optimizer._store.pipeline.tiers:
                ways = {"read": tier.reads.meter.spans, "written": tier.writes.meter.spans}
                lanes[tier.name] = {
                    way: [(s.begin_s - begin, s.end_s - begin, s.nbytes) for s in spans if begin < s.end_s < end]
                    for way, spans in ways.items()
                }
        return {"phases": [(name, at - begin, to - begin) for name, at, to in phases], "tiers": lanes}

    def close(self) -> None:
        """End threads and drop files."""
        self._engine.destroy()


def _choose_accelerator() -> None:
    """DeepSpeed takes the CPU only where it is told to."""
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _init_distributed(stock: bool) -> None:
    """Collective over the system's ranks. Stock does not compile here what it can do without."""
    import deepspeed

    import mlpo_hpc

    if stock:
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    else:
        mlpo_hpc.init_distributed()


def _build_model(spec: Spec) -> Any:
    """Residual blocks, partitioned as they are made; each rank of each system begins with the same weights."""
    import deepspeed
    import torch

    hidden, wide = spec["hidden"], WIDENING * spec["hidden"]

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widen = torch.nn.Linear(hidden, wide, bias=False)
            self.narrow = torch.nn.Linear(wide, hidden, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = rows + self.narrow(torch.relu(self.widen(rows)))
            return result

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(*[Block() for _ in range(spec["blocks"])])

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.blocks(rows).float().square().mean()
            return loss

    torch.manual_seed(spec["seed"])
    theirs = {key: value for key, value in spec["ds_config"].items() if key != SECTION}
    with deepspeed.zero.Init(config_dict_or_path=theirs):
        return Model()


def _initialize(spec: Spec, model: Any) -> Any:
    """The engine, stock or ours."""
    import deepspeed

    import mlpo_hpc

    make = deepspeed.initialize if spec["stock"] else mlpo_hpc.initialize
    return make(model=model, model_parameters=model.parameters(), config=spec["ds_config"])[0]


def _make_batches(spec: Spec, device: Any) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(spec["seed"] + int(os.environ["RANK"]))
    shape = (spec["rows"], spec["hidden"])
    batches = [torch.randn(shape, generator=generator) for _ in range(NUM_BATCHES)]
    return [batch.to(device, torch.bfloat16) for batch in batches]


def _everywhere(value: bool) -> bool:
    """Collective over the system's ranks: they go on together."""
    from mlpo_hpc.cluster.verdict import gather

    return all(gather(value))


def _drop_caches(first: bool) -> None:
    """As far as that is allowed: what was written is not read from memory."""
    import deepspeed

    if first and os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("1")
    deepspeed.comm.barrier()


def _moved_bytes() -> dict[str, int]:
    """What this process read from and wrote to block devices; for O_DIRECT that is all that it moved."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(counts["read_bytes"]), "written": int(counts["write_bytes"])}


if __name__ == "__main__":
    main()
