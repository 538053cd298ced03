"""A virtual environment on whatever Python and modules are loaded: it has only what these lack."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
METADATA = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
NETWORK = (
    "see what it says above; where there is no network, install from a directory of wheels (WHEELS=, docs/modules.md)"
)


class InstallError(Exception):
    """Nothing was installed or removed: what, where, and what to do."""


def run(what: str, advice: str, *command: str | Path) -> None:
    """Run a command, which prints what it likes.

    Raises
    ------
    InstallError
        If it fails.
    """
    _checked(what, advice, command, stdout=None)


def ask(what: str, advice: str, *command: str | Path) -> str:
    """What a command prints to its standard output; otherwise as `run`."""
    return _checked(what, advice, command, stdout=subprocess.PIPE).stdout.strip()


def create(root: Path) -> None:
    """A virtual environment at ``root`` in which all packages of this Python are seen."""
    advice = f"does {sys.executable} have its modules venv and ensurepip (Debian: python3-venv)?"
    # venv would put a pip and a setuptools of its own before those of the site, which may be newer.
    options = ("--system-site-packages", "--without-pip")
    run(f"making a virtual environment in {root}", advice, sys.executable, "-m", "venv", *options, root)
    if sys.prefix != sys.base_prefix:
        # This Python is itself a virtual environment (as in a Spack view): the new one would see the one below only.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
        (_site_packages(root) / "_site.pth").write_text("".join(lines))
    if importlib.util.find_spec("pip") is None:
        run("installing pip", advice, root / "bin/python", "-m", "ensurepip")


def install(root: Path, version: str, extras: str, wheels: Path | None) -> None:
    """Install the package from this source tree, or its wheel from a directory, and then what is lacking for it."""
    requirement = f"{_with_extras('mlpo-hpc', extras)}=={version}"
    # A mlpo_hpc that the site's Python has would do for pip.
    itself = ("--no-deps", "--ignore-installed")
    if wheels is None:
        with source() as tree:
            run("pip install", NETWORK, *_pip(root), "install", *itself, tree)
        run("pip install", NETWORK, *_pip(root), "install", requirement)
        return
    offline = ("--no-index", "--find-links", wheels)
    advice = f"{wheels} must hold mlpo-hpc {version} and what is lacking for it, as make wheels WHEELS=DIR collects it"
    run("pip install", advice, *_pip(root), "install", *offline, *itself, f"mlpo-hpc=={version}")
    run("pip install", advice, *_pip(root), "install", *offline, requirement)


def collect(wheels: Path, extras: str) -> None:
    """Put wheels of the package, and of all that this Python lacks for it, into a directory."""
    with tempfile.TemporaryDirectory() as folder, source() as tree:
        root = Path(folder) / "venv"
        create(root)
        what_if = ("install", "--quiet", "--dry-run", "--report", "-", _with_extras(str(tree), extras))
        report = json.loads(ask("pip install --dry-run", NETWORK, *_pip(root), *what_if))
        found = [(item["metadata"]["name"], item["metadata"]["version"]) for item in report["install"]]
        lacking = [f"{name}=={version}" for name, version in found if name != "mlpo-hpc"]
        run("pip wheel", NETWORK, *_pip(root), "wheel", "--no-deps", "--wheel-dir", wheels, tree, *lacking)


def packages(root: Path) -> list[str]:
    """What the environment has of its own."""
    found = importlib.metadata.distributions(path=[str(_site_packages(root))])
    return sorted(f"{item.name} {item.version}" for item in found)


@contextmanager
def source() -> Iterator[Path]:
    """A copy of the package's source: a build leaves files in its tree, and takes what an older one left there."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SOURCE / "mlpo_hpc", Path(folder) / "mlpo_hpc")
        for name in METADATA:
            shutil.copy(SOURCE / name, folder)
        yield Path(folder)


def _checked(
    what: str, advice: str, command: Sequence[str | Path], stdout: int | None
) -> subprocess.CompletedProcess[str]:
    # Packages in ~/.local of whoever installs are nobody else's, and some sites have pip install into it.
    environ = {**os.environ, "PYTHONNOUSERSITE": "1", "PIP_USER": "0"}
    done = subprocess.run([str(part) for part in command], stdout=stdout, text=True, env=environ)
    if done.returncode:
        raise InstallError(f"{what} failed on {socket.gethostname()}: {advice}")
    return done


def _pip(root: Path) -> tuple[str | Path, ...]:
    return (root / "bin/python", "-m", "pip", "--disable-pip-version-check")


def _with_extras(requirement: str, extras: str) -> str:
    return f"{requirement}[{extras}]" if extras else requirement


def _site_packages(root: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(ask("asking for its site-packages", "is its Python still there?", root / "bin/python", "-c", code))
