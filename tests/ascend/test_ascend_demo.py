"""The demo on an NPU: decode attention in FULL graphs, its lengths brought by task update."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from schedules import is_simulated

from graphrt.demo import run_demo
from graphrt.demo.npu import FusedDecodeAttention
from tests.draws import rest_long

pytestmark = pytest.mark.npu


@pytest.mark.parametrize(
    "mode", rest_long([None, "FULL_DECODE_ONLY", "PIECEWISE", "FULL"], "PIECEWISE", "FULL")
)
def test_the_demo_on_an_npu_equals_eager_and_decode_steps_update_lengths(monkeypatch, mode):
    lengths: list[list[int]] = []
    updates = FusedDecodeAttention.updates

    def noted(self, context_lens):
        lengths.append(list(context_lens))
        return updates(self, context_lens)

    monkeypatch.setattr(FusedDecodeAttention, "updates", noted)
    console = Console(file=io.StringIO(), width=100)
    assert run_demo(mode=mode, max_new_tokens=6, console=console) == 0
    text = console.file.getvalue()
    assert "0 differ" in text
    assert ("times and tokens/s below mean nothing" in text) is is_simulated()
    # FULL steps down to FULL_AND_PIECEWISE: the operator serves one token a request.
    assert (" FULL " in text) is (mode != "PIECEWISE")
    assert lengths
