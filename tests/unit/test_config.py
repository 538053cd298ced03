"""Configuration: sources, faults, and DeepSpeed configurations of today."""

from __future__ import annotations

import json

import pytest

from mlpo_hpc.config import OffloadConfig, expand, load
from mlpo_hpc.engine.translate import translate
from mlpo_hpc.errors import ConfigError, UnsupportedError

TODAY = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": 12, "pipeline_read": True},
    },
}


def test_defaults_need_nothing():
    assert load({}) == OffloadConfig()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"tires": []}, ["'tires'", "valid keys: tiers, host_memory"]),
        ({"tokens": {"backand": "off"}}, ["mlp_offload.tokens", "'backand'", "backend, permits, timeout_s"]),
        ({"tiers": [{"name": "a", "dir": "/x", "bps": 1}]}, ["mlp_offload.tiers.0", "'bps'", "read_bps"]),
        ({"host_memory": "lots"}, ["host_memory"]),
        ({"order": "random"}, ["order", "alternate"]),
        ({"placement": {"static": [2, 1]}}, ["one weight for each of 0 tiers"]),
        ({"tiers": [{"name": "a", "dir": "/x"}] * 2}, ["names must differ"]),
        ({"tiers": [{"name": "a", "dir": "/x", "read_bps": -5}]}, ["read_bps", "greater than 0"]),
        ({"tiers": [{"name": "a", "dir": "/x", "read_bps": "NaN"}]}, ["read_bps"]),
        ({"chunk_bytes": 100}, ["at least 4096"]),
        ({"prefetch": -1}, ["prefetch"]),
        ("yes", ["must be an object"]),
    ],
)
def test_faults_are_named_with_the_way_out(section, said):
    with pytest.raises(ConfigError) as caught:
        load({"mlp_offload": section})
    for text in said:
        assert text in str(caught.value)


def test_all_faults_come_in_one_message():
    with pytest.raises(ConfigError) as caught:
        load({"mlp_offload": {"order": "x", "chunk_bytes": 1, "host_memory": "y"}})
    assert str(caught.value).count("mlp_offload.") >= 3


def test_sizes_are_read_as_people_write_them():
    assert load({"mlp_offload": {"host_memory": "200GB", "chunk_bytes": "8MiB"}}).host_memory == 200 * 10**9


def test_the_environment_wins_and_nested_keys_work(monkeypatch):
    monkeypatch.setenv("MLPO_HPC_HOST_MEMORY", "1GiB")
    monkeypatch.setenv("MLPO_HPC_TOKENS__BACKEND", "off")
    monkeypatch.setenv("MLPO_HPC_TIERS", '[{"name": "a", "dir": "/a"}]')
    monkeypatch.setenv("MLPO_HPC_ROOT", "/opt/mlpo")
    found = load({"mlp_offload": {"host_memory": 5, "tokens": {"permits": 2}}})
    assert (found.host_memory, found.tokens.backend, found.tokens.permits) == (2**30, "off", 2)
    assert found.tiers[0].dir == "/a"
    monkeypatch.setenv("MLPO_HPC_HOST_MEMROY", "1GiB")
    with pytest.raises(ConfigError, match=r"host_memroy[\s\S]*overridden by the environment: .*MLPO_HPC_HOST_MEMROY"):
        load({})


def test_a_misspelt_section_is_not_passed_over():
    with pytest.raises(ConfigError, match="'mlp_offlaod'.*did you mean 'mlp_offload'"):
        load({"mlp_offlaod": {"host_memory": 1}, "zero_optimization": {}})


def test_bandwidths_are_sizes_too():
    tier = {"name": "a", "dir": "/a", "read_bps": "5GB", "write_bps": 2.5e9}
    found = load({"mlp_offload": {"tiers": [tier]}}).tiers[0]
    assert (found.read_bps, found.write_bps) == (5e9, 2.5e9)


def test_a_file_is_read_and_a_missing_or_broken_one_said(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"mlp_offload": {"order": "sequential"}}))
    assert load(path).order == "sequential"
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere.json")
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        load(path)


def test_variables_are_expanded_and_an_unset_one_is_named(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert expand("${SCRATCH}/mlpo/$SCRATCH") == "/scratch/me/mlpo//scratch/me"
    with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
        expand("${NOT_SET_ANYWHERE}/x")


def test_a_deepspeed_configuration_of_today_becomes_a_tier(tmp_path):
    today = json.loads(json.dumps(TODAY))
    today["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "made")
    found = translate(today)
    assert [(tier.name, tier.dir) for tier in found.offload.tiers] == [("nvme", str(tmp_path / "made"))]
    assert (tmp_path / "made").is_dir(), "DeepSpeed makes it too"
    zero = found.ds_config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert found.sub_group_size == zero["sub_group_size"] == 10**9
    assert found.ds_config["zero_force_ds_cpu_optimizer"] is False
    assert today["zero_optimization"]["offload_optimizer"]["device"] == "nvme", "the caller's dict is left alone"


@pytest.mark.parametrize(
    "zero", [{"stage": 3}, {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}]
)
def test_offload_is_added_where_it_is_absent_and_the_section_taken_out(zero):
    found = translate({"zero_optimization": zero, "mlp_offload": {"tiers": []}})
    assert found.ds_config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "mlp_offload" not in found.ds_config
    assert found.sub_group_size is None


@pytest.mark.parametrize(
    ("kind", "params", "adam_w"),
    [
        ("AdamW", {}, True),
        ("Adam", {}, True),
        ("Adam", {"adam_w_mode": False}, False),
        ("adamw", {"bias_correction": True, "fp32_optimizer_states": True}, True),
    ],
)
def test_adam_sections_build_torch_s_fused_adamw_with_deepspeed_s_meaning(kind, params, adam_w):
    found = translate({"zero_optimization": {"stage": 3}, "optimizer": {"type": kind, "params": {"lr": 1, **params}}})
    assert found.ds_config["optimizer"]["params"] == {
        "lr": 1, "torch_adam": True, "fused": True, "adam_w_mode": adam_w, "weight_decay": 0.0,
    }  # fmt: skip


def test_torch_s_default_decay_stays_where_torch_s_adam_was_asked_for():
    params = {"lr": 1, "torch_adam": True}
    found = translate({"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": params}})
    assert "weight_decay" not in found.ds_config["optimizer"]["params"]


def test_the_old_spelling_of_offload_is_taken():
    found = translate({"zero_optimization": {"stage": 3, "cpu_offload": True}})
    assert "cpu_offload" not in found.ds_config["zero_optimization"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage"),
        ({"zero_optimization": None}, "stage"),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}}, "ratio"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"super_offload": True}}}, "SuperOffload"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "MiCS"),
        ({"compile": {"deepcompile": True}}, "DeepCompile"),
        ({"optimizer": {"type": "Muon", "params": {}}}, "Muon"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "master weights"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "master weights"),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, "bias_correction"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key(change, said):
    with pytest.raises(UnsupportedError, match=said):
        translate({"zero_optimization": {"stage": 3}, **change})


def test_nvme_without_a_path_is_said():
    with pytest.raises(ConfigError, match="nvme_path"):
        translate({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}})
