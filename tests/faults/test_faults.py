"""An error injected at any place leaves a usable runner; `python -m tests.faults` tries all."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable

import pytest
import torch

from graphrt import GraphRTError, Platform
from tests.faults.compiled import COMPILED
from tests.faults.harness import Harness
from tests.faults.inject import Fault, Faults
from tests.faults.places import Driver
from tests.faults.platforms import maker_of, scenarios_of
from tests.faults.scenarios import SCENARIOS, CaptureFull, TaskStep
from tests.faults.sharing import SHARING
from tests.faults.world import World

ON_CPU = {**SCENARIOS, **SHARING}


pytestmark = pytest.mark.usefixtures("frozen_heap")


def check(scenario: type[World], make: Callable[[], Platform], count: int | None) -> None:
    harness = Harness(scenario, make)
    faults = list(harness.faults()) if count is None else harness.sample(count)
    findings = [harness.inject(fault) for fault in faults]
    assert findings and not [str(each) for each in findings if each.wrong]


@pytest.mark.parametrize("name", ON_CPU)
def test_after_an_injected_fault_the_runner_serves_and_leaks_nothing(name):
    check(ON_CPU[name], maker_of("cpu"), 2)


@pytest.mark.parametrize("name", ON_CPU)
def test_an_interrupt_during_the_undo_of_a_fault_leaves_the_runner_usable(name):
    harness = Harness(ON_CPU[name], maker_of("cpu"))
    findings = [harness.inject(fault) for fault in harness.doubled(2)]
    assert findings and not [str(each) for each in findings if each.wrong]


def test_a_failed_state_copy_in_a_capture_leaves_state_unchanged():
    harness = Harness(ON_CPU["CaptureFull"], maker_of("cpu"))
    for at in {fault.at for fault in harness.faults() if fault.kind == "copy"}:
        finding = harness.inject(Fault("copy", at, "memory"))
        assert not finding.wrong, str(finding)


def test_an_interrupt_during_a_failed_restore_leaves_state_unchanged():
    harness = Harness(ON_CPU["CaptureNext"], maker_of("cpu"))
    copies = sorted({fault.at for fault in harness.faults() if fault.kind == "copy"})
    # The first restore, and the last: `make test-long` has every fault.
    for at in {copies[0], copies[-1]}:
        for second in (1, 2, 3):
            finding = harness.inject(Fault("copy", at, "memory", second=second))
            assert not finding.wrong, str(finding)


@pytest.mark.parametrize("name", COMPILED)
def test_after_a_fault_a_compiled_module_serves_and_leaks_nothing(name):
    check(COMPILED[name], maker_of("cpu"), 1)


@pytest.mark.long
@pytest.mark.parametrize("name", {**ON_CPU, **COMPILED})
def test_after_every_possible_fault_the_runner_serves_and_leaks_nothing(name):
    check({**ON_CPU, **COMPILED}[name], maker_of("cpu"), None)


@pytest.mark.npu
@pytest.mark.parametrize("name", ON_CPU)
def test_after_a_fault_on_an_npu_the_runner_serves_and_leaks_nothing(name, npu):
    check(ON_CPU[name], npu, 3)


@pytest.mark.npu
def test_every_fault_in_a_task_update_on_an_npu_leaves_no_signal_set(npu):
    check(TaskStep, npu, None)


@pytest.fixture
def npu() -> Callable[[], Platform]:
    return maker_of(os.environ.get("GRAPHRT_PLATFORM", "ascend"))


@pytest.mark.cuda
@pytest.mark.parametrize("name", {**SCENARIOS, **SHARING, **COMPILED})
def test_after_a_fault_on_a_gpu_the_runner_serves_and_leaks_nothing(name):
    check(scenarios_of("cuda")[name], maker_of("cuda"), 24)


@pytest.mark.cuda
@pytest.mark.parametrize("room_mib", [0, 2, 4, 8, 24, 40])
def test_a_capture_on_a_full_gpu_drops_graphs_or_raises(room_mib):
    world = CaptureFull(maker_of("cuda")())
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + (room_mib << 20)
    try:
        torch.cuda.set_per_process_memory_fraction(limit / total)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world.act()
    except (GraphRTError, torch.OutOfMemoryError):
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    world.check_idle()
    world.check_serves()
    world.again()
    world.check_serves(hits=True)
    world.close()


def test_the_counting_driver_passes_calls_on_to_the_real_driver():
    faults, text = Faults("cuda"), ctypes.create_string_buffer(b"seven c")
    driver = Driver(faults, ctypes.CDLL(None))
    # As the ring's launch is: a function of its own, with the types of its arguments.
    length = driver["strlen"]
    length.argtypes = (ctypes.c_void_p,)
    assert length.argtypes == (ctypes.c_void_p,) and driver.strlen.argtypes is None
    with faults.armed(Fault("driver", 1, "runtime")):
        assert [length(ctypes.addressof(text)) for _ in range(3)] == [7, 2, 7]
    assert faults.seen["driver"] == 3
    assert getattr(driver, "no such function", None) is None
