"""The reference of the configuration, in Markdown: written from the JSON schema of the models in config.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ByteSize

from mlpo_hpc.config import ENV_PREFIX, SECTION, OffloadConfig

Schema = Mapping[str, Any]

INTRODUCTION = f"""# Configuration

<!-- Written by mlpo config --markdown. What a key means is said in mlpo_hpc/config.py. -->

All settings are in the section `"{SECTION}"` of the DeepSpeed configuration, and all are optional. `mlpo config FILE`
tells whether a file is valid and prints what it sets, with what the environment overrides; `mlpo config --json`
prints a JSON schema of the section, for editors.

An environment variable `{ENV_PREFIX}<KEY>` overrides a key, with two underscores before a nested one:
`{ENV_PREFIX}HOST_MEMORY=100GB`, `{ENV_PREFIX}TOKENS__BACKEND=off`. Lists are written in JSON, whole:
`{ENV_PREFIX}TIERS='[{{"name": "nvme", "dir": "/local"}}]'`. An unknown key or variable is an error that
lists the valid ones.

A *size* is a number of bytes, or a text such as `200GB` (10^9) or `64MiB` (2^20). Where the default is a dash, nothing
is set, and the text says what that means.
"""

VARIABLES = f"""
## Variables that are no keys

| variable | meaning |
|---|---|
| `{ENV_PREFIX}SITE` | profile of the site (`frontier`, `perlmutter`, ...) for striping, where it is not found out |
| `{ENV_PREFIX}INTERFACE` | network interface on which ranks meet, such as `hsn0` |
| `{ENV_PREFIX}STOP_FILE` | a file that asks all ranks to stop when it appears ([requeue.md](requeue.md)) |
| `{ENV_PREFIX}IGNORE_CONTRACT` | 1: try a DeepSpeed release that was not tested, at your own risk |
| `{ENV_PREFIX}ROOT` | set by the environment module: where the package is installed |
"""

TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}


def reference() -> str:
    """Every key with its values, default and meaning, in Markdown."""
    schema = OffloadConfig.model_json_schema()
    sections = [_section(path, section) for path, section in _sections(schema, schema["$defs"], "")]
    return "".join([INTRODUCTION, *sections, VARIABLES])


def _sections(section: Schema, definitions: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Walk the tree of objects: each with the path at which it is, such as ``tiers[].striping``."""
    yield path, section
    for name, key in section["properties"].items():
        for shape in _alternatives(key):
            is_list = "$ref" in shape.get("items", {})
            target = shape.get("$ref") or shape.get("items", {}).get("$ref")
            if target:
                inner = f"{path}.{name}".lstrip(".") + ("[]" if is_list else "")
                yield from _sections(definitions[target.rpartition("/")[2]], definitions, inner)


def _section(path: str, section: Schema) -> str:
    rows = [
        f"| `{name}` | {_values(key)} | {_default(name, key, section)} | {_prose(key['description'])} |\n"
        for name, key in section["properties"].items()
    ]
    title = f"`{path}`" if path else f'The section `"{SECTION}"`'
    head = "| key | values | default | meaning |\n|---|---|---|---|\n"
    return f"\n## {title}\n\n{_prose(section['description'])}\n\n{head}{''.join(rows)}"


def _alternatives(key: Schema) -> list[Schema]:
    """What a key may be, unions within unions unfolded; null is said by the default."""
    if "anyOf" in key:
        return [shape for each in key["anyOf"] for shape in _alternatives(each)]
    return [] if key.get("type") == "null" else [key]


def _values(key: Schema) -> str:
    shapes = _alternatives(key)
    if _is_size(key):
        return ", ".join(["size", *(_value(shape) for shape in shapes if _is_word(shape))])
    return ", ".join(map(_value, shapes))


def _is_size(key: Schema) -> bool:
    """A number that may be written as a text with a unit."""
    types = {shape.get("type") for shape in _alternatives(key) if not _is_word(shape)}
    return "string" in types and bool(types & {"integer", "number"})


def _is_word(shape: Schema) -> bool:
    return "enum" in shape or "const" in shape


def _value(shape: Schema) -> str:
    if _is_word(shape):
        return ", ".join(f"`{value}`" for value in shape.get("enum", [shape.get("const")]))
    if shape.get("type") == "array":
        items = shape["items"]
        return "list of objects" if "$ref" in items else f"list of {_value(items)}s"
    if "$ref" in shape or shape.get("type") == "object":
        return "object"
    least = "".join(
        f", {text} {shape[bound]:g}"
        for bound, text in (("minimum", "at least"), ("exclusiveMinimum", "above"))
        if bound in shape
    )
    return TYPES[shape["type"]] + least


def _default(name: str, key: Schema, section: Schema) -> str:
    if name in section.get("required", ()):
        return "must be given"
    default = key["default"]
    if default is None or isinstance(default, dict):
        return "-"
    if isinstance(default, int) and _is_size(key):
        return f"`{ByteSize(default).human_readable().replace('.0', '')}`"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _prose(docstring: str) -> str:
    """A docstring as one line of Markdown."""
    return " ".join(docstring.replace("``", "`").replace("|", "\\|").split())
