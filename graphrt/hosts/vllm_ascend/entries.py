"""The captured graphs of a wrapper, as vllm-ascend looks at them and throws them away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from graphrt.core.replay.entry import Entry, graphs_of


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
    """Captured graphs by vLLM's descriptor; one that is taken out is destroyed.

    While a step waits for its update none can be destroyed, as that would wait for the device.
    """

    def __init__(self, check_idle: Callable[[], None], drop: Callable[[Any], None]) -> None:
        """`check_idle` raises while a step is under way."""
        super().__init__()
        self._check_idle = check_idle
        self._drop = drop

    def add(self, key: Any, entry: ACLGraphEntry) -> None:
        """Note a graph that was captured."""
        super().__setitem__(key, entry)

    def __delitem__(self, key: Any) -> None:
        if key in self:
            self._check_idle()
        super().__delitem__(key)
        self._drop(key)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        entry = self[key]
        del self[key]
        return entry

    def popitem(self) -> tuple[Any, ACLGraphEntry]:
        if not self:
            return super().popitem()
        key = next(reversed(self))
        return key, self.pop(key)

    def _no_other_way(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("graphs of a wrapper come from captures alone")

    __setitem__ = setdefault = update = __ior__ = _no_other_way
