"""The records of this rank as tensors: what the codecs know, for each subgroup."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator

from mlpo_hpc.config import OffloadConfig
from mlpo_hpc.errors import UnsupportedError
from mlpo_hpc.state.codec import fp32
from mlpo_hpc.state.codec.split import (
    SplitForm,
    SplitRecord,
    checksums,
    plain_master,
    shorten,
    stamps,
    state_vectors,
)
from mlpo_hpc.telemetry.log import warn

Resize = Callable[[int, int], memoryview]
"""``(subgroup, nbytes) -> record`` gives a record another size."""


@dataclass(frozen=True)
class Part:
    """What a subgroup has of one parameter."""

    name: str
    numel: int


def wants_split(config: OffloadConfig, types: Collection[torch.dtype]) -> bool:
    """Whether codec ``split`` is to be used: it tells master weights from bf16 weights.

    Raises
    ------
    UnsupportedError
        If it was asked for and the weights have another type.
    """
    in_bf16 = set(types) == {torch.bfloat16}
    if config.state_format == "split" and not in_bf16:
        raise UnsupportedError(
            f"state_format 'split' needs a model in bf16, this one has {', '.join(sorted(map(str, types)))}: use 'auto'"
        )
    if config.state_format == "fp32" or config.tiers == []:  # what is not moved need not be short
        return False
    keeps = any(tier.keep for tier in config.tiers or ())  # a file that is kept should hold all of it
    return in_bf16 and (config.state_format == "split" or not keeps)


PART_ITEMS = 2**20
"""Items that are decoded, updated and encoded before the next: little memory besides the record, and what one pass
leaves in the processor's caches the next one finds there. A multiple of what any kernel takes at once, so that no item
is computed in another way than without parts."""


class Opened:
    """A record in use, as tensors, part by part or whole.

    Attributes
    ----------
    parts : list of slice
        Items to work on one after the other.
    record : memoryview
        Its bytes.
    weights : torch.Tensor
        The 16-bit weights, shape ``(numel,)``, in host memory if the codec looks at them. New ones are written here,
        before `encode` of their part.
    """

    def __init__(self, owner: Records, subgroup: int, record: memoryview, resize: Resize, whole: bool, new: bool):
        form = owner.form(subgroup)
        self._owner, self._subgroup, self._form = owner, subgroup, form
        self.record, self._resize = record, resize
        self._before_bytes = len(record)
        self._short: SplitRecord | None = None
        self.weights = owner.weights(subgroup)
        if form is not None and len(record) == form.nbytes:
            self._short = SplitRecord(form, record, self.weights, new)
        self.changed = [owner.name(subgroup, index) for index in self._short.changed] if self._short else []
        """Parameters whose 16-bit weights others changed."""
        self.altered = bool(self.changed)
        """Whether it is not what it was, without anything having been written to it."""
        if whole:
            self._expand()
        numel = owner.numels[subgroup]
        step = numel if whole else owner.part_items
        self.parts = [slice(begin, min(numel, begin + step)) for begin in range(0, numel, max(1, step))]

    def vectors(self, part: slice | None = None) -> list[torch.Tensor]:
        """Master weights and state vectors of a part, to be changed in place; the former until the next part."""
        part = part or slice(0, self._owner.numels[self._subgroup])
        if self._short is None:
            return [vector[part] for vector in self._owner.plain_vectors(self._subgroup, self.record)]
        master = self._owner.master[: part.stop - part.start]
        self._short.decode(part, master)
        return [master, *(vector[part] for vector in state_vectors(self._short.form, self.record))]

    def encode(self, part: slice) -> None:
        """Store the master weights of a part that `vectors` gave, when the 16-bit ones are what they will be."""
        if self._short is not None and not self._short.encode(part, self._owner.master[: part.stop - part.start]):
            self._expand()

    def done(self, part: slice) -> list[slice]:
        """Bytes of the record that do not change any more when this part and those before it are encoded."""
        nbytes, numel = fp32.ITEM_BYTES * part.stop, self._owner.numels[self._subgroup]
        stride_bytes = fp32.ITEM_BYTES * fp32.stride_items(numel)
        vectors = range(self._owner.num_state_vectors(self._subgroup))
        return [slice(number * stride_bytes, number * stride_bytes + nbytes) for number in vectors]

    def close(self, changed: bool = True) -> None:
        """Make it a record again; `changed`: whether anything was written to it or to `weights`."""
        if self._short is not None:
            if changed:
                self._short.close()
        elif self._form is not None and shorten(self._form, self.record, self.weights):
            self.record = self._resize(self._subgroup, self._form.nbytes)
        self._owner.note_stamps(self._subgroup, self.record)
        self.altered |= len(self.record) != self._before_bytes
        if changed:
            self._owner.give_weights(self._subgroup, self.weights)

    def _expand(self) -> None:
        if self._short is not None:
            short, self._short = self._short, None
            self.record = self._resize(self._subgroup, short.form.plain_bytes)
            short.expand(self.record)


class Records:
    """Master weights and state vectors in the bytes of a record.

    With codec ``split`` the master weights of one part at a time are decoded into memory that is lent; otherwise they
    are used where they lie.

    Parameters
    ----------
    numels : sequence of int
        Items of each subgroup.
    num_vectors : sequence of int
        Vectors of each subgroup, master weights and state.
    weights : callable
        The 16-bit weights of a subgroup, on any device.
    parts : sequence of sequence of Part
        The parameters of each subgroup; empty for codec ``fp32``.
    in_parts : bool
        Whether an update may be done part by part.
    """

    def __init__(
        self,
        numels: Sequence[int],
        num_vectors: Sequence[int],
        weights: Callable[[int], torch.Tensor],
        parts: Sequence[Sequence[Part]] = (),
        in_parts: bool = False,
    ) -> None:
        self.numels = list(numels)
        self.part_items = min(PART_ITEMS, max(numels)) if in_parts else max(numels)
        self.master = torch.empty(0)
        self._num_vectors = num_vectors
        forms = [
            SplitForm(numel, num - 1, tuple(part.numel for part in of_subgroup))
            for numel, num, of_subgroup in zip(numels, num_vectors, parts, strict=bool(parts))
        ]
        self._forms: list[SplitForm | None] = [form if form.pays else None for form in forms] or [None] * len(numels)
        self._in_parts = in_parts
        self._parts = parts
        self._weights = weights
        self._staged = torch.empty(0)
        self._stamps: dict[int, list[int]] = {}
        self._told: set[str] = set()
        self.before_change: Callable[[int], None] = lambda _: None
        """Called before anything of a subgroup may change, its record or its 16-bit weights."""

    @property
    def codec(self) -> str:
        """Of most of them: those of very small subgroups are ``fp32`` in any case."""
        return "split" if any(self._forms) else "fp32"

    @property
    def master_bytes(self) -> int:
        """Memory that must be lent."""
        return fp32.ITEM_BYTES * self.part_items if self._in_parts and any(self._forms) else 0

    def lend(self, memory: memoryview) -> None:
        """Memory for the master weights of one part."""
        if self.master_bytes:
            self.master = torch.frombuffer(memory, dtype=torch.float32)

    def form(self, subgroup: int) -> SplitForm | None:
        """How a subgroup's record is made up with codec ``split``."""
        return self._forms[subgroup]

    def nbytes(self, subgroup: int) -> int:
        """Bytes of a subgroup's record."""
        form = self._forms[subgroup]
        return form.nbytes if form is not None else self.most_bytes(subgroup)

    def most_bytes(self, subgroup: int) -> int:
        """Bytes of it at most: where it is stored as it is used."""
        return fp32.record_bytes(self.numels[subgroup], self._num_vectors[subgroup])

    def plain_vectors(self, subgroup: int, record: memoryview) -> list[torch.Tensor]:
        """Views of master weights and state vectors in a record of the largest size."""
        form = self._forms[subgroup]
        if form is None:
            return fp32.vectors(record, self.numels[subgroup], self._num_vectors[subgroup])
        return [plain_master(form, record), *state_vectors(form, record)]

    def open(self, subgroup: int, record: memoryview, resize: Resize, whole: bool = False, new: bool = False) -> Opened:
        """Look at a record; 16-bit weights that others changed become its master weights.

        Parameters
        ----------
        subgroup : int
            Whose.
        record : memoryview
            Its bytes.
        resize : callable
            Gives it another size.
        whole : bool
            Whether all of it is wanted at once, in place.
        new : bool
            Whether nothing was written to it yet: it has the weights, and state that is zero.
        """
        self.before_change(subgroup)
        opened = Opened(self, subgroup, record, resize, whole or not self._in_parts, new)
        for name in opened.changed:
            self._tell(name)
        return opened

    def num_state_vectors(self, subgroup: int) -> int:
        """Vectors at the beginning of a record that are stored as they are used."""
        return self._num_vectors[subgroup] - (self._forms[subgroup] is not None)

    def note_stamps(self, subgroup: int, record: memoryview) -> None:
        """Remember which 16-bit weights a record that is closed belongs to."""
        form = self._forms[subgroup]
        self._stamps[subgroup] = stamps(form, record) if form is not None and len(record) == form.nbytes else []

    def changes(self) -> Callable[[int, memoryview], tuple[int, ...]]:
        """What tells, for the records as they are now, which parameters of a subgroup have other 16-bit weights.

        To be called, from any thread, with a subgroup and the bytes of its weights.
        """
        noted = dict(self._stamps)

        def find(subgroup: int, weights: memoryview) -> tuple[int, ...]:
            form, before = self._forms[subgroup], noted.get(subgroup)
            if form is None or not before:
                return ()
            now = checksums(form, torch.frombuffer(weights, dtype=torch.int16))
            return tuple(index for index, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1])

        return find

    def name(self, subgroup: int, index: int) -> str:
        """Of a parameter."""
        return self._parts[subgroup][index].name

    def weights(self, subgroup: int) -> torch.Tensor:
        """The 16-bit weights, in host memory if the codec looks at them; then valid until the next call."""
        weights = self._weights(subgroup).detach()
        if weights.device.type == "cpu" or self._forms[subgroup] is None:
            return weights
        if not self._staged.numel():
            self._staged = get_accelerator().pin_memory(torch.empty(max(self.numels), dtype=weights.dtype))
        return self._staged[: weights.numel()].copy_(weights)

    def give_weights(self, subgroup: int, weights: torch.Tensor) -> None:
        """Make these the 16-bit weights, if they are not the very same memory."""
        own = self._weights(subgroup).detach()
        if own.data_ptr() != weights.data_ptr():
            own.copy_(weights)

    def _tell(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            warn(
                "the 16-bit weights of %s were changed from outside: they are its master weights now (stock DeepSpeed "
                "drops the change at the next step, and so does state_format 'fp32')",
                name,
            )
