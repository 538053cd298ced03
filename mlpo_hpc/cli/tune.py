"""``mlpo stripe --tune``: measure a few layouts with the ranks that there are, and recommend one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mlpo_hpc.cluster.crowd import launched_ranks
from mlpo_hpc.errors import StorageError
from mlpo_hpc.storage.filesystem import describe
from mlpo_hpc.storage.tune import Result, candidates, recommend, try_layout


def tune_directory(directory: str, writers: int, seconds: float, as_json: bool) -> None:
    """Collective over the ranks of the launcher, if there is one.

    Raises
    ------
    StorageError
        If no layout could be measured.
    """
    ranks = launched_ranks()
    filesystem = describe(directory)
    layouts = candidates(filesystem.is_lustre)
    room_bytes = min(ranks.allgather(filesystem.free_bytes)) // 16
    results = []
    for number, layout in enumerate(layouts, start=1):
        if ranks.rank == 0:
            name = str(layout) if layout else "as it is"
            click.echo(f"[{number}/{len(layouts)}] {ranks.size * writers} writers, striping {name}", err=True)
        results.append(try_layout(directory, layout, ranks, writers, seconds, room_bytes))
    if not any(result.round_trip_bps for result in results):
        raise StorageError(results[0].error)
    if ranks.rank == 0:
        _report(directory, filesystem.type, ranks.size * writers, results, as_json)


def _report(directory: str, kind: str, num_writers: int, results: list[Result], as_json: bool) -> None:
    best = recommend(results)
    advice = f"mlpo stripe {directory} {_options(best)}" if best.layout else "leave it as it is"
    if as_json:
        found = {"directory": directory, "filesystem": kind, "writers": num_writers, "recommendation": advice}
        click.echo(json.dumps(found | {"results": [_plain(result) for result in results]}, indent=1))
        return
    table = Table(title=f"{directory} ({kind}), {num_writers} writers", title_justify="left")
    for name in ("striping", "write", "read"):
        table.add_column(name, justify="left" if name == "striping" else "right")
    for result in results:
        rates = [f"{bps / 1e9:.2f} GB/s" for bps in (result.write_bps, result.read_bps)]
        table.add_row(result.name, *(["failed", ""] if result.error else rates))
    Console(color_system=None, soft_wrap=True).print(table)
    for result in results:
        if result.error:
            click.echo(f"{result.name}: {result.error}")
    click.echo(f"recommended: {advice}")


def _options(result: Result) -> str:
    assert result.layout is not None
    part = result.layout.components[0]
    return f"--count {part.count} --size {part.size_bytes}"


def _plain(result: Result) -> dict[str, Any]:
    layout = asdict(result.layout)["components"] if result.layout else None
    return {
        "striping": result.name,
        "components": layout,
        "write_bps": result.write_bps,
        "read_bps": result.read_bps,
        "error": result.error or None,
    }
