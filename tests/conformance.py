"""What every container must do, whatever file it is in and however bytes get there."""

from __future__ import annotations

import mmap
import random
import threading

import pytest

from mlpo_hpc.storage.base import ALIGNMENT_BYTES, Container


def aligned(nbytes: int) -> memoryview:
    """Memory as the pool's."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def pattern(seed: int, nbytes: int) -> memoryview:
    view = aligned(nbytes)
    view[:] = random.Random(seed).randbytes(nbytes)
    return view


def read(container: Container, slot: int, nbytes: int) -> memoryview:
    back = aligned(nbytes)
    container.read(slot, back)
    return back


def check_any_size_comes_back(container: Container, seed: int) -> None:
    rng = random.Random(seed)
    blocks = container.slot_bytes // ALIGNMENT_BYTES
    for number in range(20):
        slot, view = (
            rng.randrange(container.num_slots),
            pattern(seed + number, ALIGNMENT_BYTES * rng.randint(1, blocks)),
        )
        container.write(slot, view)
        assert read(container, slot, view.nbytes) == view


def fill(container: Container, seed: int) -> None:
    for slot in range(container.num_slots):
        container.write(slot, pattern(seed + slot, container.slot_bytes))


def check_filled(container: Container, seed: int) -> None:
    """No slot was touched by another one, or by another rank."""
    for slot in range(container.num_slots):
        assert read(container, slot, container.slot_bytes) == pattern(seed + slot, container.slot_bytes)


def check_misuse_is_refused(container: Container) -> None:
    with pytest.raises(IndexError):
        container.read(container.num_slots, aligned(ALIGNMENT_BYTES))
    with pytest.raises(ValueError, match="fit"):
        container.write(0, aligned(container.slot_bytes + ALIGNMENT_BYTES))
    with pytest.raises(ValueError, match="fit"):
        container.write(0, aligned(ALIGNMENT_BYTES)[:100])


def check_threads_do_not_disturb_each_other(container: Container, seed: int) -> None:
    """Two readers and two writers, as in the lanes of a tier."""
    half = container.num_slots // 2
    fill(container, seed)
    failures: list[BaseException] = []

    def work(slots: range, writes: bool) -> None:
        try:
            for _ in range(3):
                for slot in slots:
                    view = pattern(seed + slot, container.slot_bytes)
                    if writes:
                        container.write(slot, view)
                    else:
                        assert read(container, slot, view.nbytes) == view
        except BaseException as error:
            failures.append(error)

    jobs = [(range(0, half, 2), False), (range(1, half, 2), False)]
    jobs += [(range(half, container.num_slots, 2), True), (range(half + 1, container.num_slots, 2), True)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    check_filled(container, seed)


def check_container(container: Container, seed: int) -> None:
    """The whole suite on one rank."""
    check_any_size_comes_back(container, seed)
    check_misuse_is_refused(container)
    check_threads_do_not_disturb_each_other(container, seed)
