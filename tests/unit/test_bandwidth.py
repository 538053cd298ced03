"""mlpo probe: processes of its own, what they measure on stand-in drives, what the command prints."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial

import pytest
from click.testing import CliRunner

from mlpo_hpc.cli import main
from mlpo_hpc.cluster.crowd import Alone, Local, each, run_together
from mlpo_hpc.config import load
from mlpo_hpc.errors import MlpoError, StorageError
from mlpo_hpc.storage import bandwidth
from mlpo_hpc.storage.bandwidth import Bandwidth, measure_bandwidth
from mlpo_hpc.storage.probe import Probe
from tests.containers import MemoryContainer
from tests.standin import DriveContainer, SharedDrive

command = sys.modules["mlpo_hpc.cli.probe"]  # the package's `probe` is the command itself


def add_up(ranks, offset=0):
    values = ranks.allgather(ranks.rank + offset)
    return values, ranks.bcast(f"from {ranks.rank}"), sum(ranks.allgather(os.getpid() == os.getppid()))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_processes_of_our_own_gather(num_ranks):
    values, first, _ = run_together(num_ranks, partial(add_up, offset=7))
    assert values == [7 + rank for rank in range(num_ranks)]
    assert first == "from 0"


def die(ranks):
    if ranks.rank == 1:
        os._exit(3)
    return ranks.allgather(None)


def fail_on_the_last(ranks):
    def action():
        if ranks.rank == ranks.size - 1:
            raise StorageError("no luck")

    each(ranks, action)


def test_one_that_dies_or_fails_ends_all_and_is_told():
    with pytest.raises(MlpoError, match="another process of the measurement ended"):
        run_together(3, die)
    with pytest.raises(StorageError, match="no luck"):
        run_together(3, fail_on_the_last)


def test_one_that_does_not_answer_is_waited_for_not_for_ever(monkeypatch):
    from mlpo_hpc.cluster import crowd

    monkeypatch.setattr(crowd, "ANSWER_S", 0.2)
    ours, _theirs = crowd.multiprocessing.Pipe()
    with pytest.raises(MlpoError, match="did not answer for"):
        Local(0, 2, [ours]).allgather(None)


class TwoWays(MemoryContainer):
    """A drive whose directions do not touch each other, 40 MB/s each."""

    def __init__(self) -> None:
        super().__init__(4, 2**20)
        self._ways = {"read": threading.Lock(), "write": threading.Lock()}

    def _note(self, way: str) -> None:
        with self._ways[way]:
            time.sleep(2**20 / 40e6)


def measure(monkeypatch, container, ranks=None):
    monkeypatch.setattr(bandwidth, "open_probe", lambda *_: Probe(container))
    told = []
    found = measure_bandwidth("somewhere", ranks or Alone(), 2, 0.2, 2**30, lambda: told.append(1))
    assert len(told) == 2 * 3 * 2
    return found


def test_duplex_is_found_out(monkeypatch, tmp_path):
    assert measure(monkeypatch, TwoWays()).is_full_duplex
    drive = SharedDrive(tmp_path / "books", 0, 1, 100e6)
    found = measure(monkeypatch, DriveContainer(drive, 4, 2**20))
    assert not found.is_full_duplex
    assert found.typical_bps("at once", "read") > 1.5 * found.typical_bps("at once", "both")


def test_turns_are_advised_where_one_rank_alone_gets_more(monkeypatch, tmp_path):
    """Two ranks in threads, on a drive that loses 40 % when both use it."""
    barrier, values = threading.Barrier(2), {}

    class Thread:
        size = 2

        def __init__(self, rank):
            self.rank = rank

        def allgather(self, value):
            values[self.rank] = value
            barrier.wait(30)
            found = [values[0], values[1]]
            barrier.wait(30)
            return found

    drives = [SharedDrive(tmp_path / "books", rank, 2, 100e6) for rank in range(2)]
    probes = {rank: Probe(DriveContainer(drives[rank], 4, 2**20)) for rank in range(2)}
    monkeypatch.setattr(bandwidth, "open_probe", lambda *_: probes[int(threading.current_thread().name)])
    results = {}

    def work(rank):
        results[rank] = measure_bandwidth("x", Thread(rank), 2, 0.2, 2**30, lambda: None)

    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0].rounds_bps == results[1].rounds_bps, "all ranks know the same"
    assert results[0].turns_pay


def run(*arguments):
    return CliRunner().invoke(main, ["probe", *map(str, arguments)])


QUICK = ("--ranks", 1, "--rounds", 2, "--seconds", 0.05)


def test_what_it_prints_as_json_is_a_section_that_works(tmp_path):
    done = run(f"disk={tmp_path}", *QUICK, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (tier,) = load({"mlp_offload": found["mlp_offload"]}).tiers
    assert (tier.name, tier.dir) == ("disk", str(tmp_path))
    assert tier.read_bps > 0
    assert tier.write_bps > 0
    details = found["measured"][0]
    assert {len(rates) for rates in details["rounds_bps"].values()} == {2}
    assert set(details["rounds_bps"]) == {f"{a} {b}" for a in ("read", "write", "both") for b in ("alone", "at once")}
    assert [path.name for path in tmp_path.iterdir() if path.name != "tmp"] == [], "nothing is left"


def test_a_table_for_people_and_warnings(tmp_path, monkeypatch):
    done = run(tmp_path, *QUICK)
    assert done.exit_code == 0, done.output
    for words in ("GB/s of 1 ranks", "both, each way", "alone", "at once", "duplex", "turns"):
        assert words in done.stdout
    found = Bandwidth({("alone", "read"): [1.0]}, direct=False)
    disk = command.describe(str(tmp_path))
    (said,) = command.Finding(command.Wish("a", "/a"), disk, 1, found).warnings()
    assert "page cache" in said
    if command.describe("/dev/shm").is_memory:
        assert "is memory" in run("/dev/shm", *QUICK).stdout


def test_wrong_use_is_said(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    assert (done := run("/missing")).exit_code == 2
    assert "/missing is no directory" in done.output
    assert (done := run(f"x={tmp_path}", f"x={tmp_path / 'a'}")).exit_code == 2
    assert "two directories have one name" in done.output
    full = command.describe(str(tmp_path))
    monkeypatch.setattr(command, "describe", lambda path: type(full)(**{**vars(full), "free_bytes": 10_000}))
    done = run(tmp_path, *QUICK)
    assert done.exit_code == 1
    assert "too little space to measure" in done.output
