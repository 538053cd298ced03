"""docs/troubleshooting.md quotes messages as the sources have them."""

from __future__ import annotations

import ast
import re

import pytest

from tests.ranks import ROOT

DOCUMENT = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| `([^`]{20,})`[^|`]* \| ", DOCUMENT, re.M)
GAP = "\0"
"""Where a message has a value."""


def template(node: ast.expr) -> str | None:
    """A text as it is written, with a gap for each value of an f-string or of ``%``."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[.\d]*[sdf]", GAP, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or "" for part in node.values)
    if isinstance(node, ast.BinOp):
        return (template(node.left) or GAP) + (template(node.right) or GAP)
    return GAP if isinstance(node, ast.FormattedValue) else None


def templates() -> list[str]:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "mlpo_hpc").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr)]
    return [text for node in nodes if (text := template(node))]


TEMPLATES = templates()


def is_said(quoted: str) -> bool:
    """Whether a message begins so; ``...`` is a value, or what follows one."""
    wanted = re.compile(".+?".join(map(re.escape, quoted.replace("\\|", "|").split("..."))), re.S)
    return any(wanted.match(text) for text in TEMPLATES)


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_is_said(quoted):
    assert is_said(quoted), "no message of mlpo_hpc begins so any more: correct the document"


@pytest.mark.parametrize("quoted", ["the state file ends at bite ... where", "state file ends at byte"])
def test_what_is_not_said_is_found(quoted):
    assert not is_said(quoted)


def test_all_rows_with_messages_are_compared():
    tables = DOCUMENT.split("| message | what it means, and what to do |\n|---|---|\n")[1:]
    rows = [line for table in tables for line in table.split("\n\n")[0].splitlines()]
    assert len(QUOTED) == len(rows) >= 25
