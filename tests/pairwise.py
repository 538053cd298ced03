"""Choose few combinations of factors so that every pair of values occurs together at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Choice = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], core: Sequence[str], seed: int = 0) -> list[Choice]:
    """All combinations of the core factors; each takes a random value of the others."""
    rng = random.Random(seed)
    others = [name for name in factors if name not in core]
    chosen = []
    for values in itertools.product(*(factors[name] for name in core)):
        combination = dict(zip(core, values, strict=True)) | {name: rng.choice(factors[name]) for name in others}
        chosen.append({name: combination[name] for name in factors})
    return chosen


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Choice]:
    """A small set that covers all pairs, the same for the same seed."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations([(n, range(len(factors[n]))) for n in names], 2)
        for x in xs
        for y in ys
    }
    chosen = []
    while missing:
        best = max((_candidate(factors, rng, missing) for _ in range(50)), key=lambda c: len(_pairs(c) & missing))
        missing -= _pairs(best)
        chosen.append({name: factors[name][index] for name, index in best.items()})
    return chosen


def _candidate(factors: Mapping[str, Sequence[Any]], rng: random.Random, missing: set[Any]) -> dict[str, int]:
    """A random combination that holds at least one missing pair."""
    candidate = {name: rng.randrange(len(values)) for name, values in factors.items()}
    for name, index in rng.choice(sorted(missing)):
        candidate[name] = index
    return candidate


def _pairs(choice: Mapping[str, int]) -> set[Any]:
    return set(itertools.combinations(choice.items(), 2))
