"""The page of adapters on a GPU: one graph for adapters of any address, by a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import Batch, GraphRunner, Reason
from tests.test_readme import blocks

pytestmark = pytest.mark.cuda

PAGE = "docs/how-to/adapters.md"


@pytest.fixture
def names(tmp_path: Any) -> dict[str, Any]:
    pytest.importorskip("triton", reason="triton is not installed")
    (block,) = [each for each in blocks(PAGE) if "tl.load" in each.code]
    # Triton reads the source of a kernel from its file.
    script = tmp_path / "page.py"
    script.write_text(block.code, encoding="utf-8")
    names: dict[str, Any] = {"torch": torch, "WIDTH": 16, "RANK": 8, "__name__": "adapters_page"}
    exec("from graphrt import InputSpec", names)
    names["base"] = torch.nn.Linear(16, 16).cuda()
    exec(compile(block.code, str(script), "exec"), names)
    return names


def test_adapters_that_come_and_go_by_address_are_served_by_one_graph(names: dict[str, Any]):
    def new() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(16, 8, device="cuda"), torch.randn(8, 16, device="cuda")

    with (
        torch.no_grad(),
        GraphRunner(
            names["by_address"],
            mode="FULL",
            sizes=[1, 2, 4],
            inputs=names["inputs"],
            outputs=("tokens", 16),
            platform="cuda",
        ) as runner,
    ):
        runner.capture()
        for step in range(50):
            rows = 1 + step % 4
            adapters = [new() if row % 3 else None for row in range(step % 3, step % 3 + rows)]
            x = torch.randn(rows, 16, device="cuda")
            table = [[each.data_ptr() for each in pair] if pair else [0, 0] for pair in adapters]
            out = runner(Batch(rows), x=x, table=torch.tensor(table)).clone()
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT
            expected = names["base"](x)
            for row, pair in enumerate(adapters):
                if pair is not None:
                    expected[row] += x[row] @ pair[0] @ pair[1]
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
            torch.cuda.synchronize()
