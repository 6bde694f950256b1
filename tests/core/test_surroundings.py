"""Runners work under any default device, default dtype and inference mode."""

from __future__ import annotations

import ast
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

import graphrt
from graphrt import (
    Batch,
    Example,
    GraphOptions,
    GraphRunner,
    Host,
    InputSpec,
    eager_break,
)
from graphrt.core.base import thread_mode
from tests.draws import rest_long

WIDTH = 8


@contextmanager
def default_device(device: str):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# On "meta" lands every tensor whose device nobody names.
SURROUNDINGS = {
    "default device meta": lambda: default_device("meta"),
    "device context meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
    "default device cpu": lambda: default_device("cpu"),
}


class Serving:
    """A forward with an eager part, state, an index input, and one of requests."""

    def __init__(self, device: str) -> None:
        of = {"device": device, "dtype": torch.float32}
        numbers = torch.arange(WIDTH * WIDTH, **of).reshape(WIDTH, WIDTH)
        self.device = device
        self.weight = (numbers / 50).sin()
        self.cache = torch.zeros(9, WIDTH, **of)

    def forward(self, x, slots, starts):
        self.cache[slots] = x
        hidden = self.scaled(x @ self.weight)
        return {"hidden": hidden, "mean": hidden.mean(1, keepdim=True), "starts": starts[1:]}

    @eager_break
    def scaled(self, x):
        return x * 2

    def values(self, rows: int, device: str, reqs: int | None = None) -> dict[str, torch.Tensor]:
        x = torch.arange(rows * WIDTH, device=device, dtype=torch.float32)
        return {
            "x": (x.reshape(rows, WIDTH) / 7).cos(),
            "slots": torch.arange(rows, device=device, dtype=torch.int64),
            "starts": torch.arange((reqs or rows) + 1, device=device, dtype=torch.int32),
        }

    def expected(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = values["x"].to(self.device) @ self.weight * 2
        return {
            "hidden": hidden,
            "mean": hidden.mean(1, keepdim=True),
            "starts": values["starts"][1:].to(self.device),
        }


def check(
    around: AbstractContextManager[object], device: str, mode: str, outputs: str, level: str
) -> None:
    """Capture, steps, padded and larger than all graphs, verify, slot, report and release."""
    model = Serving(device)

    def example(batch, generator):
        return Example(values=model.values(batch.num_tokens, "cpu", batch.num_reqs))

    with around:
        runner = GraphRunner(
            model.forward,
            mode=mode,
            sizes=[1, 2, 4],
            inputs={
                "x": InputSpec(torch.float32, ("tokens", WIDTH)),
                "slots": InputSpec(torch.int64, ("tokens",), pad=8, index=True),
                "starts": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
            },
            outputs={"hidden": ("tokens", WIDTH), "mean": ("tokens", 1), "starts": ("reqs",)},
            options=GraphOptions(outputs=outputs, check=level),
            host=Host(example=example),
        )
        runner.capture()
        for rows in (4, 3, 1, 2, 4, 3, 6):
            for lies_on in {"cpu", device}:
                values = model.values(rows, lies_on)
                out = runner(Batch(rows, rows), **values)
                same(out, model.expected(values))
                assert runner.last_dispatch.reason.name == ("HIT" if rows < 5 else "TOO_LARGE")
        values = model.values(3, "cpu")
        runner.verify(Batch(3, 3), **values)
        slot = runner.slot(Batch(3, 3))
        for name, value in values.items():
            slot[name].copy_(value)
        same(runner(slot), model.expected(values))
        report = runner.report()
        assert all(t.status != "quarantined" for t in report.trust.trials)
        assert str(report)
        runner.recapture()
        same(runner(Batch(3, 3), **values), model.expected(values))
        runner.close()


def same(out: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert out[name].dtype == tensor.dtype and out[name].device == tensor.device
        torch.testing.assert_close(out[name].cpu(), tensor.cpu())


# Outputs are made without checks, and looked at by a trial.
KEPT = {("pool", "always"), ("static", "capture"), ("clone", "off")}


@pytest.mark.trust
@pytest.mark.parametrize(
    ("outputs", "level"),
    rest_long(product(["pool", "static", "clone"], ["off", "capture", "always"]), *KEPT),
)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_cpu_runner_works_under_any_default_device_dtype_or_inference_mode(
    name, mode, outputs, level
):
    check(SURROUNDINGS[name](), "cpu", mode, outputs, level)


@pytest.mark.cuda
@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", ["default device cuda", *SURROUNDINGS])
def test_a_gpu_runner_works_under_any_default_device_dtype_or_inference_mode(name, mode, outputs):
    around = SURROUNDINGS.get(name, lambda: default_device("cuda"))
    check(around(), "cuda", mode, outputs, "capture")


MADE_BY_SHAPE = {"zeros", "empty", "ones", "full", "rand", "randn", "eye", "empty_strided"}
MADE = MADE_BY_SHAPE | {"tensor", "arange", "as_tensor", "randint", "linspace", "scalar_tensor"}


def test_every_tensor_factory_call_in_graphrt_gives_device_and_dtype():
    package = Path(graphrt.__file__).parent
    unnamed = []
    for file in package.rglob("*.py"):
        if "testing" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            module, _, name = ast.unparse(node.func).rpartition(".")
            if module != "torch" or name not in MADE:
                continue
            arguments = {keyword.arg for keyword in node.keywords}
            wanted = {"device", "dtype"} if name in MADE_BY_SHAPE else {"device"}
            if None not in arguments and not wanted <= arguments:
                unnamed.append(f"{file.relative_to(package)}:{node.lineno}: {wanted - arguments}")
    assert unnamed == []


def test_without_free_keys_survives_a_key_taken_by_another_thread(monkeypatch):
    class Keys:
        def remove(self, key):
            thread_mode._free_keys["taken meanwhile"] = None
            return included()

    included = thread_mode.private.included_keys
    monkeypatch.setattr(thread_mode, "_free_keys", {"taken before": None})
    monkeypatch.setattr(thread_mode.private, "included_keys", Keys)
    assert thread_mode.without_free_keys(lambda: "called") == "called"
