"""A stand-in for CANN under the real `torch_npu`: `npu:0` is a simulated device on the CPU.

graphrt finds it as the platform `ascend-sim`, through the entry point of this distribution.

Streams, events, capture, task groups, limits and error codes are those of the device; times mean
nothing. It is taken by name only, with `GRAPHRT_PLATFORM=ascend-sim` or `platform="ascend-sim"`,
and needs torch_npu and g++, which builds it at first use. Importing torch next to torch_npu
needs TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment, as on every machine without CANN.

These variables of the environment, read when it starts, select what it does:

    GRAPHRT_SIM_SCHEDULE     eager (stays on a stream as long as it can go on), lazy (works only
                             while the host waits), random:SEED, lazy-random:SEED, slow:STREAM
                             (the stream of that id goes on only when no other can), or single
                             (one queue: tasks run in the order in which they were submitted)
    GRAPHRT_SIM_STREAMS      streams of the device (1984)
    GRAPHRT_SIM_QUEUE_DEPTH  entries of a stream's queue (2048)
    GRAPHRT_SIM_MEMORY_MB    device memory (4096)
    GRAPHRT_SIM_EVENTS       events of the device (65536)
    GRAPHRT_SIM_CANN         the CANN it says it is: 8.5.0, 8.3.RC1, or 8.1.RC1, which has no
                             aclrtValueWait, so that a signal must be reset (8.5.0)
    GRAPHRT_SIM_UPDATE_FIRST 1: a device on which a graph that has begun runs alone, so that it must
                             have every signal before (0)
    GRAPHRT_SIM_SOFTWARE_QUEUES  1: a captured graph holds no stream of the device, and takes its
                             queues, of 1024, while it runs (0)
    GRAPHRT_SIM_ALLOCATING_UPDATES  1: an update may allocate its workspace, which the graph does
                             not keep (0: an error)
    GRAPHRT_SIM_FAIL         FUNCTION:N=CODE,...: the Nth call of each function fails; see fail_call
    GRAPHRT_SIM_HANG_MS      idle time after which a wait is given up with 507046 (3000)
    GRAPHRT_SIM_SOC          the chip it says it is (Ascend910B3)
    GRAPHRT_SIM_LOG          1: captures and errors on stderr

Processes that are started from one that runs on it run on it too.
"""

from graphrt_ascend_sim.loading import (
    available_streams,
    calls,
    fail_call,
    fail_nothing,
    set_schedule,
    start,
    started,
    stream_id,
    synchronizations,
    why_not,
)
from graphrt_ascend_sim.platform import SimulatedACLGraphWrapper, SimulatedAscendPlatform

__all__ = [
    "SimulatedACLGraphWrapper",
    "SimulatedAscendPlatform",
    "available_streams",
    "calls",
    "fail_call",
    "fail_nothing",
    "set_schedule",
    "start",
    "started",
    "stream_id",
    "synchronizations",
    "why_not",
]
