"""Steps that no graph serves, on a GPU: inputs in the caller's memory, padding on the device."""

from __future__ import annotations

import pytest
import torch

from graphrt import Batch, GraphOptions, GraphRunner, InputSpec
from graphrt.errors import VerificationError

pytestmark = pytest.mark.cuda
SPECS = {name: InputSpec(torch.float32, ("tokens", 64)) for name in "xy"}


def test_a_miss_reads_device_inputs_in_place_and_copies_an_output_of_the_last_step() -> None:
    addresses: list[tuple[int, int]] = []

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        addresses.append((x.data_ptr(), y.data_ptr()))
        return x * 2 + y

    runner = GraphRunner(
        forward, inputs=SPECS, outputs=("tokens", None), mode="FULL", sizes=[4, 8], platform="cuda"
    )
    with runner:
        runner.capture()
        x, y = torch.randn(2, 30, 64, device="cuda")
        x, y = x.clone(), y.clone()
        assert torch.equal(runner(x=x, y=y), x * 2 + y)
        assert addresses[-1] == (x.data_ptr(), y.data_ptr())
        for _ in range(3):
            step = runner(x=x[:8].clone(), y=y[:8].clone())
            expected = step * 2 + y[:8]
            found = runner(Batch(8, exclude=frozenset({runner.mode})), x=step, y=y[:8])
            assert torch.equal(found, expected)
            assert addresses[-1][1] == y.data_ptr()
        own = runner.inputs.buffers["x"][:8]
        expected = own * 2 + y[:8]
        assert torch.equal(
            runner(Batch(8, exclude=frozenset({runner.mode})), x=own, y=y[:8]), expected
        )
        assert addresses[-1][0] != own.data_ptr()


def test_a_write_at_a_miss_names_the_input() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y) if len(x) > 8 else x + y

    runner = GraphRunner(forward, inputs=SPECS, mode="FULL", sizes=[4, 8], platform="cuda")
    with runner:
        runner.capture()
        x, y = (torch.randn(30, 64, device="cuda") for _ in range(2))
        with pytest.raises(VerificationError, match="written input 'x'"):
            runner(x=x, y=y)
        before = x.clone()
        assert torch.equal(runner(x=x, y=y), before + y)
        assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [3, 4])
def test_staged_device_inputs_of_several_dtypes_are_padded(rows: int) -> None:
    specs = {
        "a": InputSpec(torch.int64, ("tokens",)),
        "b": InputSpec(torch.int64, ("tokens", 5)),
        "c": InputSpec(torch.int32, ("tokens",), pad=-1),
        "d": InputSpec(torch.float32, ("tokens", 2), pad="repeat"),
        "e": InputSpec(torch.int32, ("tokens", 3)),
    }
    runner = GraphRunner(
        lambda **given: torch.cat([value.double().flatten() for value in given.values()]),
        inputs=specs,
        outputs=(None,),
        mode="FULL",
        sizes=[4],
        platform="cuda",
        options=GraphOptions(inputs_in_graph=False, check="off"),
    )
    with runner:
        runner.capture()
        for _ in range(4):
            given = {
                name: torch.randint(1, 9, spec.sizes(rows, rows), device="cuda").to(spec.dtype)
                for name, spec in specs.items()
            }
            expected = []
            for name, spec in specs.items():
                last, pad = given[name][-1:], spec.pad_value
                row = last if spec.pad == "repeat" else torch.full_like(last, pad)
                expected.append(torch.cat([given[name], *[row] * (4 - rows)]).double().flatten())
            assert torch.equal(runner(Batch(rows), **given), torch.cat(expected))
