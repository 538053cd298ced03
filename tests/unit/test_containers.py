"""One conformance suite for every container and way of opening it, and the faults of each system call."""

from __future__ import annotations

import errno
import mmap
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlpo_hpc.errors import CorruptState, StorageError, TierFull
from mlpo_hpc.storage import posix
from mlpo_hpc.storage.base import ALIGNMENT_BYTES, Slots, round_up
from mlpo_hpc.storage.posix import open_raw
from tests.containers import MemoryContainer

SLOT = 4 * ALIGNMENT_BYTES


def aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def refuse(flag, code):
    """os.open that refuses a flag, as some file systems do."""

    def opener(path, flags, mode=0o777):
        if flags & flag == flag:
            raise OSError(code, os.strerror(code))
        return real(path, flags, mode)

    real = os.open
    return opener


@pytest.fixture(params=["raw", "raw without O_DIRECT", "raw without O_TMPFILE", "memory"])
def container(request, tmp_path, monkeypatch):
    if request.param == "memory":
        made = MemoryContainer(8, SLOT)
    else:
        if request.param == "raw without O_DIRECT":
            monkeypatch.setattr(os, "open", refuse(os.O_DIRECT, errno.EINVAL))
        if request.param == "raw without O_TMPFILE":
            monkeypatch.setattr(os, "open", refuse(os.O_TMPFILE, errno.EOPNOTSUPP))
        made = open_raw(str(tmp_path), SLOT, 8)
    yield made
    made.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slot=st.integers(0, 7), blocks=st.integers(1, 4), seed=st.integers(0, 255))
def test_what_is_written_is_read(container, slot, blocks, seed):
    view = aligned(blocks * ALIGNMENT_BYTES)
    view[:] = bytes((seed + i // 7) % 256 for i in range(view.nbytes))
    container.write(slot, view)
    back = aligned(view.nbytes)
    container.read(slot, back)
    assert back == view


def test_slots_do_not_touch_each_other(container):
    views = [aligned(SLOT) for _ in range(8)]
    for slot, view in enumerate(views):
        view[:] = bytes([slot]) * SLOT
        container.write(slot, view)
    for slot in range(8):
        back = aligned(SLOT)
        container.read(slot, back)
        assert bytes(back) == bytes([slot]) * SLOT


def test_misuse_is_refused(container):
    with pytest.raises(IndexError):
        container.read(8, aligned(SLOT))
    with pytest.raises(ValueError, match="fit"):
        container.write(0, aligned(SLOT + ALIGNMENT_BYTES))
    with pytest.raises(ValueError, match="fit"):
        container.write(0, aligned(SLOT)[:100])


def test_close_is_idempotent_and_leaves_no_file(container, tmp_path):
    container.close()
    container.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_file_in_use_has_no_name(tmp_path):
    file = open_raw(str(tmp_path), SLOT, 2)
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    assert os.fstat(file.transport.fd).st_nlink == 0
    file.close()


class Script:
    """A system call that fails or falls short as told, then works."""

    def __init__(self, real, plan):
        self.real, self.plan, self.calls = real, list(plan), 0

    def __call__(self, fd, buffers, offset):
        self.calls += 1
        what = self.plan.pop(0) if self.plan else None
        if isinstance(what, OSError):
            raise what
        if isinstance(what, int):
            return self.real(fd, [buffers[0][:what]], offset) if what else 0
        return self.real(fd, buffers, offset)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shorts", [[4096], [4096, 4096], [4096, 8192]])
def test_short_transfers_go_on(tmp_path, monkeypatch, direct, shorts):
    if not direct:
        monkeypatch.setattr(os, "open", refuse(os.O_DIRECT, errno.EINVAL))
    file = open_raw(str(tmp_path), SLOT, 2)
    view, back = aligned(SLOT), aligned(SLOT)
    view[:] = os.urandom(SLOT)
    monkeypatch.setattr(os, "pwritev", Script(os.pwritev, shorts))
    monkeypatch.setattr(os, "preadv", Script(os.preadv, shorts))
    file.write(1, view)
    file.read(1, back)
    assert back == view
    assert os.pwritev.calls == len(shorts) + 1
    file.close()


def test_a_short_transfer_off_the_alignment_goes_back_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", refuse(os.O_DIRECT, errno.EINVAL))
    file = open_raw(str(tmp_path), SLOT, 1)
    view, back = aligned(SLOT), aligned(SLOT)
    view[:] = os.urandom(SLOT)
    monkeypatch.setattr(os, "pwritev", Script(os.pwritev, [5000]))
    monkeypatch.setattr(os, "preadv", Script(os.preadv, [9000]))
    file.write(0, view)
    file.read(0, back)
    assert back == view
    file.close()


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (errno.ENOSPC, TierFull, "free space"),
        (errno.EDQUOT, TierFull, "quota"),
        (errno.EIO, StorageError, "check the system log"),
    ],
)
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_errors_say_what_where_and_what_to_do(tmp_path, monkeypatch, code, kind, advice, call):
    file = open_raw(str(tmp_path), SLOT, 2)
    monkeypatch.setattr(os, call, Script(getattr(os, call), [OSError(code, os.strerror(code))]))
    with pytest.raises(kind, match=advice) as caught:
        (file.write if call == "pwritev" else file.read)(1, aligned(SLOT))
    text = str(caught.value)
    assert errno.errorcode[code] in text
    assert str(tmp_path) in text
    assert "rank 0" in text
    assert f"byte {SLOT}" in text
    file.close()


@pytest.mark.parametrize("call", ["fdatasync", "close"])
def test_errors_at_sync_and_close_are_not_lost(tmp_path, monkeypatch, call):
    monkeypatch.setattr(os, "open", refuse(os.O_DIRECT, errno.EINVAL))
    file = open_raw(str(tmp_path), SLOT, 2)

    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    fd = file.transport.fd
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="EIO"):
        file.write(0, aligned(SLOT))
        file.close()
    monkeypatch.undo()
    os.close(fd)


def test_a_truncated_file_is_found(tmp_path):
    file = open_raw(str(tmp_path), SLOT, 4)
    for slot in range(4):
        file.write(slot, aligned(SLOT))
    os.ftruncate(file.transport.fd, SLOT + 4096)
    with pytest.raises(CorruptState, match=f"ends at byte {SLOT + 4096}"):
        file.read(1, aligned(SLOT))
    file.close()


def test_a_write_that_moves_nothing_is_an_error_not_a_loop(tmp_path, monkeypatch):
    file = open_raw(str(tmp_path), SLOT, 1)
    monkeypatch.setattr(os, "pwritev", Script(os.pwritev, [0]))
    with pytest.raises(StorageError, match="stopped"):
        file.write(0, aligned(SLOT))
    file.close()


def test_large_transfers_are_cut(tmp_path, monkeypatch):
    """https://github.com/open-mpi/ompi/issues/2399 is one of many limits on a single call"""
    monkeypatch.setattr(posix, "MAX_CALL_BYTES", ALIGNMENT_BYTES)
    file = open_raw(str(tmp_path), SLOT, 1)
    view, back = aligned(SLOT), aligned(SLOT)
    view[:] = os.urandom(SLOT)
    monkeypatch.setattr(os, "pwritev", Script(os.pwritev, []))
    file.write(0, view)
    file.read(0, back)
    assert back == view
    assert os.pwritev.calls == 4
    file.close()


def test_a_directory_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(StorageError, match="ENOENT.*create the directory"):
        open_raw(str(tmp_path / "missing"), SLOT, 1)


def test_a_file_size_limit_is_found_when_the_container_is_made(tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT, before[1]))
    try:
        with pytest.raises(StorageError, match="ulimit"):
            open_raw(str(tmp_path), SLOT, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@given(st.integers(1, 3 * 4096 + 1))
def test_round_up_holds_the_size_and_is_aligned(size):
    """https://github.com/deepspeedai/DeepSpeed/issues/2006"""
    rounded = round_up(size)
    assert rounded >= size
    assert rounded % ALIGNMENT_BYTES == 0
    assert rounded - size < ALIGNMENT_BYTES


def test_the_lowest_slots_go_first():
    slots = Slots(5)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    slots.give(1)
    assert slots.take() == 1
    assert len(slots) == 2


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, TierFull), (errno.EIO, StorageError)])
def test_what_fails_while_a_range_is_written_out_is_said(tmp_path, monkeypatch, code, kind):
    monkeypatch.setattr(posix, "_call_c", lambda *_: code)
    posix.start_write_out(0, 0, 4096)
    with pytest.raises(kind, match=f"syncing.*{errno.errorcode[code]}"):
        posix.write_out(0, 0, 4096, str(tmp_path))


def test_a_range_is_written_out_by_the_whole_file_where_that_cannot_be(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(4096))
        file.flush()
        posix.write_out(file.fileno(), 0, 4096, "file")
        assert synced == []
        monkeypatch.setattr(posix, "_call_c", lambda *_: errno.ENOSYS)
        posix.write_out(file.fileno(), 0, 4096, "file")
        assert synced == [file.fileno()]


def test_the_kernel_is_really_asked(tmp_path):
    """A pipe cannot be written out: the number of that error comes back."""
    reading, writing = os.pipe()
    assert posix._call_c("sync_file_range", writing, 0, 4096, posix.WRITE) == errno.ESPIPE
    assert posix._call_c("sync_file_range", -1, 0, 4096, posix.WRITE) == errno.EBADF
    os.close(reading)
    os.close(writing)
