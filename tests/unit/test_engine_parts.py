"""The contract with DeepSpeed, and what optimizers keep."""

from __future__ import annotations

import copy
import inspect
import textwrap

import pytest
import torch

from mlpo_hpc.engine import contract, trainers
from mlpo_hpc.engine import records as records_module
from mlpo_hpc.engine.records import Records
from mlpo_hpc.engine.update import BoundState, probe_optimizer, set_group, updates_in_parts
from mlpo_hpc.errors import ConfigError, MlpoError, UnsupportedError


@pytest.fixture(scope="module")
def stage3():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return DeepSpeedZeroOptimizer_Stage3


def test_this_deepspeed_keeps_the_contract(stage3):
    import deepspeed

    contract.check(stage3, deepspeed.__version__)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("self._optimizer_step(sub_group_id)", "self._other_step(sub_group_id)", "step\\(\\) calls"),
        ("self._optimizer_step(sub_group_id)", "self._optimizer_step(sub_group_id + 1)", "step\\(\\) calls"),
        (
            "self.unscale_and_clip_grads(sub_group_id, scaled_global_grad_norm)",
            "self.unscale_and_clip_grads(sub_group_id, norms[sub_group_id])",
            "something else",
        ),
        (
            "for sub_group_id, group in enumerate(self.fp16_groups):\n\n            #prepare",
            "for sub_group_id in ():\n\n            #prepare",
            "0 loops",
        ),
        ("def _pre_step(self):", "def _before_step(self):", "no method _pre_step"),
        ("def _rigid_load_state_dict(self, state_dict,", "def _rigid_load_state_dict(self, states,", "takes"),
    ],
)  # fmt: skip
def test_another_shape_is_refused(monkeypatch, stage3, old, new, said):
    source = textwrap.dedent(inspect.getsource(stage3))
    assert old in source
    monkeypatch.setattr(contract.inspect, "getsource", lambda _: source.replace(old, new))
    with pytest.raises(UnsupportedError, match=said) as caught:
        contract.check(stage3, "99.0")
    assert "99.0" in str(caught.value)
    assert contract.NEWEST_TESTED in str(caught.value)
    monkeypatch.setenv(contract.OVERRIDE_VARIABLE, "1")
    contract.check(stage3, "99.0")


def make(kind, **kwargs):
    return kind([torch.nn.Parameter(torch.zeros(3))], **kwargs)


@pytest.mark.parametrize(
    ("kind", "kwargs", "vectors", "zero"),
    [
        (torch.optim.AdamW, {"fused": True}, {"exp_avg", "exp_avg_sq"}, True),
        (torch.optim.Adam, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, True),
        (torch.optim.SGD, {"lr": 1.0}, set(), False),
        (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}, {"momentum_buffer"}, False),
        (torch.optim.RMSprop, {"centered": True}, {"square_avg", "grad_avg"}, False),
        (torch.optim.Adamax, {}, {"exp_avg", "exp_inf"}, False),
        (torch.optim.RAdam, {}, {"exp_avg", "exp_avg_sq"}, False),
    ],
)
def test_what_optimizers_keep_is_found_without_touching_them(kind, kwargs, vectors, zero):
    optimizer = make(kind, **kwargs)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(optimizer.state_dict())
    spec = probe_optimizer(optimizer, optimizer.param_groups[0])
    assert set(spec.vectors) == vectors
    assert spec.zero_initial is zero
    assert optimizer.state_dict() == before
    assert calls == []


def test_an_optimizer_that_makes_its_state_at_birth_is_refused_with_a_way_out():
    class Eager(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            for param in self.param_groups[0]["params"]:
                self.state[param]["sum"] = torch.zeros_like(param)

        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                self.state[param]["sum"].add_(param.grad)

    optimizer = make(Eager, lr=1.0)
    with pytest.raises(UnsupportedError, match="Eager.*KeyError.*AdamW"):
        probe_optimizer(optimizer, optimizer.param_groups[0])


def test_state_of_another_shape_is_refused():
    class Factored(torch.optim.SGD):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                self.state[param]["rows"] = torch.zeros(2, 2)

    optimizer = make(Factored, lr=1.0)
    with pytest.raises(UnsupportedError, match="rows"):
        probe_optimizer(optimizer, optimizer.param_groups[0])


class Alone:
    """State of one subgroup, as it is used."""

    def __init__(self, spec, numel, in_parts=False):
        self.weights = torch.zeros(numel)
        self.records = Records([numel], [spec.num_vectors], lambda _: self.weights, in_parts=in_parts)
        self.bound = BoundState([spec], self.records)
        self.record = memoryview(bytearray(self.records.nbytes(0)))

    def open(self):
        return self.records.open(0, self.record, lambda *_: self.record)

    @property
    def vectors(self):
        return self.records.plain_vectors(0, self.record)

    def step(self, optimizer, gradient):
        """As the engine does it, part by part."""
        master, opened, group = torch.nn.Parameter(torch.empty(0)), self.open(), optimizer.param_groups[0]
        for part in opened.parts:
            vectors = opened.vectors(part)
            self.bound.bind(0, vectors, optimizer, master)
            master.grad = gradient[part].clone()
            group["params"] = [master]
            optimizer.step()
            group["params"] = []
            scalars = self.bound.unbind(0, vectors, optimizer, master)
        self.bound.take_scalars(0, scalars)
        assert master not in optimizer.state
        return len(opened.parts)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"fused": True, "amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
    ],
)
@pytest.mark.parametrize("numel", [1003, 1024, 70_001])
def test_updates_through_a_record_are_those_of_the_optimizer_itself(kind, kwargs, numel, monkeypatch):
    """Part by part where the engine does it in parts; these are as small as any may be."""
    monkeypatch.setattr(records_module, "PART_ITEMS", 256)
    torch.manual_seed(0)
    start = torch.randn(numel)
    plain = torch.nn.Parameter(start.clone())
    reference = kind([plain], **kwargs)
    optimizer = make(kind, **kwargs)
    spec, in_parts = probe_optimizer(optimizer, optimizer.param_groups[0]), updates_in_parts(optimizer)
    assert in_parts == kwargs.get("fused", False)
    alone = Alone(spec, numel, in_parts)
    alone.bound.create(alone.open(), start)
    for _ in range(5):
        gradient = torch.randn(numel)
        plain.grad = gradient.clone()
        reference.step()
        assert alone.step(optimizer, gradient) == (-(-numel // 256) if in_parts else 1)
        assert torch.equal(alone.vectors[0], plain.detach())
    for key, vector in zip(spec.vectors, alone.vectors[1:], strict=True):
        assert torch.equal(vector, reference.state[plain][key])


def test_state_saved_by_deepspeed_s_cpu_adam_goes_on_with_torch_s():
    """It counts steps in plain integers, torch in tensors."""
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(50))
    reference = torch.optim.AdamW([plain], fused=True)
    for _ in range(3):
        plain.grad = torch.randn(50)
        reference.step()
    saved = {key: value.clone() for key, value in reference.state[plain].items()} | {"step": 3}
    optimizer = make(torch.optim.AdamW, fused=True)
    alone = Alone(probe_optimizer(optimizer, optimizer.param_groups[0]), 50)
    alone.bound.restore(0, alone.open(), plain.detach(), saved)
    assert torch.equal(alone.weights, plain.detach())
    plain.grad = torch.randn(50)
    alone.step(optimizer, plain.grad)
    reference.step()
    assert torch.equal(alone.vectors[0], plain.detach())


def test_a_checkpoint_without_state_takes_the_old_state_away():
    optimizer = make(torch.optim.SGD, lr=0.1, momentum=0.9)
    alone = Alone(probe_optimizer(optimizer, optimizer.param_groups[0]), 5)
    alone.bound.restore(0, alone.open(), torch.ones(5), {"momentum_buffer": torch.full((5,), 7.0)})
    assert alone.bound.scalars(0) == {}
    alone.bound.restore(0, alone.open(), torch.zeros(5), {})
    assert not alone.vectors[1].any()
    assert alone.bound.scalars(0) is None


def test_the_probe_does_not_depend_on_the_default_type():
    optimizer = make(torch.optim.AdamW)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert probe_optimizer(optimizer, optimizer.param_groups[0]).vectors == ("exp_avg", "exp_avg_sq")
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_checkpoint_does_not_change_how_an_update_is_computed():
    """A run of another kernel saved it: updates in parts are exact with that of this run only."""
    group = {"params": [1], "lr": 0.1, "fused": True, "foreach": None}
    set_group(group, {"params": [], "lr": 0.2, "fused": None, "foreach": True, "initial_lr": 0.3})
    assert group == {"params": [1], "lr": 0.2, "fused": True, "foreach": None, "initial_lr": 0.3}


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}  # as Lightning sets them


def test_a_trainer_that_does_not_know_the_launcher_trains_no_copies():
    with pytest.raises(ConfigError, match="srun started 4 processes, but this one trains alone: 4 copies"):
        trainers._refuse_copies(1, SRUN | ALONE, {"lightning": None})


@pytest.mark.parametrize(
    ("world_size", "environ", "modules"),
    [
        (4, SRUN, {"lightning": None}),
        (1, SRUN | ALONE, {}),
        (1, SRUN | ALONE | {"TORCHELASTIC_RUN_ID": "x"}, {"lightning": None}),
        (1, SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, {"accelerate": None}),
        (1, ALONE, {"accelerate": None}),
    ],
)
def test_whoever_started_one_process_may_train_in_one(world_size, environ, modules):
    trainers._refuse_copies(world_size, environ, modules)


def test_no_optimizer_steps_before_there_is_an_engine():
    engines = []
    optimizer = make(torch.optim.SGD, lr=0.1)
    with trainers.refuse_plain_steps(engines):
        with pytest.raises(MlpoError, match="SGD steps under mlpo_hpc.offload\\(\\), but deepspeed.initialize was not"):
            optimizer.step()
        engines.append("one")
        optimizer.step()
    engines.clear()
    optimizer.step()
