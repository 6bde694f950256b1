"""Which call a thread is in, by its bytecode: on each Python, so without a device."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from graphrt.hosts.vllm_ascend import missing

# Its `get` blocks in C, as a copy to the host does.
QUEUE: SimpleQueue[Any] = SimpleQueue()
METHODS = dict.fromkeys(("cpu", "item", "tolist", "to", "clone"), QUEUE.get)
TENSOR, OTHER = SimpleNamespace(**METHODS), SimpleNamespace(**METHODS)


def local_variable() -> None:
    x = TENSOR
    x.cpu()


def variable_of_a_closure() -> None:
    x = TENSOR

    def read() -> None:
        x.item()

    read()


def to_the_host() -> None:
    TENSOR.to("cpu")


COPIES = [local_variable, variable_of_a_closure, to_the_host, lambda: TENSOR.tolist()]


def in_a_call_behind_a_copy() -> None:
    QUEUE.put(1)
    QUEUE.get(TENSOR.cpu())


OTHERS = [
    lambda: TENSOR.clone(),
    lambda: OTHER.item(),
    lambda: TENSOR.to("npu"),
    lambda: QUEUE.get(TENSOR is not None),
    in_a_call_behind_a_copy,
]


@pytest.mark.parametrize(
    ("call", "copies"),
    [*((each, True) for each in COPIES), *((each, False) for each in OTHERS)],
)
def test_a_copy_to_the_host_is_told_by_its_variable_and_method(
    call: Callable[[], object], copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing, "_is_on_npu", lambda value: value is TENSOR)
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    try:
        frame = sys._current_frames()[thread.ident or 0]
        assert missing._copies_to_host(frame) is copies
    finally:
        QUEUE.put(None)
        thread.join()


def test_a_frame_that_has_not_begun_copies_nothing() -> None:
    frame: Any = SimpleNamespace(f_code=to_the_host.__code__, f_lasti=-1)
    assert not missing._copies_to_host(frame)
