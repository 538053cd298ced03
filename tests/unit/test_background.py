"""A commit beside training: shards are found as files, what fails is told, nothing is waited for without end."""

from __future__ import annotations

import threading

import pytest

from mlpo_hpc.checkpoint import background
from mlpo_hpc.checkpoint.background import Attempt, Background
from mlpo_hpc.checkpoint.find import committed, named_latest
from mlpo_hpc.checkpoint.rotation import make_room, remove, rotate
from mlpo_hpc.errors import ConfigError, StorageError, StorageTimeout, TierFull
from tests import checkpoints

UNIQUE = "0000000a"


class Part:
    """Stands in for a rank's `Save`."""

    def __init__(self, folder, rank, error=None, may_end=None):
        self.folder, self.rank, self.error, self.may_end = folder, rank, error, may_end
        self.hurried = False

    def run(self):
        if self.may_end is not None:
            self.may_end.wait(30)
        if self.error is not None:
            raise self.error
        (self.folder / f"shard-{self.rank:05d}-{UNIQUE}.json").write_bytes(b"{}")

    def hurry(self):
        self.hurried = True
        if self.may_end is not None:
            self.may_end.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "LAST_POLL_S", 0.02)


def ranks(folder, parts, timeout_s=30.0):
    """A thread for each rank; rank 0's commit notes the shards that it was given."""
    found = []
    threads = [
        Background("one", part, Attempt(folder, UNIQUE, len(parts), timeout_s), rank, found.extend)
        for rank, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    return threads, found


def test_rank_0_commits_when_the_shards_of_all_are_there(tmp_path):
    last = threading.Event()
    parts = [Part(tmp_path, 0), Part(tmp_path, 1), Part(tmp_path, 2, may_end=last)]
    threads, found = ranks(tmp_path, parts)
    threads[1].join(30)
    assert not threads[0].is_committed()
    assert found == []
    assert threads[2].wait_written() is None, "somebody who waits hurries"
    assert threads[0].wait_ended() is None
    assert [entry.file for entry in found] == [f"shard-{rank:05d}-{UNIQUE}.json" for rank in range(3)]
    assert threads[0].is_committed()


def test_what_a_rank_is_still_writing_is_not_read(tmp_path):
    """A note that it failed, half written; should it come, it comes by a rename."""
    (tmp_path / f"failed-00001-{UNIQUE}.json.partial").write_bytes(b"")
    threads, found = ranks(tmp_path, [Part(tmp_path, 0), Part(tmp_path, 1)])
    assert threads[0].wait_ended() is None
    assert len(found) == 2


def test_a_rank_that_fails_is_told_to_the_others_and_training_is_not_disturbed(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    threads, found = ranks(folder, [Part(folder, 0), Part(folder, 1, TierFull("the disk is full"))])
    error = threads[0].wait_ended()
    assert isinstance(error, StorageError)
    assert "rank 1 on host" in str(error)
    assert "the disk is full" in str(error)
    with pytest.raises(TierFull, match="disk is full"):
        threads[1].is_committed()
    assert found == []
    threads[0].remove()
    assert not folder.exists()


def test_a_rank_that_never_comes_is_not_waited_for_without_end(tmp_path):
    gone = [Part(tmp_path, 0), Part(tmp_path, 1, may_end=threading.Event())]
    threads, _ = ranks(tmp_path, gone, timeout_s=0.1)
    error = threads[0].wait_ended()
    assert isinstance(error, StorageTimeout)
    assert "the shards of all ranks" in str(error)
    gone[1].hurry()
    threads[1].join(30)


def test_a_rank_waits_for_the_commit_of_this_attempt(tmp_path):
    checkpoints.save(tmp_path, checkpoints.usual(), attempt="0000000b")
    folder = tmp_path / "one"
    threads, _ = ranks(folder, [Part(folder, 0), Part(folder, 1)])
    for thread in threads:
        thread.join(30)
    assert not threads[1].is_committed(), "another attempt's manifest is there"
    threads[0].remove()
    assert len(list(committed(tmp_path))) == 1
    assert not list(folder.glob(f"*{UNIQUE}*"))


def steps(directory):
    return sorted(tag for tag, _ in committed(directory))


def saved(tmp_path, *tags):
    for number, tag in enumerate(tags):
        checkpoints.save(tmp_path, checkpoints.usual(), tag=tag, attempt=f"{number:08x}")


def test_the_last_ones_stay(tmp_path):
    saved(tmp_path, "a", "b", "c")
    mine = tmp_path / "a" / "notes.txt"
    mine.write_text("not ours")
    removed = rotate(tmp_path, 1, None)
    assert len(removed) in (1, 2), "besides the newest, what `latest` names stays"
    assert steps(tmp_path) == sorted({"a", "b", "c"} - set(removed))
    assert named_latest(tmp_path) in steps(tmp_path)
    if "a" in removed:
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes.txt"]
    assert rotate(tmp_path, 1, None) == []


def test_all_stay_where_nothing_was_said_and_those_of_some_steps_for_good(tmp_path):
    saved(tmp_path, "a", "b", "c")
    assert rotate(tmp_path, None, None) == []
    assert rotate(tmp_path, 1, 1) == []
    assert len(steps(tmp_path)) == 3


def test_what_will_be_replaced_makes_room_but_never_the_last_one(tmp_path):
    saved(tmp_path, "a", "b")
    make_room(tmp_path, 0, 2, None)
    assert len(steps(tmp_path)) == 2
    make_room(tmp_path, 2**60, 2, None)
    assert len(steps(tmp_path)) == 1
    make_room(tmp_path, 2**60, 1, None)
    assert len(steps(tmp_path)) == 1


def test_a_checkpoint_that_cannot_be_removed_says_so(tmp_path):
    saved(tmp_path, "a")
    remove(tmp_path / "a")
    with pytest.raises(StorageError, match="removing a checkpoint"):
        remove(tmp_path / "a")


def test_keep_every_needs_keep_last():
    from mlpo_hpc.config import load

    with pytest.raises(ConfigError, match="keep_last"):
        load({"mlp_offload": {"checkpoint": {"keep_every": 10}}})
