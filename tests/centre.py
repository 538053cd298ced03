"""A centre with modules of its own and two versions of ours, installed by `make install` without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import ROOT

OLD, NEW = "0.9.0", "0.10.0"
SITE_MODULES = {"python/3.11": 'prepend-path PATH "{bin}"', "pytorch/2.13": 'prepend-path PYTHONPATH "{packages}"'}
PACKAGES = sysconfig.get_path("purelib")
PLAIN = Path(os.path.realpath(sys.executable))
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "http_proxy": "http://localhost:9", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Centre:
    """A centre with two versions of ours: one on a Python with packages, one on modules for both."""

    folder: Path

    @property
    def apps(self) -> Path:
        return self.folder / "apps"

    @property
    def modulefiles(self) -> list[Path]:
        return [self.folder / "modulefiles", self.apps / "modulefiles"]

    @property
    def python(self) -> Path:
        """With all packages that we need, but one that is too old."""
        return self.folder / "python/bin/python"

    @property
    def packages(self) -> Path:
        """What a module puts on PYTHONPATH."""
        return self.folder / "packages"

    @property
    def at_hand(self) -> dict[str, str]:
        """Where pip finds what a network would give. Isolation would fetch setuptools; "0" is how to say no to it."""
        return {"PIP_NO_BUILD_ISOLATION": "0", "PIP_FIND_LINKS": str(self.folder / "index")}

    def source(self, version: str) -> Path:
        return self.folder / f"source-{version}"


def make(source: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    command = ["make", "-s", "-C", str(source), f"PYTHON={PLAIN}", *arguments]
    return subprocess.run(command, env={**kept, **OFFLINE, **environ}, capture_output=True, text=True, timeout=200)


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def fail(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def make_source(folder: Path, version: str) -> None:
    """This source tree, as if it were of that version."""
    for name in ("mlpo_hpc", "modules"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    path = folder / "mlpo_hpc/__init__.py"
    lines = [f'__version__ = "{version}"' if "__version__ =" in line else line for line in path.read_text().split("\n")]
    path.write_text("\n".join(lines))


def make_python(folder: Path) -> None:
    """The Python of the tests seen through another environment, which has an old ClusterShell and one of ours."""
    subprocess.run([PLAIN, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "tests.pth").write_text(f"import site; site.addsitedir({PACKAGES!r})\n")
    pretend(packages, "ClusterShell", "1.0")
    pretend(packages, "mlpo_hpc", OLD)


def make_home(folder: Path) -> None:
    """Whoever installs has what is lacking, where nobody else has it."""
    pretend(folder / f".local/lib/python3.{sys.version_info.minor}/site-packages", "ClusterShell", "1.11")


def make_packages(folder: Path) -> None:
    """The packages of the tests, but for our own and one that is needed."""
    folder.mkdir()
    for path in Path(PACKAGES).iterdir():
        if not re.search("mlpo|clustershell", path.name.lower()):
            (folder / path.name).symlink_to(path)


def pretend(packages: Path, name: str, version: str) -> None:
    """As if it were installed."""
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(metadata(name, version))


def metadata(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def make_wheel(folder: Path, name: str, version: str) -> None:
    """One without contents."""
    folder.mkdir()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata(name, version))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_centre(folder: Path) -> Centre:
    """The old version from wheels, on a Python with packages; the new one from its source, on modules."""
    made = Centre(folder)
    for name, line in SITE_MODULES.items():
        path = made.modulefiles[0] / name
        path.parent.mkdir(parents=True)
        path.write_text(f"#%Module1.0\n{line.format(bin=PLAIN.parent, packages=made.packages)}\n")
    for version in (OLD, NEW):
        make_source(made.source(version), version)
    make_python(made.python.parent.parent)
    make_packages(made.packages)
    make_home(made.folder / "home")
    make_wheel(made.folder / "index", "ClusterShell", "1.10.2")
    variables = [f"WHEELS={made.folder}/wheels", f"PYTHON={made.python}"]
    succeed(make(made.source(OLD), "wheels", *variables, **made.at_hand))
    succeed(make(made.source(OLD), "install", f"PREFIX={made.apps}", *variables))
    loaded = {"LOADEDMODULES": ":".join(SITE_MODULES), "PYTHONPATH": str(made.packages)}
    private = {"HOME": str(made.folder / "home"), "PIP_USER": "1"}
    succeed(make(made.source(NEW), "install", f"PREFIX={made.apps}", **made.at_hand, **loaded, **private))
    return made
