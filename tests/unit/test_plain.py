"""Plain values and tensors through a checkpoint: what comes back is what was given; what cannot is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlpo_hpc.checkpoint.plain import decode, encode
from mlpo_hpc.errors import ConfigError, CorruptState

FILE = Path("one/manifest.json")

keys_st = st.one_of(st.text(), st.integers(), st.booleans(), st.none())
values_st = st.recursive(
    st.one_of(keys_st, st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(keys_st, st.lists(keys_st).map(tuple)), inner),
    ),
)


@given(value=values_st)
def test_plain_values_come_back(value):
    found = decode(json.loads(json.dumps(encode(value, [], "x"))), [], FILE)
    assert found == value
    assert repr(found) == repr(value), "types too"


def test_tensors_and_numpy_s_numbers_come_back():
    tensors = []
    given_ = {"a": torch.arange(3), ("deep",)[0]: [{"b": torch.ones(2)}], "n": np.float64(0.1), "i": np.int32(7)}
    coded = json.loads(json.dumps(encode(given_, tensors, "x")))
    found = decode(coded, tensors, FILE)
    assert torch.equal(found["a"], given_["a"])
    assert torch.equal(found["deep"][0]["b"], torch.ones(2))
    assert (found["n"], found["i"]) == (0.1, 7)


def test_a_tensor_that_is_there_twice_becomes_two():
    tensors, value = [], torch.ones(2)  # safetensors refuses tensors that share memory
    encode({"last": value, "best": [value, value[:1]]}, tensors, "x")
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 3


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), b"x", print, np.zeros(2), object()])
def test_what_is_not_plain_is_refused_by_its_key(value):
    with pytest.raises(ConfigError, match=r"client_state\['a'\]\[1\]\['b'\]"):
        encode({"a": [0, {"b": value}]}, [], "client_state")


def test_a_tensor_as_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"client_state\['a'\] has a tensor as a key"):
        encode({"a": {torch.ones(1): 1}}, [], "client_state")


@pytest.mark.parametrize(
    "value",
    [
        *({"other": 1}, {"tensor": 1}, {"tensor": -1}, {"tuple": 1}, {}, {"dict": 1, "tuple": []}),
        *({"dict": [1]}, {"dict": ["ab"]}, {"dict": [[1]]}, {"dict": [[1, 2, 3]]}, {"dict": [None]}),
        *({"dict": [[[], 1]]}, {"dict": [[{"dict": []}, 1]]}, {"dict": [[{"tuple": [[]]}, 1]]}),
        *({"dict": [[{"tensor": 0}, 1]]}, {"dict": [["a", {"dict": [1]}]]}, [{"tuple": [{"dict": [2]}]}]),
    ],
)
def test_what_nobody_wrote_is_an_error_that_names_the_file(value):
    with pytest.raises(CorruptState, match=r"a value that nobody wrote.*one/manifest\.json"):
        decode(value, [torch.ones(1)], FILE)
