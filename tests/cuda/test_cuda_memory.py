"""Device memory: what graphs hold, what they give back, and what they never copy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec, eager_break
from tests import alone

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
MIB = 1 << 20
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def free_memory() -> int:
    """Free bytes of the device, with all that nobody uses given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def free_bytes() -> Iterator[Callable[[], int]]:
    alone.skip_beside_others()
    yield free_memory
    # What the allocator keeps for itself is not there for the graphs of other tests.
    free_memory()


def test_capturing_with_a_device_filling_cache_copies_no_cache_memory(free_bytes):
    width = 1024
    rows = int(0.8 * free_bytes()) // (2 * width)
    cache = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
    cache_bytes = cache.numel() * cache.element_size()

    @eager_break
    def attend(hidden: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slots, hidden)
        return cache.index_select(0, slots) * 2

    def forward(hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return attend(hidden + 1, cache, slots) + 1

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with GraphRunner(
        forward,
        mode="FULL_AND_PIECEWISE",
        sizes=[2, 4, 8],
        max_num_reqs=8,
        max_num_tokens=8,
        inputs={
            "hidden": InputSpec(torch.bfloat16, ("tokens", width)),
            "slots": InputSpec(torch.int64, ("tokens",), pad=0, index=True),
        },
        outputs=("tokens", width),
        platform=DEVICE,
    ) as runner:
        runner.capture()
        for batch, mode in ((Batch(3, 3, 1), GraphMode.FULL), (Batch(3, 2), GraphMode.PIECEWISE)):
            cache[-8:].fill_(7)
            hidden = torch.full((3, width), float(batch.num_reqs), dtype=torch.bfloat16)
            # The last rows lie behind what 32 bits count, in elements and in bytes.
            out = runner(batch, hidden=hidden, slots=torch.tensor([rows - 1, rows - 3, 1]))
            assert runner.last_dispatch.mode is mode
            assert (out == 2 * (batch.num_reqs + 1) + 1).all()
            last = cache[-4:, 0].tolist()
            assert last == [7, batch.num_reqs + 1, 7, batch.num_reqs + 1]
            # The padding row wrote the dummy slot, and nothing else was written.
            assert cache[0, 0] == 1 and not cache[2:6].any()
    assert torch.cuda.max_memory_reserved() - before < 0.02 * cache_bytes


def typed(dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor [6, 8] with memory of its own; skips dtypes that cannot be allocated."""
    try:
        tensor = torch.empty(6, 8, dtype=dtype, device=device)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        pytest.skip(f"torch allocates no {dtype} here: {str(error).splitlines()[0]}")
    if tensor.is_quantized:
        pytest.skip(f"torch allocates {dtype} without a quantizer, and then takes no view of it")
    return tensor


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the whole storage of `tensor`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[1:5, ::2],
    "expanded": lambda t: t[2:3].expand(4, 8),
    "scalar": lambda t: t[3, 3],
    "empty": lambda t: t[:0],
}


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weak_tensor_reference_is_the_same_tensor_and_keeps_no_memory(dtype: torch.dtype) -> None:
    pool = GraphPool(DEVICE)
    for layout, cut in LAYOUTS.items():
        with pool.platform.allocate_in(pool.memory):
            own = typed(dtype, DEVICE)
            view = cut(own)
            weak = pool.platform.weak_ref(pool.memory, view)
            assert (weak.dtype, weak.device) == (view.dtype, view.device)
            assert (weak.shape, weak.stride()) == (view.shape, view.stride()), layout
            assert weak.storage_offset() == view.storage_offset(), layout
            assert weak.data_ptr() == view.data_ptr(), layout
            raw(own).fill_(0)
            raw(weak).fill_(171)
            assert (raw(own) == 171).all()
            address = own.untyped_storage().data_ptr()
            del own, view
            # The block is free while `weak` lives.
            assert typed(dtype, DEVICE).untyped_storage().data_ptr() == address, layout
    pool.close()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_smaller_sizes_reuse_memory_of_larger_sizes_and_close_frees_all(free_bytes, mode):
    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 4096)
        return eager_break(lambda t: t * 1)((wide * 2).sum(1, keepdim=True)) + wide[:, :8]

    before = free_bytes()
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[8, 64, 512, 1024],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform=DEVICE,
    )
    runner.capture()
    report = runner.report()
    largest, *smaller = report.graphs
    assert largest.descriptor.num_tokens == 1024
    assert largest.pool_bytes >= 128 * MIB
    assert 0 <= sum(record.pool_bytes for record in smaller) <= largest.pool_bytes // 8
    assert report.pool_bytes >= sum(record.pool_bytes for record in report.graphs)
    held = before - free_bytes()
    assert held >= report.pool_bytes
    runner.close()
    assert before - free_bytes() <= held - 0.95 * report.pool_bytes
