"""Adapters of LoRA by their addresses, in one graph: `python3 examples/lora_by_address.py`.

Each token brings the addresses of its adapter's two weights, 0 for none, so adapters may come and
go and stay where they were loaded. Needs an NVIDIA GPU and Triton. graphrt neither keeps nor checks
what is behind an address: the host keeps an adapter until its last step has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrt import Batch, GraphRunner, InputSpec

WIDTH, RANK = 16, 8  # powers of two, as Triton's ranges are


@triton.jit
def _add_lora(x, table, out, WIDTH: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns, ranks = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, RANK)
    address = tl.load(table + 2 * row)
    if address != 0:
        down = address.to(tl.pointer_type(tl.float32))
        up = tl.load(table + 2 * row + 1).to(tl.pointer_type(tl.float32))
        tokens = tl.load(x + row * WIDTH + columns)
        into = tl.load(down + columns[:, None] * RANK + ranks[None, :])
        hidden = tl.sum(tokens[:, None] * into, 0)
        back = tl.load(up + ranks[:, None] * WIDTH + columns[None, :])
        at = out + row * WIDTH + columns
        tl.store(at, tl.load(at) + tl.sum(hidden[:, None] * back, 0))


@torch.library.custom_op("lora_by_address::add", mutates_args=("out",))
def add_lora(x: Tensor, table: Tensor, out: Tensor, rank: int) -> None:
    """Add each token's adapter, whose addresses are in a row of `table`, to `out`."""
    _add_lora[(x.shape[0],)](x, table, out, x.shape[1], rank)


def runner_of(base: torch.nn.Module) -> GraphRunner[Tensor]:
    """Graphs of a layer with the adapters of each token."""

    def forward(x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = base(x)
        add_lora(x, table, out, RANK)
        return out

    return GraphRunner(
        forward,
        mode="FULL",
        sizes=[1, 2, 4],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", WIDTH)),
            "table": InputSpec(torch.int64, ("tokens", 2), pad=0),
        },
        outputs=("tokens", WIDTH),
        platform="cuda",
    )


@torch.no_grad()
def main() -> None:
    base = torch.nn.Linear(WIDTH, WIDTH).cuda()
    with runner_of(base) as runner:
        runner.capture()
        for step in range(50):
            # Loaded for this step; the second token has none.
            loaded = [
                (torch.randn(WIDTH, RANK, device="cuda"), torch.randn(RANK, WIDTH, device="cuda"))
                for _ in range(step % 3)
            ]
            rows = [[each.data_ptr() for each in pair] for pair in loaded]
            rows.insert(min(1, len(rows)), [0, 0])
            x = torch.randn(len(rows), WIDTH, device="cuda")
            out = runner(Batch(len(rows)), x=x, table=torch.tensor(rows)).clone()
            expected, adapters = base(x), iter(loaded)
            for row, (address, _) in enumerate(rows):
                if address:
                    down, up = next(adapters)
                    expected[row] += x[row] @ down @ up
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
            torch.cuda.synchronize()
        print({reason.name: count for reason, count in runner.report().reasons.items() if count})


if __name__ == "__main__":
    main()
