"""Static inputs: buffers keep their addresses, live rows are copied, padding rows are refilled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt import Batch, GraphRunner, InputSpec
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.device.registry import get_platform
from graphrt.core.inputs.buffers import StaticInputs, batch_of
from graphrt.core.inputs.transport import StagedCopy
from graphrt.cpu.platform import CpuPlatform

SPECS = {
    "ids": InputSpec(torch.int64, ("tokens",), pad=7),
    "mrope": InputSpec(torch.int64, (3, "tokens"), pad=-1),
    "table": InputSpec(torch.int32, ("reqs", 2), pad=0, index=True),
    "starts": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
    "loose": InputSpec(torch.float32, ("tokens", 2)),
}


def static(specs, tokens: int, reqs: int) -> StaticInputs:
    return StaticInputs(specs, platform=get_platform("cpu"), tokens=tokens, reqs=reqs, device="cpu")


def values(tokens: int, reqs: int) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.arange(1, tokens + 1),
        "mrope": torch.arange(3 * tokens).reshape(3, tokens),
        "table": torch.ones(reqs, 2, dtype=torch.int32),
        "starts": torch.arange(reqs + 1, dtype=torch.int32),
        "loose": torch.ones(tokens, 2),
    }


class HeldEvent:
    """An event that passes when the test says so, as that of a device far behind."""

    def __init__(self) -> None:
        self.passed = True
        self.waited = 0

    def record(self, stream: object) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True
        self.waited += 1


class StagingPlatform(CpuPlatform):
    """The CPU with what a device has: events, and host memory apart from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[HeldEvent] = []

    def new_event(self) -> HeldEvent:
        self.events.append(HeldEvent())
        return self.events[-1]


@pytest.mark.parametrize("staged", [False, True])
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 4), st.sets(st.sampled_from(list(SPECS)))),
        min_size=1,
        max_size=6,
    )
)
def test_after_any_fills_live_rows_hold_the_inputs_and_padding_rows_the_padding(staged, steps):
    inputs = static(SPECS, 8, 4)
    if staged:
        inputs.transport = StagedCopy(inputs.transport.slab, StagingPlatform())
    for tokens, reqs, in_place in steps:
        layout = inputs.layout(8, 4)
        views = layout.views
        for name in views.keys() - {"loose"}:
            views[name].fill_(99)
        given_values = expected = values(tokens, reqs)
        live = live_rows(views, tokens, reqs)
        for name in in_place:
            live[name].copy_(expected[name])
            given_values = {**given_values, name: live[name]}
        inputs.fill(given_values, layout, tokens, reqs)
        for name, rows in live.items():
            assert torch.equal(rows, expected[name]), name
        assert (views["ids"][tokens:] == 7).all()
        assert (views["mrope"][:, tokens:] == -1).all()
        assert (views["table"][reqs:] == 0).all()
        assert (views["starts"][reqs:] == reqs).all()


def live_rows(views, tokens: int, reqs: int):
    cut = {"mrope": (slice(None), slice(tokens)), "table": slice(reqs), "starts": slice(reqs + 1)}
    return {name: view[cut.get(name, slice(tokens))] for name, view in views.items()}


def test_input_views_of_a_size_keep_their_addresses_across_fills():
    inputs = static(SPECS, 8, 4)
    before = {name: view.data_ptr() for name, view in inputs.layout(4, 2).views.items()}
    inputs.fill(values(8, 4), inputs.layout(8, 4), 8, 4)
    inputs.fill(values(3, 1), inputs.layout(4, 2), 3, 1)
    after = {name: view.data_ptr() for name, view in inputs.layout(4, 2).views.items()}
    assert before == after
    assert all(address % 4 == 0 for address in after.values())


@pytest.mark.parametrize("staged", [False, True])
def test_an_input_that_overlaps_another_place_of_the_buffers_is_copied_whole(staged):
    specs = {name: InputSpec(torch.int64, ("tokens",)) for name in "abc"}
    inputs = static(specs, 64, 64)
    if staged:
        inputs.transport = StagedCopy(inputs.transport.slab, StagingPlatform())
    small = inputs.layout(32, 32).views
    step = {name: torch.arange(32) + 100 * place for place, name in enumerate("abc")}
    inputs.fill(step, inputs.layout(32, 32), 32, 32)
    # "b" and "c" of this size lie where "a" and "b" of the larger one will be written.
    inputs.fill({**step, "b": small["b"], "c": small["c"]}, inputs.layout(64, 64), 32, 32)
    views = inputs.layout(64, 64).views
    for name, value in step.items():
        assert torch.equal(views[name][:32], value)
        assert not views[name][32:].any()


def staged_steps(platform: StagingPlatform, max_slots: int) -> tuple[StagedCopy, Callable[[], int]]:
    """A transport with so many slots, and a step of it, which returns where its slot is."""
    inputs = static({"x": InputSpec(torch.int64, ("tokens",))}, 8, 8)
    inputs.transport = StagedCopy(inputs.transport.slab, platform, max_slots=max_slots)

    def step() -> int:
        inputs.fill({"x": torch.arange(8)}, inputs.layout(8, 8), 8, 8)
        return inputs.transport._slots[-1][0].low

    return inputs.transport, step


def test_the_host_waits_for_a_staging_slot_only_if_all_are_in_use():
    platform = StagingPlatform()
    staged, step = staged_steps(platform, 3)
    first = [step() for _ in range(3)]
    assert len(set(first)) == 3 and staged.waits == 0
    assert step() == first[0]
    assert staged.waits == 1 and platform.events[0].waited == 1
    platform.events[1].passed = True
    assert step() == first[1]
    assert staged.waits == 1


def test_a_freed_staging_slot_is_reused_before_another_is_allocated():
    platform = StagingPlatform()
    _, step = staged_steps(platform, 64)
    for _ in range(5):
        step()
        platform.events[0].passed = True
    assert len(platform.events) == 1


def test_a_lazily_negated_view_of_the_input_buffer_is_filled_with_its_values():
    inputs = static({"x": InputSpec(torch.float32, ("tokens",))}, 4, 4)
    layout = inputs.layout(4, 4)
    layout.views["x"].copy_(torch.arange(4.0))
    inputs.fill({"x": torch._neg_view(layout.views["x"])}, layout, 4, 4)
    assert layout.views["x"].tolist() == [0.0, -1.0, -2.0, -3.0]


def test_an_input_that_already_is_its_buffer_is_not_copied():
    inputs = static({"ids": SPECS["ids"]}, 8, 8)
    own = inputs.layout(3, 3).views["ids"]
    own.copy_(torch.tensor([4, 5, 6]))
    version = own._version
    inputs.fill({"ids": own}, inputs.layout(3, 3), 3, 3)
    assert own._version == version
    assert own.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int32)}, "torch.int32"),
        ({"ids": torch.zeros(4, dtype=torch.int64)}, r"\(4,\)"),
        ({"ids": torch.zeros(1, dtype=torch.int64)}, r"\(1,\)"),
        ({"table": torch.zeros(2, 3, dtype=torch.int32)}, r"\(2, 3\)"),
        ({"mrope": torch.zeros(2, 3, dtype=torch.int64)}, r"\(2, 3\)"),
        ({"extra": torch.zeros(3)}, "extra"),
        ({"ids": None}, "ids"),
    ],
)
def test_a_fill_with_a_bad_input_raises_and_the_next_fill_works(change, text):
    inputs = static(SPECS, 8, 4)
    wrong = {**values(3, 2), **change}
    wrong = {name: value for name, value in wrong.items() if value is not None}
    with pytest.raises(InvalidInputError, match=text):
        inputs.fill(wrong, inputs.layout(8, 4), 3, 2)
    inputs.fill(values(3, 2), inputs.layout(8, 4), 3, 2)
    assert inputs.layout(8, 4).views["ids"].tolist() == [1, 2, 3, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": ("lines",)},
        {"shape": ("tokens", "reqs")},
        {"shape": ("tokens-1",)},
        {"shape": ("tokens",), "pad": "zero"},
        {"shape": ("tokens",), "pad": "keep"},
    ],
)
def test_an_input_spec_with_a_bad_axis_or_padding_is_refused(arguments):
    with pytest.raises(InvalidInputError):
        InputSpec(torch.int64, **arguments)


def test_tokens_and_requests_are_inferred_from_input_shapes():
    inputs = static(SPECS, 8, 4)
    assert inputs.declared.infer(values(5, 3)) == (5, 3)
    with pytest.raises(InvalidInputError, match="disagree"):
        inputs.declared.infer({**values(5, 3), "ids": torch.zeros(4, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("tokens", "reqs", "batch"),
    [(4, 2, Batch(4, 2)), (3, 3, Batch(3, 3, 1)), (4, None, Batch(4))],
    ids=str,
)
def test_equal_token_and_request_counts_are_inferred_as_query_length_of_one(tokens, reqs, batch):
    of_requests = reqs is not None
    named = ["ids", "table"] if of_requests else ["ids"]
    inputs = static({name: SPECS[name] for name in named}, 8, 4)
    step = values(tokens, reqs or 1)
    assert batch_of(inputs, {name: step[name] for name in named}) == batch


def test_nested_inputs_may_have_names_reserved_at_the_top_level():
    specs = {"stage": {"updates": SPECS["ids"], "self": SPECS["mrope"]}}
    assert sorted(static(specs, 8, 4).buffers) == ["stage.self", "stage.updates"]
    with pytest.raises(InvalidInputError, match="updates"):
        static(specs["stage"], 8, 4)


def test_nested_inputs_keep_their_structure():
    specs = {"ids": SPECS["ids"], "stage": {"hidden": InputSpec(torch.float32, ("tokens", 2))}}
    inputs = static(specs, 4, 4)
    step = {"ids": torch.tensor([1, 2]), "stage": {"hidden": torch.ones(2, 2)}}
    inputs.fill(step, inputs.layout(4, 4), 2, 2)
    seen = inputs.nest(inputs.layout(4, 4).views)
    assert seen["stage"]["hidden"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


def test_each_input_view_has_its_own_storage_of_its_size():
    inputs = StaticInputs(SPECS, platform=CpuPlatform(), tokens=4, reqs=2, device="cpu")
    for view in inputs.layout(4, 2).views.values():
        assert view.storage_offset() == 0
        assert view.untyped_storage().nbytes() == view.nbytes
    kept = inputs.layout(4, 2).views["mrope"]
    kept.fill_(3)
    del inputs
    assert kept.eq(3).all()


@pytest.mark.parametrize("tokens", [1, 4, 300])
def test_the_input_slab_is_rounded_up_to_multiples_of_256_bytes(tokens):
    slab = static(SPECS, tokens, tokens).transport.slab
    assert slab.nbytes <= slab.buffer.nbytes < slab.nbytes + 256
    assert slab.buffer.nbytes % 256 == 0


def test_as_strided_from_offset_zero_of_an_input_reads_that_input():
    def forward(first, second):
        return second.as_strided(second.shape, (1,), 0) + first

    specs = {name: InputSpec(torch.int64, ("tokens",)) for name in ("first", "second")}
    runner = GraphRunner(
        forward, mode="FULL", sizes=[2], max_num_tokens=2, inputs=specs, platform="cpu"
    )
    runner.capture()
    out = runner(first=torch.tensor([1, 2]), second=torch.tensor([30, 40]))
    assert out.tolist() == [31, 42]
