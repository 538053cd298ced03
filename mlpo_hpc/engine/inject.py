"""Our optimizer in place of DeepSpeed's ZeRO-3 one, for as long as a context is open."""

from __future__ import annotations

import functools
import inspect
import json
import os
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlpo_hpc.cluster import launch
from mlpo_hpc.cluster.memory import return_freed_memory, reuse_freed_memory
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import SECTION, read_ds_config
from mlpo_hpc.engine import trainers
from mlpo_hpc.engine.translate import Translation, translate
from mlpo_hpc.errors import ConfigError, MlpoError, UnsupportedError
from mlpo_hpc.telemetry import log

DsConfig = Mapping[str, Any] | str | os.PathLike[str]

CLASS_NAME = "DeepSpeedZeroOptimizer_Stage3"

_open_contexts: list[list[Any]] = []
"""The engines made under each open `offload` context."""


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Collective over all ranks. See `mlpo_hpc.initialize`."""
    log.start()
    import deepspeed

    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs)
    init_distributed()
    config = together(lambda: _checked_config(given.arguments))
    with offload(config):
        result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*given.args, **given.kwargs)
    return result


@contextmanager
def offload(ds_config: DsConfig) -> Iterator[None]:
    """See `mlpo_hpc.offload`. Contexts may be nested; the innermost one's configuration holds."""
    log.start()
    mine = read_ds_config(ds_config)
    translate(mine)  # a wrong configuration is said before a trainer does its work
    import deepspeed
    import deepspeed.runtime.zero.stage3 as stage3_module

    _import_subclasses_of_stage3()
    from mlpo_hpc.engine import contract
    from mlpo_hpc.engine.stage3 import STOCK_CLASS

    contract.check(STOCK_CLASS, deepspeed.__version__)
    stock_initialize = getattr(deepspeed.initialize, "stock", deepspeed.initialize)

    @functools.wraps(stock_initialize)
    def initialize_with_offload(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(stock_initialize).bind(*args, **kwargs)
        if not _trains(given.arguments):  # a reference model, say: there is no state to offload
            with _replaced(stage3_module, CLASS_NAME, STOCK_CLASS):
                return stock_initialize(*args, **kwargs)
        result = _initialize(stock_initialize, stage3_module, given, mine)
        for engines in _open_contexts:
            engines.append(result[0])
        return result

    initialize_with_offload.stock = stock_initialize  # type: ignore[attr-defined]
    # A name imported earlier (`from deepspeed import initialize`) passes us by: say so, do not train stock.
    refusing = type(CLASS_NAME, (STOCK_CLASS,), {"__init__": _refuse_bypass})
    made: list[Any] = []
    _open_contexts.append(made)
    try:
        with (
            _replaced(deepspeed, "initialize", initialize_with_offload),
            _replaced(stage3_module, CLASS_NAME, refusing),
            trainers.refuse_plain_steps(made),
        ):
            yield
    finally:
        _open_contexts.pop()
    if not made:
        raise MlpoError(
            "nothing was initialised under mlpo_hpc.offload(): open it around the call that runs "
            "deepspeed.initialize, such as trainer.train() or accelerator.prepare(), not around the constructor"
        )


def _initialize(
    stock_initialize: Callable[..., Any], stage3_module: Any, given: inspect.BoundArguments, mine: Mapping[str, Any]
) -> Any:
    """Collective over all ranks. `deepspeed.initialize` with our optimizer in place of the stock one."""
    from mlpo_hpc.engine.stage3 import OffloadStage3

    init_distributed()
    trainers.refuse_copies()
    translation = _agree(lambda: _translate_call(given, mine))
    bound_class = type(OffloadStage3.__name__, (OffloadStage3,), {"translation": translation})
    with _replaced(stage3_module, CLASS_NAME, bound_class), _replaced(trainers, "initialising", True):
        result = stock_initialize(*given.args, **given.kwargs)
    if not isinstance(result[0].optimizer, OffloadStage3):
        raise UnsupportedError(
            f"DeepSpeed built {type(result[0].optimizer).__name__} instead of the offload engine: another library "
            "replaces its ZeRO-3 optimizer too"
        )
    _map_checkpoints(result[0])
    _own_checkpoints(result[0])
    _follow_steps(result[0])
    result[0].optimizer.keep_heap(reuse_freed_memory)
    return result


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _trains(arguments: Mapping[str, Any]) -> bool:
    """Whether a call of `deepspeed.initialize` makes an optimizer."""
    return arguments.get("optimizer") is not None or "optimizer" in _config_of(arguments)


def _refuse_bypass(*_: Any, **__: Any) -> None:
    raise MlpoError(
        "call deepspeed.initialize through the module: a name imported before mlpo_hpc.offload() passes it by"
    )


def _import_subclasses_of_stage3() -> None:
    """Whatever derives from the ZeRO-3 optimizer must do so before it is replaced."""
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401


def init_distributed() -> None:
    """Collective over all ranks. See `mlpo_hpc.init_distributed`."""
    return_freed_memory()
    import deepspeed
    import torch

    accelerator = deepspeed.accelerator.get_accelerator()
    started = deepspeed.comm.is_initialized()
    if not started:
        dist = torch.distributed
        launch.prepare((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None)
    if accelerator.device_name() != "cpu":
        _pick_device(accelerator)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not started:
        backend = accelerator.communication_backend_name()
        with _nothing_to_compile(deepspeed.ops):
            deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def _pick_device(accelerator: Any) -> None:
    """Choose the device before the first collective: all ranks would meet on device 0.

    A launcher may show each rank one device only (``--gpus-per-task``); DeepSpeed and torch take
    LOCAL_RANK for its number, so it becomes 0 there. Without LOCAL_RANK whoever started
    torch.distributed has chosen.
    """
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(accelerator.current_device())))
    if accelerator.device_count() == 1 and local_rank > 0:
        for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):  # DeepSpeed wants these equal
            if name in os.environ:
                os.environ[name] = "0"
        local_rank = 0
    accelerator.set_device(local_rank)


@contextmanager
def _nothing_to_compile(ops: Any) -> Iterator[None]:
    """Keep DeepSpeed from compiling its shared-memory collectives for CPUs on the spot."""
    hidden = vars(ops).get("__compatible_ops__")
    vars(ops)["__compatible_ops__"] = {}
    try:
        yield
    finally:
        if hidden is None:
            del vars(ops)["__compatible_ops__"]
        else:
            vars(ops)["__compatible_ops__"] = hidden


def _config_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration among the arguments of `deepspeed.initialize`, wherever it is."""
    namespace = arguments.get("args")
    for value in (
        arguments.get("config"),
        arguments.get("config_params"),
        getattr(namespace, "deepspeed_config", None),
    ):
        if value is not None:
            return read_ds_config(value)
    raise ConfigError("no DeepSpeed configuration was given: pass config=... (a dict or the path of a JSON file)")


def _checked_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    config = _config_of(arguments)
    translate(config)
    if not _trains(arguments):
        raise ConfigError("there is no optimizer: pass optimizer=..., or give the configuration an 'optimizer' section")
    return config


def _translate_call(given: inspect.BoundArguments, mine: Mapping[str, Any]) -> Translation:
    """Translate the configuration of a call, and let the call use the result."""
    theirs = _config_of(given.arguments)
    section = mine.get(SECTION)
    if SECTION in theirs and section is not None and theirs[SECTION] != section:
        raise ConfigError(f"'{SECTION}' given to mlpo_hpc.offload() and the one DeepSpeed was given differ; keep one")
    if section is not None:
        theirs[SECTION] = section
    translation = translate(theirs)
    if getattr(given.arguments.get("args"), "deepspeed_config", None) is not None:
        given.arguments["args"].deepspeed_config = None
    given.arguments.pop("config_params", None)
    given.arguments["config"] = translation.ds_config
    return translation


def _agree(make: Callable[[], Translation]) -> Translation:
    """Collective over the training world. The same configuration on all ranks, or the same error."""
    translation = together(make)
    mine = {
        "versions": _versions(),
        "mlp_offload": translation.offload.model_dump(mode="json"),
        **translation.ds_config,
    }
    everyone = gather(json.loads(json.dumps(mine, sort_keys=True, default=repr)))
    for rank, theirs in enumerate(everyone):
        if differences := list(_differences(theirs, everyone[0])):
            error = ConfigError(
                f"ranks disagree about the configuration (rank {rank} | rank 0):\n  " + "\n  ".join(differences) + "\n"
                "Give all ranks the same file, the same MLPO_HPC_ variables and the same environment"
            )
            error.on_all_ranks = True
            raise error
    return translation


def _differences(mine: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where two configurations differ, a line each."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({*mine, *theirs}):
            yield from _differences(mine.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif mine != theirs:
        yield f"{path}: {mine} | {theirs}"


def _versions() -> dict[str, str]:
    """Of what must be the same on all ranks."""
    import deepspeed
    import torch

    import mlpo_hpc

    return {"mlpo_hpc": mlpo_hpc.__version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__}


def _follow_steps(engine: Any) -> None:
    """Let our figures go to the journal, and to DeepSpeed's own monitor (TensorBoard, W&B, CSV), where they are on."""
    journal = engine.optimizer.journal
    if journal is None and not engine.monitor.enabled:
        return
    seen = weakref.ref(engine)  # the engine has the optimizer

    def tell(report: Mapping[str, Any]) -> None:
        here = seen()
        if here is None:
            return
        if journal is not None:
            journal.step(here.global_steps + 1, report)  # DeepSpeed counts this step later
        if here.monitor.enabled:
            samples = here.global_samples + here.train_batch_size()  # as DeepSpeed counts this step itself
            here.monitor.write_events([(f"Train/Offload/{name}", value, samples) for name, value in _figures(report)])

    engine.optimizer.after_step = tell


def _figures(report: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a report by name, those of tiers with the tier's."""
    for name, value in report.items():
        if isinstance(value, int | float) and name != "step":
            yield name, value
    for tier, figures in report["tiers"].items():
        for name, value in figures.items():
            if isinstance(value, int | float):
                yield f"{tier}_{name}", value


def _own_checkpoints(engine: Any) -> None:
    """Save and load in our own format; a mixture of experts has parts in files of DeepSpeed's alone."""
    from mlpo_hpc.engine.loading import Loading
    from mlpo_hpc.engine.saving import Saving

    if not engine.has_moe_layers:
        saving = Saving(engine)
        engine.save_checkpoint, engine.checkpoint_committed = saving.save, saving.committed
        engine.load_checkpoint = Loading(engine, saving).load


def _map_checkpoints(engine: Any) -> None:
    """Let DeepSpeed's checkpoint files be mapped when they are loaded, not copied into memory whole."""
    import torch
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    stock = engine.checkpoint_engine
    if type(stock) is not TorchCheckpointEngine:
        return

    def load(path: str, map_location: Any = None) -> Any:
        # Files in torch's old format cannot be mapped.
        return torch.load(path, map_location=map_location, weights_only=False, mmap=zipfile.is_zipfile(path))

    stock.load = load
