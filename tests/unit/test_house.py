"""The house: imports point one way, heavy libraries are imported where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mlpo_hpc

PACKAGE = Path(mlpo_hpc.__file__).parent
FLOORS = [
    {"config", "errors"},
    {"telemetry"},
    {"cluster"},
    {"storage", "tokens"},
    {"state"},
    {"checkpoint"},
    {"engine", "planner", "batch"},
    {"cli", "bench", "doctor", "report"},
]
HEAVY = {"torch", "deepspeed", "mpi4py", "h5py"}


def floor_of(name: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if name in rooms)


def imports_of(path: Path, top_level_only: bool = False):
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    parts = path.relative_to(PACKAGE).parts
    if parts[0] in ("__init__.py", "__main__.py"):
        return
    mine = floor_of(parts[0].removesuffix(".py"))
    for name in imports_of(path):
        if name.startswith("mlpo_hpc.") and name not in ("mlpo_hpc.errors", "mlpo_hpc.config", "mlpo_hpc.__version__"):
            assert floor_of(name.split(".")[1]) <= mine, f"{path} imports {name}"
    if parts[0] != "engine":
        runs_stock = parts == ("bench", "worker.py")  # a comparison side by side must run stock DeepSpeed
        knows_deepspeed = any(name.split(".")[0] == "deepspeed" for name in imports_of(path))
        assert runs_stock or not knows_deepspeed, "only engine/ knows DeepSpeed"
        assert not any(name.split(".")[0] in HEAVY for name in imports_of(path, top_level_only=True))


def test_torch_cuda_is_nowhere():
    for path in PACKAGE.rglob("*.py"):
        assert "torch.cuda" not in path.read_text(), path


def test_importing_the_package_is_light():
    code = f"import sys, mlpo_hpc, mlpo_hpc.cli; print([m for m in {sorted(HEAVY)} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_is_too_long_to_read():
    for path in PACKAGE.rglob("*.py"):
        assert path.read_text().count("\n") <= 400, path
