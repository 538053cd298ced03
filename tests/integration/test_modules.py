"""`make install`: what it puts where, and what real module systems make of it. Nothing here needs a network."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import modulesystems
from tests.centre import NEW, OFFLINE, OLD, PACKAGES, SITE_MODULES, fail, make, make_centre, succeed
from tests.ranks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_centre(tmp_path_factory.mktemp("site"))


@pytest.fixture(params=list(modulesystems.COMMANDS))
def module(request, site, tmp_path):
    """Runs a script in which ``module`` is that of one of the systems."""
    if not modulesystems.find(request.param):
        pytest.skip(f"{request.param} is not installed (Debian has a package of that name; see .ci/packages)")

    def run(script: str, modulefiles=site.modulefiles, **environ: str) -> subprocess.CompletedProcess[str]:
        return modulesystems.run(request.param, script, modulefiles, tmp_path, **environ)

    run.system = request.param
    return run


def own_packages(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("lib/python3.*/site-packages/*.dist-info"))


def test_only_what_is_lacking_is_installed(site):
    assert sorted(path.name for path in (site.folder / "wheels").iterdir()) == [
        "ClusterShell-1.10.2-py3-none-any.whl",
        f"mlpo_hpc-{OLD}-py3-none-any.whl",
    ]
    old = site.apps / "mlpo_hpc" / OLD
    assert own_packages(old) == ["ClusterShell-1.10.2.dist-info", f"mlpo_hpc-{OLD}.dist-info"]
    new = site.apps / "mlpo_hpc" / NEW
    assert own_packages(new) == ["ClusterShell-1.10.2.dist-info", f"mlpo_hpc-{NEW}.dist-info"]
    theirs = own_packages(site.python.parent.parent)
    assert theirs == ["ClusterShell-1.0.dist-info", f"mlpo_hpc-{OLD}.dist-info"], "which stays as it is"
    code = "import importlib.util as find; print(*[find.find_spec(name).origin for name in ('torch', 'mlpo_hpc')])"
    done = subprocess.run([old / "bin/python", "-c", code], capture_output=True, text=True, cwd="/", check=True)
    torch, ours = done.stdout.split()
    assert Path(torch).is_relative_to(PACKAGES)
    assert Path(ours).is_relative_to(old)


def test_the_source_tree_stays_as_it_was(site):
    for version in (OLD, NEW):
        files = {str(path.relative_to(site.source(version))) for path in site.source(version).rglob("*")}
        assert not [name for name in files if name.endswith((".egg-info", "__pycache__")) or name == "build"]


def test_loading_takes_the_newest_with_what_it_was_installed_on(module):
    done = module("module load mlpo_hpc && mlpo --version && echo $MLPO_HPC_ROOT $LOADEDMODULES")
    succeed(done)
    version, facts = done.stdout.strip().split("\n")
    root, loaded = facts.split()
    assert version == f"mlpo, version {NEW}"
    assert root.endswith(f"apps/mlpo_hpc/{NEW}")
    assert loaded == ":".join([*SITE_MODULES, f"mlpo_hpc/{NEW}"])


def in_any_order(line):
    """Lmod moves a folder that a site's module adds again to the front, and leaves it there."""
    name, _, value = line.partition("=")
    return (name, sorted(value.split(":"))) if name == "PATH" else line


def test_unloading_leaves_the_environment_as_it_was(module):
    done = module("env; echo ====; module load mlpo_hpc; env; echo ====; module unload mlpo_hpc; env")
    succeed(done)
    before, within, after = map(modulesystems.without_bookkeeping, done.stdout.split("====\n"))
    assert [in_any_order(line) for line in before] == [in_any_order(line) for line in after]
    new = {line.partition("=")[0] for line in set(within) - set(before)}
    assert new == {"PATH", "PYTHONPATH", "MLPO_HPC_ROOT"}, "PYTHONPATH is of the site's module"
    text = succeed(module("module load pytorch mlpo_hpc; module unload mlpo_hpc; echo $LOADEDMODULES"))
    assert "pytorch/2.13" in text, "what the user loaded stays"


def test_help_and_whatis(module):
    text = succeed(module("module help mlpo_hpc; module whatis mlpo_hpc; module help mlpo_hpc/" + OLD))
    assert f"mlpo_hpc {NEW}: multi-level, multi-path offload" in text
    assert f"Version: {NEW}" in text
    assert "Description: Optimizer state of DeepSpeed ZeRO-3" in text
    for version in (OLD, NEW):
        assert f"ClusterShell 1.10.2, mlpo-hpc {version}" in text


def test_of_two_versions_one_is_loaded(module):
    text = succeed(
        module(f"module load mlpo_hpc/{OLD} && mlpo --version && module load mlpo_hpc/{NEW}; mlpo --version")
    )
    versions = [line.split()[-1] for line in text.split("\n") if line.startswith("mlpo, version")]
    if module.system == "lmod":
        assert versions == [OLD, NEW], "the new one takes its place"
    else:
        assert versions == [OLD, OLD], "the new one is refused"
        assert "conflict" in text
    text = succeed(module(f"module load mlpo_hpc/{NEW} && module swap mlpo_hpc/{OLD} && mlpo --version"))
    assert f"version {OLD}" in text


def test_each_version_is_listed_once(module):
    text = succeed(module("module --terse avail mlpo_hpc 2>&1"))
    listed = [line.split("(")[0] for line in text.split("\n") if line.startswith("mlpo_hpc/") and line[-1] != "/"]
    assert sorted(listed) == [f"mlpo_hpc/{NEW}", f"mlpo_hpc/{OLD}"]


def test_any_path_can_be_written_in_both_languages(module, site, tmp_path):
    """The module files for a root whose name is full of what Lua, Tcl and shells take for their own."""
    root = '/apps/$HOME [exit] {"}" \\ ;\']]'
    writer = runpy.run_path(str(ROOT / "modules/modulefile.py"))
    description = writer["describe"](root=root, version="1.0", python=root, packages=root)
    folder = site.modulefiles[0] / f"quoted-{module.system}"
    folder.mkdir()
    (folder / "1.0").write_text(writer["tcl"](description, []))
    (folder / "1.0.lua").write_text(writer["lua"](description, []))
    done = module(f'module load {folder.name}/1.0 && echo "$MLPO_HPC_ROOT"; module help {folder.name}/1.0')
    assert root in succeed(done)
    assert done.stdout == f"{root}\n"


def test_what_is_installed_is_not_replaced(site):
    text = fail(make(site.source(OLD), "install", f"PREFIX={site.apps}", f"PYTHON={site.python}"))
    assert f"{site.apps}/mlpo_hpc/{OLD} exists" in text
    assert f"make uninstall PREFIX={site.apps} VERSION={OLD}" in text
    assert own_packages(site.apps / "mlpo_hpc" / OLD)


def test_an_installation_that_fails_leaves_nothing(site, tmp_path):
    (tmp_path / "wheels").mkdir()
    arguments = [f"PREFIX={tmp_path}/apps", f"WHEELS={tmp_path}/wheels", f"PYTHON={site.python}"]
    text = fail(make(site.source(OLD), "install", *arguments))
    assert f"{tmp_path}/wheels must hold mlpo-hpc {OLD} and what is lacking for it" in text
    assert list((tmp_path / "apps").rglob("*")) == []


def test_an_installation_that_was_killed_is_no_module_and_can_be_removed(site, tmp_path):
    command = [site.python, site.source(OLD) / "modules/install.py", "install", f"--prefix={tmp_path}/apps"]
    installing = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = tmp_path / "apps/mlpo_hpc" / OLD
    while not (root / "pyvenv.cfg").exists():
        assert installing.poll() is None
        time.sleep(0.01)
    os.killpg(installing.pid, signal.SIGKILL)
    installing.wait()
    assert not (tmp_path / "apps/modulefiles").exists()
    assert "cut short" in fail(make(site.source(OLD), "install", f"PREFIX={tmp_path}/apps"))
    succeed(make(site.source(OLD), "uninstall", f"PREFIX={tmp_path}/apps"))
    assert list((tmp_path / "apps").rglob("*")) == []


def test_uninstall_removes_one_version_and_moves_the_default(site, tmp_path):
    apps = tmp_path / "apps"
    shutil.copytree(site.apps, apps, symlinks=True)
    uninstall = ["uninstall", f"PREFIX={apps}"]
    succeed(make(site.source(NEW), *uninstall))
    assert [path.name for path in (apps / "mlpo_hpc").iterdir()] == [OLD]
    assert sorted(path.name for path in (apps / "modulefiles/mlpo_hpc").iterdir()) == [".version", OLD, f"{OLD}.lua"]
    assert OLD in (apps / "modulefiles/mlpo_hpc/.version").read_text()
    assert f"(installed: {OLD})" in fail(make(site.source(NEW), *uninstall))
    succeed(make(site.source(NEW), *uninstall, f"VERSION={OLD}"))
    assert [str(path.relative_to(apps)) for path in apps.rglob("*")] == ["modulefiles"]


def test_what_others_made_is_left_alone(site, tmp_path):
    apps = tmp_path / "apps"
    shutil.copytree(site.apps, apps, symlinks=True)
    (apps / "mlpo_hpc/1.0").mkdir()
    (apps / "mlpo_hpc/1.0/file").touch()
    for name in (f"{OLD}.lua", ".version"):
        (apps / "modulefiles/mlpo_hpc" / name).write_text("-- of the site\n")
    text = fail(make(site.source(NEW), "uninstall", f"PREFIX={apps}", "VERSION=1.0"))
    assert "was not made by make install" in text
    assert "is no version" in fail(make(site.source(NEW), "uninstall", f"PREFIX={apps}", "VERSION=../apps"))
    succeed(make(site.source(NEW), "uninstall", f"PREFIX={apps}", f"VERSION={OLD}"))
    assert (apps / "mlpo_hpc/1.0/file").exists()
    for name in (f"{OLD}.lua", ".version"):
        assert (apps / "modulefiles/mlpo_hpc" / name).read_text() == "-- of the site\n"
    assert not (apps / "modulefiles/mlpo_hpc" / OLD).exists()


def test_it_does_not_install_upon_itself(site, tmp_path):
    text = fail(make(site.source(OLD), "install", f"PREFIX={tmp_path}/apps", MLPO_HPC_ROOT="/apps/mlpo_hpc/0.1.0"))
    assert "module unload mlpo_hpc" in text
    assert not (tmp_path / "apps").exists()


def test_the_document_works_as_it_stands(module, site, tmp_path):
    text = (ROOT / "docs/modules.md").read_text().replace("/apps", f"{tmp_path}/apps").replace("0.1.0", OLD)
    commands = "".join(re.findall(r"^```sh\n(.+?)^```$", text, re.MULTILINE | re.DOTALL))
    assert commands.count("make ") == 5
    script = f"set -e\ncd {site.source(OLD)}\n{commands}"
    text = succeed(module(script, site.modulefiles[:1], **OFFLINE, **site.at_hand))
    assert f"mlpo, version {OLD}" in text
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "apps").rglob("*")] == ["apps/modulefiles"]
