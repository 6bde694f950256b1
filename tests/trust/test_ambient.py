"""Settings of the process that change what operators do are compared; others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphrt.core.base import torch_names
from graphrt.trust.checks import Ambient
from tests.trust.twins import ambient_state_put_back

matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def _put_back():
    reduced = (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    # torch's own test helpers, once imported, let nobody write cudnn's settings but in here.
    with ambient_state_put_back(), torch.backends.__allow_nonbracketed_mutation():
        torch.set_autocast_enabled("cpu", False)
        before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
        yield
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
        torch.set_default_device(None)
        torch.set_deterministic_debug_mode("default")
        matmul.allow_fp16_reduced_precision_reduction = reduced[0]
        matmul.allow_bf16_reduced_precision_reduction = reduced[1]


@pytest.fixture(params=["guard", "one by one"])
def way(request, monkeypatch):
    """Torch's own guard, and what stands in for it where torch has none."""
    if request.param == "one by one":
        monkeypatch.setattr(torch_names, "state_guard", None)
    return request.param


def attribute(owner: object, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, not getattr(owner, name))


def toggled(owner: object) -> Callable[[], None]:
    def toggle() -> None:
        owner.fp32_precision = "ieee" if owner.fp32_precision == "tf32" else "tf32"

    return toggle


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "default device": (
        lambda: torch.set_default_device("meta"),
        lambda: torch.set_default_device(None),
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "TF32 in matmul": (attribute(matmul, "allow_tf32"),) * 2,
    "TF32 in cudnn": (toggled(cudnn.conv),) * 2,
    "TF32 in RNNs of cudnn": (toggled(cudnn.rnn),) * 2,
    "reduced precision sums of float16": (
        attribute(matmul, "allow_fp16_reduced_precision_reduction"),
    )
    * 2,
    "reduced precision sums of bfloat16": (
        attribute(matmul, "allow_bf16_reduced_precision_reduction"),
    )
    * 2,
}


def test_the_table_of_this_test_has_every_compared_setting():
    modes = {"torch function modes", "torch dispatch modes"}  # test_modes.py
    assert {*SETTINGS, "autocast dtype", *modes} == {*Ambient("cpu")._now()}


def also(name: str) -> list[str]:
    """What is named with a setting."""
    return ["autocast dtype"] if name == "autocast" else []


@pytest.fixture
def seen_by(request, way):
    """Marks what torch's guard does not look at."""
    name = request.node.callspec.params["name"]
    if way == "guard" and ("cudnn" in name):
        reason = f"torch's guard does not look at it, so no step compares it: {name}"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_is_named_with_both_values_until_set_back(name, seen_by):
    change, back = SETTINGS[name]
    ambient = Ambient("cpu")
    assert ambient.holds() and ambient.differences() == []
    change()
    found = ambient.differences()
    assert [each.partition(":")[0] for each in found] == [name, *also(name)]
    assert all(each.endswith(" at capture") for each in found)
    assert not ambient.holds()
    back()
    assert ambient.differences() == [] and ambient.holds()


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_compared_with_those_at_capture(name, seen_by):
    change, back = SETTINGS[name]
    change()
    ambient = Ambient("cpu")
    assert ambient.holds()
    back()
    assert not ambient.holds()
    assert [each.partition(":")[0] for each in ambient.differences()] == [name, *also(name)]


def test_tf32_by_the_newer_of_torchs_settings_is_compared(way):
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        ambient = Ambient("cpu")
        assert ambient.holds()
        matmul.fp32_precision = "ieee"
        assert ambient.differences() == ["TF32 in matmul: False, True at capture"]
    finally:
        matmul.fp32_precision = before


def test_the_dtype_of_autocast_counts_where_autocast_is_on(way):
    ambient = Ambient("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    assert ambient.differences() == [] and ambient.holds()
    torch.set_autocast_enabled("cpu", True)
    on = Ambient("cpu")
    assert on.holds()
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert not on.holds()
    assert on.differences() == ["autocast dtype: torch.bfloat16, torch.float16 at capture"]


def test_autocast_of_another_device_is_not_compared(way):
    ambient = Ambient("cpu")
    torch.set_autocast_enabled("cuda", True)
    assert ambient.differences() == [] and ambient.holds()


@pytest.mark.parametrize("harmless", ["gradients", "inference mode", "threads"])
def test_changed_grad_mode_inference_mode_and_threads_count_as_harmless(harmless, way):
    ambient = Ambient("cpu")
    if harmless == "threads":
        torch.set_num_threads(torch.get_num_threads() + 1)
        assert ambient.differences() == [] and ambient.holds()
        return
    around = torch.enable_grad() if harmless == "gradients" else torch.inference_mode()
    with around:
        assert ambient.differences() == []
        assert ambient.holds()
    assert ambient.differences() == [] and ambient.holds()


def test_several_changed_settings_are_all_named(way):
    ambient = Ambient("cpu")
    SETTINGS["autocast"][0]()
    SETTINGS["default dtype"][0]()
    assert [each.partition(":")[0] for each in ambient.differences()] == [
        "autocast",
        "autocast dtype",
        "default dtype",
    ]


def test_after_a_harmless_change_a_harmful_change_is_still_found(way):
    ambient = Ambient("cpu")
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert ambient.differences() == []
    torch.set_default_dtype(torch.float64)
    assert not ambient.holds() and len(ambient.differences()) == 1
    assert not ambient.holds()
