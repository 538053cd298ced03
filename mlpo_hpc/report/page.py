"""The page of a run: one HTML file that needs nothing else, in light and dark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from mlpo_hpc import __version__
from mlpo_hpc.report import pictures
from mlpo_hpc.report.figures import Figures, TierFigures
from mlpo_hpc.report.findings import Finding, findings_of
from mlpo_hpc.report.run import Run, Start


def draw_page(run: Run, figures: Figures, name: str) -> str:
    """The whole page.

    Parameters
    ----------
    run : Run
        What to show.
    figures : Figures
        Its figures.
    name : str
        Of the run, for the title.
    """
    verdict, *notes = findings_of(run, figures)
    body = [
        _head(run, name),
        _verdict(verdict, notes),
        _tiles(run, figures),
        _section("Loss", pictures.draw_loss(run)) if figures.losses else "",
        _section("Where the time goes", pictures.draw_phases(run), _OF_PHASES),
        _storage(run, figures.tiers),
        _memory(run, figures),
        _wear(figures.tiers),
        _starts(run),
        _facts(run),
    ]
    style = files("mlpo_hpc.report").joinpath("page.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: mlpo report</title><style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + f'\n<p class="soft">mlpo_hpc {escape(__version__)}, {_when(time.time())}</p></main></body></html>\n'
    )


_OF_PHASES = (
    "Means of the ranks. Other: what is left of an iteration, such as loading data, waiting for other ranks and saving "
    "checkpoints. Dotted lines are restarts."
)
_OF_TIERS = (
    "GB/s are those of a node while the tier moves bytes. Expected: each way while the other way is used too. At work: "
    "part of an iteration in which it moves any; the tier that is at work longest bounds the update."
)


def _head(run: Run, name: str) -> str:
    last, steps = run.starts[-1], run.steps
    ranks, nodes = last.first["world_size"], len(last.nodes)
    hours = sum(start.ended_s - start.began_s for start in run.starts) / 3600
    restarts = len(run.starts) - 1
    facts = [
        f"steps {steps[0].number:,} to {steps[-1].number:,}",
        f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}",
        f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min",
        f"{restarts} restart{'s' * (restarts != 1)}",
        f"{_when(run.starts[0].began_s)} to {_when(last.ended_s)}",
    ]
    if (parameters := _parameters(last)) is not None:
        facts.insert(
            0, f"{parameters / 1e9:,.2f} B parameters" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M parameters"
        )
    return f'<h1>{escape(name)}</h1><p class="soft">{escape(" · ".join(facts))}</p>'


def _parameters(start: Start) -> int | None:
    """Of the whole model, if all ranks tell of theirs."""
    counts = [facts.get("model", {}).get("parameters") for facts in start.ranks.values()]
    whole = len(counts) == start.first["world_size"] and None not in counts
    return sum(counts) if whole else None


def _verdict(verdict: Finding, notes: Sequence[Finding]) -> str:
    items = "".join(f"<li>{escape(note.text)}</li>" for note in notes)
    rest = f'<ul class="notes">{items}</ul>' if notes else ""
    return f'<div class="verdict {verdict.kind}">{escape(verdict.text)}</div>{rest}'


def _tiles(run: Run, figures: Figures) -> str:
    update_s, floor_s = figures.phases_s["update"], figures.update_floor_s
    tiles = [("an iteration, median", _seconds(figures.iteration_s)), ("of it the update", _seconds(update_s))]
    if floor_s:
        tiles.append(("update / its floor", f"{update_s / floor_s:.2f}"))
    if figures.losses:
        tiles.append((f"loss, from {figures.losses[0]:.3f}", f"{figures.losses[1]:.3f}"))
    if figures.text_tokens_ps:
        tiles.append(("text tokens a second", f"{figures.text_tokens_ps:,.0f}"))
    if figures.tiers:
        moved = (sum(t.read_bytes for t in figures.tiers), sum(t.written_bytes for t in figures.tiers))
        unit, scale = pictures.byte_unit(max(moved))
        tiles.append((f"{unit} read / written a step", " / ".join(f"{nbytes / scale:.3g}" for nbytes in moved)))
    if (busiest := figures.busiest) is not None:
        tiles.append(("tier at work longest", f"{busiest.name} {busiest.busy_share:.0%}"))
    tiles.append(("state found in host memory", f"{figures.found_share:.0%}"))
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for what, value in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _storage(run: Run, tiers: Sequence[TierFigures]) -> str:
    if not tiers:
        return _section("Tiers", "<p>None is used: all state stays in host memory.</p>")
    columns = ("at work", "GB/s read", "GB/s written", "GB/s expected", "of it", "read a step", "written a step")
    rows = [
        [
            tier.name,
            f'<span class="bar"><u style="width:{tier.busy_share:.1%}"></u></span>{tier.busy_share:.0%}',
            _gbps(tier.read_bps),
            _gbps(tier.write_bps),
            _gbps(tier.expected_bps),
            "" if tier.of_expected is None else f"{tier.of_expected:.0%}",
            _size(tier.read_bytes),
            _size(tier.written_bytes),
        ]
        for tier in tiers
    ]
    busy = pictures.draw_busy(run, tiers)
    each = "".join(
        f"<h3>{escape(tier.name)}</h3>"
        f'<div class="pair">{pictures.draw_rates(run, tier)}{pictures.draw_bytes(run, tier)}</div>'
        for tier in tiers
    )
    return _section("Tiers", _table(("tier",), columns, rows, marked=1) + busy + each, _OF_TIERS)


def _memory(run: Run, figures: Figures) -> str:
    waits = pictures.draw_waits(run, figures.tiers) if figures.tiers else ""
    host = run.steps[-1].memory["host_bytes"] / max(1, len(run.starts[-1].nodes))
    note = f"Buffers and cache may take {_size(host)} of a node. What is found there is neither read nor written."
    return _section("Host memory and turns", f'<div class="pair">{pictures.draw_found(run)}{waits}</div>', note)


def _wear(tiers: Sequence[TierFigures]) -> str:
    rows = [
        [
            tier.name,
            f"{tier.wear.written_bytes / 1e12:,.2f}",
            _size(tier.facts.get("filesystem_bytes") or 0.0),
            "" if tier.wear.drive_writes is None else f"{tier.wear.drive_writes:,.2f}",
            "" if not tier.wear.rated_days else f"{tier.wear.rated_days:,.0f}",
        ]
        for tier in tiers
        if tier.wear is not None
    ]
    columns = ("TB written a day", "size", "drive writes a day", "days until a drive of 1 a day is worn out")
    note = (
        "What a node writes to drives of its own in 24 hours of such steps, over the size of the file system. Drives "
        "of data centres are rated for 1 to 3 drive writes a day, for five years."
    )
    return _section("Wear", _table(("tier",), columns, rows), note) if rows else ""


def _starts(run: Run) -> str:
    rows = []
    for start in run.starts:
        job = start.first.get("job") or {}
        done = f"{start.numbers[0]:,} to {start.numbers[-1]:,}" if start.numbers else "none"
        name = f"{job['number']}, restart {job['restart_count']}" if job else "none"
        hosts = ", ".join(dict.fromkeys(host for host, _ in start.nodes))
        where = f"{start.first['world_size']} on {hosts}"
        minutes = f"{(start.ended_s - start.began_s) / 60:,.1f}"
        rows.append([_when(start.began_s), name, where, done, minutes])
    return _section("Starts", _table(("began", "job", "ranks"), ("steps", "minutes"), rows))


def _facts(run: Run) -> str:
    first = run.starts[-1].first
    rows = []
    for name, tier in first["tiers"].items():
        tokens = tier.get("tokens") or {}
        rows.append(
            [
                name,
                str(tier.get("path", "")),
                f"{tier.get('filesystem', '?')}, {'shared' if tier.get('shared') else 'node-local'}",
                f"{tier.get('container', '?')} over {tier.get('transport', '?')}",
                f"{tokens.get('scope', '?')} ({tokens.get('backend', '?')})",
            ]
        )
    tiers = _table(("tier", "directory", "file system", "container", "turns"), (), rows) if rows else ""
    told = {**first.get("versions", {}), **first.get("model", {})}
    told.pop("parameters", None)
    versions = ", ".join(
        f"{what.replace('_', ' ') if what != 'mlpo_hpc' else what} {value}" for what, value in told.items()
    )
    config = escape(json.dumps(first.get("config", {}), indent=1))
    details = f"<details><summary>Configuration (mlp_offload), as it was used</summary><pre>{config}</pre></details>"
    return _section("Facts of the last start", f"{tiers}<p>{escape(versions)}</p>{details}")


def _section(title: str, body: str, note: str = "") -> str:
    told = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{told}{body}</section>"


def _table(
    words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], marked: int | None = None
) -> str:
    """Cells are text, but those of the column `marked` are HTML."""
    head = "".join(f"<th>{escape(w)}</th>" for w in words) + "".join(
        f'<th class="number">{escape(n)}</th>' for n in numbers
    )
    lines = []
    for row in rows:
        cells = [
            f'<td class="{"text" if place < len(words) else "number"}">{cell if place == marked else escape(cell)}</td>'
            for place, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(seconds))


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _gbps(bps: float | None) -> str:
    return "" if bps is None else f"{bps / 1e9:.2f}"


def _size(nbytes: float) -> str:
    unit, scale = pictures.byte_unit(nbytes)
    return f"{nbytes / scale:.3g} {unit}"
