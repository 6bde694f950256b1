"""Orders of updating the tasks of a graph and replaying it: `python update_orders.py ORDER`.

Run as a script it prints what came out, because the wrong orders leave a device that hangs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

LAYERS, STEPS = 3, 5
OPTIONS: dict[str, Any] = {"num_heads": 2, "input_layout": "BNSD", "scale": 0.5}


class Attention:
    """A graph of attention layers whose lengths are updated, and what it should compute."""

    def __init__(self, pool: Any = None) -> None:
        draw = torch.Generator().manual_seed(0)
        self.host = [torch.randn(1, 2, 8, 16, generator=draw) for _ in range(2 * LAYERS)]
        self.device = [tensor.half().npu() for tensor in self.host]
        self.query = torch.randn(1, 2, 1, 16, generator=draw)
        self.updates = torch.npu.Stream()
        self.done: Any = None
        self.graph, self.sites = torch.npu.NPUGraph(), []
        hidden = self.query.half().npu()
        self.keep = hidden
        # Of the most that any lengths need, and kept: an update that allocates its own is an error.
        self.workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            hidden, self.device[0], self.device[1], actual_seq_lengths_kv=[8], **OPTIONS
        )
        with torch.npu.graph(self.graph, pool=pool):
            stream = torch.npu.current_stream()
            for layer in range(LAYERS):
                event = torch.npu.ExternalEvent()
                event.wait(stream)
                event.reset(stream)
                out = torch.empty_like(hidden), torch.empty(1, device="npu")
                torch.npu.graph_task_group_begin(stream)
                self.issue(layer, hidden, out, 1)
                group = torch.npu.graph_task_group_end(stream)
                self.sites.append((layer, hidden, out, event, group))
                hidden = out[0] + hidden
        self.out = hidden

    def issue(self, layer: int, query: Any, out: Any, length: int) -> None:
        torch_npu.npu_fused_infer_attention_score.out(
            query, self.device[2 * layer], self.device[2 * layer + 1],
            actual_seq_lengths_kv=[length], out=list(out), workspace=self.workspace, **OPTIONS,
        )  # fmt: skip

    def expected(self, length: int) -> torch.Tensor:
        hidden = self.query
        for layer in range(LAYERS):
            key, value = (tensor[:, :, :length] for tensor in self.host[2 * layer : 2 * layer + 2])
            scores = hidden @ key.transpose(-1, -2) * OPTIONS["scale"]
            hidden = torch.softmax(scores, -1) @ value + hidden
        return hidden

    def update(self, length: int, sites: int = LAYERS, fail_at: int | None = None) -> None:
        torch.npu.set_device(0)
        stream = self.updates
        with torch.npu.stream(stream):
            for layer, query, out, event, group in self.sites[:sites]:
                torch.npu.graph_task_update_begin(stream, group)
                try:
                    if layer == fail_at:
                        raise ArithmeticError
                    self.issue(layer, query, out, length)
                finally:
                    torch.npu.graph_task_update_end(stream)
                event.record(stream)

    def replay(self) -> None:
        self.graph.replay()
        self.done = torch.npu.Event()
        self.done.record()

    def fence(self) -> None:
        if self.done is not None:
            self.updates.wait_event(self.done)


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def host_wait_then_replay(model: Attention, length: int) -> None:
    torch.npu.current_stream().synchronize()
    model.replay()
    model.update(length)


def host_wait_then_update(model: Attention, length: int) -> None:
    torch.npu.current_stream().synchronize()
    model.update(length)
    model.replay()


def stream_wait_then_replay(model: Attention, length: int) -> None:
    model.updates.wait_stream(torch.npu.current_stream())
    model.replay()
    model.update(length)


def stream_wait_then_update(model: Attention, length: int) -> None:
    model.updates.wait_stream(torch.npu.current_stream())
    model.update(length)
    model.replay()


def graph_wait_then_replay(model: Attention, length: int) -> None:
    model.fence()
    model.replay()
    model.update(length)


def graph_wait_then_update(model: Attention, length: int) -> None:
    model.fence()
    model.update(length)
    model.replay()


def host_wait_then_both(model: Attention, length: int) -> None:
    torch.npu.current_stream().synchronize()
    thread = in_thread(lambda: model.update(length))
    model.replay()
    thread.join()


def replay_without_wait(model: Attention, length: int) -> None:
    model.replay()
    model.update(length)


def update_without_wait(model: Attention, length: int) -> None:
    model.update(length)
    model.replay()


def one_site_left_out(model: Attention, length: int) -> None:
    torch.npu.current_stream().synchronize()
    model.replay()
    model.update(length, sites=LAYERS - 1)


def no_update(model: Attention, length: int) -> None:
    model.replay()


def two_replays_an_update(model: Attention, length: int) -> None:
    model.fence()
    model.update(length)
    model.replay()
    model.replay()


RIGHT = [
    host_wait_then_replay,
    host_wait_then_update,
    stream_wait_then_replay,
    stream_wait_then_update,
    graph_wait_then_replay,
    graph_wait_then_update,
    host_wait_then_both,
]
WRONG = [
    replay_without_wait,
    update_without_wait,
    one_site_left_out,
    no_update,
    two_replays_an_update,
]


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a result in float16 is this one; those of other lengths are further away."""
    return torch.allclose(out.cpu().float(), expected, atol=2e-2)


def wrong_steps(order: Callable[[Attention, int], None]) -> list[int]:
    """The steps whose result is not the expected one."""
    model, found = Attention(), []
    for length in range(1, STEPS + 1):
        order(model, length)
        found.append(model.out.clone())
    torch.npu.synchronize()
    return [length for length, out in enumerate(found, 1) if not close(out, model.expected(length))]


def main(name: str) -> None:
    try:
        print("wrong steps:", wrong_steps(globals()[name]))
    except RuntimeError as error:
        print(str(error).replace("\n", " | "))


if __name__ == "__main__":
    main(sys.argv[1])
