"""Which call a thread is in, by its bytecode: on each Python, so without a device."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from graphrt.hosts.vllm_ascend import missing

# Blocks in C, as a copy to the host does.
LOCK = threading.Lock()
TENSOR = SimpleNamespace(**dict.fromkeys(("cpu", "item", "tolist", "clone"), LOCK.acquire))
TENSOR.to = lambda device: None


def local_variable() -> None:
    x = TENSOR
    x.cpu()


def variable_of_a_closure() -> None:
    x = TENSOR

    def read() -> None:
        x.item()

    read()


COPIES = [local_variable, variable_of_a_closure, lambda: TENSOR.tolist()]


def another_method() -> None:
    TENSOR.clone()


def another_object() -> None:
    queue = SimpleNamespace(item=LOCK.acquire, of=TENSOR)
    queue.item()


def argument_of_a_call() -> None:
    LOCK.acquire(TENSOR.to("cpu") is None)


def in_a_call_behind_a_copy() -> None:
    LOCK.release()
    LOCK.acquire(TENSOR.cpu())


OTHERS = [another_method, another_object, argument_of_a_call, in_a_call_behind_a_copy]


@pytest.mark.parametrize(
    ("call", "copies"),
    [*((each, True) for each in COPIES), *((each, False) for each in OTHERS)],
)
def test_a_copy_to_the_host_is_told_by_its_variable_and_method(
    call: Callable[[], object], copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing, "_is_on_npu", lambda value: value is TENSOR)
    LOCK.acquire()
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    try:
        frame = sys._current_frames()[thread.ident or 0]
        assert missing._copies_to_host(frame) is copies
    finally:
        LOCK.release()
        thread.join()
        LOCK.acquire(blocking=False)
        LOCK.release()
