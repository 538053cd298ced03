"""`mlpo config`: the reference is complete and in the docs; a configuration is looked at as training looks at it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mlpo_hpc.cli import main
from mlpo_hpc.config import ENV_OF_OTHERS, ENV_PREFIX, OffloadConfig, load
from tests.ranks import ROOT

SCHEMA = OffloadConfig.model_json_schema()
SECTIONS = {"mlp_offload": SCHEMA, **SCHEMA["$defs"]}
SET = {
    "tiers": [{"name": "nvme", "dir": "/x", "read_bps": "5GB", "striping": {"policy": "auto"}}],
    "placement": {"static": [1]},
    "host_memory": "2GB",
}


def run(*arguments, **environ):
    return CliRunner().invoke(main, ["config", *map(str, arguments)], env=environ)


def written(folder, section, stage=3):
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "mlp_offload": section}))
    return path


def test_the_document_is_what_is_printed():
    assert (ROOT / "docs/configuration.md").read_text() == run("--markdown").output, (
        "write it again: python -m mlpo_hpc config --markdown > docs/configuration.md"
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_says_what_it_means(section):
    assert SECTIONS[section]["description"]
    for key, shape in SECTIONS[section]["properties"].items():
        assert shape.get("description"), f"{key}: needs a docstring below it, other than that of its class"


def test_every_section_and_variable_is_in_the_reference():
    text = run("--markdown").output
    for section in SECTIONS.values():
        for key in section["properties"]:
            assert f"\n| `{key}` |" in text, key
    for name in ENV_OF_OTHERS:
        assert f"\n| `{ENV_PREFIX}{name}` |" in text, name


@pytest.mark.parametrize(
    "row",
    [
        "| `host_memory` | size, `auto` | `auto` |",
        "| `chunk_bytes` | size | `64MiB` |",
        "| `name` | text | must be given |",
        "| `timeout_s` | number, above 0 | `1800` |",
        "| `read_bps` | size | - |",
        "| `static` | list of numbers | must be given |",
        "## `tiers[].striping.components[]`",
    ],
)
def test_values_and_defaults_read_as_people_write_them(row):
    assert row in run("--markdown").output


def test_a_terminal_gets_the_same_keys():
    text = run().output
    assert "|---" not in text
    assert "host_memory" in text


def test_what_a_file_sets_is_printed_and_means_the_same(tmp_path):
    path = written(tmp_path, SET)
    done = run(path, "--json", MLPO_HPC_PREFETCH="3")
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert found.pop("valid")
    assert load(found) == load({"mlp_offload": {**SET, "prefetch": 3}})
    assert "is valid" in run(path).output


@pytest.mark.parametrize(
    ("section", "stage", "said"),
    [
        ({"tokens": {"backend": "x"}, "order": "y"}, 3, ["mlp_offload.tokens.backend: ", "mlp_offload.order: "]),
        ({}, 2, ["works with ZeRO stage 3"]),
    ],
)
def test_faults_are_told_and_the_exit_code_is_1(tmp_path, section, stage, said):
    path = written(tmp_path, section, stage)
    for done in (run(path), run(path, "--json")):
        assert done.exit_code == 1
        assert all(text in done.output for text in said)
    assert json.loads(run(path, "--json").output)["valid"] is False


def test_wrong_usage():
    assert run("/no/such/file").exit_code == 2
    assert run("--markdown", "--json").exit_code == 2
