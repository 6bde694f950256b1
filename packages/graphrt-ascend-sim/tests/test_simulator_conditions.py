"""If-nodes, which torch_npu captures of `torch.cond` and CANN runs where queues are software."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.npu
if os.environ.get("GRAPHRT_PLATFORM") != "ascend-sim":
    reason = "needs graphrt-ascend-sim and GRAPHRT_PLATFORM=ascend-sim (make test-ascend)"
    pytest.skip(reason, allow_module_level=True)

import graphrt_ascend_sim as simulator  # noqa: E402

simulator.start()

from test_simulator import run  # noqa: E402


def done(*names: str, **settings: object) -> bool:
    """Whether these end well, one after the other in one process."""
    calls = "\n".join(f"c.{name}()" for name in names)
    end = "print('done', flush=True)\nos._exit(0)"
    return "done" in run(f"import os, conditional_graphs as c\n{calls}\n{end}", **settings)


@pytest.mark.parametrize("schedule", ["eager", "random:1"])
def test_a_device_value_chooses_the_branch_at_each_replay(schedule: str) -> None:
    names = ("values_decide_at_each_replay", "nested", "side_stream_and_order")
    assert done(*names, software_queues=1, schedule=schedule)


def test_invalid_conditions_give_the_errors_of_the_runtime() -> None:
    names = ("switch_and_defaults", "what_the_runtime_refuses", "an_error_in_a_branch")
    assert done(*names, software_queues=1)


def test_a_device_with_hardware_queues_supports_no_conditions() -> None:
    assert done("without_software_queues")
