"""Striping: arguments, answers, policies and profiles, against a stand-in ``lfs``."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlpo_hpc.cli import main
from mlpo_hpc.cluster.sites import find_site, sites
from mlpo_hpc.config import Striping, load
from mlpo_hpc.errors import ConfigError, StorageError
from mlpo_hpc.state import tiers
from mlpo_hpc.storage import filesystem
from mlpo_hpc.storage.place import find_places
from mlpo_hpc.storage.striping import (
    Component,
    StripeLayout,
    explicit_layout,
    file_alignment_bytes,
    get_layout,
    parse_layout,
    rule_layout,
    set_layout,
    wanted_layout,
)
from mlpo_hpc.storage.tune import Result, recommend

PLAIN = "stripe_count:  4 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1 pool: flash\n"
YAML = """lmm_stripe_count:  -1
lmm_stripe_size:   1048576
lmm_pattern:       raid0,overstriped
lmm_layout_gen:    0
lmm_stripe_offset: -1
"""
PROGRESSIVE = """  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             N/A
    lcme_flags:          0
    lcme_extent.e_start: 0
    lcme_extent.e_end:   4194304
      stripe_count:  1       stripe_size:   1048576       pattern:       raid0       stripe_offset: -1

    lcme_id:             N/A
    lcme_flags:          0
    lcme_extent.e_start: 4194304
    lcme_extent.e_end:   EOF
      stripe_count:  32       stripe_size:   4194304       pattern:       raid0       pool: capacity
"""


@pytest.mark.parametrize(
    ("text", "components"),
    [
        (PLAIN, [Component(4, 4194304, "flash")]),
        (YAML, [Component(-1, 1048576, overstripe=True)]),
        ("stripe_count:  65535 stripe_size: 0\n", [Component(-1)]),
        (PROGRESSIVE, [Component(1, 1048576, end_bytes=4194304), Component(32, 4194304, "capacity")]),
    ],
)
def test_answers_of_lfs_are_read(text, components):
    assert list(parse_layout(text).components) == components


def printed(layout):
    """As ``lfs getstripe -d`` prints it."""
    lines = []
    for component in layout.components:
        if len(layout.components) > 1:
            lines.append(f"    lcme_extent.e_end:   {component.end_bytes or 'EOF'}")
        pattern = "raid0,overstriped" if component.overstripe else "raid0"
        pool = f" pool: {component.pool}" if component.pool else ""
        size = component.size_bytes or 1048576
        lines.append(
            f"  stripe_count:  {component.count} stripe_size:  {size} pattern: {pattern} stripe_offset: -1{pool}"
        )
    return "\n".join(lines)


components = st.builds(
    Component,
    st.sampled_from([-1, 1, 4, 300]),
    st.sampled_from([None, 65536, 4194304]),
    st.sampled_from([None, "flash"]),
    st.none(),
    st.booleans(),
)


@given(st.lists(components, min_size=1, max_size=4))
def test_what_is_granted_as_asked_is_found_so_and_nothing_else_is(parts):
    ends = [2**20 * 4**i for i in range(len(parts) - 1)] + [None]
    layout = StripeLayout(tuple(replace(part, end_bytes=end) for part, end in zip(parts, ends, strict=True)))
    granted = parse_layout(printed(layout))
    assert granted.grants(layout)
    other = replace(layout.components[0], count=7)
    assert not parse_layout(printed(StripeLayout((other, *layout.components[1:])))).grants(layout)
    assert not granted.grants(StripeLayout((*layout.components, Component(1))))


LFS = """#!/bin/sh
echo "$*" >> {folder}/calls
[ -z "$(cat {folder}/fails 2>/dev/null)" ] || {{ cat {folder}/fails >&2; exit 22; }}
[ "$1" = setstripe ] || cat {folder}/answer
"""


@pytest.fixture
def lfs(tmp_path, monkeypatch):
    """A stand-in on PATH that records its arguments and gives the answer that is put there."""
    folder = tmp_path / "lfs"
    folder.mkdir()
    program = folder / "lfs"
    program.write_text(LFS.format(folder=folder))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "answer").write_text(PLAIN)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setitem(filesystem.MAGIC, 0xEF53, "lustre")
    monkeypatch.setattr(filesystem, "_magic", lambda real: 0xEF53)
    return folder


def calls(lfs):
    path = lfs / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_arguments_are_exactly_those_of_lfs(lfs, tmp_path):
    granted = set_layout(str(tmp_path), StripeLayout((Component(4, 4194304, "flash"),)))
    assert calls(lfs) == [f"setstripe -c 4 -S 4194304 -p flash {tmp_path}", f"getstripe -d {tmp_path}"]
    assert granted == StripeLayout((Component(4, 4194304, "flash"),))
    wide = StripeLayout((Component(1, end_bytes=4194304), Component(64, overstripe=True)))
    set_layout(str(tmp_path), wide)
    assert calls(lfs)[2] == f"setstripe -E 4194304 -c 1 -E -1 -C 64 {tmp_path}"


def test_lfs_that_is_missing_fails_or_talks_otherwise_is_said(lfs, tmp_path, monkeypatch):
    (lfs / "answer").write_text("what?\n")
    with pytest.raises(StorageError, match=r"cannot read the answer .*\n?what\?"):
        get_layout(str(tmp_path))
    (lfs / "fails").write_text("setstripe: cannot resolve pool 'flash'")
    with pytest.raises(StorageError, match=r"'lfs setstripe -c 2 .*' failed with 22 on host .*cannot resolve pool"):
        set_layout(str(tmp_path), StripeLayout((Component(2),)))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StorageError, match="no 'lfs' on PATH"):
        get_layout(str(tmp_path))


def test_policies():
    explicit = Striping.model_validate(
        {"policy": "explicit", "count": 8, "size": "16MiB", "pool": "p", "overstripe": True}
    )
    assert str(wanted_layout(explicit, "state", 1, None)[0]) == "-C 8 -S 16777216 -p p"
    assert wanted_layout(Striping(), "state", 1, sites()["lumi"])[0] is None
    auto = Striping(policy="auto")
    assert str(wanted_layout(auto, "state", 9, sites()["lumi"])[0]) == "-c 1 -S 4194304"
    assert str(wanted_layout(auto, "wide", 9, sites()["alps"])[0]) == "-c 32 -S 4194304"
    layout, reason = wanted_layout(auto, "state", 9, sites()["frontier"])
    assert layout is None
    assert "512 GB" in reason
    assert wanted_layout(auto, "state", 9, None)[0] == rule_layout("state", 9)
    assert [rule_layout("wide", nodes).components[0].count for nodes in (1, 10, 1000)] == [8, 20, 64]


@pytest.mark.parametrize("name", sites())
def test_profiles_are_whole_and_have_a_source(name):
    site = sites()[name]
    assert len(site.source) > 20
    assert site.scheduler in ("Slurm", "PBS")
    for purpose in ("state", "wide"):
        striping = site.striping(purpose)
        assert striping.policy == "inherit" or explicit_layout(striping).components
    environ = {key: pattern.split("|")[0].replace(".*", "-login-01") for key, pattern in site.when.items()}
    assert find_site(environ) is site
    assert find_site({"MLPO_HPC_SITE": name}) is site


def test_elsewhere_there_is_no_profile_and_a_wrong_name_is_an_error():
    assert find_site({}) is None
    with pytest.raises(ConfigError, match=r"MLPO_HPC_SITE=moon is no profile; there are frontier, "):
        find_site({"MLPO_HPC_SITE": "moon"})


@pytest.mark.parametrize(
    ("striping", "words"),
    [
        ({"policy": "explicit"}, "needs 'count' or 'components'"),
        ({"count": 4}, "say 'explicit'"),
        ({"policy": "explicit", "count": 0}, "-1 (all targets)"),
        ({"policy": "explicit", "count": 1, "size": "100KiB"}, "multiple of 64 KiB"),
        ({"policy": "explicit", "count": 1, "size": "4GiB"}, "under 4 GiB"),
        ({"policy": "explicit", "components": [{"count": 1, "end": "4MiB"}, {"count": 2, "end": "2MiB"}]}, "must grow"),
        ({"policy": "explicit", "components": [{"count": 1, "end": "4MiB"}, {}]}, "needs a 'count'"),
        ({"policy": "explicit", "count": 2, "components": [{"count": 1, "end": "4MiB"}, {"count": 2}]}, "either"),
        ({"polcy": "auto"}, "unknown key 'polcy'"),
    ],
)
def test_wrong_striping_is_said(striping, words):
    with pytest.raises(ConfigError) as caught:
        load({"mlp_offload": {"tiers": [{"name": "pfs", "dir": "/x", "striping": striping}]}})
    assert words in str(caught.value)


def place(tmp_path, striping):
    (tmp_path / "pfs").mkdir(exist_ok=True)
    tier = {"name": "pfs", "dir": str(tmp_path / "pfs"), "striping": striping}
    return find_places(load({"mlp_offload": {"tiers": [tier]}}))[0]


def test_the_engine_sets_what_is_wanted_and_says_what_was_granted(lfs, tmp_path, caplog):
    caplog.set_level("INFO")
    tiers._stripe(place(tmp_path, {"policy": "explicit", "count": 4, "size": "4MiB", "pool": "flash"}), 2)
    assert calls(lfs)[0] == f"setstripe -c 4 -S 4194304 -p flash {tmp_path}/pfs"
    assert "striping '-c 4 -S 4194304 -p flash' set on" in caplog.text
    tiers._stripe(place(tmp_path, {"policy": "explicit", "count": 16}), 2)
    assert "'-c 16' was asked for, '-c 4 -S 4194304 -p flash' granted" in caplog.text
    (lfs / "fails").write_text("quota")
    tiers._stripe(place(tmp_path, {"policy": "auto"}), 2)
    assert "was not set: 'lfs setstripe -c 4 -S 4194304" in caplog.text


def test_one_rank_of_those_that_share_a_directory_sets_it(lfs, tmp_path, monkeypatch):
    here = place(tmp_path, {"policy": "explicit", "count": 4})
    key = here.directory_key(("n1", ""))
    monkeypatch.setattr(
        tiers,
        "gather",
        lambda value: [value] if isinstance(value, dict) else [(("n1", ""), [key]), (("n1", ""), [key])],
    )
    for rank in range(2):
        assert tiers.stripe_directories([here], SimpleNamespace(key=("n1", ""), world_rank=rank)) == {}
    assert [line.split()[0] for line in calls(lfs)] == ["setstripe", "getstripe"]


@pytest.mark.parametrize(
    ("striping", "hints"),
    [
        ({"count": 4, "size": "4MiB"}, {"striping_factor": "4", "striping_unit": "4194304"}),
        ({"count": -1}, {"striping_factor": "-1"}),
        ({"count": 4, "pool": "flash"}, {}),
        ({"components": [{"count": 1, "end": "1MiB"}, {"count": 8}]}, {}),
    ],
)
def test_without_lfs_the_same_is_asked_for_by_hints_as_far_as_they_go(tmp_path, monkeypatch, caplog, striping, hints):
    monkeypatch.setenv("PATH", "/nowhere")
    here = place(tmp_path, {"policy": "explicit", **striping})
    here = replace(here, filesystem=replace(here.filesystem, type="lustre"))
    assert tiers._stripe(here, 1) == hints
    assert "there is no 'lfs'" in caplog.text
    assert ("asking for it by the hints" in caplog.text) == bool(hints)


def test_files_are_aligned_to_stripes_or_blocks(lfs, tmp_path, monkeypatch):
    assert file_alignment_bytes(str(tmp_path), is_lustre=True) == 4 * 2**20
    assert file_alignment_bytes(str(tmp_path), is_lustre=False) == 2**20
    block = SimpleNamespace(st_blksize=16 * 2**20)
    monkeypatch.setattr(os, "stat", lambda path: block)
    assert file_alignment_bytes(str(tmp_path), is_lustre=False) == 16 * 2**20, "Storage Scale"
    block.st_blksize = 2**30
    assert file_alignment_bytes(str(tmp_path), is_lustre=False) == 64 * 2**20
    monkeypatch.setenv("PATH", "/nowhere")
    block.st_blksize = 4096
    assert file_alignment_bytes(str(tmp_path), is_lustre=True) == 2**20, "its size is not known"


def test_without_lustre_it_is_a_no_op_that_is_logged(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setenv("PATH", "/nowhere")
    tiers._stripe(place(tmp_path, {"policy": "explicit", "count": 4}), 1)
    assert "has no stripes to set" in caplog.text


def run(*arguments):
    result = CliRunner().invoke(main, ["stripe", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_shows_sets_and_compares(lfs, tmp_path):
    code, text = run(tmp_path)
    assert code == 0
    assert "before   lfs setstripe -c 4 -S 4194304 -p flash" in text
    assert calls(lfs) == [f"getstripe -d {tmp_path}"]
    code, text = run(tmp_path, "--auto", "--dry-run", "--json")
    assert (code, json.loads(text)["wanted"]["arguments"]) == (0, "-c 4 -S 4194304")
    assert len(calls(lfs)) == 2, "nothing was set"
    code, text = run(tmp_path, "--count", 4, "--size", "4MiB", "--pool", "flash", "--json")
    assert (code, json.loads(text)["as_wanted"]) == (0, True)
    code, text = run(tmp_path, "--component", "end=4MiB,count=1", "--component", "count=32,size=4MiB")
    assert code == 1, "granted otherwise"
    assert "lfs setstripe -E 4194304 -c 1 -E -1 -c 32 -S 4194304" in text
    assert "not what was asked for" in text


def test_tuning_tries_layouts_in_folders_of_their_own_and_leaves_nothing(lfs, tmp_path):
    (tmp_path / "run").mkdir()
    code, text = run(tmp_path / "run", "--tune", "--seconds", 0.1, "--writers", 2, "--json")
    assert code == 0
    found = json.loads(text[text.index("{") :])
    assert [result["striping"] for result in found["results"]][:3] == ["as it is", "-c 1 -S 4194304", "-c 2 -S 4194304"]
    assert all(result["write_bps"] > 0 and result["read_bps"] > 0 for result in found["results"])
    assert found["writers"] == 2
    folders = [line.split()[-1] for line in calls(lfs) if line.startswith("setstripe")]
    assert len(set(folders)) == len(folders) == 5
    assert all(folder.startswith(f"{tmp_path}/run/.mlpo_hpc-") for folder in folders)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_layout_that_cannot_be_set_is_said_and_the_others_are_tried(lfs, tmp_path):
    (lfs / "fails").write_text("no such pool")
    code, text = run(tmp_path, "--tune", "--seconds", 0.1, "--writers", 1)
    assert code == 0
    assert "no such pool" in text
    assert "recommended: leave it as it is" in text
    assert run(tmp_path, "--tune", "--count", 4)[0] == 2


def test_what_is_recommended_is_faster_than_what_is_there():
    there, equal, fast = (
        Result(None, 1e9, 1e9),
        Result(rule_layout("state", 1), 1.04e9, 1.04e9),
        Result(rule_layout("wide", 1), 2e9, 1e9),
    )
    failed = Result(rule_layout("wide", 9), error="no")
    assert recommend([there, equal, failed]) is there
    assert recommend([there, equal, fast]) is fast


def test_the_command_says_what_is_wrong(lfs, tmp_path):
    assert run(tmp_path, "--count", 0)[0] == 2
    assert "-1 (all targets)" in run(tmp_path, "--count", 0)[1]
    assert run(tmp_path / "missing")[0] == 2
    assert run(tmp_path, "--component", "count=1")[0] == 2
    (lfs / "fails").write_text("not on Lustre")
    code, text = run(tmp_path, "--count", 2)
    assert (code, "not on Lustre" in text) == (1, True)


def test_the_command_is_a_no_op_here(tmp_path):
    code, text = run(tmp_path, "--count", 2)
    assert code == 0
    assert "has no stripes to set" in text


def test_the_kind_of_a_file_system_is_what_the_kernel_says(tmp_path, monkeypatch):
    assert filesystem.describe("/dev/shm").type == "tmpfs"
    monkeypatch.setattr(filesystem, "_magic", lambda real: 0x47504653)
    found = filesystem.describe(str(tmp_path))
    assert (found.type, found.is_shared, found.is_lustre) == ("gpfs", True, False)
    monkeypatch.setattr(filesystem, "_mount_of", lambda real: ("/x", "fuse.daos"))
    assert filesystem.describe(str(tmp_path)).type == "fuse.daos", "FUSE has one number for all"
    monkeypatch.setattr(filesystem, "_magic", lambda real: 0x12345)
    monkeypatch.setattr(filesystem, "_mount_of", lambda real: ("/x", "wekafs"))
    assert filesystem.describe(str(tmp_path)).is_shared
