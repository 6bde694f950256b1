"""Which of torch_npu's streams graphrt keeps, on a `torch.npu` that has them and nothing else."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest

from graphrt.ascend.memory import GraphMemory
from graphrt.ascend.streams import OwnStreams


def npu_of(monkeypatch: Any, count: int) -> Any:
    monkeypatch.setenv("STREAMS_PER_DEVICE", str(count))
    turn = itertools.cycle(range(count))

    class Stream:
        device_index, device_type = 0, 20

        def __new__(cls, device: Any = None, priority: int = 0, **others: Any) -> Any:
            stream = super().__new__(cls)
            stream.stream_id = others["stream_id"] if others else next(turn)  # type: ignore[attr-defined]
            return stream

    class Npu:
        def empty_cache(self) -> None:
            pass

        graph_pool_handle = memory_snapshot = empty_cache

        def default_stream(self) -> Any:
            return Stream(stream_id=-1)

        def current_device(self) -> int:
            return 0

    Npu.Stream = Stream  # type: ignore[attr-defined]
    return Npu()


def test_streams_to_update_on_are_never_handed_out_again(monkeypatch):
    npu = npu_of(monkeypatch, 8)
    own = OwnStreams(npu)
    lent = [own.lend() for _ in range(3)]
    updating = {stream.stream_id for stream in own.for_updates()}
    assert updating == {0, 1} and own.for_updates() is own.for_updates()
    kept = updating | {stream.stream_id for stream in lent}
    assert len(kept) == 5
    assert {npu.Stream().stream_id for _ in range(40)} == {*range(8)} - kept


@pytest.mark.parametrize("frozen", [False, True])
def test_streams_that_a_host_holds_are_kept_last(frozen, monkeypatch):
    npu = npu_of(monkeypatch, 8)
    held = [npu.Stream() for _ in range(8)]
    del held[3:]  # the next ones that torch_npu hands out are held
    own = OwnStreams(npu)
    if frozen:
        gc.freeze()
    try:
        own.for_updates()
        assert bool(gc.get_freeze_count()) is frozen
    finally:
        gc.unfreeze()
    assert {stream.stream_id for stream in own.for_updates()} == {3, 4}
    lent = [own.lend() for _ in range(4)]
    assert {stream.stream_id for stream in lent} >= {5, 6, 7}


def test_at_most_half_of_torch_npus_streams_are_kept(monkeypatch):
    npu = npu_of(monkeypatch, 8)
    own = OwnStreams(npu)
    lent = [own.lend() for _ in range(9)]
    kept = {stream.stream_id for stream in (*lent, *own.for_updates())}
    assert len(kept) == 6
    assert {npu.Stream().stream_id for _ in range(40)} == {*range(8)} - kept
    # One that there is is made as it was asked for.
    assert npu.Stream(stream_id=2, device_index=0, device_type=20).stream_id == 2


def test_a_returned_stream_is_lent_before_a_new_stream_is_kept(monkeypatch):
    own = OwnStreams(npu_of(monkeypatch, 8))
    first = own.lend()
    number, loan = first.stream_id, own.loan_of(first)
    del first
    second = own.lend()
    assert loan is not None and second.stream_id != number
    del loan
    assert own.lend().stream_id == number


def test_a_stream_stays_lent_while_a_pool_may_have_graphs_that_were_captured_on_it(monkeypatch):
    npu = npu_of(monkeypatch, 8)
    own = OwnStreams(npu)
    memory, stream = GraphMemory(npu, own), own.lend()
    number = stream.stream_id
    memory.capturing_on(stream)
    del stream
    other = own.lend()
    assert other.stream_id != number
    memory.clear()
    assert own.lend().stream_id == number
