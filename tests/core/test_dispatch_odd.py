"""Unusual values of batches, descriptors and limits are served rightly or refused by name."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from graphrt import Batch, BatchDescriptor, GraphDispatcher, GraphMode, GraphOptions, Reason
from graphrt.core.base.errors import InvalidBatchError, InvalidModeError, InvalidOptionError

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def ladder(**options: Any) -> GraphDispatcher:
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", **options)
    for size in (1, 2, 4, 8):
        dispatcher.publish(PIECEWISE, BatchDescriptor(size))
        dispatcher.publish(FULL, BatchDescriptor(size, size, uniform=True, query_len=1))
    return dispatcher


@pytest.mark.parametrize("integer", [numpy.int64, numpy.uint8, torch.tensor, numpy.array])
@pytest.mark.parametrize("counts", [(3, 3, 1), (3, 2, None), (99, 3, None), (3, None, 7)])
def test_batch_counts_given_as_numpy_or_tensor_integers_dispatch_like_ints(integer, counts):
    odd = Batch(*(None if count is None else integer(count) for count in counts))
    dispatcher = ladder()
    for _ in range(2):
        dispatch = dispatcher.dispatch(odd)
        assert dispatch == dispatcher.dispatch(Batch(*counts))
        assert type(dispatch.descriptor.num_tokens) is int
        assert dispatcher.step(odd).slot == dispatch.slot
    assert BatchDescriptor(integer(4), integer(4)) == BatchDescriptor(4, 4)


NONE_SUCH = [
    (3.0,),
    (2.5,),
    (float("nan"),),
    ("3",),
    (None,),
    (True,),
    (9999999.0,),
    (3, "3", 1),
    (3, 2.5),
    (3, True),
    (5, 2, 2.5),
    (3, 3, 1.0),
    (3, 3, "1"),
    (torch.tensor(2.5),),
    (torch.tensor(True),),
    (torch.tensor([1, 2]),),
    (3, 3, 1, "a"),
    (3, 3, 1, 5),
    (3, 3, 1, (1.5,)),
    (3, 3, 1, (), "x"),
    (3, 3, 1, (), 1.5),
    (3, 3, 1, (), 0, [1]),
]


@pytest.mark.parametrize("values", NONE_SUCH, ids=str)
def test_a_batch_with_fields_of_wrong_type_is_refused(values):
    dispatcher = ladder()
    dispatcher.dispatch(Batch(1))
    for ask in (dispatcher.dispatch, dispatcher.step):
        with pytest.raises(InvalidBatchError):
            ask(Batch(*values))
    assert dispatcher.counts()[Reason.HIT] == 1


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize(
    "batch",
    [
        3,
        None,
        (3, 3, 1),
        (3, 3, 1, (), 0, None, frozenset({FULL})),
        torch.arange(7),
        torch.zeros(2, 4),
    ],
    ids=repr,
)
def test_dispatching_an_object_that_is_no_valid_batch_raises(batch, published):
    dispatcher = ladder()
    if not published:
        dispatcher.withdraw_all()
    dispatcher.dispatch(Batch(1))
    for ask in (dispatcher.dispatch, dispatcher.step, dispatcher.planned_for):
        with pytest.raises(InvalidBatchError):
            ask(batch)


def test_bounds_may_be_given_as_an_array_tensor_or_list():
    dispatcher = GraphDispatcher("FULL")
    dispatcher.publish(FULL, BatchDescriptor(4, bounds=numpy.array([64, 64])))
    assert dispatcher.dispatch(Batch(3, bounds=torch.tensor([3, 64]))).reason is Reason.HIT
    assert dispatcher.dispatch(Batch(3, bounds=[3, 65])).reason is Reason.NO_GRAPH


def test_a_tuple_equal_to_a_remembered_batch_is_refused():
    dispatcher = ladder()
    for _ in range(2):
        assert dispatcher.dispatch(Batch(9)).reason is Reason.TOO_LARGE
    with pytest.raises(InvalidBatchError):
        dispatcher.dispatch(tuple(Batch(9)))


@pytest.mark.parametrize("count", [0.0, -0.0, False])
def test_a_lora_count_of_wrong_type_is_refused_though_it_equals_zero(count):
    dispatcher = ladder()
    assert dispatcher.dispatch(Batch(3)).reason is Reason.HIT
    with pytest.raises(InvalidBatchError, match="num_active_loras"):
        dispatcher.dispatch(Batch(3, num_active_loras=count))
    assert type(Batch(3, num_active_loras=numpy.int64(0)).num_active_loras) is int


@pytest.mark.parametrize("change", [{"num_tokens": 9.0}, {"num_tokens": "3"}, {"query_len": 2.5}])
def test_batch_replace_checks_the_new_fields(change):
    with pytest.raises(InvalidBatchError):
        Batch(9)._replace(**change)
    assert type(Batch(9)._replace(num_tokens=numpy.int64(4)).num_tokens) is int


@pytest.mark.parametrize("tokens", [0, -3])
def test_an_empty_batch_is_refused_even_with_an_agreed_graph(tokens):
    dispatcher = ladder()
    for _ in range(2):
        assert dispatcher.dispatch(Batch(3), agreed=BatchDescriptor(4)).descriptor.num_tokens == 4
        with pytest.raises(InvalidBatchError, match="at least one token"):
            dispatcher.dispatch(Batch(tokens), agreed=BatchDescriptor(4))


@pytest.mark.parametrize(
    "exclude",
    [{FULL}, frozenset({FULL}), [FULL], (FULL,), {FULL: 1}, {"full"}, ["FULL", GraphMode.NONE]],
    ids=repr,
)
def test_exclude_accepts_any_collection_of_modes_or_mode_names(exclude):
    dispatcher = ladder()
    for _ in range(2):
        assert dispatcher.dispatch(Batch(3, 3, 1, exclude=exclude)).mode is PIECEWISE


@pytest.mark.parametrize(
    "exclude",
    [
        *("FULL", FULL, 5, {"FULL_AND_PIECEWISE"}, [GraphMode.FULL_DECODE_ONLY], {"half"}),
        iter([FULL]),
    ],
)
def test_an_exclude_that_is_no_collection_of_runtime_modes_raises(exclude):
    dispatcher = ladder()
    dispatcher.dispatch(Batch(3, exclude=frozenset({FULL})))
    with pytest.raises(InvalidModeError):
        dispatcher.dispatch(Batch(3, exclude=exclude))


@pytest.mark.parametrize("agreed", [8, "8", (8, 8), tuple(BatchDescriptor(8)), Batch(8), FULL])
def test_an_agreed_graph_that_is_no_descriptor_is_refused(agreed):
    dispatcher = ladder()
    for _ in range(2):
        dispatcher.dispatch(Batch(3), agreed=BatchDescriptor(8))
        for ask in (dispatcher.dispatch, dispatcher.peek, dispatcher.planned_for):
            with pytest.raises(InvalidBatchError, match="named by its descriptor"):
                ask(Batch(3), agreed=agreed)


@pytest.mark.parametrize("ratio", ["x", -1, 0.5, float("nan"), float("inf"), True])
def test_a_max_padding_below_one_or_of_wrong_type_is_refused(ratio):
    with pytest.raises(InvalidOptionError, match="max_padding"):
        GraphDispatcher("FULL", max_padding=ratio)
    with pytest.raises(InvalidOptionError, match="max_padding"):
        GraphOptions(max_padding=ratio)


def test_the_dispatcher_accepts_the_mode_of_a_graph_as_a_name():
    dispatcher = GraphDispatcher("FULL")
    slot = dispatcher.reserve("full", BatchDescriptor(4))
    assert dispatcher.publish("FULL", BatchDescriptor(4)).slot == slot
    assert dispatcher.dispatch(Batch(3)).mode is FULL
    dispatcher.withdraw("Full", BatchDescriptor(4))
    assert dispatcher.dispatch(Batch(3)).reason is Reason.NOT_CAPTURED


@pytest.mark.parametrize("name", ["reserve", "publish", "withdraw"])
@pytest.mark.parametrize("mode", [GraphMode.NONE, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "x", 5])
def test_the_dispatcher_refuses_graphs_of_a_mode_that_is_no_runtime_mode(name, mode):
    with pytest.raises(InvalidModeError):
        getattr(GraphDispatcher("FULL"), name)(mode, BatchDescriptor(4))


@pytest.mark.parametrize("name", ["reserve", "publish", "withdraw"])
@pytest.mark.parametrize("descriptor", [4, None, (4, 4), Batch(4)])
def test_the_dispatcher_refuses_graphs_named_by_no_descriptor(name, descriptor):
    with pytest.raises(InvalidBatchError, match="descriptor"):
        getattr(GraphDispatcher("FULL"), name)(FULL, descriptor)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_tokens": 4.0},
        {"num_tokens": "4"},
        {"num_tokens": None},
        {"num_tokens": True},
        {"num_tokens": 4, "num_reqs": 2.0},
        {"num_tokens": 4, "num_reqs": "x"},
        {"num_tokens": 4, "query_len": "x"},
        {"num_tokens": 4, "uniform": True, "query_len": 0},
        {"num_tokens": 4, "uniform": True, "query_len": -2},
        {"num_tokens": 4, "bounds": 8},
        {"num_tokens": 4, "bounds": "8"},
        {"num_tokens": 4, "bounds": ("x",)},
        {"num_tokens": 4, "bounds": (1.5,)},
        {"num_tokens": 4, "variant": [1]},
        {"num_tokens": 4, "num_active_loras": "x"},
        {"num_tokens": 4, "num_active_loras": 1.5},
        {"num_tokens": 4, "uniform": "yes"},
        {"num_tokens": 4, "has_lora": 2},
    ],
    ids=str,
)
def test_a_descriptor_with_fields_of_wrong_type_or_value_is_refused(arguments):
    with pytest.raises(InvalidBatchError):
        BatchDescriptor(**arguments)


def test_descriptors_from_lists_and_numpy_values_equal_plain_descriptors():
    plain = BatchDescriptor(4, 4, uniform=True, query_len=1, bounds=(8,))
    odd = BatchDescriptor(4, 4, uniform=numpy.bool_(True), query_len=1, bounds=[numpy.int64(8)])
    assert odd == plain and hash(odd) == hash(plain)
