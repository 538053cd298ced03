"""The records of this rank as tensors: what the codecs know, for each subgroup."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator

from mlpo_hpc.config import OffloadConfig
from mlpo_hpc.errors import UnsupportedError
from mlpo_hpc.state.codec import fp32
from mlpo_hpc.state.codec.split import Split, SplitForm, checksums, plain_master, state_vectors, take_over
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


@dataclass
class _Open:
    """A record whose master weights were not encoded yet: they are where they were decoded to."""

    subgroup: int
    record: memoryview
    resize: Resize
    checksums: list[int]


class Records:
    """Master weights and state vectors in the bytes of a record.

    With codec ``split`` the master weights are decoded into memory that is lent for one subgroup at a time, and encoded
    when they have changed; otherwise they are used where they lie. The last ones of a step may stay decoded: with
    alternating order they are the first of the next one.

    Parameters
    ----------
    numels : sequence of int
        Items of each subgroup.
    num_vectors : sequence of int
        Vectors of each subgroup, master weights and state.
    parts : sequence of sequence of Part
        The parameters of each subgroup; empty for codec ``fp32``.
    weights : callable
        The 16-bit weights of a subgroup, on any device.
    """

    def __init__(
        self,
        numels: Sequence[int],
        num_vectors: Sequence[int],
        parts: Sequence[Sequence[Part]] = (),
        weights: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.numels = list(numels)
        self._num_vectors = num_vectors
        forms = [
            SplitForm(numel, num - 1, tuple(part.numel for part in of_subgroup))
            for numel, num, of_subgroup in zip(numels, num_vectors, parts, strict=bool(parts))
        ]
        self._forms: list[SplitForm | None] = [form if form.pays else None for form in forms] or [None] * len(numels)
        self._parts = parts
        self._weights = weights
        self._staged = torch.empty(0)
        self._told: set[str] = set()
        self._split = Split() if any(self._forms) else None
        self._master = torch.empty(0)
        self._open: _Open | None = None

    @property
    def codec(self) -> str:
        """Of most of them: those of very small subgroups are ``fp32`` in any case."""
        return "split" if any(self._forms) else "fp32"

    @property
    def master_bytes(self) -> int:
        """Memory that must be lent."""
        numels = [form.numel for form in self._forms if form is not None]
        return fp32.ITEM_BYTES * max(numels, default=0)

    def lend(self, memory: memoryview) -> None:
        """Memory for the master weights of one subgroup."""
        if self.master_bytes:
            self._master = torch.frombuffer(memory, dtype=torch.float32)

    def nbytes(self, subgroup: int) -> int:
        """Bytes of a subgroup's record."""
        form = self._forms[subgroup]
        return form.nbytes if form is not None else self.most_bytes(subgroup)

    def most_bytes(self, subgroup: int) -> int:
        """Bytes of it at most: where it is stored as it is used."""
        return fp32.record_bytes(self.numels[subgroup], self._num_vectors[subgroup])

    def state_bytes(self, subgroup: int) -> int:
        """How many of a record's first bytes are state vectors: they are done with when the optimizer is."""
        form = self._forms[subgroup]
        return 0 if form is None else form.master_offset

    def vectors(self, subgroup: int, record: memoryview) -> list[torch.Tensor]:
        """Master weights and state vectors, to be written to; the master weights may be undefined before."""
        form = self._forms[subgroup]
        if form is None:
            return self.plain_vectors(subgroup, record)
        if self._open is not None and self._open.subgroup != subgroup:
            self.settle(self._open.subgroup)
        return [self._master[: form.numel], *state_vectors(form, record)]

    def plain_vectors(self, subgroup: int, record: memoryview) -> list[torch.Tensor]:
        """Views of master weights and state vectors in a record of the largest size."""
        form = self._forms[subgroup]
        if form is None:
            return fp32.vectors(record, self.numels[subgroup], self._num_vectors[subgroup])
        return [plain_master(form, record), *state_vectors(form, record)]

    def decode(self, subgroup: int, record: memoryview) -> list[torch.Tensor]:
        """Master weights and state vectors; 16-bit weights that others changed become the master weights."""
        form, vectors = self._forms[subgroup], self.vectors(subgroup, record)
        if form is None:
            return vectors
        changed: list[int] = []
        if self._open is not None:
            changed = take_over(form, self._open.checksums, self._host_weights(subgroup), vectors[0])
        elif len(record) == form.nbytes:
            assert self._split is not None
            changed = self._split.decode(form, record, self._host_weights(subgroup), vectors[0])
        else:
            vectors[0].copy_(plain_master(form, record))
        for index in changed:
            self._tell(self._parts[subgroup][index].name)
        return vectors

    def _host_weights(self, subgroup: int) -> torch.Tensor:
        """The 16-bit weights in host memory; valid until the next call."""
        assert self._weights is not None
        weights = self._weights(subgroup).detach()
        if weights.device.type == "cpu":
            return weights
        if not self._staged.numel():
            self._staged = get_accelerator().pin_memory(torch.empty(max(self.numels), dtype=weights.dtype))
        return self._staged[: weights.numel()].copy_(weights)

    def _tell(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            warn(
                "the 16-bit weights of %s were changed from outside: they are its master weights now (stock DeepSpeed "
                "drops the change at the next step, and so does state_format 'fp32')",
                name,
            )

    def encode_later(self, subgroup: int, record: memoryview, resize: Resize) -> None:
        """As `encode`, but only when `settle` is called, or another record needs the memory of the master weights."""
        form = self._forms[subgroup]
        if form is not None:
            self._open = _Open(subgroup, record, resize, checksums(form, self._host_weights(subgroup)))

    def settle(self, subgroup: int) -> None:
        """Encode a record now if it was put off."""
        if self._open is not None and self._open.subgroup == subgroup:
            left = self._open
            self.decode(subgroup, left.record)
            self.encode(subgroup, left.record, left.resize)

    def encode(self, subgroup: int, record: memoryview, resize: Resize) -> None:
        """Make a record of what `vectors` or `decode` gave.

        Parameters
        ----------
        subgroup : int
            Whose.
        record : memoryview
            Its present bytes.
        resize : callable
            Gives it another size, which its new bytes may need.
        """
        form = self._forms[subgroup]
        if form is None:
            return
        self._open = None
        assert self._split is not None
        weights, master = self._host_weights(subgroup), self._master[: form.numel]
        fits = self._split.encode(form, record[: form.nbytes], weights, master)
        wanted = form.nbytes if fits else form.plain_bytes
        if len(record) != wanted:
            record = resize(subgroup, wanted)
        if not fits:
            plain_master(form, record).copy_(master)

    def make_plain(self, subgroup: int, record: memoryview, resize: Resize) -> memoryview:
        """A decoded record in its largest size; `encode` makes it what it was."""
        form = self._forms[subgroup]
        if form is None or len(record) == form.plain_bytes:
            return record
        record = resize(subgroup, form.plain_bytes)
        plain_master(form, record).copy_(self._master[: form.numel])
        return record
