"""mlpo report: journals of several ranks, nodes and starts merged; what is made of them; the page and the command."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from mlpo_hpc.cli import main
from mlpo_hpc.errors import MlpoError
from mlpo_hpc.report.chart import MOST_POINTS, Chart, Series
from mlpo_hpc.report.figures import figures_of
from mlpo_hpc.report.findings import findings_of
from mlpo_hpc.report.journals import find_journals, read_journals
from mlpo_hpc.report.page import draw_page
from mlpo_hpc.report.run import build_run

GB = 10**9


def tier(scope="direction", at_once=1, shared=False, **more):
    facts = {"path": "/drive", "filesystem": "ext4", "filesystem_bytes": 1000 * GB, "shared": shared}
    tokens = {"backend": "mpi", "scope": scope}
    return {**facts, "at_once": at_once, "measured_bps": 2e9, "tokens": tokens, "container": "raw", **more}


def start(rank=0, began_s=1000.0, ranks=1, host="n1", **tiers):
    job = {"scheduler": "slurm", "cluster": "c", "number": "77", "restart_count": int(began_s > 1000)}
    facts = {"began_s": began_s, "job": job, "host": host, "machine": host, "world_rank": rank, "world_size": ranks}
    rest = {"versions": {"torch": "2.13"}, "config": {"order": "alternate"}, "model": {"parameters": 10**9}}
    return {"start": {**facts, **rest, "tiers": tiers or {"nvme": tier()}}}


def step(number, time_s=None, iteration_s=10.0, update_s=8.0, tiers=None, **more):
    times = {"forward_s": 0.5, "backward_s": 1.0, "update_s": update_s, "iteration_s": iteration_s}
    memory = {"cache_hits": 1, "cache_misses": 3, "state_bytes": 8 * GB, "found_bytes": 2 * GB, "host_bytes": 3 * GB}
    line = {"step": number, "time_s": 1000.0 + 10 * number if time_s is None else time_s, **times, **memory, **more}
    return {**line, "tiers": {"nvme": moved()} if tiers is None else tiers}


def moved(read=4 * GB, written=4 * GB, read_s=3.0, write_s=3.5, wait_s=0.1):
    return {"bytes_read": read, "bytes_written": written, "read_s": read_s, "write_s": write_s, "wait_s": wait_s}


def write(folder, rank, *lines, torn=""):
    folder.mkdir(exist_ok=True)
    path = folder / f"steps-{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return path


def load(*folders):
    run = build_run(read_journals([path for folder in folders for path in find_journals(folder)]))
    return run, figures_of(run)


def texts(run, figures):
    return "\n".join(finding.text for finding in findings_of(run, figures))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "telemetry"


# ---- reading and merging ----------------------------------------------------------------------


def test_what_a_kill_or_a_bad_disk_left_is_counted_and_the_rest_read(folder):
    write(folder, 0, step(0), start(), step(1), {"loss": 2.0, "step": 1}, 3, {"step": 2}, step(3), torn='{"step":4,"ti')
    found = read_journals(find_journals(folder))
    assert [sorted(part.steps) for part in found.parts] == [[1, 3]]
    assert found.parts[0].losses == {1: (2.0, None)}
    assert found.num_torn == 4, "a step before any start, a number, a line without figures, the torn one"
    run, figures = load(folder)
    assert "cut short or damaged, and left out: 4" in texts(run, figures)


def test_other_files_are_no_journals(folder):
    write(folder, 0, start(), step(1))
    for name in ("steps-x.jsonl", "trace.0.json", "steps-1.jsonl.bak"):
        (folder / name).write_text("{}")
    assert [path.name for path in find_journals(folder)] == ["steps-0.jsonl"]
    assert find_journals(folder / "steps-0.jsonl") == [folder / "steps-0.jsonl"]


def test_after_a_restart_the_last_doing_of_a_step_counts(folder):
    first = [start(), *(step(n) for n in (1, 2, 3, 4)), *({"loss": 9.0, "step": n} for n in (1, 2, 3, 4))]
    again = [start(began_s=2000.0), *(step(n, 2000.0 + n) for n in (3, 4, 5)), {"loss": 1.0, "step": 3}]
    write(folder, 0, *first, *again)
    run, figures = load(folder)
    assert [s.number for s in run.steps] == [1, 2, 3, 4, 5]
    assert [s.start for s in run.steps] == [0, 0, 1, 1, 1]
    assert [s.loss for s in run.steps] == [9.0, 9.0, 1.0, None, None]
    assert run.num_redone == 2
    assert figures.losses == (9.0, 1.0)
    assert "done again after a restart: 2" in texts(run, figures)
    assert "overlap" not in texts(run, figures)


def test_two_runs_in_one_folder_are_told(folder):
    write(folder, 0, start(), step(1), step(2, 5000.0), start(began_s=3000.0), step(3, 6000.0))
    assert "Starts overlap in time: two runs wrote here" in texts(*load(folder))


def test_ranks_that_take_turns_add_up_and_others_are_at_work_together(folder):
    turns, at_once, one_way = tier(at_once=1), tier("off", at_once=2), tier("tier", at_once=1)
    tiers = {"turns": turns, "free": at_once, "half": one_way}
    for rank in range(2):
        done = dict.fromkeys(tiers, moved(read=1 * GB, written=2 * GB, read_s=1.0, write_s=2.0, wait_s=0.5))
        write(folder, rank, start(rank, ranks=2, **tiers), step(1, tiers=done))
    (one,) = load(folder)[0].steps
    of = {name: next(iter(nodes.values())) for name, nodes in one.tiers.items()}
    assert (of["turns"].read_s, of["turns"].busy_s, of["turns"].bps("read")) == (2.0, 4.0, 1e9)
    assert (of["free"].read_s, of["free"].busy_s, of["free"].bps("read")) == (1.0, 2.0, 2e9)
    assert of["half"].busy_s == 6.0, "reading and writing take turns too"
    assert of["turns"].wait_s == 0.5
    assert one.memory["state_bytes"] == 16 * GB


def test_the_slower_node_is_named_and_missing_ranks_are(folder):
    shared = {"pfs": tier(shared=True)}
    for rank, (host, seconds) in enumerate((("n1", 2.0), ("n2", 2.0), ("n3", 7.0))):
        done = {"pfs": moved(read_s=seconds, write_s=seconds)}
        write(folder, rank, start(rank, ranks=4, host=host, **shared), step(1, tiers=done), step(2, tiers=done))
    run, figures = load(folder)
    assert figures.tiers[0].slowest_node == "n3"
    assert "pfs is slower on n3" in texts(run, figures)
    assert "1 of 4 ranks' journals are missing" in texts(run, figures)
    assert figures.tiers[0].wear is None, "those drives are the centre's"


def test_journals_of_several_folders_are_one_run(tmp_path):
    for rank in range(2):
        write(tmp_path / f"n{rank}", rank, start(rank, ranks=2, host=f"n{rank}"), step(1), step(2))
    run, figures = load(tmp_path / "n0", tmp_path / "n1")
    assert len(run.starts) == 1
    assert len(run.starts[0].nodes) == 2
    assert figures.tiers[0].read_bytes == 8 * GB


# ---- figures and findings ---------------------------------------------------------------------


def test_figures_are_those_of_the_steps_with_a_known_duration(folder):
    slow = step(1, iteration_s=None, update_s=99.0, tiers={"nvme": moved(read_s=90.0, write_s=90.0)})
    tokens = [{"loss": 3.0, "step": n, "text_tokens": 1000} for n in (1, 2, 3)]
    write(folder, 0, start(), slow, step(2), step(3), *tokens)
    _, figures = load(folder)
    (nvme,) = figures.tiers
    assert (figures.iteration_s, figures.phases_s["update"], figures.text_tokens_ps) == (10.0, 8.0, 100.0)
    assert (nvme.busy_s, nvme.busy_share) == (3.5, 0.35)
    assert nvme.of_expected == pytest.approx(4 / 3.5 / 2)
    assert figures.update_floor_s == 2.0
    assert figures.found_share == 0.25
    assert nvme.wear.written_bytes == pytest.approx(4 * GB * 86400 / 10)
    assert nvme.wear.drive_writes == pytest.approx(34.56)


def test_a_restart_on_another_node_changes_no_figure(folder):
    first = [start(), step(1), step(2), step(3)]
    write(folder, 0, *first)
    _, alone = load(folder)
    write(folder, 0, *first, start(began_s=2000.0, host="n2"), step(4, 2010.0), step(5, 2020.0))
    _, both = load(folder)
    before, after = alone.tiers[0], both.tiers[0]
    figures = [(tier.busy_s, tier.busy_share, tier.wait_s) for tier in (before, after)]
    assert figures[0] == pytest.approx(figures[1])
    assert after.wear == before.wear
    assert after.slowest_node is None


def test_without_a_measurement_the_configured_rates_are_expected(folder):
    given = tier(measured_bps=None, read_bps=3e9, write_bps=1.5e9)
    write(folder, 0, start(nvme=given), step(1), step(2))
    assert load(folder)[1].tiers[0].expected_bps == pytest.approx(2e9)
    write(folder, 0, start(nvme=tier(measured_bps=None)), step(1), step(2))
    assert load(folder)[1].update_floor_s is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {"tiers": {"nvme": moved(read_s=7.0, write_s=7.5)}},
            "storage",
            "nvme, the bottleneck, is at work as long as 94%",
        ),
        ({}, "compute", "in only 44% of that time"),
        ({"update_s": 2.0}, "good", "Bound by forward and backward, not by storage"),
        ({"tiers": {}}, "good", "no state moves"),
    ],
)
def test_the_verdict(folder, changes, kind, words):
    write(folder, 0, start(), step(1, **changes), step(2, **changes))
    verdict = findings_of(*load(folder))[0]
    assert (verdict.kind, words in verdict.text) == (kind, True), verdict.text


def test_tiers_that_are_evenly_at_work_are_no_bottleneck_and_slow_ones_are_told(folder):
    both = {"nvme": moved(read_s=7.0, write_s=7.2), "pfs": moved(read_s=7.0, write_s=7.5)}
    write(folder, 0, start(nvme=tier(), pfs=tier(shared=True)), step(1, tiers=both), step(2, tiers=both))
    run, figures = load(folder)
    assert "all 2 tiers are evenly at work" in findings_of(run, figures)[0].text
    assert "pfs gives 27% of the 2.00 GB/s that were measured at the start" in texts(run, figures)
    assert "drive writes a day; a drive rated for one" in texts(run, figures)


def test_a_loss_that_is_no_number_is_told_with_its_first_step(folder):
    losses = [{"loss": value, "step": n} for n, value in ((1, 2.0), (2, None), (3, None))]
    write(folder, 0, start(), step(1), step(2), step(3), *losses)
    assert "The loss is no finite number in 2 steps, first in step 2" in texts(*load(folder))


def test_no_steps_is_an_error_that_says_so(folder):
    write(folder, 0, start(), start(began_s=2000.0), torn='{"st')
    with pytest.raises(MlpoError, match=r"no step was done in 2 starts of this run \(on n1\)"):
        load(folder)
    write(folder, 0)
    with pytest.raises(MlpoError, match="the journals are empty"):
        load(folder)


# ---- the page ---------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags are closed in order; collects text and what is loaded from elsewhere."""

    VOID = {"meta", "br", "rect", "line", "polyline", "polygon"}

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text, self.loads = [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def charts(self):
        return [attributes["aria-label"] for tag, attributes in self.seen if tag == "svg"]


def page_of(folder, name="run"):
    run, figures = load(folder)
    page = Page(draw_page(run, figures, name))
    assert page.open == []
    assert page.loads == [], "one file that needs nothing else"
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in page.seen)
    return page


def test_the_page_has_it_all(folder):
    losses = [{"loss": 3.0 / n, "step": n, "text_tokens": 1000} for n in (1, 2, 3)]
    tiers = {"nvme": tier(), "pfs": tier("off", shared=True, path="/lustre/<me>")}
    both = {"nvme": moved(), "pfs": moved()}
    lines = [step(n, tiers=both) for n in (1, 2)]
    write(folder, 0, start(**tiers), *lines, *losses[:2], start(began_s=2000.0, **tiers), step(3, 2010.0, tiers=both))
    page = page_of(folder, "a <run>")
    assert page.charts() == [
        "Loss over steps",
        "A step by phase",
        "Part of an iteration in which a tier moves bytes",
        *("Rate of a node", "Moved in a step, all nodes") * 2,
        "State found in host memory",
        "Wait for tokens in a step",
    ]
    for words in (
        "a <run>",
        "steps 1 to 3",
        "1 restart",
        "77, restart 1",
        "restart at step 3",
        "/lustre/<me>",
        "direction (mpi)",
        "torch 2.13",
        '"order": "alternate"',
        "drive writes a day",
        "1.00 B parameters",
        "measured",
        "update / its floor",
    ):
        assert words in page.text, words
    assert "prefers-color-scheme: dark" in page.text


def test_without_losses_the_page_says_how_to_record_them(folder):
    write(folder, 0, start(), step(1), step(2))
    page = page_of(folder)
    assert "Loss over steps" not in page.charts()
    assert "record_loss(loss, text_tokens)" in page.text


def test_one_step_or_no_tier_is_a_page_too(folder):
    write(folder, 0, start(), step(1, iteration_s=None), {"loss": 2.0, "step": 1})
    assert "Only one step was done" in page_of(folder).text
    write(folder, 0, {"start": {**start()["start"], "tiers": {}}}, step(1, tiers={}), step(2, tiers={}))
    assert "all state stays in host memory" in page_of(folder).text


def test_a_long_run_is_drawn_in_groups(folder):
    numbers = list(range(1, 100_001))
    drawn = Chart(numbers, "s", [Series("x", "c-read", [float(n) for n in numbers])]).svg("x")
    assert drawn.count("<rect") <= MOST_POINTS
    assert len(drawn) < 60_000
    assert "100,000" in drawn


def test_gaps_flat_lines_and_a_single_point_are_drawn(folder):
    values = [None, 5.0, 5.0, None, 5.0]
    drawn = Chart([1, 2, 3, 4, 5], "s", [Series("x", "c-read", values)], from_zero=False).svg("x")
    assert drawn.count("<polyline") == 2
    assert "nan" not in drawn
    assert Chart([1], "s", [Series("x", "c-read", [0.0])], stacked=True).svg("x").count("<polygon") == 1
    assert "<polyline" not in Chart([1], "s", [Series("x", "c-read", [None])]).svg("x")


# ---- the command ------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_what_matters(folder):
    write(folder, 0, start(), step(1), step(2), torn='{"ste')
    done = command(folder)
    assert done.exit_code == 0, done.output
    assert "Bound by the update itself" in done.output
    assert "cut short or damaged, and left out: 1" in done.output
    assert f"page: {folder / 'report.html'}" in done.output
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert sorted(os.listdir(folder)) == ["report.html", "steps-0.jsonl"]
    assert command(folder, folder / "steps-0.jsonl", "-o", folder / "other.html").exit_code == 0
    assert (folder / "other.html").exists()


def test_json_has_the_findings_and_every_step_and_writes_no_page(folder):
    write(folder, 0, start(), step(1), step(2), {"loss": None, "step": 2})
    done = command(folder, "--json")
    assert done.exit_code == 0
    found = json.loads(done.output, parse_constant=pytest.fail)
    assert found["findings"][0]["kind"] == "compute"
    assert found["figures"]["tiers"][0]["wear"]["drive_writes"] == pytest.approx(34.56)
    assert [line["step"] for line in found["steps"]] == [1, 2]
    assert found["steps"][1]["loss"] is None
    assert found["steps"][0]["tiers"]["nvme"]["n1"]["bytes_read"] == 4 * GB
    assert not (folder / "report.html").exists()
    assert command(folder, "--json", "-o", folder / "page.html").exit_code == 0
    assert (folder / "page.html").exists()


def test_what_cannot_be_reported_is_an_error(folder, tmp_path):
    assert command(tmp_path / "missing").exit_code == 2
    assert command().exit_code == 2
    folder.mkdir()
    done = command(folder)
    assert (done.exit_code, "holds no journals" in done.output) == (1, True)
    write(folder, 0, start())
    done = command(folder)
    assert (done.exit_code, "no step was done in 1 start of this run" in done.output) == (1, True)
    write(folder, 0, start(), step(1))
    done = command(folder, "-o", tmp_path / "no/where.html")
    assert (done.exit_code, "cannot write the page" in done.output) == (1, True)


def test_help_has_an_example():
    done = command("--help")
    assert done.exit_code == 0
    assert "mlpo report runs/traces" in done.output
