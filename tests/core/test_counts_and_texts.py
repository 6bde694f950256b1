"""How failed steps are counted, how a dispatch is printed, and calls refused inside a capture."""

import pytest
import torch
from test_runner import rows, runner

from graphrt import Host, Reason
from graphrt.errors import GraphRTError


def test_a_step_that_raises_is_counted_as_failed_and_not_as_served() -> None:
    raised = [False]

    def bind(*_: object) -> None:
        if raised[0]:
            raise ValueError("no room")

    run = runner(lambda x: x * 2, host=Host(bind=bind))
    run.capture()
    assert torch.equal(run(x=rows(2)), rows(2, 2.0))
    raised[0] = True
    with pytest.raises(ValueError, match="no room"):
        run(x=rows(2))
    raised[0] = False
    assert run.report().reasons[Reason.FAILED] == 1
    run(x=rows(2))
    report = run.report()
    assert report.reasons[Reason.FAILED] == 1
    # The two that the graph served.
    assert (report.live_tokens, report.padded_tokens) == (4, 4)


def test_the_repr_of_a_dispatch_shows_a_slot_only_for_hits() -> None:
    run = runner(lambda x: x * 2)
    run.capture()
    run(x=rows(2))
    assert f"slot {run.last_dispatch.slot}" in repr(run.last_dispatch)
    run(x=rows(9))
    assert "slot" not in repr(run.last_dispatch)


@pytest.mark.parametrize("call", ["verify", "capture_next"])
def test_verify_and_capture_next_inside_another_capture_are_refused(call: str) -> None:
    others = runner(lambda x: x * 2)
    others.capture()
    told = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        try:
            getattr(others, call)(**({} if call == "capture_next" else {"x": rows(1)}))
        except GraphRTError as error:
            told.append(str(error))
        return x * 2

    run = runner(forward)
    run.capture()
    assert any(f"{call}()" in each for each in told)
