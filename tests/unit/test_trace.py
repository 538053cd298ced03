"""Traces: what is in them, rows of what overlaps, files that end early, disks that fill up."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpo_hpc.config import load
from mlpo_hpc.errors import ConfigError, StorageError
from mlpo_hpc.storage.tier import StorageTier
from mlpo_hpc.telemetry.metrics import Meter
from mlpo_hpc.telemetry.trace import Trace, open_trace
from tests.containers import MemoryContainer


def events(path):
    """As Perfetto reads it: the closing bracket may be missing."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def spans(path):
    found = events(path)
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    return [(names[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"], e["args"]) for e in found if e["ph"] == "X"]


def test_spans_are_on_their_tracks(tmp_path):
    trace = open_trace(str(tmp_path / "new" / "folder"), 3, "n1")
    trace.track("pfs read")("chunk", 10.0, 10.5, 10**9)
    trace.track("phases")("forward", 9.0, 10.0, 0)
    trace.flush()
    trace.flush()
    path = tmp_path / "new" / "folder" / "trace.3.json"
    assert events(path)[0]["args"]["name"] == "rank 3 on n1"
    (first, second) = spans(path)
    assert (first[0], first[1], second[0], second[1]) == ("phases", "forward", "pfs read", "chunk")
    assert second[4] == {"bytes": 10**9, "GB/s": 2.0}
    assert second[2] - first[2] == pytest.approx(1e6, abs=1)
    assert second[3] - second[2] == pytest.approx(0.5e6, abs=1)
    trace.close()
    trace.close()
    trace.flush()


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=40))
def test_what_overlaps_gets_rows_of_its_own(tmp_path_factory, pairs):
    path = tmp_path_factory.mktemp("trace") / "t.json"
    trace = Trace(str(path), 0, "n1")
    for begin, took in pairs:
        trace.track("nvme write")("chunk", begin, begin + took, 1)
    trace.flush()
    trace.close()
    rows = {}
    for row, _, begin, end, _ in spans(path):
        assert begin >= rows.get(row, 0) - 0.2, "rounded to a tenth of a microsecond"
        rows[row] = end
    assert len(spans(path)) == len(pairs)


def test_lanes_and_waits_are_told_from_their_threads(tmp_path):
    trace = Trace(str(tmp_path / "t.json"), 0, "n1")
    meter = Meter()
    meter.record = trace.track("nvme read")

    def work():
        for _ in range(50):
            meter.waited(0.001)
            meter.waited(1e-6)
            with meter.moving(4096):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.flush()
    names = [name for _, name, *_ in spans(tmp_path / "t.json")]
    assert (names.count("chunk"), names.count("waits for the token")) == (200, 200), "short waits are left out"


def test_a_disk_that_fills_up_ends_the_trace_not_the_run(tmp_path, caplog):
    trace = Trace(str(tmp_path / "t.json"), 0, "n1")
    trace._file = open("/dev/full", "w")  # noqa: SIM115
    trace.track("x")("y", 0.0, 1.0, 0)
    trace.flush()
    assert "ends here" in caplog.text
    trace.track("x")("y", 0.0, 1.0, 0)
    trace.flush()


def test_a_place_that_cannot_be_written_is_said_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="making the telemetry directory"):
        open_trace(str(tmp_path / "file" / "x"), 0, "n1")
    with pytest.raises(ConfigError, match="'trace' needs 'dir'"):
        load({"mlp_offload": {"telemetry": {"trace": True}}})


def test_without_a_trace_nothing_is_told():
    tier = StorageTier("nvme", MemoryContainer(2))
    assert tier.reads.meter.record is None
    tier.close()
