"""Install mlpo_hpc as an environment module, or remove it: what `make install` and `make uninstall` run.

``PREFIX/mlpo_hpc/VERSION`` is a virtual environment, ``PREFIX/modulefiles/mlpo_hpc`` has the module files.
It runs in the Python of the loaded modules, so it takes nothing but the standard library.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import environment
import modulefile
from environment import InstallError

NAME = "mlpo_hpc"
RECORD = "installed.json"
"""In the root: that we made it, and on what."""


@dataclass(frozen=True)
class Place:
    """Where a version lies."""

    prefix: Path
    version: str

    @property
    def root(self) -> Path:
        return self.prefix / NAME / self.version

    @property
    def modulefiles(self) -> Path:
        return self.prefix / "modulefiles" / NAME

    @property
    def lua(self) -> Path:
        return self.modulefiles / f"{self.version}.lua"

    @property
    def tcl(self) -> Path:
        return self.modulefiles / self.version


def install(place: Place, wheels: Path | None, extras: str, modules: list[str]) -> None:
    """Make the environment, then the module files: nobody can load what is not complete.

    Raises
    ------
    InstallError
        If there is something already, or a part fails; what was made until then is removed.
    """
    try:
        place.root.mkdir(parents=True)
    except FileExistsError:
        raise InstallError(
            f"{place.root} exists: that version is installed, or being installed, or was cut short. "
            f"To replace it: make uninstall PREFIX={place.prefix} VERSION={place.version}"
        ) from None
    try:
        _record(place, modules)
        environment.create(place.root)
        environment.install(place.root, place.version, extras, wheels)
        _check(place)
        _publish(place, modules)
    except BaseException:
        _remove(place)
        raise
    _tell(place, modules)


def uninstall(place: Place) -> None:
    """Remove a version, or what is left of an installation of it that was cut short.

    Raises
    ------
    InstallError
        If it is not there, or not of our making.
    """
    if not place.root.is_dir():
        present = ", ".join(_versions(place.root.parent)) or "none"
        raise InstallError(f"{place.root}: no version {place.version} is installed there (installed: {present})")
    if place.root.is_symlink() or not (place.root / RECORD).is_file():
        raise InstallError(f"{place.root} was not made by make install (it has no {RECORD}): remove it by hand")
    _remove(place)
    print(f"mlpo_hpc {place.version} is no longer in {place.prefix}")


def _record(place: Place, modules: list[str]) -> None:
    facts = {"version": place.version, "python": sys.executable, "python_prefix": sys.prefix, "modules": modules}
    (place.root / RECORD).write_text(json.dumps(facts, indent=1) + "\n")


def _check(place: Place) -> None:
    """It starts, and is that version."""
    found = environment.ask("its first start", "see above", place.root / "bin/mlpo", "--version")
    if found.split()[-1] != place.version:
        raise InstallError(f"{place.root}/bin/mlpo says {found!r} and not {place.version}")


def _publish(place: Place, modules: list[str]) -> None:
    module = modulefile.describe(
        root=str(place.root),
        version=place.version,
        python=sys.prefix,
        packages=", ".join(environment.packages(place.root)),
    )
    place.modulefiles.mkdir(parents=True, exist_ok=True)
    for path in (place.lua, place.tcl):
        if path.exists() and modulefile.MARK not in path.read_text():
            raise InstallError(f"{path} was not made by make install: move it away")
    _write(place.tcl, modulefile.tcl(module, modules))
    _write(place.lua, modulefile.lua(module, modules))
    _choose_default(place)


def _remove(place: Place) -> None:
    """Module files first, so that nobody loads what is about to go."""
    for path in (place.lua, place.tcl):
        if path.exists() and modulefile.MARK in path.read_text():
            path.unlink()
    if place.modulefiles.is_dir():
        _choose_default(place)
    shutil.rmtree(place.root)
    for folder in (place.modulefiles, place.root.parent):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _choose_default(place: Place) -> None:
    """The newest version that has our module file; a file ``.version`` of the site's own stays as it is."""
    path = place.modulefiles / ".version"
    if path.exists() and modulefile.MARK not in path.read_text():
        return
    ours = [file.stem for file in place.modulefiles.glob("*.lua") if modulefile.MARK in file.read_text()]
    if ours:
        _write(path, modulefile.default(max(ours, key=_age)))
    else:
        path.unlink(missing_ok=True)


def _versions(folder: Path) -> list[str]:
    return sorted((path.parent.name for path in folder.glob(f"*/{RECORD}")), key=_age)


def _age(version: str) -> tuple[list[int], bool, str]:
    """For sorting: 0.9.0 < 0.10.0rc1 < 0.10.0."""
    suffix = version.lstrip("0123456789.")
    release = version.removesuffix(suffix)
    return (
        [int(number) for number in release.split(".") if number],
        not suffix.startswith(("a", "b", "rc", "dev")),
        suffix,
    )


def _write(path: Path, text: str) -> None:
    """Whole or not at all. Module systems do not look at names that begin with a dot."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.rename(path)


def _tell(place: Place, modules: list[str]) -> None:
    print(
        f"mlpo_hpc {place.version} is in {place.root}\n"
        f"  on {sys.executable}, with modules: {', '.join(modules) or 'none'}\n"
        f"  of its own: {', '.join(environment.packages(place.root))}\n"
        f"try: module use {place.prefix}/modulefiles && module load {NAME}/{place.version} && mlpo --version"
    )
    if place.root.stat().st_mode & 0o005 != 0o005:
        print(f"note: not everybody can read {place.root}: your umask kept others out")


def _source_version() -> str:
    """Read, not imported: pydantic may be what is lacking here."""
    tree = ast.parse((environment.SOURCE / "mlpo_hpc/__init__.py").read_text())
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return str(ast.literal_eval(values["__version__"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["install", "uninstall", "wheels"])
    parser.add_argument("--prefix", default="", help="where modules of this site lie")
    parser.add_argument("--version", default=_source_version(), help="which one to uninstall")
    parser.add_argument("--wheels", default="", help="install from this directory, without network; or put them there")
    parser.add_argument("--extras", default="", help="of setup.cfg")
    parser.add_argument("--modules", default=os.environ.get("LOADEDMODULES", "").replace(":", " "))
    return parser.parse_args()


def _run(given: argparse.Namespace) -> None:
    wheels = Path(given.wheels).absolute() if given.wheels else None
    if given.action != "uninstall" and "MLPO_HPC_ROOT" in os.environ:
        raise InstallError("a module of mlpo_hpc is loaded, and would be installed upon: module unload mlpo_hpc")
    if given.action == "wheels":
        if wheels is None:
            raise InstallError("say where to put them: make wheels WHEELS=DIR")
        return environment.collect(wheels, given.extras)
    if not given.prefix:
        raise InstallError(f"say where: make {given.action} PREFIX=/apps")
    if not re.fullmatch(r"\d[\w.+!]*", given.version):
        raise InstallError(f"{given.version!r} is no version")
    prefix = Path(given.prefix).absolute()
    if given.action == "uninstall":
        return uninstall(Place(prefix, given.version))
    return install(Place(prefix, _source_version()), wheels, given.extras, given.modules.split())


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half made is removed
    given = _arguments()
    try:
        _run(given)
    except InstallError as error:
        sys.exit(f"mlpo_hpc: {error}")
    except OSError as error:
        advice = "is there room, and may you write there?"
        sys.exit(f"mlpo_hpc: {given.action} failed on host {socket.gethostname()}: {error}: {advice}")


if __name__ == "__main__":
    main()
