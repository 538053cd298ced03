"""Codec ``split``: every bit pattern comes back, by encoding and decoding, whatever the 16-bit weights are."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpo_hpc.engine import records as records_module
from mlpo_hpc.engine.records import Part, Records
from mlpo_hpc.state.codec.split import Split, SplitForm, plain_master, state_vectors

TIE_DOWN = 0x3F808000  # exactly between two bf16 values, the lower of which is even


def from_bits(values):
    return torch.from_numpy(np.asarray(values, np.uint32).view(np.int32).copy()).view(torch.float32)


def bits(tensor):
    return tensor.view(torch.int32).numpy().view(np.uint32)


class Alone:
    """The records of one subgroup, and what a pipeline would hold."""

    def __init__(self, weights, pieces=None, num_vectors=3):
        self.weights = weights
        pieces = pieces or [weights.numel()]
        parts = [Part(f"p{i}", numel) for i, numel in enumerate(pieces)]
        self.records = Records([weights.numel()], [num_vectors], [parts], lambda _: self.weights)
        assert self.records.codec == "split"
        memory = memoryview(bytearray(self.records.master_bytes))
        self.records.lend(memory)
        self.buffer = memoryview(bytearray(self.records.most_bytes(0)))
        self.record = self.buffer[: self.records.nbytes(0)]

    def resize(self, _subgroup, nbytes):
        self.record = self.buffer[:nbytes]
        return self.record

    def store(self, master):
        vectors = self.records.vectors(0, self.record)
        vectors[0].copy_(master)
        self.records.encode(0, self.record, self.resize)
        vectors[0].fill_(float("nan"))

    def load(self):
        """The master weights, and whose 16-bit weights are said to have been changed."""
        said = []
        with patch.object(records_module, "warn", lambda text, *values: said.append(text % values)):
            vectors = self.records.decode(0, self.record)
        return vectors[0].clone(), said


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), numel=st.integers(4000, 200_000), spread=st.sampled_from([1, 2**8, 2**16, 2**32])
)
def test_random_bit_patterns_come_back(seed, numel, spread):
    generator = np.random.default_rng(seed)
    first = generator.integers(0, 2**32)
    master = from_bits((first + generator.integers(0, spread, numel)) % 2**32)
    alone = Alone(master.to(torch.bfloat16))
    alone.store(master)
    back, changed = alone.load()
    assert np.array_equal(bits(back), bits(master))
    assert changed == []


def test_every_bit_pattern_comes_back(request):
    """Runs of neighbours; with ``--all`` all 2^32, against the weights that torch rounds them to."""
    count = 2**20
    step = count if request.config.getoption("--all") else 97 * count
    for begin in range(0, 2**32, step):
        master = from_bits(np.arange(begin, begin + count, dtype=np.uint32))
        alone = Alone(master.to(torch.bfloat16))
        alone.store(master)
        back, changed = alone.load()
        assert np.array_equal(bits(back), bits(master)), f"from {begin:#x} on"
        assert changed == []


def test_every_sixteen_bit_pattern_becomes_its_own_fp32():
    """torch shifts, NaNs with their payload too: that is what the codec relies on."""
    patterns = np.arange(2**16, dtype=np.uint16)
    weights = torch.from_numpy(patterns.view(np.int16).copy()).view(torch.bfloat16)
    assert np.array_equal(bits(weights.to(torch.float32)), patterns.astype(np.uint32) << 16)
    assert np.array_equal(bits(torch.empty(2**16).copy_(weights)), patterns.astype(np.uint32) << 16)


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        (0x7FC00000, None),  # torch rounds NaNs to one of its own, which is not the same everywhere
        (0x7F800001, True),
        (0xFFFFFFFF, None),
        (TIE_DOWN, True),
        (TIE_DOWN + 0x10000, False),  # a tie that is rounded up
        (0x7F7FFFFF, False),  # rounds to infinity
        (0x80000000, False),
    ],
)
def test_records_full_of_what_is_hard(pattern, plain):
    numel = 5000
    alone = Alone(from_bits([pattern] * numel).to(torch.bfloat16))
    alone.store(from_bits([pattern] * numel))
    if plain is not None:
        assert (len(alone.record) == alone.records.most_bytes(0)) == plain
    back, _ = alone.load()
    assert np.array_equal(bits(back), np.full(numel, pattern, np.uint32))
    rest = alone.records.vectors(0, alone.record)[1:]
    for vector in rest:
        vector.copy_(torch.arange(numel))
    alone.store(torch.ones(numel))
    alone.weights = torch.ones(numel, dtype=torch.bfloat16)
    alone.store(torch.ones(numel))
    assert len(alone.record) == alone.records.nbytes(0), "and short again as soon as that is possible"
    assert all(torch.equal(v, torch.arange(numel).float()) for v in alone.records.vectors(0, alone.record)[1:])


def test_some_exceptions_fit_into_a_record():
    numel = 100_000
    master = torch.randn(numel)
    where = torch.randperm(numel)[:100]
    master.view(torch.int32)[where] = TIE_DOWN
    alone = Alone(master.to(torch.bfloat16))
    alone.store(master)
    assert len(alone.record) == alone.records.nbytes(0)
    back, _ = alone.load()
    assert torch.equal(back, master)


def test_a_record_has_ten_bytes_a_parameter():
    form = SplitForm(10**6, 2, (10**6,))
    assert 10.0 < form.nbytes / form.numel < 10.03
    assert form.plain_bytes / form.numel >= 12


def test_parameters_that_others_changed_are_found_and_become_the_master_weights():
    master = torch.randn(9000)
    alone = Alone(master.to(torch.bfloat16), pieces=[3000, 2000, 4000])
    alone.store(master)
    alone.weights = alone.weights.clone()
    alone.weights[3000:5000] = 0.0  # pruned: with the old low halves this would be NaNs
    back, changed = alone.load()
    assert len(changed) == 1
    assert "16-bit weights of p1 were changed" in changed[0]
    assert torch.equal(back[:3000], master[:3000])
    assert torch.equal(back[5000:], master[5000:])
    assert not back[3000:5000].any()
    assert torch.equal(alone.load()[0], back), "until it is encoded again"
    assert alone.load()[1] == [], "said once"
    alone.store(back)
    alone.records._told.clear()
    assert alone.load()[1] == []


def test_master_weights_that_have_nothing_to_do_with_the_weights_come_back():
    """As `safe_set_full_fp32_param` leaves them, until the next step."""
    alone = Alone(torch.randn(5000).to(torch.bfloat16))
    master = torch.randn(5000)
    alone.store(master)
    assert torch.equal(alone.load()[0], master)
    again = Alone(alone.weights)
    again.store(torch.randn(5000))
    vectors = again.records.decode(0, again.record)
    plain = again.records.make_plain(0, again.record, again.resize)
    assert torch.equal(plain_master(SplitForm(5000, 2, (5000,)), plain), vectors[0])


def test_making_plain_and_encoding_again_changes_nothing():
    master = torch.randn(5000)
    alone = Alone(master.to(torch.bfloat16))
    for vector in alone.records.vectors(0, alone.record)[1:]:
        vector.normal_()
    alone.store(master)
    before = bytes(alone.record)
    alone.load()
    vectors = alone.records.decode(0, alone.record)
    plain = alone.records.make_plain(0, alone.record, alone.resize)
    found = alone.records.plain_vectors(0, plain)
    assert torch.equal(found[0], master)
    assert all(torch.equal(a, b) for a, b in zip(found[1:], vectors[1:], strict=True))
    alone.records.encode(0, plain, alone.resize)
    assert bytes(alone.record) == before


def test_small_subgroups_stay_as_they_are():
    records = Records([10, 50_000], [3, 3], [[Part("a", 10)], [Part("b", 50_000)]], lambda _: torch.empty(0))
    assert records.nbytes(0) == records.most_bytes(0)
    assert records.nbytes(1) < records.most_bytes(1)
    assert Records([10], [3], [[Part("a", 10)]], lambda _: torch.empty(0)).codec == "fp32"


def test_blocks_do_not_show():
    form = SplitForm(200_001, 2, (200_001,))
    master = torch.randn(form.numel)
    weights = master.to(torch.bfloat16)
    record = memoryview(bytearray(form.nbytes))
    split, back = Split(), torch.empty(form.numel)
    assert split.encode(form, record, weights, master)
    assert split.decode(form, record, weights, back) == []
    assert torch.equal(back, master)
    assert len(state_vectors(form, record)) == 2


def test_what_is_put_off_is_encoded_before_its_memory_is_needed():
    """The last record of a step stays decoded; it is found so, or settled first."""
    torch.manual_seed(1)
    masters = [torch.randn(5000) for _ in range(2)]
    weights = [master.to(torch.bfloat16) for master in masters]
    records = Records([5000, 5000], [3, 3], [[Part("a", 5000)], [Part("b", 5000)]], lambda s: weights[s])
    records.lend(memoryview(bytearray(records.master_bytes)))
    memory = [memoryview(bytearray(records.nbytes(0))) for _ in masters]

    def resize(_subgroup, _nbytes):
        raise AssertionError("it fits")

    for subgroup, master in enumerate(masters):
        records.vectors(subgroup, memory[subgroup])[0].copy_(master)
        records.encode_later(subgroup, memory[subgroup], resize)
    records.settle(0)  # nothing to do any more: it was settled when 1 needed the memory
    assert not any(bytes(memory[1])), "not yet"
    assert torch.equal(records.decode(1, memory[1])[0], masters[1]), "found as it was left"
    assert torch.equal(records.decode(0, memory[0])[0], masters[0])
    assert torch.equal(records.decode(1, memory[1])[0], masters[1]), "settled by the line before"
    records.encode_later(1, memory[1], resize)
    weights[1] = torch.zeros(5000, dtype=torch.bfloat16)
    assert not records.decode(1, memory[1])[0].any(), "a change from outside counts here too"
    records.encode_later(1, memory[1], resize)
    records.settle(1)
    assert not Records.decode(records, 1, memory[1])[0].any()
