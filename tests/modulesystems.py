"""The module systems of this machine: a shell with one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from glob import glob
from pathlib import Path

COMMANDS = {
    "lmod": ["$LMOD_CMD", "/usr/share/lmod/lmod/libexec/lmod", "/opt/*/lmod/lmod/libexec/lmod"],
    "environment-modules": [
        "$MODULES_CMD",
        "/usr/lib/*/modulecmd.tcl",
        "/usr/share/Modules/libexec/modulecmd.tcl",
        "/opt/environment-modules/usr/lib/*/modulecmd.tcl",  # where .ci/packages puts it
    ],
}
INTERPRETERS = {"lmod": "", "environment-modules": "tclsh "}
BOOKKEEPING = ("LMOD_", "__LMOD_", "_ModuleTable", "__MODULES_", "MODULE", "LOADEDMODULES", "_LMFILES_", "_=", "SHLVL=")


def find(system: str) -> str:
    """Its command; empty if it is not installed."""
    if INTERPRETERS[system] and not shutil.which(INTERPRETERS[system].strip()):
        return ""
    return next((path for pattern in COMMANDS[system] for path in sorted(glob(os.path.expandvars(pattern)))), "")


def run(
    system: str, script: str, modulefiles: Sequence[Path], home: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a bash script in ``home`` in which ``module`` is that of the system, as its own start-up file defines it."""
    function = f'module() {{ eval "$({INTERPRETERS[system]}{find(system)} bash "$@")"; }}\n'
    use = f"module use {' '.join(map(str, modulefiles))}\n"
    # Nothing twice on PATH: Lmod tidies that up, and does not undo it.
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), **environ}
    command = ["bash", "--norc", "--noprofile", "-c", function + use + script]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, cwd=home)


def without_bookkeeping(environment: str) -> list[str]:
    """The lines of ``env`` that are not the module system's own."""
    return sorted(line for line in environment.splitlines() if not line.startswith(BOOKKEEPING))
