"""NPU streams run out during captures, at any number of free streams: see `exhaustion`."""

from __future__ import annotations

import pytest
from exhaustion import MODES
from schedules import need_simulator, python

pytestmark = pytest.mark.npu

SHALLOW = {"GRAPHRT_SIM_QUEUE_DEPTH": "64"}
"""Queues of which a full graph of 8 layers fills five, one after the other."""


def rows(
    call: str, *, streams: int, timeout_s: float = 300, shallow: bool = True
) -> list[list[str]]:
    """The rows that `call` gives, as texts, in a process with such a device."""
    need_simulator()
    code = f"import exhaustion\nfor row in exhaustion.{call}: print(row, flush=True)\nprint('done')"
    out = python(
        code, streams=streams, timeout_s=timeout_s, environment=SHALLOW if shallow else None
    )
    *lines, done = out.splitlines()
    assert done == "done"
    return [line.split(" | ") for line in lines if " | " in line]


def test_every_mode_serves_with_22_free_streams():
    table = rows(f"modes({MODES!r}, (22,))", streams=300)
    assert [(mode, int(free)) for mode, free, *_ in table] == [(mode, 22) for mode in MODES]


def test_every_mode_serves_when_few_streams_exist_at_process_start():
    two = MODES[0], MODES[-1]
    # Too few for the streams that torch_npu makes; enough.
    assert len(rows(f"cold({two!r})", streams=22)) == 2
    assert any(int(full) for _, _, full, *_ in rows(f"cold({two!r})", streams=48))


def test_captures_with_few_streams_keep_the_order_of_surrounding_work():
    need_simulator()
    code = "import exhaustion; print(exhaustion.overtaken(60)); print('done')"
    assert python(code, streams=200, schedule="random:1").splitlines()[-2:] == ["[]", "done"]


def test_forwards_that_may_run_out_of_streams_are_captured_on_a_safe_stream():
    need_simulator()
    out = python("import exhaustion; exhaustion.chosen(); print('done')", streams=400)
    assert out.splitlines()[-1] == "done"


@pytest.mark.long
@pytest.mark.parametrize("shallow", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_serves_with_1_to_200_free_streams(mode, shallow):
    table = rows(f"rows({mode!r}, range(1, 201))", streams=300, timeout_s=1800, shallow=shallow)
    assert [int(free) for _, free, *_ in table] == list(range(1, 201))


@pytest.mark.long
@pytest.mark.parametrize("streams", [*range(4, 50), *range(50, 201, 10)])
def test_every_mode_serves_with_any_number_of_device_streams(streams):
    assert len(rows("cold()", streams=streams)) == len(MODES)
