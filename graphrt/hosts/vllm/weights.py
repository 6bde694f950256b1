"""New weights in vLLM: whether the tensors that graphs read are where they were at the capture.

1. After `capture_model` the addresses of the models' tensors are noted: of the target's, and of a
   draft model's.
2. After `reload_weights`, and after a weight transfer, they are compared. vLLM writes in place, so
   graphs stay. Otherwise all graphs are destroyed, and steps run eagerly until vLLM captures again:
   it captures all of them or none, and its captures may write pages of live requests.

Hosts that write weights by other ways call `weights_changed()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from graphrt.core.base import tree
from graphrt.core.base.texts import listed
from graphrt.hosts.vllm.log import logger


class Weights:
    """The addresses of the models in this process, and what has captured graphs that read them."""

    def __init__(self) -> None:
        # A model -> name -> where its tensor was.
        self._were: WeakKeyDictionary[torch.nn.Module, dict[str, object]] = WeakKeyDictionary()
        self.managers: WeakSet[Any] = WeakSet()
        """vLLM's managers of FULL graphs that have captured."""
        self.encoders: WeakSet[Any] = WeakSet()
        """vLLM's managers of encoder graphs that have captured."""
        self.wrappers: Callable[[], list[Any]] = list
        """Returns vLLM's wrappers."""
        self.destroyed: Callable[[], object] = int
        """Called when all graphs are destroyed."""

    def captured(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A runner's `capture_model`, after which addresses are noted."""

        @functools.wraps(original)
        def capture_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(runner, *args, **kwargs)
            for model in _models_of(runner):
                self._were[model] = _places(model)
            return result

        return capture_model

    def compared(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method that loads weights, after which addresses are compared."""

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                # After an error too: it may have moved some.
                self.changed(original.__name__)

        return load

    def changed(self, name: str) -> int:
        """Compare, after a load by `name`; returns how many tensors have moved. If some have, all
        graphs are destroyed, and a line of the log says so."""
        if not self._were:
            return 0
        moved: list[str] = []
        for model, were in self._were.items():
            now = _places(model)
            kind = type(model).__name__
            moved += [f"{kind}.{each}" for each, was in were.items() if now.get(each) != was]
        if not moved:
            logger.info("graphrt: %s wrote in place, so all graphs stay", name)
            return 0
        self._were.clear()
        count = self._destroy()
        logger.warning(
            "graphrt: %s replaced %d tensors: %d FULL graphs of managers and those of all wrappers "
            "may read the old ones and are destroyed; steps run eagerly until "
            "`worker.model_runner.capture_model()` is called on each rank, while no request is "
            "running\n  got: %s",
            name,
            len(moved),
            count,
            listed(moved),
        )
        return len(moved)

    def _destroy(self) -> int:
        """Destroy all graphs; returns how many were not of wrappers."""
        self.destroyed()
        count = sum(len(manager.graphs) for manager in self.managers)
        for manager in self.managers:
            # Dispatches to no graph, until it captures again.
            manager._graphs_captured = False
            manager.graphs.clear()
        for encoder in self.encoders:
            encoder.clear()
        for wrapper in self.wrappers():
            wrapper.clear_graphs()
            # A wrapper that was cleared would capture at its next step.
            wrapper.seal()
        return count


def _models_of(runner: Any) -> Iterator[torch.nn.Module]:
    yield runner.get_model()
    draft = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(draft, "model", None)
    unwrap = getattr(type(model), "unwrap", None)
    model = model if unwrap is None else unwrap(model)
    if isinstance(model, torch.nn.Module):
        yield model


def _places(model: torch.nn.Module) -> dict[str, object]:
    """name -> where a tensor of the model is: of parameters, buffers, and plain attributes, such as
    what a backend of attention has computed of its weights."""
    return {
        f"{path}.{name}" if path else name: tree.identity(tensor)
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers, vars(module))
        for name, tensor in held.items()
        if isinstance(tensor, torch.Tensor)
    }
