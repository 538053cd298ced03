"""What the slots of one rank hold: how records are made up, and which parameters are in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecordForm:
    """How the record of a subgroup is made up: vectors of fp32, one after the other.

    Parameters
    ----------
    numel : int
        Items of each vector.
    stride : int
        Items from the beginning of one vector to the next.
    vectors : tuple of str
        Their names, master weights first: ``fp32``, ``exp_avg``, ``exp_avg_sq`` for Adam.
    """

    numel: int
    stride: int
    vectors: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one rank keeps.

    Parameters
    ----------
    name : str
        Of the parameter, as the model calls it.
    shape : tuple of int
        Of the whole parameter.
    first, numel : int
        Which of its items, counted row by row.
    subgroup, begin : int
        Where they are: in each vector of this subgroup's record, from this item on.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    numel: int
    subgroup: int
    begin: int


@dataclass(frozen=True)
class Contents:
    """What one rank keeps."""

    codec: str
    records: tuple[RecordForm, ...] = ()
    pieces: tuple[Piece, ...] = ()
