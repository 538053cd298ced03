"""One rank's part in a checkpoint: what an update changes is saved as it was, whenever the update comes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash

from mlpo_hpc.checkpoint import write
from mlpo_hpc.checkpoint.copy_on_write import CopyOnWrite
from mlpo_hpc.checkpoint.manifest import RecordEntry, Shard
from mlpo_hpc.checkpoint.save import Outline, Save
from mlpo_hpc.checkpoint.write import ShardWriter
from mlpo_hpc.errors import StorageTimeout
from mlpo_hpc.state.table import Chunk as Lying
from mlpo_hpc.storage import pace
from mlpo_hpc.storage.pace import Pace

NUM_SUBGROUPS, PIECE, WAIT_S = 3, 4096, 30.0
SIZES = (3 * PIECE, 2 * PIECE + 100)  # weights and state of a subgroup


class Gate(Pace):
    """Lets pieces through one by one."""

    def __init__(self, is_free):
        super().__init__()
        self._is_free = is_free
        self.may = threading.Semaphore(0)
        self.done = threading.Semaphore(0)

    @contextmanager
    def moving(self):
        assert self.may.acquire(timeout=WAIT_S)
        yield
        self.done.release()

    @property
    def is_free(self):
        return self._is_free

    def let(self, pieces):
        for _ in range(pieces):
            self.may.release()
            assert self.done.acquire(timeout=WAIT_S)

    def open(self):
        self.may.release(10**6)


class Held:
    """Stands in for a seal of state that is in host memory alone."""

    def __init__(self, memory):
        self.memory = memory

    def close(self):
        self.memory = {}


class Scene:
    """A rank whose weights and state are of one value a subgroup, and its save in a thread."""

    def __init__(self, folder, monkeypatch, copies, past_cache=False, gate=None):
        monkeypatch.setattr(write, "CHUNK_BYTES", PIECE)
        self.live = [
            [np.full(nbytes, 10 * subgroup + number, np.uint8) for number, nbytes in enumerate(SIZES)]
            for subgroup in range(NUM_SUBGROUPS)
        ]
        self.gate = gate or Gate(is_free=not past_cache)
        records = [
            RecordEntry(
                numel=1, vectors=(), pieces=(), split=False, nbytes=SIZES[1], chunks=(), weights=(), scalars=None
            )
        ] * NUM_SUBGROUPS
        weights = [CopyOnWrite(lambda data=data: data.data) for data, _ in self.live]
        seal = Held({subgroup: state.data for subgroup, (_, state) in enumerate(self.live)})
        writer = ShardWriter(folder, 0, "0000000a", self.gate)
        outline = Outline(records, [], [2, 0, 1], {}, {})
        self.save = Save(writer, outline, seal, weights, lambda s, data: (data[0],), [], [], copies, {})
        self.folder = folder
        self.thread = threading.Thread(target=self.save.run)
        self.thread.start()

    def update(self):
        """As a step does, subgroup by subgroup."""
        for subgroup in (2, 0, 1):
            self.save.wait_safe(subgroup, WAIT_S)
            for data in self.live[subgroup]:
                data[:] = 255

    def saved(self):
        """What became of it: values of weights and state."""
        if isinstance(self.gate, Gate):
            self.gate.open()
        self.thread.join(WAIT_S)
        (file,) = self.folder.glob("shard-*")
        return [
            (record.changed, self._read(record.weights), self._read(record.chunks))
            for record in Shard.model_validate_json(file.read_bytes()).records
        ]

    def _read(self, chunks):
        data = b""
        for chunk in chunks:
            bytes_ = (self.folder / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]
            assert xxhash.xxh3_64_hexdigest(bytes_) == chunk.checksum
            data += bytes_
        return sorted(set(data)), len(data)


TRUTH = [
    ((10 * subgroup,), ([10 * subgroup], SIZES[0]), ([10 * subgroup + 1], SIZES[1]))
    for subgroup in range(NUM_SUBGROUPS)
]


def test_what_was_saved_is_not_kept_in_memory(tmp_path, monkeypatch):
    scene = Scene(tmp_path, monkeypatch, copies=True)
    assert scene.saved() == TRUTH
    live = [weakref.ref(data) for pair in scene.live for data in pair]
    gc.disable()
    try:
        del scene
        assert [each() for each in live] == [None] * len(live)
    finally:
        gc.enable()


def test_what_an_update_is_about_to_change_is_copied_before_it_comes(tmp_path, monkeypatch):
    """Nothing is written while the tiers are left to it; it waits for nothing, and copies nothing itself."""
    expected = threading.Event()
    expected.set()
    scene = Scene(tmp_path, monkeypatch, copies=True, gate=Pace([Idle()], lambda _: expected.is_set()))
    kept = [each for subgroup in range(NUM_SUBGROUPS) for each in scene.save._kept[subgroup]]
    deadline = time.monotonic() + WAIT_S
    while any(each._is_live for each in kept) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not any(each._is_live for each in kept)
    scene.update()
    expected.clear()
    scene.save.hurry()
    assert scene.saved() == TRUTH


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("pieces", range(NUM_SUBGROUPS * 6 + 1))
def test_an_update_at_any_moment_changes_nothing_that_is_saved(tmp_path, monkeypatch, pieces, past_cache):
    """By copies: it never waits for storage."""
    scene = Scene(tmp_path, monkeypatch, copies=True, past_cache=past_cache)
    scene.gate.let(pieces)
    scene.update()
    assert scene.saved() == TRUTH


@pytest.mark.parametrize("pieces", [0, 4, 11, 18])
def test_without_memory_to_spare_an_update_waits(tmp_path, monkeypatch, pieces):
    scene = Scene(tmp_path, monkeypatch, copies=False)
    scene.gate.let(pieces)
    if pieces < 6:
        with pytest.raises(StorageTimeout, match="the checkpoint does not get on"):
            scene.save.wait_safe(2, 0.01)
    training = threading.Thread(target=scene.update)
    training.start()
    assert scene.saved() == TRUTH
    training.join(WAIT_S)
    assert not training.is_alive()


class Idle:
    """A lane of which nothing is asked."""

    def is_idle(self):
        return True

    @contextmanager
    def turn(self):
        yield


def test_a_save_that_an_update_waits_for_does_not_wait_for_the_update(tmp_path, monkeypatch):
    """A step has begun, so the tiers are its own; but it waits for what is to be written."""
    monkeypatch.setattr(pace, "LEAST_PATIENCE_S", 1000.0)
    monkeypatch.setattr(pace, "MOST_PATIENCE_S", 1000.0)
    scene = Scene(tmp_path, monkeypatch, copies=False, gate=Pace([Idle()], lambda _: True))
    scene.update()
    scene.save.hurry()
    assert scene.saved() == TRUTH


def test_nothing_is_being_read_any_more_when_a_save_has_failed(tmp_path, monkeypatch):
    settled = []

    class Reads:
        def move(self, slot, view, label, checksum):
            return Mock(wait=lambda: 0.0, settle=lambda: settled.append(slot))

    scene = Scene(tmp_path, monkeypatch, copies=True)
    scene.save._tiers, scene.save._paces = [Mock(reads=Reads())], [Pace()]
    monkeypatch.setattr(ShardWriter, "add_whole", lambda self, view, checksum: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(scene.save._copy(0, [Lying(0, slot, PIECE, 7) for slot in range(3)]))
    assert settled == [1], "the one that was read ahead"
    scene.saved()


def test_a_subgroup_without_items_is_copied_too():
    empty = CopyOnWrite(lambda: memoryview(b""))
    empty.before_change(WAIT_S)
    with empty.reading() as view:
        assert len(view) == 0


def test_an_update_that_comes_when_the_save_has_failed_does_not_wait(tmp_path, monkeypatch):
    scene = Scene(tmp_path, monkeypatch, copies=False)
    monkeypatch.setattr(ShardWriter, "_move", lambda self, piece: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    scene.gate.open()
    scene.update()
    scene.thread.join(WAIT_S)
    assert list(tmp_path.glob("*-0000000a.*")) == []


def test_what_is_a_copy_already_is_not_copied_again():
    data, fetched = np.arange(8, dtype=np.uint8), []

    def fetch():
        fetched.append(1)
        return data.copy().data

    own = CopyOnWrite(fetch, is_live=False)
    own.before_change(WAIT_S)
    own.before_change(WAIT_S)
    data[:] = 0
    with own.reading() as view:
        assert (bytes(view), fetched) == (bytes(range(8)), [1])
