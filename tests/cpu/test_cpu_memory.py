"""Where the machine has too little memory, what fits serves and the rest is named."""

from __future__ import annotations

import textwrap

import pytest

from graphrt.errors import ResourceExhaustedError
from graphrt.platforms import get_platform
from tests import starts

resource = pytest.importorskip("resource", reason="memory limits need a POSIX system")

PROGRAM = """
import resource, warnings
import torch
from graphrt import Batch, GraphRunner, GraphOptions, InputSpec
from graphrt.errors import GraphsDroppedWarning, ResourceExhaustedError

def forward(x):
    # 64 MiB a row: 4 GiB for the largest size.
    return torch.ones(x.shape[0], 16, 1024, 1024)[:, 0, 0, :4] * x

(forward(torch.ones(1, 4)) @ torch.ones(4, 4)).sum()  # threads and libraries are there
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)
runner = GraphRunner(
    forward,
    mode="FULL",
    sizes=[1, 2, 64],
    inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
    outputs=("tokens", 4),
    options=GraphOptions(strict=%s),
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        runner.capture()
    except ResourceExhaustedError as error:
        print("refused", "1 of 3" in str(error))
told = [str(each.message) for each in caught if each.category is GraphsDroppedWarning]
print(len(told), len(runner.report().graphs), len(runner.report().dropped))
out = runner(x=torch.full((2, 4), 3.0))
print(out.tolist() == [[3.0] * 4] * 2, runner.last_dispatch.reason.name)
"""


@pytest.mark.parametrize(
    ("strict", "lines"),
    [(False, ["1 2 1", "True HIT"]), (True, ["refused True", "0 2 1", "True HIT"])],
)
def test_a_capture_size_that_does_not_fit_into_memory_is_dropped_by_name(strict, lines):
    done = starts.run("-c", textwrap.dedent(PROGRAM % strict))
    assert done.stdout.splitlines() == lines, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), ResourceExhaustedError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ResourceExhaustedError),
        (ResourceExhaustedError("full"), ResourceExhaustedError),
    ],
)
def test_out_of_memory_errors_are_recognised_on_the_cpu(error, kind):
    cpu = get_platform("cpu")
    assert type(cpu.explain(error)) is kind
    assert not isinstance(cpu.explain(RuntimeError("no memory of it")), ResourceExhaustedError)
