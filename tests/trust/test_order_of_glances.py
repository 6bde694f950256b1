"""Glances look at slots in an order in which one of the first looks finds one change of many."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import GraphRunner, InputSpec, Reason
from graphrt.trust import host_watch
from graphrt.trust.glances import ring_of
from graphrt.trust.host_watch import HostWatch
from graphrt.trust.places.slots import ELEMENT, ITEM, Place
from graphrt.trust.places.walk import places_of

WIDTH = 4


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def slots_of(layers: int, label: str, holder: str) -> list[tuple[Place, Any]]:
    """A slot for each of many layers: `layers[3].scales[0]`."""
    model = Place(None, "model", ITEM, {})
    entries = []
    for at in range(layers):
        layer = Place(model, f".layers[{at}]", ELEMENT, [], at)
        entries.append((Place(Place(layer, holder, ITEM, {}), label, ELEMENT, [], at), at))
    return entries


def longest_wait(ring: list[Any], wanted: list[Any]) -> int:
    """The most looks in a row, over the end of the ring too, at none of the wanted entries."""
    ids = {id(slot) for slot, _ in wanted}
    hits = [at for at, (slot, _) in enumerate(ring) if id(slot) in ids]
    return max(
        after - at - 1 for at, after in zip(hits, [*hits[1:], hits[0] + len(ring)], strict=True)
    )


@pytest.mark.parametrize("layers", [2, 7, 32, 200])
def test_each_kind_of_slot_comes_up_evenly_and_so_does_each_part_of_the_layers(layers: int) -> None:
    groups = [
        slots_of(layers, label, holder)
        for holder in (".scales", ".names", ".merged", ".hooks")
        for label in ("[0]", ".__dict__", ".a", ".b")
    ]
    ring = ring_of([], [each for group in groups for each in group])
    assert len(ring) == len({id(slot) for slot, _ in ring}) == 16 * layers
    for group in groups:
        assert longest_wait(ring, group) <= 2 * len(groups)
        quarter = group[layers // 4 : layers // 2]
        if len(quarter) > 2:
            assert longest_wait(ring, quarter) <= 12 * len(groups)


def test_slots_of_graphs_tensors_are_a_tenth_of_all_looks() -> None:
    reads, others = slots_of(3, "[0]", ".weight"), slots_of(900, "[0]", ".scales")
    ring = ring_of(reads, others)
    assert longest_wait(ring, reads) <= 11
    assert len(ring) <= 1.2 * len(others)
    assert longest_wait(ring, reads[:1]) <= 33
    assert all(longest_wait(ring, [each]) < len(ring) for each in others[:20])
    assert {id(slot) for slot, _ in ring} == {id(slot) for slot, _ in (*reads, *others)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.merged: list[str] = []
        self.scales, self.active = [1.0], {"name": "a"}
        self.by_name = {"a": 1.0, "b": 2.0}
        self.config = SimpleNamespace(alpha=1.0, beta=[0.5], gamma={"x": 1})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged:
            return self.linear(x)
        return (
            self.linear(x) * self.scales[0] * self.by_name[self.active["name"]]
            + self.config.beta[0]
        )


def merge(layer: Layer) -> None:
    layer.linear.weight.mul_(2.0)
    layer.merged.append("a")


def scale(layer: Layer) -> None:
    layer.scales[0] = 3.0


def bias(layer: Layer) -> None:
    layer.config.beta[0] = 0.25


def activate(layer: Layer) -> None:
    layer.active["name"] = "b"


def replace_weight(layer: Layer) -> None:
    layer.linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def move_weight(layer: Layer) -> None:
    layer.linear.weight.data = torch.ones(WIDTH, WIDTH)


def replace_config(layer: Layer) -> None:
    layer.config = SimpleNamespace(alpha=1.0, beta=[0.25], gamma={"x": 1})


CHANGES = [merge, scale, bias, activate, replace_weight, move_weight, replace_config]


@pytest.mark.parametrize("layers", [4, 64])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_change_in_all_layers_is_found_by_one_of_the_first_looks_however_many_there_are(
    change: Callable[[Layer], None], layers: int
) -> None:
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    inputs = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
    runner = GraphRunner(lambda x: model(x), mode="FULL", sizes=(4,), inputs=inputs, platform="cpu")
    runner.capture()
    x = torch.ones(4, WIDTH)
    for _ in range(5):
        runner(x=x)
    for layer in model:
        change(layer)
    expected, late = model(x), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while not torch.allclose(runner(x=x), expected):
            late += 1
    # By the kinds of slots that a layer has, whatever the number of layers.
    assert late <= 8, late
    assert runner.last_dispatch is not None
    assert runner.last_dispatch.reason is Reason.QUARANTINED


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales, self.names, self.scale = [1.0, 2.0], {"a": [3.0]}, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0] * self.names["a"][0] * self.scale


def test_glances_go_by_the_order_of_the_walk_and_not_by_that_of_containers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = places_of(nn.Sequential(*(Mixed() for _ in range(3))).forward)
    walked = [*(place for place, _ in (*places.objects, *places.outline)), *places.numbers]
    host, ordered = HostWatch(), list[Place]()

    def noted(reads: Any, others: Any) -> Any:
        ordered.extend(place for place, _ in others)
        return ring_of(reads, others)

    monkeypatch.setattr(host_watch, "ring_of", noted)
    host.aim(places)
    host.glances([], repeat(True))
    glanced = {*map(id, ordered)}
    expected = [*dict.fromkeys(id(place) for place in walked if id(place) in glanced)]
    # Lengths of containers come last.
    assert 8 < len(expected) < len(ordered)
    assert [*map(id, ordered)][: len(expected)] == expected
