"""The harness that serves vLLM under load: one schedule for all engines, and its comparison.

Its engines need a GPU; the schedule and the comparison do not.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tomllib", reason="benchmarks need Python 3.11")

from benchmarks.gpu.vllm_host.configurations import configurations
from benchmarks.gpu.vllm_host.logprobs import difference, same_share
from benchmarks.gpu.vllm_host.processes import _runs
from benchmarks.gpu.vllm_host.serving import Arrivals, Load, Steps, serve, verdicts


class Engine:
    """Serves each request a token a step; `slow` is in how many calls the model runs once."""

    def __init__(self, steps: Steps, slow: int) -> None:
        self.steps, self.slow, self.calls = steps, slow, 0
        self.running: dict[str, Any] = {}
        self.came: list[tuple[int, str, Any]] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any) -> None:
        self.running[name] = [params, params.max_tokens]
        self.came.append((len(self.steps.begins), name, lora_request))

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def step(self) -> list[Any]:
        self.calls += 1
        if self.calls % self.slow:
            return []
        self.steps.begins.append(float(self.calls))
        self.steps.batches.append((len(self.running), len(self.running)))
        outputs = []
        for name, state in [*self.running.items()]:
            state[1] -= 1
            if not state[1]:
                del self.running[name]
            token = state[0].allowed_token_ids[0]
            said = {token: SimpleNamespace(logprob=-3.0), 5: SimpleNamespace(logprob=-0.1)}
            new = SimpleNamespace(token_ids=[token], logprobs=[said])
            outputs.append(SimpleNamespace(request_id=name, outputs=[new]))
        return outputs


def test_engines_of_any_speed_get_the_same_requests_at_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
):
    stub = ModuleType("vllm.sampling_params")
    stub.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", stub)
    engines: Any = SimpleNamespace(
        sampling=SimpleNamespace, adapter_of=lambda index: index % 3 or None
    )
    found = []
    for slow in (1, 3):
        steps, arrivals = Steps(), Arrivals(400, 7)
        engine = Engine(steps, slow)
        said = serve(engines, engine, arrivals, steps, Load(400, 2))
        found.append((engine.came, steps.batches, said.tokens, said.logprobs, said.aborts))
        for name, tokens in said.tokens.items():
            assert {*tokens} == {arrivals.prompts[name][0]}
            assert len(tokens) == len(said.logprobs[name]) <= arrivals.lengths[name]
    assert found[0] == found[1]
    came, batches, _, _, aborts = found[0]
    assert len(batches) == 400 and aborts > 5 and {lora for _, _, lora in came} == {None, 1, 2}


def test_log_probabilities_are_compared_token_by_token():
    theirs = {"a": [[(7, -3.0), (1, -0.5), (2, -1.0)]] * 2, "only theirs": [[(1, -1.0)]]}
    near = {"a": [[(7, -3.01), (1, -0.6), (2, -0.9)], [(7, -3.0), (2, -0.7), (1, -0.7001)]]}
    found = difference(near, theirs)
    assert found["tokens"] == 2 and found["compared"] == 6
    assert found["max"] == pytest.approx(0.3)
    # The second token's best is another one, worse by half in the eyes of the other engine.
    assert found["other_best"] == 0.5 and found["largest_gap"] == 0.5
    assert difference(theirs, theirs)["max"] == 0
    # A best candidate that the other engine does not list is as bad as its worst, or more.
    assert difference({"a": [[(9, -0.1)]]}, theirs)["largest_gap"] == 2.5
    assert difference({}, theirs)["tokens"] == 0
    assert same_share([1, 2, 3], [1, 2, 4, 5]) == 0.5


@pytest.mark.parametrize(("apart", "is_near"), [(0.1, True), (0.9, False)])
def test_graphs_may_be_as_far_from_eager_as_vllms_own_are(apart, is_near):
    def result(apart: float) -> dict[str, Any]:
        return {
            "stage": "done",
            "step": {},
            "captures": {"missing": 0, "dropped": []},
            "logprobs": {"p99": apart, "max": 2 * apart},
        }

    checks = verdicts({"v2-serving-vllm": result(0.1), "v2-serving-while": result(apart)})
    assert checks["v2-serving"]["as near to eager as vLLM's own (while)"] is is_near


def test_each_load_has_each_engine():
    names = [name for name, options in configurations().items() if _runs("serving", options)]
    loads = ("v1", "v2", "v1-lora", "v2-lora", "v1-draft", "v1-ngram")
    kinds = ("vllm", "upfront", "while", "checked", "eager")
    assert {*names} == {f"{load}-serving-{kind}" for load in loads for kind in kinds}
