"""An engine like vllm-ascend that calls in another order, or with other lengths, than it should."""

from __future__ import annotations

import contextlib
import gc
import itertools

import protocol_engine as host
import pytest
import torch
from protocol_engine import Host, Key, Mode
from test_vllm_ascend import Runner

from graphrt.core.base.errors import InvalidUpdateError, MissingUpdateError
from graphrt.hosts.vllm_ascend.missing import refuse_waiting
from tests.core import interrupts

pytestmark = pytest.mark.npu


def made(**decoder) -> Runner:
    runner = Runner(**decoder)
    runner.capture()
    return runner


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("asks_each_step", [False, True])
def test_paged_attention_equals_eager(first, asks_each_step):
    runner = made(operate=host.paged_operator, asks_each_step=asks_each_step)
    assert runner.differs(12, first=first) == []


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda lens: [-1, *lens[1:]], "negative length"),
        (lambda lens: [host.MOST_KV + 1, *lens[1:]], "beyond its block table"),
        (lambda lens: lens[:-1], "leaves requests out"),
    ],
    ids=["negative", "too long", "too few"],
)
def test_lengths_that_would_end_the_launch_queue_are_refused_before_launch(wrong, says, first):
    runner = made(operate=host.paged_operator)
    lens = runner.fill(8)
    with pytest.raises(InvalidUpdateError, match=says):
        runner.replay(Key(8), wrong(lens), first=first)
    torch.npu.synchronize()
    assert runner.differs(6, first=first) == []


@pytest.mark.parametrize("first", [False, True])
def test_an_interrupt_anywhere_in_a_step_never_hangs_and_the_next_steps_equal_eager(
    first, monkeypatch
):
    files = interrupts._GRAPHRT, contextlib.__file__
    monkeypatch.setattr(interrupts, "_GRAPHRT", files)
    runner = made()
    tracebacks = []  # kept, as a debugger does: they must not hold a lock
    for at in itertools.count(0, 5):
        places = interrupts.Places(at)
        lens = runner.fill(8)
        try:
            places(lambda lens=lens: runner.replay(Key(8), lens, first=first))
        except KeyboardInterrupt as interrupt:
            tracebacks.append(interrupt)
        else:
            assert at > 100
            break
        # Between the call and its update the step waits.
        with contextlib.suppress(MissingUpdateError):
            refuse_waiting()
        torch.npu.synchronize()
        assert runner.differs(2, first=first) == [], places.where


def test_two_wrappers_sharing_params_each_update_their_own_graph():
    engine = Host()
    one, other = Runner(engine=engine), Runner(engine=engine, seed=5)
    other.params = engine._graph_params = one.params
    one.capture()
    other.capture()
    for _ in range(3):
        assert one.differs(3) == []
        assert other.differs(3) == []


def launched(runner: Runner) -> None:
    context = runner.context(Key(8))
    with runner.host.step(context):
        runner.wrapper(runner.x)


@pytest.mark.parametrize(
    "clear",
    [
        lambda wrapper: wrapper.clear_graphs(),
        lambda wrapper: wrapper.concrete_aclgraph_entries.pop(Key(4)),
        lambda wrapper: wrapper.concrete_aclgraph_entries.popitem(),
        lambda wrapper: setattr(wrapper, "concrete_aclgraph_entries", {}),
    ],
    ids=["clear", "pop", "popitem", "assign"],
)
def test_clearing_graphs_while_a_step_waits_for_its_update_raises(clear):
    runner = made()
    launched(runner)
    with pytest.raises(MissingUpdateError, match="got none"):
        clear(runner.wrapper)
    torch.npu.synchronize()
    assert set(runner.wrapper.concrete_aclgraph_entries) == {Key(4), Key(8)}
    assert runner.differs(4) == []
    clear(runner.wrapper)
    assert len(runner.wrapper._graphs.entries) < 2


def test_an_engine_can_be_deleted_while_a_step_waits_for_its_update():
    runner = made()
    launched(runner)
    del runner
    gc.collect()
    torch.npu.synchronize()
    assert made().differs(3) == []


def test_the_graph_entries_allow_removal_but_no_insertion():
    runner = made()
    entries = runner.wrapper.concrete_aclgraph_entries
    key, entry = entries.popitem()
    assert key == Key(4) and len(runner.wrapper._graphs.entries) == 1
    for put in (
        lambda: entries.update({key: entry}),
        lambda: entries.setdefault(key, entry),
        lambda: entries.__setitem__(key, entry),
    ):
        with pytest.raises(TypeError, match="captures alone"):
            put()
    assert entries.pop(key, None) is None
    with pytest.raises(KeyError):
        entries.pop(key)
    entries.popitem()
    with pytest.raises(KeyError):
        entries.popitem()


@pytest.mark.parametrize("updated_again", [False, True])
def test_an_update_ahead_of_launch_is_used_only_by_its_own_graph(updated_again):
    runner = made()
    context = runner.context(Key(4), Mode.FULL, runner.fill(4))
    lens = runner.fill(8)
    with runner.host.step(context):
        runner.update(context)
        other = runner.context(Key(8), Mode.FULL, lens)
        context.batch_descriptor, context.attn_metadata = Key(8), other.attn_metadata
        if updated_again:
            runner.update(context)
        out = runner.wrapper(runner.x)
        if not updated_again:
            runner.update(context)
    assert torch.equal(out.cpu(), runner.eager(Key(8), lens))
    runner.sizes = (4, 4, 4, 8)
    assert runner.differs(8) == []
