"""One description of a module (module.toml), written as a module file for Lmod and one for Environment Modules.

Lmod: https://lmod.readthedocs.io/en/latest/050_lua_modulefiles.html
Environment Modules: https://modules.readthedocs.io/en/stable/modulefile.html
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

TEMPLATE = Path(__file__).with_name("module.toml")
MARK = "Written by `make install` of mlpo_hpc"
"""In every module file that `make uninstall` may remove."""


def describe(**values: str) -> dict[str, Any]:
    """The description of the module, with ``values`` for its placeholders.

    Raises
    ------
    KeyError
        If a placeholder has no value.
    """

    def fill(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: fill(item) for key, item in part.items()}
        return Template(part).substitute(values)

    description: dict[str, Any] = fill(tomllib.loads(TEMPLATE.read_text()))
    return description


def lua(module: dict[str, Any], modules: Sequence[str]) -> str:
    """For Lmod, which loads ``modules`` before it, and unloads them with it unless they were loaded already."""
    return "\n".join(_lua_lines(module, modules)) + "\n"


def tcl(module: dict[str, Any], modules: Sequence[str]) -> str:
    """For Environment Modules: from version 5 it loads ``modules`` too, an older one says which of them is missing."""
    return "\n".join(_tcl_lines(module, modules)) + "\n"


def default(version: str) -> str:
    """The file ``.version``, which both systems read: what is loaded if no version is named."""
    return f"#%Module1.0\n# {MARK}: the newest version.\nset ModulesVersion {_in_tcl(version)}\n"


def _lua_lines(module: dict[str, Any], modules: Sequence[str]) -> Iterator[str]:
    yield f"-- {MARK}."
    yield f"help([==[\n{module['help']}]==])"
    yield from (f"whatis({_in_lua(f'{key}: {text}')})" for key, text in module["whatis"].items())
    # Another version takes its place.
    yield f"family({_in_lua(module['name'])})"
    # One by one, in the order in which they were loaded: in a hierarchy one makes the next one visible.
    yield from (f"depends_on({_in_lua(name)})" for name in modules)
    yield from (f"setenv({_in_lua(name)}, {_in_lua(value)})" for name, value in module["setenv"].items())
    yield from (f"prepend_path({_in_lua(name)}, {_in_lua(value)})" for name, value in module["prepend_path"].items())


def _tcl_lines(module: dict[str, Any], modules: Sequence[str]) -> Iterator[str]:
    yield "#%Module1.0"
    yield f"# {MARK}."
    yield f"proc ModulesHelp {{ }} {{\n    puts stderr {_in_tcl(module['help'])}\n}}"
    yield from (f"module-whatis {_in_tcl(f'{key}: {text}')}" for key, text in module["whatis"].items())
    # Environment Modules know families from version 5 only.
    yield f"conflict {_in_tcl(module['name'])}"
    # Several names in one statement would mean any of them.
    yield from (f"prereq {_in_tcl(name)}" for name in modules)
    yield from (f"setenv {_in_tcl(name)} {_in_tcl(value)}" for name, value in module["setenv"].items())
    yield from (f"prepend-path {_in_tcl(name)} {_in_tcl(value)}" for name, value in module["prepend_path"].items())


def _in_lua(text: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _in_tcl(text: str) -> str:
    return '"' + re.sub(r'(["\\\[\]{}$])', r"\\\1", text) + '"'
