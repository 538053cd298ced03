"""Our optimizer in place of DeepSpeed's ZeRO-3 one, for as long as a context is open."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlpo_hpc.cluster import launch
from mlpo_hpc.cluster.memory import return_freed_memory
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import SECTION, read_ds_config
from mlpo_hpc.engine.translate import Translation, translate
from mlpo_hpc.errors import ConfigError, MlpoError, UnsupportedError
from mlpo_hpc.telemetry import log

DsConfig = Mapping[str, Any] | str | os.PathLike[str]


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
    """See `mlpo_hpc.offload`."""
    log.start()
    mine = read_ds_config(ds_config)
    translate(mine)  # a wrong configuration is said before a trainer does its work
    import deepspeed
    import deepspeed.runtime.zero.stage3 as stage3_module

    _import_subclasses_of_stage3()
    from mlpo_hpc.engine import contract
    from mlpo_hpc.engine.stage3 import OffloadStage3

    stock_class = stage3_module.DeepSpeedZeroOptimizer_Stage3
    stock_initialize = deepspeed.initialize
    contract.check(stock_class, deepspeed.__version__)
    engines: list[Any] = []

    @functools.wraps(stock_initialize)
    def initialize_with_offload(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(stock_initialize).bind(*args, **kwargs)
        init_distributed()
        translation = _agree(lambda: _translate_call(given, mine))
        bound_class = type("OffloadStage3", (OffloadStage3,), {"translation": translation})
        stage3_module.DeepSpeedZeroOptimizer_Stage3 = bound_class
        result = stock_initialize(*given.args, **given.kwargs)
        if not isinstance(result[0].optimizer, OffloadStage3):
            raise UnsupportedError(
                f"DeepSpeed built {type(result[0].optimizer).__name__} instead of the offload engine: another library "
                "replaces its ZeRO-3 optimizer too"
            )
        _map_checkpoints(result[0])
        engines.append(result[0])
        return result

    deepspeed.initialize = initialize_with_offload
    # A name imported earlier (`from deepspeed import initialize`) passes us by: say so, do not train stock.
    stage3_module.DeepSpeedZeroOptimizer_Stage3 = type(
        stock_class.__name__, (stock_class,), {"__init__": _refuse_bypass}
    )
    try:
        yield
    finally:
        deepspeed.initialize = stock_initialize
        stage3_module.DeepSpeedZeroOptimizer_Stage3 = stock_class
    if not engines:
        raise MlpoError(
            "nothing was initialised under mlpo_hpc.offload(): open it around the call that runs "
            "deepspeed.initialize, such as trainer.train() or accelerator.prepare(), not around the constructor"
        )


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

    if not deepspeed.comm.is_initialized():
        launch.prepare()
        accelerator = deepspeed.accelerator.get_accelerator()
        backend = accelerator.communication_backend_name()
        if accelerator.device_name() != "cpu":
            # Before the first collective: all ranks would meet on device 0. One device may be all we see.
            accelerator.set_device(int(os.environ["LOCAL_RANK"]) % accelerator.device_count())
        with _nothing_to_compile(deepspeed.ops):
            deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


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
    mine = {"mlp_offload": translation.offload.model_dump(mode="json"), **translation.ds_config}
    texts = gather(json.dumps(mine, sort_keys=True, default=repr))
    odd = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if odd:
        raise ConfigError(
            f"ranks disagree about the configuration: rank {odd[0]} has\n  {texts[odd[0]]}\nrank 0 has\n  {texts[0]}\n"
            "Give all ranks the same file and the same MLPO_HPC_ variables"
        )
    return translation


def _map_checkpoints(engine: Any) -> None:
    """Let DeepSpeed's checkpoint files be mapped when they are loaded, not copied into memory whole."""
    import torch
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    stock = engine.checkpoint_engine
    if type(stock) is not TorchCheckpointEngine:
        return

    def load(path: str, map_location: Any = None) -> Any:
        zipped = torch.serialization._is_zipfile(open(path, "rb"))  # noqa: SIM115
        return torch.load(path, map_location=map_location, weights_only=False, mmap=zipped)

    stock.load = load
