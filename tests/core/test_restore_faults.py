"""A state restore that fails once: captures and trials still leave the state unchanged."""

from __future__ import annotations

import contextlib

import pytest
import torch
from test_runner import rows, runner

from graphrt import Example, GraphOptions, Host, State
from graphrt.core.base.errors import ResourceExhaustedError

OFF = GraphOptions(check="off")
"""So that what is declared is all that is put back."""

ERRORS = {
    "runtime": lambda: RuntimeError("restore"),
    "room": lambda: ResourceExhaustedError("restore"),
    "interrupt": lambda: KeyboardInterrupt("restore"),
}


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphsDroppedWarning")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("failing", range(8))
@pytest.mark.parametrize("outputs", [None, ("tokens", 4)], ids=["found", "declared"])
def test_a_state_restore_that_fails_once_is_repeated_by_capture(outputs, failing, error):
    sizes = [4] if outputs is None else [2, 4]
    count, restores = torch.zeros(1), []

    def restore(value: torch.Tensor) -> None:
        restores.append(value)
        if len(restores) == failing + 1:
            raise ERRORS[error]()
        count.copy_(value)

    def forward(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + count

    state = State(save=count.clone, restore=restore)
    # Without outputs= an eager step more is run, to find their axes.
    run = runner(forward, host=Host(state=[state]), outputs=outputs, options=OFF, sizes=sizes)
    with contextlib.suppress(RuntimeError, ResourceExhaustedError, KeyboardInterrupt):
        run.capture()
    assert count.item() == 0
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))


@pytest.mark.trust
@pytest.mark.parametrize("name", ["rounding_of", "difference"])
def test_a_trial_that_raises_while_comparing_outputs_restores_state(name, monkeypatch):
    count = torch.zeros(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + count

    def example(batch, generator) -> Example:
        return Example({"x": rows(batch.num_tokens)})

    run = runner(forward, host=Host(example=example))

    def no_memory(*args, **kwargs):
        raise MemoryError(name)

    with monkeypatch.context() as patched:
        patched.setattr(f"graphrt.trust.trial.{name}", no_memory)
        with pytest.raises(MemoryError, match=name):
            run.capture()
    assert count.item() == 0
    run.capture()
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))
