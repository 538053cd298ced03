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
from mlpo_hpc.state.codec import split as split_module
from mlpo_hpc.state.codec.split import SplitForm, SplitRecord

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
        self.records = Records([weights.numel()], [num_vectors], lambda _: self.weights, [parts], in_parts=True)
        assert self.records.codec == "split"
        memory = memoryview(bytearray(self.records.master_bytes))
        self.records.lend(memory)
        self.buffer = memoryview(bytearray(self.records.most_bytes(0)))
        self.record = self.buffer[: self.records.nbytes(0)]
        self.store(weights.float(), new=True)

    def resize(self, _subgroup, nbytes):
        self.record = self.buffer[:nbytes]
        return self.record

    def open(self, **how):
        return self.records.open(0, self.record, self.resize, **how)

    def store(self, master, weights=None, state=None, **how):
        """Set master weights, 16-bit weights and state, part by part."""
        opened = self.open(**how)
        for part in opened.parts:
            kept, *rest = opened.vectors(part)
            kept.copy_(master[part])
            for vector, values in zip(rest, state or [], strict=bool(state)):
                vector.copy_(values[part])
            if weights is not None:
                opened.weights[part].copy_(weights[part])
            opened.encode(part)
            if len(opened.parts) > 1:
                self.records.master.fill_(float("nan"))
        opened.close()

    def load(self):
        """The master weights, and whose 16-bit weights are said to have been changed."""
        return self.look()[0], self.said

    def look(self, whole=False):
        self.said = []
        with patch.object(records_module, "warn", lambda text, *values: self.said.append(text % values)):
            opened = self.open(whole=whole)
        parts = [[vector.clone() for vector in opened.vectors(part)] for part in opened.parts]
        opened.close(changed=False)
        return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


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
    state = torch.arange(numel).float()
    alone.store(torch.ones(numel), state=[state, state])
    alone.store(torch.ones(numel), weights=torch.ones(numel))
    assert len(alone.record) == alone.records.nbytes(0), "and short again as soon as that is possible"
    back, *rest = alone.look()
    assert torch.equal(back, torch.ones(numel))
    assert all(torch.equal(vector, state) for vector in rest)


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


def test_looking_at_all_of_a_record_changes_nothing():
    master, state = torch.randn(5000), [torch.randn(5000), torch.randn(5000)]
    alone = Alone(master.to(torch.bfloat16))
    alone.store(master, state=state)
    before = bytes(alone.record)
    opened = alone.open(whole=True)
    assert len(opened.record) == alone.records.most_bytes(0)
    found = alone.records.plain_vectors(0, opened.record)
    assert all(torch.equal(a, b) for a, b in zip(found, [master, *state], strict=True))
    opened.close(changed=False)
    assert bytes(alone.record) == before
    assert not opened.altered


def test_looking_at_a_record_whose_weights_were_changed_alters_it():
    """Its chunks go together: some of the old and some of the new would be neither."""
    master = torch.randn(5000)
    alone = Alone(master.to(torch.bfloat16))
    alone.store(master)
    alone.weights[:100] = 1.0
    opened = alone.open(whole=True)
    opened.close(changed=False)
    assert opened.altered
    assert alone.open().changed == []


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(3000, 12_000),
    bad=st.lists(st.tuples(st.integers(0, 12_000), st.integers(1, 3000)), max_size=3),
    changed=st.sets(st.integers(0, 2)),
    whole=st.booleans(),
)
def test_updates_part_by_part_are_updates(seed, numel, bad, changed, whole):
    """Whatever is an exception before or after, wherever it begins to be too much, whatever others changed."""
    torch.manual_seed(seed)
    pieces = [numel // 3, numel // 7, numel - numel // 3 - numel // 7]
    with patch.object(records_module, "PART_ITEMS", 1024), patch.object(split_module, "BLOCK_ITEMS", 256):
        alone = Alone(torch.randn(numel).to(torch.bfloat16), pieces)
        alone.store(alone.weights.float())
        wanted = alone.weights.float()
        for turn in range(3):
            master, state = torch.randn(numel), [torch.randn(numel), torch.randn(numel)]
            for begin, count in bad[turn:]:
                master[begin : begin + count] = from_bits([TIE_DOWN])
            alone.store(master, weights=master, state=state, whole=whole and turn == 1)
            wanted = master.clone()
            begins = np.cumsum([0, *pieces])
            for index in changed if turn == 1 and len(alone.record) == alone.records.nbytes(0) else ():
                alone.weights[begins[index] : begins[index + 1]] += 1
                wanted[begins[index] : begins[index + 1]] = alone.weights[begins[index] : begins[index + 1]].float()
            found = alone.look(whole=whole)
            assert all(torch.equal(a, b) for a, b in zip(found, [wanted, *state], strict=True))
        assert (len(alone.record) == alone.records.nbytes(0)) == (exceptions(master) <= 64 + numel // 1024)


def exceptions(master):
    """Items whose low half does not tell all."""
    difference = bits(master).view(np.int32) - bits(master.to(torch.bfloat16).float()).view(np.int32)
    return int(((difference < -(2**15)) | (difference >= 2**15)).sum())


def test_small_subgroups_stay_as_they_are():
    records = Records([10, 50_000], [3, 3], lambda _: torch.empty(0), [[Part("a", 10)], [Part("b", 50_000)]])
    assert records.nbytes(0) == records.most_bytes(0)
    assert records.nbytes(1) < records.most_bytes(1)
    assert Records([10], [3], lambda _: torch.empty(0), [[Part("a", 10)]]).codec == "fp32"


def test_blocks_do_not_show():
    form = SplitForm(600_001, 2, (600_001,))
    master = torch.randn(form.numel)
    weights = master.to(torch.bfloat16)
    record, back, all_of_it = memoryview(bytearray(form.nbytes)), torch.empty(form.numel), slice(0, form.numel)
    new = SplitRecord(form, record, weights, new=True)
    assert new.encode(all_of_it, master)
    new.close()
    again = SplitRecord(form, record, weights)
    again.decode(all_of_it, back)
    assert again.changed == []
    assert torch.equal(back, master)
