"""Graphs of equal structure on one executable: right results, counted, never where unsafe."""

from __future__ import annotations

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec
from graphrt.core.base import MissingCapabilityError

pytestmark = pytest.mark.cuda

SIZES = [1, 2, 4, 8, 16, 32]


def runner(forward, **arguments) -> GraphRunner:
    return GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens", 64))},
        outputs=("tokens",),
        mode=arguments.pop("mode", "FULL"),
        sizes=SIZES,
        max_num_reqs=32,
        platform="cuda",
        options=GraphOptions(share_executables=True, **arguments.pop("options", {})),
        **arguments,
    )


def chain(x: torch.Tensor) -> torch.Tensor:
    for step in range(6):
        x = (x + step).relu() * 0.5
    return x


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_switching_between_graphs_gives_each_its_own_results(mode):
    with runner(chain, mode=mode) as shared:
        shared.capture()
        figures = shared.report().sharing
        assert figures is not None
        assert figures.graphs == len(SIZES)
        assert figures.executables < len(SIZES)
        before = figures.switches
        steps = [1, 32, 5, 5, 16, 2, 31, 8, 1, 32]
        seen = []
        for rows in steps:
            x = torch.randn(rows, 64)
            seen.append((x, shared(x=x).clone()))
        for x, out in seen:
            assert torch.equal(out.cpu(), chain(x))
        after = shared.report().sharing
        assert after is not None and after.switches > before


def test_the_same_graph_again_needs_no_switch():
    with runner(chain) as shared:
        shared.capture()
        x = torch.randn(8, 64)
        shared(x=x)
        before = shared.report().sharing.switches
        for _ in range(5):
            shared(x=x)
        assert shared.report().sharing.switches == before


def test_launches_that_are_under_way_keep_their_own_parameters():
    with runner(chain) as shared:
        shared.capture()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        given = [torch.randn(rows, 64) for rows in (1, 32, 2, 16, 4) * 10]
        seen = [shared(x=x).clone() for x in given]
        for x, out in zip(given, seen, strict=True):
            assert torch.equal(out.cpu(), chain(x))


def test_graphs_that_draw_random_numbers_are_not_shared_and_advance():
    with runner(lambda x: x + torch.rand_like(x)) as shared:
        shared.capture()
        figures = shared.report().sharing
        assert figures.graphs == figures.executables == len(SIZES)
        x = torch.zeros(4, 64)
        first, second = shared(x=x).clone(), shared(x=x).clone()
        assert not torch.equal(first, second)


def by_size(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 8:
        return x.exp()
    return x.sin() if x.shape[0] > 2 else x.cos().sum(1, keepdim=True) + x


def test_graphs_of_other_kernels_and_of_another_structure_keep_their_results():
    with runner(by_size) as shared:
        shared.capture()
        figures = shared.report().sharing
        assert figures.graphs == len(SIZES)
        assert 2 <= figures.executables < len(SIZES)
        for rows in (4, 32, 1, 4, 16, 2, 32):
            x = torch.randn(rows, 64, device="cuda")
            assert torch.equal(shared(x=x), by_size(x))


def test_an_executable_lives_until_the_last_graph_on_it_is_gone():
    # A graph that fetches inputs is replayed by its runner alone.
    with runner(chain, options={"inputs_in_graph": False}) as shared:
        shared.capture()
        wrapper = next(iter(shared.graphs.owners()))
        by_size = {descriptor.num_tokens: descriptor for descriptor in wrapper.entries}
        graph = wrapper.entries[by_size[4]].parts[0]
        for size in SIZES:
            if size != 4:
                wrapper.drop(by_size[size])
        graph.replay()
        torch.cuda.synchronize()
        wrapper.drop(by_size[4])
        shared.recapture()
        x = torch.randn(3, 64)
        assert torch.equal(shared(x=x).cpu(), chain(x))


def test_a_platform_without_it_refuses_the_option():
    with pytest.raises(MissingCapabilityError, match="share_executables"):
        GraphRunner(
            chain,
            inputs={"x": InputSpec(torch.float32, ("tokens", 64))},
            mode="FULL",
            sizes=[1],
            platform="cpu",
            options=GraphOptions(share_executables=True),
        )
