"""`BatchDescriptor`: equal graphs have equal descriptors; contradictory fields are refused."""

from __future__ import annotations

import copy
import pickle

import pytest

from graphrt import Batch, BatchDescriptor
from graphrt.core.base.errors import InvalidBatchError


def test_a_descriptor_derives_its_query_length_and_lora_flag():
    assert BatchDescriptor(8, 4, uniform=True) == BatchDescriptor(8, 4, uniform=True, query_len=2)
    assert BatchDescriptor(8, num_active_loras=2).has_lora


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_tokens": 0},
        {"num_tokens": -3},
        {"num_tokens": 8, "num_reqs": 0},
        {"num_tokens": 8, "num_active_loras": -1},
        {"num_tokens": 8, "uniform": True},
        {"num_tokens": 8, "uniform": True, "num_reqs": 3},
        {"num_tokens": 8, "uniform": True, "query_len": 3},
    ],
)
def test_a_descriptor_with_contradictory_counts_is_refused(arguments):
    with pytest.raises(InvalidBatchError):
        BatchDescriptor(**arguments)


def test_descriptor_replace_checks_the_new_fields():
    descriptor = BatchDescriptor(8, 4, uniform=True)
    assert descriptor._replace(num_tokens=16, num_reqs=8) == BatchDescriptor(16, 8, True)
    with pytest.raises(InvalidBatchError):
        descriptor._replace(num_tokens=7)
    with pytest.raises(AttributeError):
        descriptor.num_tokens = 7


def test_a_descriptor_survives_pickling_and_copying():
    descriptor = BatchDescriptor(8, 4, True, False, 3, 2, (64, 8), ("draft", 1))
    for again in (pickle.loads(pickle.dumps(descriptor)), copy.deepcopy(descriptor)):
        assert again == descriptor and type(again) is BatchDescriptor
        assert hash(again) == hash(descriptor)


def test_a_descriptor_is_unequal_to_a_batch():
    assert BatchDescriptor(4) != Batch(4)
    assert repr(BatchDescriptor(4)) == "BatchDescriptor(4)" != repr(Batch(4))
