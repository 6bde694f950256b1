"""A thread that torch has not worked in yet has no context; the driver's door gives it one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.cuda.driver import api, fetch

NO_CONTEXT = api.INVALID_CONTEXT
PRIMARY = 7


class ContextDriver:
    """A driver that works only in threads with a context."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self.calls: list[str] = []

    def cuCtxGetCurrent(self, context: Any) -> int:
        self.calls.append("cuCtxGetCurrent")
        context._obj.value = getattr(self.threads, "context", None)
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.threads.context = context.value
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 10
        context._obj.value = PRIMARY
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return self._works("cuGraphDestroy")

    def launch(self, *arguments: Any) -> int:
        return self._works("launch")

    def _works(self, call: str) -> int:
        self.calls.append(call)
        return 0 if getattr(self.threads, "context", None) else NO_CONTEXT


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ContextDriver:
    fake = ContextDriver()
    monkeypatch.setattr(api, "_library", lambda: fake)
    monkeypatch.setattr(api, "_threads", threading.local())
    monkeypatch.setattr(api, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(fetch, "raw_stream_of", lambda device: 0)
    return fake


def in_new_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


def fetch_of(driver: ContextDriver) -> Callable[[], None]:
    ring = fetch.FetchRing.__new__(fetch.FetchRing)
    ring.slots, ring.payload, ring.stride = 2, 256, 512
    ring.memory, ring._slab = torch.zeros(2048, dtype=torch.uint8), torch.zeros(512)
    ring._counter = torch.zeros(256, dtype=torch.uint8)
    ring._device, ring._function, ring._launch = 0, 1, driver.launch  # type: ignore[assignment]
    return ring.prepare(16, 1)


def test_a_driver_call_in_a_new_thread_gets_a_context(driver):
    def work() -> None:
        api.need().cuGraphDestroy(ctypes.c_void_p(1))
        api.check("cuGraphDestroy", api.need().cuGraphDestroy(ctypes.c_void_p(1)))
        assert driver.threads.context == PRIMARY

    in_new_thread(work)
    in_new_thread(work)
    # Asked once a thread.
    assert driver.calls.count("cuCtxGetCurrent") == 2


def test_a_thread_keeps_the_driver_context_already_set(driver):
    def work() -> None:
        driver.threads.context = 99
        api.need()
        assert driver.threads.context == 99

    in_new_thread(work)


def test_a_fetch_as_the_first_call_of_a_thread_gets_a_context(driver):
    fetched = fetch_of(driver)
    in_new_thread(fetched)
    assert driver.calls[-1] == "launch" and driver.calls.count("launch") == 2


def test_a_fetch_restores_a_lost_driver_context(driver):
    fetched = fetch_of(driver)

    def work() -> None:
        fetched()
        driver.threads.context = None
        fetched()
        before = len(driver.calls)
        fetched()
        # Nothing is asked where it works.
        assert driver.calls[before:] == ["launch"]

    in_new_thread(work)


def test_a_failed_fetch_launch_raises_a_driver_error_with_its_code(driver, monkeypatch):
    monkeypatch.setattr(driver, "launch", lambda *arguments: 700)
    fetched = fetch_of(driver)
    with pytest.raises(api.DriverError, match="CUresult 700"):
        fetched()
