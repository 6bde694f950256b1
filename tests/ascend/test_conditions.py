"""If-nodes (`torch.cond`) inside of captured forwards on a simulated NPU: see `conditions`."""

from __future__ import annotations

import pytest
from schedules import need_simulator, python

pytestmark = pytest.mark.npu


def done(*names: str, software_queues: bool, schedule: str = "eager") -> bool:
    """Whether these end well, one after the other in one process."""
    need_simulator()
    calls = "\n".join(f"conditions.{name}()" for name in names)
    environment = {"GRAPHRT_SIM_SOFTWARE_QUEUES": str(int(software_queues))}
    code = f"import conditions\n{calls}\nprint('done')"
    return python(code, schedule=schedule, environment=environment).splitlines()[-1] == "done"


def test_an_if_node_chooses_its_branch_at_each_replay():
    assert done("if_nodes_are_replayed", software_queues=True, schedule="random:1")


def test_conditions_on_a_device_without_if_nodes_run_eagerly_with_a_reason():
    names = "a_device_without_them_says_so", "torch_cond_by_itself_reads_its_predicate"
    assert done(*names, software_queues=False)
