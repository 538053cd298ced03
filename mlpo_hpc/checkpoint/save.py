"""One rank's part in a checkpoint: sealed state and the 16-bit weights into its shard, while training goes on or waits.

What an update changes is written first: the 16-bit weights, and state that is in host memory alone. What was not
written by then is copied, or the update waits. What lies on the tiers is sealed and can be copied later.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mlpo_hpc.checkpoint.copy_on_write import CopyOnWrite, stuck
from mlpo_hpc.checkpoint.manifest import Chunk, FileEntry, PieceEntry, RecordEntry
from mlpo_hpc.checkpoint.write import ShardWriter
from mlpo_hpc.state.cache import Buffer
from mlpo_hpc.state.links import LinkedFile
from mlpo_hpc.state.seal import Seal
from mlpo_hpc.state.table import Chunk as Lying
from mlpo_hpc.storage.lane import Moving
from mlpo_hpc.storage.pace import Pace
from mlpo_hpc.storage.tier import StorageTier

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outline:
    """What a rank saves, without its bytes.

    Parameters
    ----------
    records : sequence of RecordEntry
        By subgroup, without chunks.
    pieces : sequence of PieceEntry
        What of which parameter they are.
    order : sequence of int
        In which subgroups are updated next.
    tensors, rng : mapping
        What is small; see `Shard`.
    """

    records: Sequence[RecordEntry]
    pieces: Sequence[PieceEntry]
    order: Sequence[int]
    tensors: Mapping[str, torch.Tensor]
    rng: Mapping[str, Any]


class Save:
    """Writes the shard of one rank.

    Parameters
    ----------
    writer : ShardWriter
        Of the shard; owned.
    outline : Outline
        What to save.
    seal : Seal
        The state; owned.
    weights : sequence of CopyOnWrite
        The 16-bit weights of each subgroup.
    find_changed : callable
        Given a subgroup and the bytes of its weights, the parameters that others changed; see `RecordEntry`.
    tiers : sequence of StorageTier
        Where the sealed state lies.
    paces : sequence of Pace
        How reading from each tier goes on beside other traffic.
    copies : bool
        Whether what an update is about to change is copied in host memory, so that no update waits for storage.
    linked : mapping
        Of a tier's number to its file that is in the checkpoint.
    """

    def __init__(
        self,
        writer: ShardWriter,
        outline: Outline,
        seal: Seal,
        weights: Sequence[CopyOnWrite],
        find_changed: Callable[[int, memoryview], tuple[int, ...]],
        tiers: Sequence[StorageTier],
        paces: Sequence[Pace],
        copies: bool,
        linked: Mapping[int, LinkedFile],
    ) -> None:
        self._writer = writer
        self._outline = outline
        self._seal = seal
        self._find_changed = find_changed
        self._tiers = tiers
        self._copies = copies
        self._paces = paces
        self._linked = linked
        self._used: dict[int, dict[int, int]] = {tier: {} for tier in linked}
        """Bytes that the checkpoint needs of each slot of those files."""
        writer.pace.before_others = self._copy_rest
        self._safe = [threading.Event() for _ in outline.records]
        self._kept = {subgroup: self._keep(subgroup, each) for subgroup, each in enumerate(weights)}
        self._bounces = [Buffer(1), Buffer(1)]
        self._written: dict[int, tuple[tuple[int, ...], list[tuple[Chunk, ...]]]] = {}

    def wait_safe(self, subgroup: int, timeout_s: float) -> None:
        """Wait until a subgroup may be changed.

        Raises
        ------
        StorageTimeout
            If it takes longer than `timeout_s`.
        """
        if self._copies:
            for kept in self._kept[subgroup]:
                kept.before_change(timeout_s)
            return
        with self._writer.pace.awaited():
            safe = self._safe[subgroup].wait(timeout_s)
        if not safe:
            raise stuck(timeout_s)

    def run(self) -> FileEntry:
        """Write the shard; what the manifest says of it. If it fails, nothing of it is left and training may go on."""
        try:
            for subgroup in self._outline.order:
                self._secure(subgroup)
            for file in self._linked.values():
                file.give_name()
            records = {subgroup: self._save(subgroup) for subgroup in self._outline.order}
            for tier, file in self._linked.items():
                self._complete(tier, file)
            ordered = [records[subgroup] for subgroup in range(len(records))]
            return self._writer.finish(ordered, self._outline.pieces, self._outline.tensors, self._outline.rng)
        except BaseException:
            self._writer.remove()
            raise
        finally:
            self._end()

    def _end(self) -> None:
        self._writer.close()
        self._writer.pace.before_others = lambda: None  # or what was saved would stay in memory until it is collected
        for kept in itertools.chain(*self._kept.values()):
            kept.drop()
        self._seal.close()
        for event in self._safe:
            event.set()

    def abandon(self) -> None:
        """Instead of `run`: the checkpoint will not be."""
        self._writer.remove()
        self._end()

    def hurry(self) -> None:
        """Somebody waits for it."""
        for pace in (*self._paces, self._writer.pace):
            pace.hurry()

    def remove(self) -> None:
        """Take away the shard: the checkpoint will not be."""
        self._writer.remove()

    def _complete(self, tier: int, file: LinkedFile) -> None:
        """A file that is linked has nothing but what is wanted, and is on the device."""
        if not self._used[tier] and not file.of_node:
            file.path.unlink()
            return
        container = file.sealed
        for slot in range(container.num_slots):
            container.punch(slot, self._used[tier].get(slot, 0))
        container.transport.sync()

    def _keep(self, subgroup: int, weights: CopyOnWrite) -> list[CopyOnWrite]:
        """What the next update of a subgroup changes: the weights, and the state that is in host memory alone."""
        memory = self._seal.memory
        return [weights, *([CopyOnWrite(partial(memory.__getitem__, subgroup))] if subgroup in memory else [])]

    def _secure(self, subgroup: int) -> None:
        kept = self._kept[subgroup]
        with kept[0].reading() as weights:
            changed = self._find_changed(subgroup, weights)
        self._written[subgroup] = changed, [self._writer.add(each) for each in kept]
        self._safe[subgroup].set()
        for each in kept:
            each.drop()

    def _copy_rest(self) -> None:
        """While the tiers are left to an update nothing can be written, but copied before it asks."""
        if self._copies:
            for kept in itertools.chain.from_iterable(map(self._kept.__getitem__, self._outline.order)):
                kept.before_change(threading.TIMEOUT_MAX)

    def _save(self, subgroup: int) -> RecordEntry:
        changed, (weights, *state) = self._written[subgroup]
        entry = {"changed": changed, "weights": weights, "chunks": state[0] if state else self._take_chunks(subgroup)}
        return self._outline.records[subgroup].model_copy(update=entry)

    def _take_chunks(self, subgroup: int) -> tuple[Chunk, ...]:
        """From the tiers: by copying, or as they are."""
        found = [(lying, self._find_linked(lying)) for lying in self._seal.chunks(subgroup)]
        copied = self._copy(subgroup, [lying for lying, linked in found if linked is None])
        chunks = [[linked] if linked is not None else next(copied) for _, linked in found]
        self._seal.release(subgroup, but=self._linked)
        return tuple(itertools.chain(*chunks))

    def _find_linked(self, lying: Lying) -> Chunk | None:
        """Where a chunk is in a file that is in the checkpoint already."""
        file = self._linked.get(lying.tier)
        if file is None or file.container.generation(lying.slot) != file.generation or lying.checksum is None:
            return None
        self._used[lying.tier][lying.slot % file.container.num_slots] = lying.nbytes
        offset = file.container.place(lying.slot)
        return Chunk(file=file.path.name, offset=offset, nbytes=lying.nbytes, checksum=f"{lying.checksum:016x}")

    def _copy(self, subgroup: int, chunks: Sequence[Lying]) -> Iterator[tuple[Chunk, ...]]:
        """From tiers into the shard: each chunk is read while the one before it is written."""
        reads = (self._read(subgroup, lying, number % 2) for number, lying in enumerate(chunks))
        coming = next(reads, None)
        try:
            while coming is not None:
                lying, view, moving = coming
                self._paces[lying.tier].took(moving.wait())
                coming = next(reads, None)
                yield self._add(view, lying.checksum)
        finally:
            if coming is not None:  # its file may be closed when this save has ended
                coming[-1].settle()

    def _read(self, subgroup: int, lying: Lying, place: int) -> tuple[Lying, memoryview, Moving]:
        """Begin to read a chunk, into one of two places."""
        if self._bounces[place].nbytes < lying.nbytes:
            self._bounces[place] = Buffer(lying.nbytes)
        view = self._bounces[place].view(lying.nbytes)
        self._paces[lying.tier].wait()
        moving = self._tiers[lying.tier].reads.move(lying.slot, view, f"subgroup {subgroup}", lying.checksum)
        return lying, view, moving

    def _add(self, view: memoryview, checksum: int | None) -> tuple[Chunk, ...]:
        if checksum is None:
            return self._writer.add(CopyOnWrite(lambda: view))
        return (self._writer.add_whole(view, checksum),)
