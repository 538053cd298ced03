"""From a record in host memory to what the torch optimizer updates, and back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlpo_hpc.engine.records import Opened, Records
from mlpo_hpc.errors import UnsupportedError

PROBE_NUMEL = 8
MASTER = "fp32"
"""The master weights, as DeepSpeed's checkpoints call them."""

Fetch = Callable[[str | None, slice], torch.Tensor]

# Optimizers whose kernel computes an item in the same way wherever it lies among aligned parts.
FUSED = (torch.optim.Adam, torch.optim.AdamW)
IN_PARTS = "DeepSpeedCPUAdam"
KERNEL_KEYS = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that say how an update is computed, not what: those of this run hold, whatever a checkpoint has."""

# Optimizers whose state before the first step is all zero, so that it can be in place from the start.
ZERO_INITIAL_STATE: tuple[type, ...] = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class StateSpec:
    """What one optimizer keeps for each parameter."""

    vectors: tuple[str, ...]
    """Keys of fp32 tensors shaped like the parameter: they travel with the master weights."""
    scalars: dict[str, Any]
    """The other keys, with their values after one step: they stay in host memory."""
    zero_initial: bool
    """Whether all of it is zero before the first step."""

    @property
    def num_vectors(self) -> int:
        """Vectors of a record: master weights and state."""
        return 1 + len(self.vectors)


def probe_optimizer(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> StateSpec:
    """Find out what an optimizer keeps, by one step of its own code on a tiny parameter.

    Raises
    ------
    UnsupportedError
        If the optimizer cannot step on a parameter it was not made with, or keeps state that is
        neither shaped like the parameter nor small.
    """
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    parameter = torch.zeros(PROBE_NUMEL, requires_grad=True, **kind)
    parameter.grad = torch.zeros(PROBE_NUMEL, **kind)
    double = _double(optimizer, {**group, "params": [parameter]})
    try:
        double.step()
    except Exception as error:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be offloaded: it does not step on a parameter that it was not made "
            f"with ({type(error).__name__}: {error}). Use AdamW or another torch optimizer that makes its state lazily."
        ) from error
    state = double.state[parameter]
    vectors = tuple(key for key, value in state.items() if _is_vector(value))
    odd = [key for key, value in state.items() if torch.is_tensor(value) and key not in vectors and value.numel() > 1]
    if odd:
        raise UnsupportedError(
            f"{type(optimizer).__name__} keeps state of a shape or type that cannot be offloaded: {odd}"
        )
    scalars = {key: value for key, value in state.items() if key not in vectors}
    return StateSpec(vectors, scalars, type(optimizer) in ZERO_INITIAL_STATE)


def updates_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer makes the same of a vector, bit for bit, when it is given parts of it.

    Others may compute a sum over all of it, or share it among threads such that the last items of each share
    are computed by other instructions.
    """
    if type(optimizer).__name__ == IN_PARTS:
        return True
    return type(optimizer) in FUSED and all(group.get("fused") for group in optimizer.param_groups)


def set_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a parameter group the hyper-parameters of a checkpoint."""
    group.update({key: value for key, value in saved.items() if key not in {"params", *KERNEL_KEYS}})


def _double(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """The same optimizer with one other parameter: no hooks, no scheduler's wrapper, state of its own."""
    double = object.__new__(_without_del(type(optimizer)))
    double.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    double.param_groups = [group]
    double.state = defaultdict(dict)
    double._optimizer_step_pre_hooks = OrderedDict()
    double._optimizer_step_post_hooks = OrderedDict()
    return double


def _without_del(kind: type) -> Any:
    """DeepSpeed's own CPU optimizers free their C++ half in `__del__`, which the double shares."""
    return type(kind.__name__, (kind,), {"__del__": lambda self: None}) if hasattr(kind, "__del__") else kind


def _is_vector(value: Any) -> bool:
    return torch.is_tensor(value) and value.shape == (PROBE_NUMEL,) and value.dtype == torch.float32


class BoundState:
    """Scalars and presence of state for each subgroup, and the binding of records to torch tensors.

    Parameters
    ----------
    specs : list of StateSpec
        Of each subgroup.
    records : Records
        What holds them.
    """

    def __init__(self, specs: list[StateSpec], records: Records) -> None:
        self.specs = specs
        self.records = records
        self.numels = records.numels
        self._scalars: list[dict[str, Any] | None] = [_initial_scalars(spec) for spec in specs]

    def create(self, opened: Opened, weights: torch.Tensor) -> None:
        """Write the first state: master weights from the 16-bit ones, everything else zero."""
        for part in opened.parts:
            master, *rest = opened.vectors(part)
            master.copy_(weights.detach().reshape(-1)[part])
            for vector in rest:
                vector.zero_()
            opened.encode(part)

    def bind(
        self, subgroup: int, vectors: list[torch.Tensor], optimizer: torch.optim.Optimizer, master: torch.Tensor
    ) -> None:
        """Let the optimizer's parameter and state be these vectors; what else it keeps is a copy."""
        data, *rest = vectors
        master.data = data
        scalars = self._scalars[subgroup]
        if scalars is not None:
            keys = self.specs[subgroup].vectors
            copies = {key: value.clone() if torch.is_tensor(value) else value for key, value in scalars.items()}
            values = dict(zip(keys, rest, strict=True)) | copies
            optimizer.state[master] = {key: values[key] for key in self._key_order(subgroup) if key in values}

    def unbind(
        self, subgroup: int, vectors: list[torch.Tensor], optimizer: torch.optim.Optimizer, master: torch.Tensor
    ) -> dict[str, Any] | None:
        """Take the state back: what the optimizer made anew goes into the vectors. What is no vector is returned."""
        _, *rest = vectors
        state: dict[str, Any] | None = optimizer.state.pop(master, None)
        _empty(master)
        if not state:
            return None
        for key, slot in zip(self.specs[subgroup].vectors, rest, strict=True):
            value = state.pop(key, None)
            if value is None:
                raise UnsupportedError(f"the optimizer keeps no {key!r} of subgroup {subgroup}, which its probe had")
            if value.data_ptr() != slot.data_ptr():
                slot.copy_(value)
        grown = [key for key, value in state.items() if torch.is_tensor(value) and value.numel() > 1]
        if grown:
            raise UnsupportedError(f"the optimizer began to keep {grown}, which its probe did not have")
        return state

    def forget(self, optimizer: torch.optim.Optimizer, master: torch.Tensor) -> None:
        """Undo `bind` where nothing was changed; what refers to the state's dict keeps it whole."""
        optimizer.state.pop(master, None)
        _empty(master)

    def restore(self, subgroup: int, opened: Opened, weights: torch.Tensor, state: dict[str, Any] | None) -> None:
        """Write master weights and state from a checkpoint into a record, and the 16-bit weights. Without `state` only
        the weights."""
        keys, values = self.specs[subgroup].vectors, state or {}
        flat = weights.detach().reshape(-1)
        for part in opened.parts:
            master, *rest = opened.vectors(part)
            master.copy_(flat[part])
            for key, slot in zip(keys, rest, strict=True) if state is not None else ():
                slot.copy_(values[key].reshape(-1)[part]) if key in values else slot.zero_()
            opened.weights[part].copy_(flat[part])
            opened.encode(part)
        if state is not None:
            examples = self.specs[subgroup].scalars
            saved = {key: _like(examples.get(key), value) for key, value in state.items() if key not in keys}
            self._scalars[subgroup] = saved if state else _initial_scalars(self.specs[subgroup])

    def take_scalars(self, subgroup: int, values: dict[str, Any] | None) -> None:
        """Keep what `unbind` returned; nothing, if the optimizer did not step."""
        if values is not None:
            self._scalars[subgroup] = values

    def load(self, subgroup: int, opened: Opened, fetch: Fetch, with_state: bool) -> None:
        """Fill a record, and the 16-bit weights, from a checkpoint that is asked for each part.

        Parameters
        ----------
        subgroup : int
            Whose.
        opened : Opened
            Its record.
        fetch : callable
            ``(vector, part) -> values``; None for the vector: the 16-bit weights.
        with_state : bool
            Whether it has the state vectors too; else those stay as they are.
        """
        for part in opened.parts:
            master, *rest = opened.vectors(part)
            master.copy_(fetch(MASTER, part))
            for key, slot in zip(self.specs[subgroup].vectors, rest, strict=True) if with_state else ():
                slot.copy_(fetch(key, part))
            opened.weights[part].copy_(fetch(None, part))
            opened.encode(part)

    def set_scalars(self, subgroup: int, values: Mapping[str, float] | None) -> None:
        """Set state that is not a vector, each value in the form that this optimizer keeps; None: as at the start."""
        if values is None:
            self._scalars[subgroup] = _initial_scalars(self.specs[subgroup])
            return
        examples = self.specs[subgroup].scalars
        self._scalars[subgroup] = {key: _like(examples.get(key), value) for key, value in values.items()}

    def scalars(self, subgroup: int) -> dict[str, Any] | None:
        """State that is not a vector; None before the first step of an optimizer that makes it lazily."""
        return self._scalars[subgroup]

    def _key_order(self, subgroup: int) -> list[str]:
        spec = self.specs[subgroup]
        return [
            *spec.scalars,
            *spec.vectors,
            *(key for key in self._scalars[subgroup] or {} if key not in spec.scalars),
        ]


def _like(example: Any, value: Any) -> Any:
    """A saved scalar in the form that this optimizer keeps.

    Each subgroup gets its own copy: step counts grow in place, and a checkpoint may hold one tensor
    for all. DeepSpeed's CPU Adam saves plain integers, torch's AdamW keeps tensors.
    """
    if torch.is_tensor(example):
        return torch.as_tensor(value, dtype=example.dtype).clone()
    if torch.is_tensor(value):
        return value.clone() if example is None else value.item()
    return value if example is None else type(example)(value)


def _empty(master: torch.Tensor) -> None:
    master.data = torch.empty(0, dtype=torch.float32)
    master.grad = None


def _initial_scalars(spec: StateSpec) -> dict[str, Any] | None:
    if not spec.zero_initial:
        return None
    return {key: torch.zeros_like(value) if torch.is_tensor(value) else 0 for key, value in spec.scalars.items()}
