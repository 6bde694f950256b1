"""Settings of the process that change what operators do are compared; others are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt import GraphRunner, InputSpec, Reason
from graphrt.compile.cache.key.versions import ambient_state
from graphrt.core.base import torch_names
from graphrt.core.base.settings import ASKED, TURN, Setting, around_part, settings
from graphrt.core.replay.entry import under_settings
from graphrt.errors import CaptureError, GraphQuarantinedWarning
from graphrt.trust import checks
from graphrt.trust.checks import Ambient
from tests.trust.twins import ambient_state_put_back

TABLE = {row.name: row for row in settings("cpu")}
IN_TURN = checks._EVERY * sum(row.step == TURN for row in TABLE.values())
"""Looks until each setting that takes long to read had its turn."""
_setters = torch._C
matmul = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _put_back():
    with ambient_state_put_back():
        torch.set_autocast_enabled("cpu", False)
        yield
        torch.set_default_device(None)


@pytest.fixture(params=["C", "Python", "one by one"])
def way(request, monkeypatch):
    """Torch's guard and reads, by C or by iterators; and where torch has no guard."""
    if request.param == "Python":
        monkeypatch.setattr(checks, "NativeGlances", None)
    elif request.param == "one by one":
        monkeypatch.setattr(torch_names, "state_guard", None)


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def set_by(setter: Callable[[object], object], value: object, before: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def put_back(row: Setting) -> contextlib.AbstractContextManager[object]:
    setter = setter_of(row.name)
    return set_by(setter, row.read(), row.read())


def setter_of(name: str) -> Callable[[bool], object]:
    """What sets a setting that is on or off."""
    of_attention = {
        "cudnn_sdp_enabled": _setters._set_sdp_use_cudnn,
        "flash_sdp_enabled": _setters._set_sdp_use_flash,
        "math_sdp_enabled": _setters._set_sdp_use_math,
        "mem_efficient_sdp_enabled": _setters._set_sdp_use_mem_efficient,
    }
    return of_attention.get(name) or getattr(_setters, f"_set_{name}")


def other_value(row: Setting) -> contextlib.AbstractContextManager[object]:
    """Inside, the setting of this row has another value."""
    name, now = row.name, row.read()
    set_fill = partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory")
    by_name: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "autocast on cpu": lambda: torch.autocast("cpu", torch.bfloat16),
        "default device": lambda: torch.device("meta"),
        "torch function modes": BaseTorchFunctionMode,
        "torch dispatch modes": Passes,
        "default dtype": lambda: set_by(torch.set_default_dtype, torch.float64, now),
        "deterministic algorithms": lambda: set_by(torch.set_deterministic_debug_mode, 2, now),
        "autocast cache": lambda: set_by(torch.set_autocast_cache_enabled, not now, now),
        "gradients": torch.enable_grad,
        "inference mode": torch.inference_mode,
        "fill uninitialized memory": lambda: set_by(set_fill, not now, now),
    }
    if name in by_name:
        return by_name[name]()
    if name.endswith("fp32_precision"):
        setter = partial(_setters._set_fp32_precision_setter, *name.split(".")[:2])
        return set_by(setter, "ieee" if now == "tf32" else "tf32", now)
    if name.startswith("allow_"):
        setter = partial(setattr, matmul, name.removesuffix("_split_k"))
        # Sums that are split must be allowed where reduced ones are.
        return set_by(setter, (False, False) if name.endswith("_split_k") else not now, now)
    return set_by(setter_of(name), not now, now)


def named(found: list[str]) -> set[str]:
    assert all(each.endswith(" at capture") for each in found)
    return {each.partition(":")[0] for each in found}


def holds(ambient: Ambient) -> bool:
    """Whether no step of as many as it takes at most finds a change."""
    return all(next(ambient.looks) for _ in range(IN_TURN))


COMPARED = [row for row in TABLE.values() if row.step]


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_a_changed_setting_is_named_with_both_values_until_set_back(row, way):
    ambient = Ambient("cpu")
    if row.step == ASKED:
        ambient.ask()
        assert ambient.differences() == []
    assert holds(ambient)
    with other_value(row):
        if row.step == TURN:
            assert not holds(ambient)
        else:
            assert not next(ambient.looks)
        assert row.name in named(ambient.differences())
        assert not any(next(ambient.looks) for _ in range(IN_TURN))
    assert ambient.differences() == [] and holds(ambient)


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_settings_are_compared_with_those_at_capture(row, way):
    if row.step == ASKED:
        pytest.skip("graphs have no gradients, whatever their capture had")
    with other_value(row):
        ambient = Ambient("cpu")
        assert holds(ambient)
    assert not holds(ambient) and row.name in named(ambient.differences())


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_an_eager_part_is_refused_under_another_setting_if_its_row_says_so(row):
    around = around_part()
    with other_value(row):
        if row.part and row.name != "autocast on cpu":
            with pytest.raises(CaptureError, match="the forward enters another setting") as caught:
                under_settings(holds, around)
            assert row.name.removesuffix("_split_k") in str(caught.value)
        else:
            # Autocast is entered again at replay.
            assert (under_settings(holds, around) is holds) != row.part


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_the_key_of_compiled_code_has_a_setting_if_its_row_says_so(row):
    before = ambient_state("cpu")
    with other_value(row):
        now = ambient_state("cpu")
    assert (row.name in {name for name in now if now[name] != before[name]}) == row.key


def runner_of_one_size() -> tuple[GraphRunner, torch.Tensor]:
    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    runner = GraphRunner(lambda x: x * 2, mode="FULL", sizes=[4], inputs=inputs, platform="cpu")
    runner.capture()
    x = torch.ones(4, 4)
    for _ in range(2):
        runner(x=x)
    assert runner.last_dispatch.reason is Reason.HIT
    return runner, x


def steps(runner: GraphRunner, x: torch.Tensor) -> None:
    for _ in range(IN_TURN):
        runner(x=x)


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_steps_run_eagerly_while_a_setting_differs_and_replay_when_it_is_set_back(row):
    if row.step == ASKED:
        pytest.skip("the forward does not ask for it")
    runner, x = runner_of_one_size()
    with other_value(row):
        with pytest.warns(GraphQuarantinedWarning, match=row.name):
            steps(runner, x)
        assert runner.last_dispatch.reason is Reason.SETTINGS_CHANGED
        runner(x=x)
        assert runner.last_dispatch.reason is Reason.SETTINGS_CHANGED
    runner(x=x)
    assert runner.last_dispatch.reason is Reason.HIT


CHANGES = {
    "allow_fp16_accumulation": partial(setattr, matmul, "allow_fp16_accumulation", True),
    "cudnn.deterministic": partial(setattr, torch.backends.cudnn, "deterministic", True),
    "cudnn.enabled": partial(setattr, torch.backends.cudnn, "enabled", False),
    "flash": partial(torch.backends.cuda.enable_flash_sdp, False),
    "kernel of attention": lambda: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_step_after_a_change_by_torchs_public_names_runs_eagerly(name):
    if "cudnn" in name and torch.backends.flags_frozen():
        pytest.skip("torch's own test helpers, once imported, let nobody write cudnn's settings")
    runner, x = runner_of_one_size()
    rows = [TABLE[each] for each in ("cublas_allow_fp16_accumulation", "cudnn_deterministic")]
    rows += [TABLE[each] for each in ("cudnn_enabled", "flash_sdp_enabled")]
    with contextlib.ExitStack() as stack:
        for row in rows:
            stack.enter_context(put_back(row))
        if name == "kernel of attention":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        CHANGES[name]()
        with pytest.warns(GraphQuarantinedWarning):
            runner(x=x)
        assert runner.last_dispatch.reason is Reason.SETTINGS_CHANGED
    runner(x=x)
    assert runner.last_dispatch.reason is Reason.HIT


def test_precision_none_is_that_of_ieee(way):
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "none"
        ambient = Ambient("cpu")
        matmul.fp32_precision = "ieee"
        assert ambient.differences() == [] and holds(ambient)
        matmul.fp32_precision = "tf32"
        assert ambient.differences() == ["cuda.matmul.fp32_precision: tf32, ieee at capture"]
    finally:
        matmul.fp32_precision = before


def test_the_dtype_of_autocast_counts_where_autocast_is_on(way):
    ambient = Ambient("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    assert ambient.differences() == [] and holds(ambient)
    torch.set_autocast_enabled("cpu", True)
    on = Ambient("cpu")
    assert holds(on)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert not holds(on)
    assert on.differences() == ["autocast on cpu: torch.bfloat16, torch.float16 at capture"]


def test_autocast_of_another_device_is_not_compared(way):
    ambient = Ambient("cpu")
    torch.set_autocast_enabled("cuda", True)
    assert ambient.differences() == [] and holds(ambient)


@pytest.mark.parametrize("harmless", ["gradients", "inference mode", "threads", "cudnn.benchmark"])
def test_changed_grad_mode_inference_mode_threads_and_benchmark_count_as_harmless(harmless, way):
    ambient = Ambient("cpu")
    if harmless == "threads":
        torch.set_num_threads(torch.get_num_threads() + 1)
        assert ambient.differences() == [] and holds(ambient)
        return
    around = {
        "gradients": torch.enable_grad,
        "inference mode": torch.inference_mode,
        "cudnn.benchmark": lambda: other_value(TABLE["cudnn_benchmark"]),
    }[harmless]
    with around():
        assert ambient.differences() == []
        assert holds(ambient)
    assert ambient.differences() == [] and holds(ambient)


def test_several_changed_settings_are_all_named(way):
    ambient = Ambient("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_default_dtype(torch.float64)
    assert named(ambient.differences()) == {"autocast on cpu", "default dtype"}


def test_after_a_harmless_change_a_harmful_change_is_still_found(way):
    ambient = Ambient("cpu")
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert ambient.differences() == []
    torch.set_default_dtype(torch.float64)
    assert not holds(ambient) and len(ambient.differences()) == 1
    assert not holds(ambient)
