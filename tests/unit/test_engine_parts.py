"""The contract with DeepSpeed, and what optimizers keep."""

from __future__ import annotations

import copy
import inspect
import textwrap

import pytest
import torch

from mlpo_hpc.engine import contract
from mlpo_hpc.engine.records import Records
from mlpo_hpc.engine.update import BoundState, probe_optimizer
from mlpo_hpc.errors import UnsupportedError


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


def bind_alone(spec, numel):
    """State of one subgroup, as it is used."""
    return BoundState([spec], Records([numel], [spec.num_vectors]))


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_updates_through_a_record_are_those_of_the_optimizer_itself(kind, kwargs):
    torch.manual_seed(0)
    numel = 1003
    start = torch.randn(numel)
    plain = torch.nn.Parameter(start.clone())
    reference = kind([plain], **kwargs)
    optimizer = make(kind, **kwargs)
    group = optimizer.param_groups[0]
    bound = bind_alone(probe_optimizer(optimizer, group), numel)
    record = memoryview(bytearray(bound.records.nbytes(0)))
    master = torch.nn.Parameter(torch.empty(0))
    bound.create(0, record, start)
    for _ in range(5):
        gradient = torch.randn(numel)
        plain.grad = gradient.clone()
        reference.step()
        bound.bind(0, bound.records.vectors(0, record), optimizer, master)
        master.grad = gradient.clone()
        group["params"] = [master]
        optimizer.step()
        group["params"] = []
        bound.unbind(0, record, optimizer, master)
        assert torch.equal(bound.records.vectors(0, record)[0], plain.detach())
    for key, vector in zip(bound.specs[0].vectors, bound.records.vectors(0, record)[1:], strict=True):
        assert torch.equal(vector, reference.state[plain][key])
    assert master not in optimizer.state


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
    group = optimizer.param_groups[0]
    bound = bind_alone(probe_optimizer(optimizer, group), 50)
    record, master = memoryview(bytearray(bound.records.nbytes(0))), torch.nn.Parameter(torch.empty(0))
    bound.restore(0, record, plain.detach(), saved)
    bound.bind(0, bound.records.vectors(0, record), optimizer, master)
    plain.grad = torch.randn(50)
    master.grad = plain.grad.clone()
    group["params"] = [master]
    optimizer.step()
    reference.step()
    assert torch.equal(master.detach(), plain.detach())


def test_a_checkpoint_without_state_takes_the_old_state_away():
    optimizer = make(torch.optim.SGD, lr=0.1, momentum=0.9)
    bound = bind_alone(probe_optimizer(optimizer, optimizer.param_groups[0]), 5)
    record = memoryview(bytearray(bound.records.nbytes(0)))
    bound.restore(0, record, torch.ones(5), {"momentum_buffer": torch.full((5,), 7.0)})
    bound.restore(0, record, torch.zeros(5), {})
    assert not bound.records.vectors(0, record)[1].any()
    assert bound.scalars(0) is None


def test_the_probe_does_not_depend_on_the_default_type():
    optimizer = make(torch.optim.AdamW)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert probe_optimizer(optimizer, optimizer.param_groups[0]).vectors == ("exp_avg", "exp_avg_sq")
    finally:
        torch.set_default_dtype(torch.float32)
