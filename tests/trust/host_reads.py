"""Values that the host reads out of tensors inside the forward, by ways that torch sees or not,
and operators of the host's own that do more than their schema says."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch

from tests.trust.scenario import Scenario, at_change, defect

SETTINGS: dict[str, Any] = {}
"""What the custom operators below read and write beside their arguments."""


@torch.library.custom_op("graphrt_trust::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    """Reads a global Python number."""
    return x * SETTINGS["scale"]


@torch.library.custom_op("graphrt_trust::counted", mutates_args=())
def counted(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Writes `count`, which its schema denies."""
    count.add_(1)
    return x * count


@torch.library.custom_op("graphrt_trust::global_counted", mutates_args=())
def global_counted(x: torch.Tensor) -> torch.Tensor:
    """Reads and writes a tensor that is no argument."""
    SETTINGS["count"].add_(1)
    return x * SETTINGS["count"]


@torch.library.custom_op("graphrt_trust::indexed", mutates_args=())
def indexed(x: torch.Tensor) -> torch.Tensor:
    """Counts its calls in Python."""
    SETTINGS["calls"] += 1
    return x * SETTINGS["calls"]


@defect("host read", "silent", devices=("cpu",))
def memory_read_through_ctypes(device):
    scale = torch.ones(8)

    def forward(x):
        return x * ctypes.cast(scale.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]

    return Scenario(forward, between=at_change(lambda: scale.fill_(3)))


@defect("host read", "named", devices=("cpu",))
def weight_read_through_numpy(device):
    scale = torch.ones(8)
    return Scenario(
        lambda x: x * float(scale.numpy()[2]), between=at_change(lambda: scale.fill_(3))
    )


@defect("host read", "late", devices=("cpu",))
def numpy_array_taken_before(device):
    scale = torch.ones(8)
    array = scale.numpy()
    return Scenario(lambda x: x * float(array.sum()), between=at_change(lambda: scale.fill_(3)))


@defect("host read", "named", devices=("cpu",))
def input_read_through_numpy(device):
    return Scenario(lambda x: x * float(x.numpy()[0, 0]))


@defect("host read", "named", devices=("cpu",))
def weight_read_through_dlpack(device):
    scale = torch.ones(8)

    def forward(x):
        copied = torch.from_dlpack(scale).numpy().tolist()
        return x * copied[0]

    return Scenario(forward, between=at_change(lambda: scale.fill_(3)))


@defect("host read", "named")
def item_of_a_weight(device):
    scale = torch.ones(8)
    return Scenario(lambda x: x * scale[0].item(), between=at_change(lambda: scale.fill_(3)))


@defect("host read", "named")
def list_of_a_weight(device):
    scale = torch.ones(8)
    return Scenario(lambda x: x * sum(scale.tolist()), between=at_change(lambda: scale.fill_(3)))


@defect("host read", "named")
def item_of_a_length_kept_on_the_host(device):
    length = torch.zeros((), dtype=torch.int64, device="cpu")

    def forward(x):
        return x * (1 + length.item())

    return Scenario(forward, between=lambda step: length.fill_(step))


@defect("host read", "named")
def position_kept_in_a_tensor_on_the_host(device):
    table = torch.randn(128, 8)
    position = torch.zeros((), dtype=torch.int64, device="cpu")

    def forward(x):
        position.add_(1)
        return x + table[int(position)]

    return Scenario(forward, state=lambda: [position])


@defect("host read", "named")
def branch_by_a_value_of_the_input(device):
    return Scenario(lambda x: torch.relu(x) if x[0, 0].item() > 0 else torch.tanh(x))


@defect("host read", "named")
def branch_by_a_tensor_itself(device):
    def forward(x):
        if (x[0] > 0.5).any():
            return x * 2
        return x * 3

    return Scenario(forward)


@defect("host read", "named")
def early_exit_when_a_residual_is_small(device):
    weight = torch.randn(8, 8) * 0.3

    def forward(x):
        for _ in range(8):
            x = torch.tanh(x @ weight)
            if x.abs().max() < 0.3:
                break
        return x

    return Scenario(forward)


@defect("host read", "named")
def loop_over_the_largest_value(device):
    def forward(x):
        for _ in range(1 + int(x.abs().max())):
            x = x * 1.5
        return x

    return Scenario(forward)


@defect("host read", "named")
def rows_chosen_by_a_mask(device):
    def forward(x):
        positive = x[x[:, 0] > 0]
        return x + positive.sum(0)

    return Scenario(forward)


@defect("host read", "named")
def nonzero_experts(device):
    experts = torch.randn(4, 8, 8)

    def forward(x):
        chosen = x[:, :4].argmax(1)
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            at = (chosen == expert).nonzero().squeeze(1)
            out.index_copy_(0, at, x[at] @ experts[expert])
        return out

    return Scenario(forward)


@defect("host read", "named")
def copied_to_the_host_and_back(device):
    def forward(x):
        return torch.tensor([row[::-1] for row in x.cpu().tolist()], device=x.device)

    return Scenario(forward)


@defect("host read", "named")
def python_list_that_changes_made_a_tensor(device):
    lengths = [1.0] * 8

    def between(step):
        lengths[step % 8] = 3.0 + step

    return Scenario(lambda x: x * torch.tensor(lengths, device=x.device), between=between)


@defect("host read", "named", drifts=True)
def count_made_a_tensor(device):
    model = SimpleNamespace(calls=0)

    def forward(x):
        model.calls += 1
        return x * torch.tensor(float(model.calls), device=x.device)

    return Scenario(forward)


@defect("host read", "named")
def length_of_a_list_made_a_tensor(device):
    queue: list[int] = []

    def forward(x):
        return x + torch.full((1,), len(queue), dtype=torch.float32, device=x.device)

    return Scenario(forward, between=lambda step: queue.append(step) if step else None)


@defect("operator", "right", on_cuda="silent")
def custom_operator_reads_a_global(device):
    SETTINGS["scale"] = 1.0
    return Scenario(scaled, between=at_change(lambda: SETTINGS.update(scale=3.0)))


@defect("operator", "named", drifts=True)
def custom_operator_counts_its_calls(device):
    SETTINGS["calls"] = 0
    return Scenario(indexed)


@defect("operator", "named", drifts=True)
def custom_operator_hides_a_write(device):
    count = torch.zeros(1)
    return Scenario(lambda x: counted(x, count))


@defect("operator", "named", drifts=True)
def custom_operator_writes_a_global_tensor(device):
    SETTINGS["count"] = torch.zeros(1)
    return Scenario(global_counted)


@defect("operator", "late", long=True)
def custom_autograd_function_reads_a_global(device):
    SETTINGS["scale"] = 1.0

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * SETTINGS["scale"]

    change = at_change(lambda: SETTINGS.update(scale=3.0))
    return Scenario(lambda x: Scaled.apply(x), between=change)
