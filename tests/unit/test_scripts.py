"""Shell scripts, module files, README and docs: parsed, and what they name exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from mlpo_hpc import REQUEUE_EXIT_CODE
from mlpo_hpc.cli import main
from mlpo_hpc.cli.bench import USUAL
from mlpo_hpc.config import OffloadConfig, Tier

ROOT = Path(__file__).parent.parent.parent
CI = ("run", "setup", "mpirun", "packages", "setup_mpis")
SCRIPTS = [*sorted((ROOT / "slurm").glob("*.sbatch")), *(ROOT / ".ci" / name for name in CI)]
TEXTS = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "architecture",
            "modules",
            "doctor",
            "configuration",
            "requeue",
            "checkpoints",
            "report",
            "trainers",
            "slurm",
        )
    ),
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)


def test_what_the_batch_script_says_twice_is_the_same():
    text = (ROOT / "slurm/pretrain.sbatch").read_text()
    (asked_s,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.M)
    assert re.findall(r"^lead_s=(\d+)", text, re.M) == [asked_s]
    assert re.findall(r"^requeue_status=(\d+)", text, re.M) == [str(REQUEUE_EXIT_CODE)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.name)
def test_files_and_targets_that_are_named_exist(path):
    text = path.read_text()
    for target in re.findall(r"^make (\w[\w-]*)", text, re.M):
        assert re.search(rf"^([\w ]+ )?{target}\b[\w ]*:", (ROOT / "Makefile").read_text(), re.M), target
    for name in re.findall(r"\b(?:examples|slurm|docs|tests)/[\w./-]+\w", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (path.parent / link).exists(), link


COMMAND = re.compile(r"^(?:srun [^|\n]*?)?mlpo ([a-z].*)$", re.M)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_commands_that_are_shown_have_these_options(path):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    for line in COMMAND.findall("".join(text for language, text in blocks if language in ("", "sh"))):
        words = shlex.split(re.split(r" [>|] ", line)[0], comments=True)
        command, context = main, click.Context(main)
        while isinstance(command, click.Group):
            words = words if words[0] in command.commands else [USUAL, *words]
            name, command, words = command.resolve_command(context, words)
            context = click.Context(command, parent=context, info_name=name)
        command.make_parser(context).parse_args(words)


def test_the_readme_lists_every_key():
    text = (ROOT / "README.md").read_text()
    for key in [*OffloadConfig.model_fields, *Tier.model_fields]:
        assert f"`{key}`" in text, key


def test_modules_of_the_house_are_in_the_docs():
    text = (ROOT / "docs/architecture.md").read_text()
    for path in (ROOT / "mlpo_hpc").rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py", "fp32.py"):
            assert path.name in text, path.name


TOP_LEVEL = {"mlpo_hpc", "slurm", "modules", "tests", "examples", "setup.cfg", "pyproject.toml"}


def test_the_top_level_is_complete():
    present = {path.name for path in ROOT.iterdir()}
    assert present >= TOP_LEVEL | {"README.md", "LICENSE", "Makefile", "docs", ".ci"}
