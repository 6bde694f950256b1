"""Host arguments of tasks are padded to the graph's size; wrong values are refused."""

from __future__ import annotations

import pytest
import torch

from graphrt import (
    UNCHANGED,
    Batch,
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    HostArg,
    UpdatableTask,
)
from graphrt.core.base.errors import InvalidOptionError, InvalidUpdateError, MissingUpdateError
from graphrt.core.replay.entry import TaskTable
from graphrt.core.replay.tasks import WORST_CASE, CapturedTask

TOKENS, REQS = 8, 4


@pytest.mark.parametrize(
    ("arg", "value", "expected"),
    [
        (HostArg("reqs", "zero"), [5, 6], [5, 6, 0, 0]),
        (HostArg("reqs", "repeat"), [5, 6], [5, 6, 6, 6]),
        (HostArg("reqs", "cumulative"), [2, 4], [2, 4, 4, 8]),
        (HostArg("reqs", "cumulative"), [2, 4, 6, 8], [2, 4, 6, 8]),
        (HostArg("reqs+1", "cumulative"), [2, 4, 5, 6], [2, 4, 5, 6, 8]),
        (HostArg("reqs+1", "zero"), [5, 6], [5, 6, 0, 0, 0]),
        (HostArg("reqs", "cumulative"), [8], [8, 8, 8, 8]),
        (HostArg("tokens", "zero"), [1], [1] + [0] * 7),
        (HostArg(None), "BSND", "BSND"),
    ],
)
def test_host_argument_values_are_padded_to_the_graphs_size(arg, value, expected):
    assert arg.fitted("lengths", value, TOKENS, REQS) == expected


@pytest.mark.parametrize(
    ("arg", "value"),
    [
        (HostArg("reqs"), [1] * 5),
        (HostArg("reqs"), []),
        (HostArg("reqs", "cumulative"), [4, 2]),
        (HostArg("reqs", "cumulative"), [4, 9]),
        (HostArg("reqs", "cumulative"), [-1, 3]),
        (HostArg("reqs", "cumulative"), []),
        (HostArg("reqs", "cumulative"), [1, 2, 3, 4]),
        (HostArg("reqs+1"), [1] * 6),
    ],
)
def test_host_argument_values_that_do_not_fit_the_graph_raise(arg, value):
    with pytest.raises(InvalidUpdateError, match="lengths"):
        arg.fitted("lengths", value, TOKENS, REQS)


@pytest.mark.parametrize(
    ("query_len", "tokens", "value", "expected"),
    [
        (1, 256, [1], list(range(1, 257))),
        (2, 8, [2], [2, 4, 6, 8]),
        (2, 8, [2, 4, 6, 8], [2, 4, 6, 8]),
        (2, 8, [1, 3], [1, 3, 5, 7, 8]),
        (3, 12, [3, 6, 7], [3, 6, 7, 10, 12]),
    ],
)
def test_padding_tokens_of_a_uniform_graph_are_spread_over_its_padding_requests(
    query_len, tokens, value, expected
):
    arg = HostArg("reqs" if len(expected) == tokens // query_len else "reqs+1", "cumulative")
    lengths = arg.fitted("lengths", value, tokens, tokens // query_len, query_len=query_len)
    assert lengths == expected


def test_padding_requests_of_a_uniform_graph_have_its_query_length():
    arg = HostArg("reqs", "query_len")
    assert arg.fitted("lengths", [2, 2], 8, 4, query_len=2) == [2, 2, 2, 2]
    assert arg.fitted("lengths", [2, 1], 8, 4) == [2, 1, 0, 0]
    # All requests are live: the spare one has the tokens that are left.
    spare = HostArg("reqs+1", "query_len")
    assert spare.fitted("lengths", [2] * 4, 8, 4, query_len=2) == [2, 2, 2, 2, 0]
    assert spare.fitted("lengths", [2, 1], 8, 4, query_len=2) == [2, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 1, 1], "6 tokens up to request 3"),
        ([0, 2, 4], "at most 2 tokens for each request"),
        ([2, 4, 6], "at most 2 tokens for each request"),
        ([3, 3, 3], "at most 2 tokens for each request"),
        ([2, 2, 2, 1], "at least 8 tokens up to request 4"),
        ([2, 2], "leaves out live reqs"),
    ],
)
def test_query_lengths_that_are_not_the_batchs_are_refused(value, text):
    """Running sums among them: an operator would read other tokens for a request."""
    arg, live = HostArg("reqs", "query_len"), Batch(6, 3, 2)
    with pytest.raises(InvalidUpdateError, match=text):
        arg.fitted("lengths", value, 8, 4, query_len=2, live=live)
    for right in ([2, 2, 2], [2, 2, 2, 2]):
        assert arg.fitted("lengths", right, 8, 4, query_len=2, live=live) == [2] * 4


def test_query_lengths_of_a_mixed_batch_add_up_to_its_live_tokens():
    arg, live = HostArg("reqs", "query_len", least=0), Batch(6, 3)
    assert arg.fitted("lengths", [1, 2, 3], 8, 4, live=live) == [1, 2, 3, 0]
    # Tokens of padding need no request: no sum says where they end.
    assert arg.fitted("lengths", [1, 2, 3], 8, 3, live=live) == [1, 2, 3]
    for wrong in ([1, 2, 2], [1, 3, 6], [7, -1, 0]):
        with pytest.raises(InvalidUpdateError, match=r"add up|bounds"):
            arg.fitted("lengths", wrong, 8, 4, live=live)


QUERIES = {"keys": HostArg("reqs"), "queries": HostArg("reqs", "query_len", optional=True)}


@pytest.mark.parametrize(
    ("descriptor", "live", "expected"),
    [
        (BatchDescriptor(8, 4, True, query_len=2), Batch(6, 3, 2), [2, 2, 2, 2]),
        (BatchDescriptor(8, 4, True, query_len=2), None, [2, 2, 2, 2]),
        (BatchDescriptor(8, 4), Batch(6, 3, 2), [2, 2, 2, 0]),
    ],
)
def test_query_lengths_left_out_of_an_update_are_that_of_the_graph_or_the_batch(
    descriptor, live, expected
):
    task = UpdatableTask("attention", print, QUERIES)
    context = ForwardContext(GraphMode.FULL, descriptor, live=live)
    filled = task.fitted({"keys": [5, 6, 7]}, context)
    assert filled == {"keys": [5, 6, 7, 0], "queries": expected}
    # So that a graph which was captured with them, or without, takes both.
    assert task.fitted({"keys": [5, 6, 7], "queries": expected}, context) == filled


def test_query_lengths_left_out_of_a_mixed_batch_are_refused():
    task = UpdatableTask("attention", print, QUERIES)
    context = ForwardContext(GraphMode.FULL, BatchDescriptor(8, 4), live=Batch(6, 3))
    with pytest.raises(InvalidUpdateError, match=r"left out[\s\S]*queries[\s\S]*query_len"):
        task.fitted({"keys": [5, 6, 7]}, context)


@pytest.mark.parametrize("value", [[1, 4], [3], [2, 3], [1], [2, 4, 6, 7]])
def test_cumulative_lengths_beyond_a_uniform_graphs_query_length_are_refused(value):
    """Four of two tokens: what does not add up would be given to a request of the padding."""
    arg = HostArg("reqs", "cumulative")
    with pytest.raises(InvalidUpdateError, match="add up"):
        arg.fitted("lengths", value, 8, 4, query_len=2)


def test_padding_tokens_without_a_request_are_refused_with_the_way_to_have_one():
    arg, live = HostArg("reqs", "cumulative"), Batch(5, 3)
    with pytest.raises(InvalidUpdateError, match=r"padding tokens[\s\S]*spare_request=True"):
        arg.fitted("lengths", [1, 3, 5], 8, 3, live=live)
    assert HostArg("reqs+1", "cumulative").fitted("lengths", [1, 3, 5], 8, 3, live=live)[-1] == 8
    # A sum that is wrong is told as such.
    with pytest.raises(InvalidUpdateError, match="add up to the batch"):
        arg.fitted("lengths", [1, 3, 4], 8, 3, live=live)


def test_a_host_argument_with_least_above_most_is_refused():
    with pytest.raises(InvalidOptionError, match=r"least=5, most=1[\s\S]*least=1, most=5"):
        HostArg(least=5, most=1)
    assert HostArg(least=5, most=5).most == 5


LIVE = Batch(5, 3)


@pytest.mark.parametrize(
    ("arg", "value", "text"),
    [
        (HostArg("reqs", least=0), [3, -1, 3], "out of its bounds"),
        (HostArg("reqs", least=0, most=16), [3, 17, 3], "each from 0 to 16"),
        (HostArg("reqs", most=16), [3, 17, 3], "bounds"),
        (HostArg("reqs"), [3, 3], "leaves out live reqs"),
        (HostArg("reqs", "repeat"), [3], "leaves out live reqs"),
        (HostArg("reqs+1"), [3, 3], "leaves out live reqs"),
        (HostArg("tokens"), [3] * 4, "leaves out live tokens"),
        (HostArg("reqs", "cumulative"), [2, 5], "leaves out live reqs"),
        (HostArg("reqs", "cumulative"), [1, 2, 4], "add up to the batch"),
        (HostArg("reqs", "cumulative"), [1, 2, 6, 8], "add up to the batch"),
        (HostArg("reqs"), [1.0, 2.0, 3.0], "whole numbers"),
        (HostArg("reqs"), [None, 1, 2], "whole numbers"),
        (HostArg("reqs"), [True, False, True], "whole numbers"),
        (HostArg("reqs"), None, "whole numbers"),
        (HostArg("reqs"), 3, "whole numbers"),
        (HostArg("reqs"), "abc", "whole numbers"),
        (HostArg("reqs"), torch.tensor([1.0, 2.0, 3.0]), "whole numbers"),
        (HostArg("reqs"), torch.empty(3, dtype=torch.int64, device="meta"), "on the host"),
    ],
)
def test_host_argument_values_that_contradict_the_batch_raise(arg, value, text):
    with pytest.raises(InvalidUpdateError, match=text):
        arg.fitted("lengths", value, TOKENS, REQS, live=LIVE)


@pytest.mark.parametrize(
    ("arg", "value", "expected"),
    [
        (HostArg("reqs", least=0, most=16), [16, 0, 3], [16, 0, 3, 0]),
        (HostArg("reqs", "cumulative"), [1, 2, 5], [1, 2, 5, 8]),
        # A host may pad by itself.
        (HostArg("reqs", "cumulative"), [1, 2, 5, 8], [1, 2, 5, 8]),
        (HostArg("tokens"), [3] * 5, [3] * 5 + [0] * 3),
    ],
)
def test_host_argument_values_that_match_the_batch_are_accepted(arg, value, expected):
    assert arg.fitted("lengths", value, TOKENS, REQS, live=LIVE) == expected


def test_cumulative_lengths_must_end_at_the_number_of_tokens():
    arg = HostArg("reqs", "cumulative")
    assert arg.fitted("lengths", [2, 8], TOKENS, None) == [2, 8]
    with pytest.raises(InvalidUpdateError, match="no request is left"):
        arg.fitted("lengths", [2, 4], TOKENS, None)


def resolve(updates, *, tasks=3, all_known=True):
    spec = UpdatableTask(
        "attention", print, {"lengths": HostArg("reqs"), "splits": HostArg(None, optional=True)}
    )
    captured = [
        CapturedTask(spec, f"layer.{place}", None, (), {}, {"lengths": [0, 0]})
        for place in range(tasks)
    ]
    context = ForwardContext(GraphMode.FULL, BatchDescriptor(2, 2), updates=updates)
    return TaskTable(captured).values(context, all_known=all_known)


def test_tasks_of_a_group_share_the_same_fitted_values():
    values = resolve({"attention": {"lengths": [1]}})
    assert values == [{"lengths": [1, 0]}] * 3
    assert values[0] is values[1] is values[2]
    own = resolve({"attention": {"lengths": [1]}, "layer.1": {"lengths": [2]}})
    assert own == [{"lengths": [1, 0]}, {"lengths": [2, 0]}, {"lengths": [1, 0]}]
    assert own[0] is own[2]


def test_an_optional_host_argument_may_be_left_out():
    spec = UpdatableTask(
        "attention", print, {"lengths": HostArg("reqs"), "splits": HostArg(None, optional=True)}
    )
    for own in ({"lengths": [1]}, {"lengths": [1], "splits": 2}):
        assert spec.values_for("layer.0", {"attention": own}) == own
    for own in ({}, {"splits": 2}, {"lengths": [1], "more": 2}):
        with pytest.raises(InvalidUpdateError, match="wrong keys"):
            spec.values_for("layer.0", {"attention": own})


def test_worst_case_as_updates_raises_with_its_name():
    with pytest.raises(MissingUpdateError, match="got: WORST_CASE"):
        resolve(WORST_CASE)
    assert repr(UNCHANGED) == "UNCHANGED"


def test_updates_equal_to_the_captured_values_resolve_to_none():
    assert resolve({"attention": {"lengths": (0,)}}) is None
    assert resolve(UNCHANGED) is None
    assert resolve({f"layer.{place}": {"lengths": [0]} for place in range(3)}) is None


@pytest.mark.parametrize(
    ("was", "now", "changes"),
    [
        (0.0, -0.0, True),
        (1, 1.0, True),
        (1, True, True),
        ([0.0], [-0.0], True),
        (2.5, float("2.5"), False),
        (1000, int("1000"), False),
        ([1, 2.0], [1, 2.0], False),
    ],
)
def test_an_equal_scalar_of_another_type_or_sign_counts_as_a_change(was, now, changes):
    spec = UpdatableTask("scale", print, {"by": HostArg(None)})
    tasks = [CapturedTask(spec, f"layer.{place}", None, (), {}, {"by": was}) for place in range(2)]
    for updates in ({"scale": {"by": now}}, {f"layer.{place}": {"by": now} for place in range(2)}):
        context = ForwardContext(GraphMode.FULL, BatchDescriptor(2, 2), updates=updates)
        values = TaskTable(tasks).values(context, all_known=True)
        assert repr(values) == repr([{"by": now}] * 2 if changes else None)


@pytest.mark.parametrize(
    ("updates", "error", "text"),
    [
        (None, MissingUpdateError, "UNCHANGED"),
        ([], MissingUpdateError, "UNCHANGED"),
        ({}, MissingUpdateError, "layer.0"),
        ({"layer.0": {"lengths": [1]}}, MissingUpdateError, "layer.1"),
        ({"attention": {"lengths": [1]}, "mlp": {}}, InvalidUpdateError, "mlp"),
        ({"attention": {}}, InvalidUpdateError, "lengths"),
        ({"attention": {"lengths": [1], "lens": [1]}}, InvalidUpdateError, "lens"),
        ({"attention": {"lengths": [1], "splits": 2}}, InvalidUpdateError, "splits"),
        ({"attention": {"lengths": [1, 2, 3]}}, InvalidUpdateError, "3"),
    ],
)
def test_missing_unknown_or_malformed_updates_raise(updates, error, text):
    with pytest.raises(error, match=text):
        resolve(updates)


def test_a_piece_ignores_updates_of_tasks_in_other_pieces():
    updates = {"attention": {"lengths": [1]}, "mlp": {}}
    assert resolve(updates, all_known=False) == [{"lengths": [1, 0]}] * 3


def test_updates_for_tasks_of_two_groups_keep_the_task_order():
    specs = [UpdatableTask(group, print, {"n": HostArg(None)}) for group in ("a", "b")]
    captured = [
        CapturedTask(specs[place % 2], f"layer.{place}", None, (), {}, {"n": 0})
        for place in range(4)
    ]
    table = TaskTable(captured)

    def resolved(updates):
        context = ForwardContext(GraphMode.FULL, BatchDescriptor(2, 2), updates=updates)
        by_task = table.values(context, all_known=True)
        return None if by_task is None else [values["n"] for values in by_task]

    assert resolved({"a": {"n": 1}, "b": {"n": 2}}) == [1, 2, 1, 2]
    assert resolved({"a": {"n": 0}, "b": {"n": 2}, "layer.3": {"n": 4}}) == [0, 2, 0, 4]
    assert resolved({"a": {"n": 0}, "b": {"n": 0}}) is None
    captured[2].values = {"n": 5}
    assert resolved({"a": {"n": 0}, "b": {"n": 0}}) == [0, 0, 0, 0]
    assert resolved({"a": {"n": 0}, "b": {"n": 0}, "layer.2": {"n": 5}}) is None
    with pytest.raises(MissingUpdateError, match=r"layer\.1"):
        resolved({"a": {"n": 1}})


def test_two_tasks_of_the_same_name_are_padded_by_their_own_declarations():
    specs = [
        UpdatableTask("attention", print, {"n": HostArg("reqs", pad)}) for pad in ("zero", "repeat")
    ]
    captured = [CapturedTask(spec, "attention", None, (), {}, {"n": [0, 0]}) for spec in specs]
    updates = {"attention": {"n": [3]}}
    context = ForwardContext(GraphMode.FULL, BatchDescriptor(2, 2), updates=updates)
    values = TaskTable(captured).values(context, all_known=True)
    assert values == [{"n": [3, 0]}, {"n": [3, 3]}]
