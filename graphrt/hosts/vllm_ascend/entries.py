"""The captured graphs of a wrapper, as vllm-ascend looks at them and throws them away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphrt.core.replay import Entry, graphs_of


class ACLGraphEntry:
    """One captured graph: vLLM's descriptor, the device's graph, and what a replay returns."""

    def __init__(self, batch_descriptor: Any, entry: Entry, input_addresses: list[int]) -> None:
        self.batch_descriptor = batch_descriptor
        self.input_addresses = input_addresses
        self._entry = entry

    @property
    def aclgraph(self) -> Any:
        """The graph of torch_npu; graphrt alone replays it."""
        return graphs_of(self._entry.parts)[0]

    @property
    def output(self) -> Any:
        """Weak references to what the graph writes."""
        return self._entry.outputs


class Entries(dict[Any, ACLGraphEntry]):
    """Captured graphs by vLLM's descriptor; one that is taken out is destroyed."""

    def __init__(self, drop: Callable[[Any], None]) -> None:
        super().__init__()
        self._drop = drop

    def add(self, key: Any, entry: ACLGraphEntry) -> None:
        """Note a graph that was captured."""
        super().__setitem__(key, entry)

    def __setitem__(self, key: Any, entry: Any) -> None:
        raise TypeError("graphs of a wrapper come from captures alone")

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._drop(key)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        found = super().pop(key, *default)
        self._drop(key)
        return found
