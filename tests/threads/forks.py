"""Children of a process one of whose threads is in the middle of a step, a capture or a trial."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from graphrt import (
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    InputSpec,
    current_context,
)
from graphrt.compile.locks import process_lock
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import get_platform
from graphrt.cpu.platform import CpuPlatform
from graphrt.errors import PoolBusyError, PoolError

RIGHT, NAMED, WRONG, BUSY, HUNG = "right", "named", "wrong", "busy", "hung"
CODES = {0: RIGHT, 3: NAMED, 4: WRONG, 5: BUSY, -signal.SIGALRM: HUNG}
LIMIT_S = 10


def inputs(rows: int) -> Tensor:
    """Other ones at each call. Not torch's random numbers: the lock of its generator, held by
    another thread while the process forks, stays locked in the child."""
    return torch.full((rows, 4), random.random())


class Gate:
    """Holds a thread inside of a forward until the process was forked."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.holds = False
        self.in_warm_ups = True

    def __call__(self) -> None:
        context = current_context()
        records = context is not None and context.mode is GraphMode.FULL
        if not (self.in_warm_ups or records):
            return
        if self.holds and threading.current_thread() is not threading.main_thread():
            self.inside.set()
            self.go_on.wait(30)


class Served:
    """A runner whose forward can be stopped in the middle."""

    def __init__(self, **arguments: object) -> None:
        self.gate = Gate()
        arguments.setdefault("options", GraphOptions())
        self.runner = GraphRunner(
            self.forward,
            mode="FULL",
            sizes=[2, 4],
            inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
            outputs=("tokens", 4),
            **{"platform": "cpu", **arguments},  # type: ignore[arg-type]
        )

    def forward(self, x: Tensor) -> Tensor:
        """x * 2 + 1, and a stop in between where the gate holds."""
        hidden = x * 2
        self.gate()
        return hidden + 1

    def is_right(self) -> bool:
        """Whether steps with and without a graph are."""
        for rows in (1, 2, 3, 4, 5):
            x = inputs(rows)
            if not torch.equal(self.runner(x=x).cpu(), x * 2 + 1):
                return False
        return True


def child_of(check: Callable[[], bool]) -> str:
    """What became of `check` in a child of this process."""
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        code = 1
        try:
            code = 0 if check() else 4
        except PoolBusyError:
            code = 5
        except PoolError:
            code = 3
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return CODES.get(code, f"ended with {code}")


def within(served: Served, call: Callable[[], object], check: Callable[[], bool]) -> str:
    """A child that is forked while another thread is in the forward of `call`."""
    served.gate.holds = True
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert served.gate.inside.wait(30)
    try:
        return child_of(check)
    finally:
        served.gate.holds = False
        served.gate.go_on.set()
        thread.join()
        assert not errors, errors
        assert served.is_right()


def in_an_eager_step() -> str:
    """Another thread runs a step that no graph serves."""
    served = Served()
    served.runner.capture()
    return within(served, lambda: served.runner(x=inputs(9)), served.is_right)


def in_a_capture() -> str:
    """Another thread captures."""
    served = Served()
    return within(served, served.runner.capture, served.is_right)


def in_a_lazy_capture() -> str:
    """Another thread's step captures its graph."""
    served = Served(options=GraphOptions(lazy=True))
    return within(served, lambda: served.runner(x=inputs(2)), served.is_right)


def in_a_trial() -> str:
    """Another thread verifies a step."""
    served = Served()
    served.runner.capture()
    return within(served, lambda: served.runner.verify(x=inputs(2)), served.is_right)


def in_a_warm_up_elsewhere() -> str:
    """Another thread warms up in a pool of its own."""
    return _elsewhere(in_warm_ups=True)


def in_a_capture_elsewhere() -> str:
    """The same in a capture, which holds the lock of the device."""
    return _elsewhere(in_warm_ups=False)


def _elsewhere(*, in_warm_ups: bool) -> str:
    served, other = Served(), Served()
    other.gate.in_warm_ups = in_warm_ups
    served.runner.capture()
    collects = gc.isenabled()

    def check() -> bool:
        served.runner.recapture()
        return served.is_right() and gc.isenabled() == collects

    return within(other, other.runner.capture, check)


class DeviceWrapper(GraphWrapper):
    """That of `Device`."""

    platform_name = "device"


class Device(CpuPlatform):
    """A platform that is not to be asked in a child, one of two devices."""

    name = "device"
    forked = False

    def get_static_graph_wrapper_cls(self) -> str:
        return f"{__name__}.DeviceWrapper"

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int | None:
        assert not self.forked, "a child asks the device"
        return 0


def of_a_device() -> list[str]:
    """Children of a process that has graphs of a device: a step, captures and a new pool."""
    return _children_of(Device())


def of_a_gpu() -> list[str]:
    """The same of a GPU."""
    return _children_of(get_platform("cuda"))


def _children_of(device: Platform) -> list[str]:
    served = Served(platform=device)
    served.runner.capture()

    def in_child(call: Callable[[], object]) -> Callable[[], bool]:
        def check() -> bool:
            if isinstance(device, Device):
                device.forked = True
            call()
            return False

        return check

    calls: list[Callable[[], object]] = [
        served.is_right,
        served.runner.recapture,
        lambda: served.runner.verify(x=inputs(2)),
        lambda: GraphPool(device),
    ]
    results = [child_of(in_child(call)) for call in calls]
    return [*results, RIGHT if served.is_right() else WRONG]


def in_the_compiler() -> str:
    """Another thread compiles, which one at a time does in a process."""
    lock, held, over = process_lock(), threading.Event(), threading.Event()

    def compiling() -> None:
        with lock:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=compiling)
    thread.start()
    assert held.wait(30)
    try:
        return child_of(lambda: lock.acquire(timeout=LIMIT_S / 2))
    finally:
        over.set()
        thread.join()


def closed_in_a_child() -> str:
    """A child that cannot use a pool may close it all the same."""
    served = Served()

    def check() -> bool:
        served.runner.close()
        served.runner.close()
        return True

    return within(served, served.runner.capture, check)


def in_the_middle(seconds: float = 2.0) -> dict[str, int]:
    """Children forked at any time while threads step, capture and release without a stop."""
    served, other = Served(), Served(options=GraphOptions(lazy=True))
    served.runner.capture()
    over, counts = threading.Event(), dict[str, int]()

    def step() -> None:
        while not over.is_set():
            served.runner(x=inputs(3))

    def change() -> None:
        while not over.is_set():
            other.runner(x=inputs(3))
            other.runner.release()

    threads = [threading.Thread(target=each) for each in (step, change)]
    for each in threads:
        each.start()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for each in (served, other):
            result = child_of(each.is_right)
            counts[result] = counts.get(result, 0) + 1
    over.set()
    for each in threads:
        each.join()
    return counts


SCENARIOS: dict[str, Callable[[], object]] = {
    each.__name__: each
    for each in (
        in_an_eager_step,
        in_a_capture,
        in_a_lazy_capture,
        in_a_trial,
        in_a_warm_up_elsewhere,
        in_a_capture_elsewhere,
        in_the_compiler,
        closed_in_a_child,
        of_a_device,
        of_a_gpu,
        in_the_middle,
    )
}

if __name__ == "__main__":
    print(SCENARIOS[sys.argv[1]]())
