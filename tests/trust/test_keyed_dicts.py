"""Tensors in dicts whose keys are tuples or members of enums, and tensors given twice."""

import enum
from collections.abc import Hashable

import pytest
import torch

from graphrt import GraphRunner, Host, InputSpec, Reason, eager_break

Side = enum.Enum("Side", ["KEY", "VALUE"])


def runner_of(forward: object, mode: str = "FULL") -> GraphRunner:
    run: GraphRunner = GraphRunner(
        forward,
        mode=mode,
        sizes=[4],
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
    )
    run.capture()
    return run


@pytest.mark.parametrize(
    "key", [lambda number: (number, "k"), lambda number: (number, Side.KEY)], ids=["text", "enum"]
)
@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
def test_a_replaced_tensor_far_back_in_a_dict_is_found(key) -> None:
    caches: dict[Hashable, torch.Tensor] = {key(number): torch.zeros(3) for number in range(100)}
    run = runner_of(lambda x: x + caches[key(90)])
    x = torch.ones(4, 3)
    for _ in range(3):
        assert torch.equal(run(x=x), x)
    caches[key(90)] = torch.full((3,), 5.0)
    for _ in range(run.report().trust.glance_steps + 1):
        out = run(x=x)
    assert torch.equal(out, x + 5)
    assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.QUARANTINED


def test_an_eager_part_given_the_same_tensor_twice_gets_the_same_tensor_at_replays() -> None:
    @eager_break
    def attention(query: torch.Tensor, key: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return query + key if rest is query else query + key + rest

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = x + 1
        return attention(hidden, hidden * 2, hidden) + 1

    run = runner_of(forward, "PIECEWISE")
    for _ in range(3):
        assert torch.equal(run(x=torch.ones(4, 3)), torch.full((4, 3), 7.0))
        assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.HIT


def test_multihead_attention_as_an_eager_part_is_served_by_graphs() -> None:
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    attend = eager_break(lambda h: model(h, h, h, need_weights=False)[0])
    twice = eager_break(lambda q, k, v: model(q, k, v, need_weights=False)[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = x.repeat(1, 3)[None, :, :8] * 2
        return (twice(hidden, hidden, hidden) + attend(hidden))[0, :, :3] + 1

    run: GraphRunner = GraphRunner(
        forward,
        mode="PIECEWISE",
        sizes=[4],
        platform="cpu",
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        host=Host(mixes_rows=True),
    )
    run.capture()
    x = torch.randn(4, 3)
    with torch.no_grad():
        right = forward(x)
    for _ in range(3):
        assert torch.equal(run(x=x), right)
        assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.HIT
