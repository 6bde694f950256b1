"""Which layers an update issues, which are patched, and the fallbacks of refused updates."""

from __future__ import annotations

import random
import struct

import pytest
from fake_driver import Fake, copy, kernel, read

from graphrt.core.base.errors import TaskContractError, TaskError
from graphrt.cuda.update.addresses import Homes, strange_address
from graphrt.cuda.update.images import KERNEL, NOTHING, image_of, key_of, offsets
from graphrt.cuda.update.ladder import UpdateCounts
from graphrt.cuda.update.node_parameters import PatchedSetting, SharedSetting
from graphrt.cuda.update.siblings import REMEMBERED, own_words, patched

ADDRESS = 0x7F10_0000_0000


def attention(layer, values):
    """Two kernels: a by-value struct of addresses and scalars, and one whose grid changes."""
    row = values["row"]
    cache, out = ADDRESS + 0x1000 * layer, ADDRESS + 0x100_0000 + 0x2000 * layer
    table = ADDRESS + 0x800_0000 + 512 * row
    return (
        kernel(
            struct.pack("<i", row),
            struct.pack("<QQQ", cache, table, out),
            b"\x01",
            variant=row % 4,
        ),
        kernel(struct.pack("<Q", out), grid=row + 1),
    )


def mixed(layer, values):
    """A copy and a fill beside a kernel, and a node that does nothing."""
    row = values["row"]
    out = ADDRESS + 0x2000 * layer
    return (
        image_of(2, (), [struct.pack("<QQ", out, row)]),
        copy(struct.pack("<QQQ", ADDRESS + 512 * row, out, 64).ljust(256, b"\0")),
        NOTHING,
        kernel(struct.pack("<Qd", out, row / 3)),
    )


def shrinking(layer, values):
    """Two kernels, of which some rows need only the first."""
    row = values["row"]
    first, second = attention(layer, values)
    return (first,) if row % 3 == 0 and row else (first, second)


def at(row):
    return {"row": row}


@pytest.mark.parametrize("issue", [attention, mixed])
def test_a_single_layer_is_issued_for_all_after_two_value_sets_agreed(issue):
    fake = Fake(issue, at(0))
    assert [fake.step(at(row)) for row in (1, 2, 3, 4, 5)] == [4, 4, 1, 1, 1]
    assert fake.right()
    counts = fake.counts
    assert (counts.self_checks, counts.self_check_failures, counts.reissues) == (2, 0, 11)
    # The layers of the second set that was compared are patched already.
    assert counts.shared_patches == 4 * 3 * (len(issue(0, at(0))) - (issue is mixed))


@pytest.mark.parametrize("issue", [attention, mixed, shrinking])
def test_every_step_equals_issuing_each_layer_separately(issue):
    chosen = random.Random(0)
    fake = Fake(issue, at(0), layers=5)
    for _ in range(400):
        if chosen.random() < 0.3:
            fake.step(*(at(chosen.randrange(40)) for _ in fake.tasks))
        else:
            fake.step(at(chosen.randrange(40)))
        assert fake.right()
    assert fake.counts.shared_patches and fake.counts.memo_hits


def test_parameters_are_memoized_by_value_and_unchanged_nodes_are_not_patched():
    fake = Fake(attention, at(0))
    for row in (1, 2, 3, 4):
        fake.step(at(row))
    assert [fake.step(at(row)) for row in (1, 2, 3, 4)] == [0, 0, 0, 0]
    assert fake.right()
    hits, patches = fake.counts.memo_hits, fake.counts.patches
    assert hits == 16
    fake.step(at(4))
    assert fake.counts.patches == patches
    # A list that is no plain value is not remembered, and the other layers are still patched.
    assert fake.step({"row": 4, "extra": object()}) == 1


def test_the_number_of_memoized_parameter_sets_is_bounded():
    fake = Fake(attention, at(0))
    for row in range(1, REMEMBERED + 40):
        fake.step(at(row))
    assert fake.step(at(1)) == 1
    assert fake.step(at(REMEMBERED + 39)) == 0


def test_a_value_set_without_changed_parameters_does_not_count_as_comparison():
    fake = Fake(attention, at(3))
    extra = [{"row": 3, "extra": number} for number in range(3)]
    assert [fake.step(values) for values in extra] == [4, 4, 4]
    assert [fake.step(at(row)) for row in (4, 4, 5, 6)] == [4, 0, 4, 1]
    assert fake.right()


def scaled(layer, values):
    """A scalar of the layer that only shows in its product with the host argument."""
    return (kernel(struct.pack("<d", values["row"] * (1 + layer))),)


def moving(layer, values):
    """An address of the layer that moves with the host argument."""
    return (kernel(struct.pack("<Q", ADDRESS + 0x1000 * layer + 16 * values["row"])),)


@pytest.mark.parametrize(("issue", "checks"), [(scaled, 1), (moving, 1)])
def test_layers_whose_parameters_change_differently_are_issued_separately(issue, checks):
    fake = Fake(issue, at(0))
    for row in (1, 2, 3, 4):
        assert fake.step(at(row)) == 4
        assert fake.right()
    assert fake.step(at(3)) == 0 and fake.right()
    counts = fake.counts
    assert (counts.self_checks, counts.self_check_failures) == (checks, 1)
    assert counts.shared_patches == 0


def test_values_that_change_a_layers_own_parameter_are_issued_per_layer():
    def issue(layer, values):
        moved = 16 if values["row"] > 10 else 0
        return (kernel(struct.pack("<Qi", ADDRESS + 0x1000 * layer + moved, values["row"])),)

    fake = Fake(issue, at(0))
    assert [fake.step(at(row)) for row in (1, 2, 3, 11, 4, 11)] == [4, 4, 1, 4, 1, 0]
    assert fake.right()
    assert fake.counts.self_check_failures == 1
    fake.step(at(4))
    assert fake.right()


def test_a_switch_to_another_kernel_is_issued_per_layer():
    def issue(layer, values):
        out = struct.pack("<Q", ADDRESS + 0x1000 * layer)
        if values["row"] < 10:
            return (kernel(out, struct.pack("<i", values["row"])),)
        return (kernel(out, struct.pack("<iii", 1, 2, layer)),)

    fake = Fake(issue, at(0))
    for row in (1, 2, 3, 10, 4, 10, 11, 5):
        fake.step(at(row))
        assert fake.right()


def test_only_tasks_of_the_same_kind_are_compared():
    fake = Fake(scaled, at(0), kin=lambda layer: f"kind {layer % 2}")
    fake.step(at(1))
    assert fake.counts.self_checks == 2
    alone = Fake(scaled, at(0), kin=str)
    assert [alone.step(at(row)) for row in (1, 2, 3)] == [4, 4, 4]
    assert alone.right() and alone.counts.self_checks == 0


def test_a_raising_task_sets_no_parameter_and_the_next_step_is_right():
    fail = []

    def issue(layer, values):
        if fail and layer == 2:
            raise RuntimeError("in the task")
        return attention(layer, values)

    fake = Fake(issue, at(0))
    fake.step(at(1))
    fail.append(True)
    before = dict(fake.calls.executable)
    with pytest.raises(RuntimeError, match="in the task"):
        fake.step(at(2))
    assert fake.calls.executable == before and fake.counts.failed == 1
    fail.clear()
    for row in (2, 3, 4, 1):
        fake.step(at(row))
        assert fake.right()


# The way down ------------------------------------------------------------------------------------


def steps_of(calls):
    """The calls in order, each once."""
    return list(dict.fromkeys(calls.made))


@pytest.mark.parametrize("issue", [attention, mixed])
@pytest.mark.parametrize(
    ("refuse", "ends", "counted"),
    [
        (set(), [], (0, 0)),
        ({"set"}, ["set_template", "update_whole"], (1, 0)),
        (
            {"set", "update_whole"},
            ["set_template", "update_whole", "can_instantiate", "instantiate"],
            (0, 1),
        ),
    ],
)
def test_a_refused_node_update_falls_back_in_the_documented_order(issue, refuse, ends, counted):
    fake = Fake(issue, at(0))
    for row in (1, 2, 3):
        fake.step(at(row))
    if "set" in refuse:
        refuse = refuse | {"set_kernel", "set_memory"}
    fake.calls.refuse, fake.calls.made = refuse, []
    fake.step(at(4))
    assert fake.right()
    assert [call for call in steps_of(fake.calls) if call not in ("set_kernel", "set_memory")] == (
        ends
    )
    assert (fake.counts.whole_updates, fake.counts.rebuilds) == counted
    # The executable takes single nodes again, and the template is brought up where it lags.
    fake.calls.refuse = set()
    fake.step(*(at(row) for row in (9, 4, 9, 5)))
    assert fake.right()
    fake.calls.refuse = refuse
    fake.step(at(6))
    assert fake.right()


@pytest.mark.parametrize("last", ["can_instantiate", "set_template"])
def test_a_graph_with_every_update_way_refused_raises_at_all_later_steps(last):
    fake = Fake(attention, at(0))
    fake.step(at(1))
    fake.calls.refuse = {"set_kernel", "update_whole", last}
    with pytest.raises(TaskError, match="capture it again"):
        fake.step(at(2))
    assert "instantiate" not in fake.calls.made
    fake.calls.refuse, fake.calls.made = set(), []
    with pytest.raises(TaskError):
        fake.step(at(1))
    assert fake.calls.made == [] and fake.counts.failed == 2


def test_an_interrupted_update_is_set_again_at_the_next_step(monkeypatch):
    fake = Fake(attention, at(0))
    for row in (1, 2, 3):
        fake.step(at(row))
    set_kernel = fake.calls.set_kernel
    left = iter(range(3))

    def interrupted(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return set_kernel(*arguments)

    monkeypatch.setattr(fake.calls, "set_kernel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fake.step(at(4))
    monkeypatch.undo()
    fake.step(at(4))
    assert fake.right()


def test_update_figures_are_absent_before_the_first_task():
    assert UpdateCounts().figures() is None
    fake = Fake(attention, at(0))
    fake.step(at(1))
    figures = fake.counts.figures()
    assert figures.reissues == 4 and figures.patches == 8 and figures.failed == 0


# Pieces ------------------------------------------------------------------------------------------


def test_patched_kernel_parameters_equal_the_predicted_parameters():
    chosen = random.Random(1)
    for _ in range(200):
        sizes = [chosen.choice([1, 2, 4, 8, 12, 24, 128]) for _ in range(chosen.randint(0, 5))]

        def some(sizes=sizes, like=None):
            arguments = [chosen.randbytes(size) for size in sizes]
            if like is not None:
                starts = offsets(sizes)
                for i, size in enumerate(sizes):
                    if chosen.random() < 0.5:
                        arguments[i] = like.data[starts[i] : starts[i] + size]
                    elif size >= 8:
                        old = like.data[starts[i] : starts[i] + size]
                        arguments[i] = old[:4] + arguments[i][4:]
            return kernel(*arguments, grid=chosen.randint(1, 9))

        first = some()
        layers = [first, some(like=first), some(like=first)]
        own = own_words(layers)
        shared = SharedSetting(first, own)
        settings = [PatchedSetting(base, shared) for base in layers]
        sources = [some(like=first), some(like=first), first]
        for _ in range(8):
            layer, source = chosen.randrange(3), chosen.choice(sources)
            settings[layer].load(source)
            assert read(KERNEL, settings[layer].reference) == patched(layers[layer], own, source)


def test_kernel_arguments_of_different_sizes_cannot_be_patched():
    assert patched(kernel(b"1234"), frozenset(), kernel(b"12345678")) is None


def test_memo_keys_distinguish_types_and_reject_values_that_are_not_plain():
    values = [1, 1.0, True, 0.0, -0.0, None, "1", [1], (1,), [1.0], [True], [], [1, None]]
    assert len({key_of({"a": value}) for value in values}) == len(values)
    assert key_of({"a": [1, 2]}) == key_of({"a": [1, 2]})
    assert key_of({"a": 1}) != key_of({"b": 1})
    assert key_of({"a": [[1]]}) is None
    assert key_of({"a": object()}) is None


def homes_of(*tensors):
    """Homes of a task with these tensors, on a device with three more blocks."""
    blocks = [
        (ADDRESS, ADDRESS + 64),
        (ADDRESS + 64, ADDRESS + 128),
        (ADDRESS + 512, ADDRESS + 1024),
    ]
    return Homes(tensors, lambda address: next((b for b in blocks if b[0] <= address < b[1]), None))


@pytest.mark.parametrize(
    ("old", "new", "strange"),
    [
        (ADDRESS, ADDRESS + 32, False),  # within its block
        (ADDRESS, ADDRESS + 64, True),  # in the next block
        (ADDRESS, ADDRESS + 512, False),  # in a captured tensor
        (ADDRESS + 512, ADDRESS + 640, True),  # out of a captured tensor, within its block
        (ADDRESS, 0, False),  # nothing
        (ADDRESS, ADDRESS + 4096, False),  # no memory
        (0, ADDRESS, False),
        (5, 6, False),
        (1 << 40, ADDRESS, False),  # was no address
    ],
)
def test_an_address_may_move_only_within_its_block_or_captured_tensors(old, new, strange):
    homes = homes_of((ADDRESS + 512, ADDRESS + 640))
    before, now = (kernel(b"abcd", struct.pack("<iiQ", 1, 2, each)) for each in (old, new))
    strange_one = strange_address(homes, (before,), (now,))
    assert strange_one == (new if strange else None)


def test_a_task_contract_error_names_the_task():
    from graphrt.cuda.update.tasks import refused

    fake = Fake(attention, at(0))
    error = refused(fake.tasks[1], "a tensor that it was not captured with")
    assert isinstance(error, TaskContractError)
    assert "layer.1" in str(error) and "not captured with" in str(error)


@pytest.mark.parametrize("refuse", [set(), {"set_kernel"}, {"set_kernel", "update_whole"}])
def test_unneeded_kernel_launches_are_disabled_and_enabled_again(refuse):
    fake = Fake(shrinking, at(0))
    for row in (1, 3, 2, 6, 6, 4, 9):
        fake.calls.refuse = set(refuse)
        fake.step(at(row))
        assert fake.right()
        assert len(fake.calls.off) == (4 if row % 3 == 0 else 0)


def test_a_graph_whose_nodes_cannot_be_disabled_raises():
    fake = Fake(shrinking, at(0))
    fake.calls.refuse = {"set_enabled"}
    with pytest.raises(TaskError):
        fake.step(at(3))
    assert fake.counts.failed == 1
