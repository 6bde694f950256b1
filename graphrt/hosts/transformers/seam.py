"""`Seam`: replaces methods of a model by ours, captures it, and says why it has no graphs.

What cannot be captured runs as before. A model with other weights, layers or attributes than at
the capture is not served until `recapture()`. Each set of active adapters of PEFT has graphs of its
own, captured where it is first used.
"""

from __future__ import annotations

import functools
import linecache
import threading
import traceback
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphrt.core.base.log import logger
from graphrt.core.base.texts import error_line
from graphrt.core.runner.findings import Look
from graphrt.errors import CaptureError, GraphRTError
from graphrt.hosts.advice import advise
from graphrt.hosts.same_model import SameModel
from graphrt.hosts.transformers.adapters import MOST, Adapters
from graphrt.hosts.transformers.changes import hooks_inside, is_unread
from graphrt.hosts.transformers.reports import Counts

NO_GRAPHS = "the model has no graphs"

_NOT_A_MODELS = ("torch.", "graphrt.")
"""Modules that run below a model's code, and above it."""


@dataclass
class Captured:
    """What was captured for one set of active adapters, and the model as it was then."""

    graphs: Any
    """`StepGraphs` or `Buckets`."""
    active: Hashable
    adapters: Adapters
    model: SameModel


class Seam(ABC):
    """Stands between one model and its graphs; base of `ModelGraphs` and `EncoderGraphs`."""

    _UNREAD: frozenset[str] = frozenset()
    """Names of the config that calls by graphs do not read."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # Why there are no graphs; None if there are.
        self._refused: str | None = "captured nothing yet: recapture() does"
        self._counts = Counts(type(model).__name__)
        # A forward that the instance had already; None if it has that of its class.
        self._models_own: Callable[..., Any] | None = model.__dict__.get("forward")
        # Name of a replaced method -> the instance's attribute before; None if it had none.
        self._before: dict[str, Any] = {}
        # Held by a call that uses the graphs or their memory.
        self._using = threading.RLock()
        # The active adapters -> what was captured for them, or why that failed; which of it serves
        # steps; and the first part of the model that has changed since.
        self._by_adapters: dict[Hashable, Captured | str] = {}
        self._captured: Captured | None = None
        self._changed: str | None = None

    @property
    def _forward(self) -> Callable[..., Any]:
        """The model's own forward; that of its class may be replaced at any time."""
        return self._models_own or types.MethodType(type(self.model).forward, self.model)

    def install(self) -> None:
        """Put our methods in front of the model's."""
        for name, method in self._methods().items():
            self._before[name] = self.model.__dict__.get(name)
            kind = _InstalledForward if name == "forward" else _Installed
            self.model.__dict__[name] = kind(method, getattr(self.model, name))

    def uninstall(self) -> None:
        """Give the model its methods back, and the memory to the device."""
        for name, original in self._before.items():
            if original is None:
                self.model.__dict__.pop(name, None)
            else:
                self.model.__dict__[name] = original
        with self._using:
            self._release()

    def capture(self, *, strict: bool) -> None:
        """Capture all graphs. What fails is raised with `strict`, and else logged: the model then
        runs as before."""
        with self._using:
            self._release()
            try:
                self._captured = self._capture_for(None)
            except Exception as error:
                # graphrt's, or the model's own, which is called here as users call it.
                advise(error)
                if strict:
                    raise
                self._refused = f"{error_line(error)}{_line_of(error)}"
                name = type(self.model).__name__
                logger.warning("%s has no graphs: %s", name, self._refused)
            else:
                self._refused, self._changed = None, None
                self._by_adapters[self._captured.active] = self._captured

    def _capture_for(self, beside: Captured | None) -> Captured:
        """Capture all graphs for the adapters that are active now, `beside` those of others."""
        self._check_model()
        # Memory made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            graphs = self._capture(None if beside is None else beside.graphs)
        adapters = Adapters(self.model)
        return Captured(graphs, adapters.active(), adapters, self._as_now(adapters))

    def _as_now(self, adapters: Adapters) -> SameModel:
        is_same = functools.partial(is_unread, adapters=adapters, unread=self._UNREAD)
        return SameModel(self._forward, is_same)

    def recapture(self) -> None:
        """Capture again, after a change of the model; raises what capturing raises."""
        self.capture(strict=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copy of the model has no graphs.
        return None

    @abstractmethod
    def _methods(self) -> dict[str, Callable[..., Any]]:
        """Name of a method of the model -> our method in its place."""

    @abstractmethod
    def _capture(self, beside: Any) -> Any:
        """Capture all graphs and return them; there are none yet but those `beside`."""

    def _release(self) -> None:
        """Destroy the graphs, if there are some."""
        for each in self._by_adapters.values():
            if isinstance(each, Captured):
                each.graphs.close()
        self._by_adapters, self._captured = {}, None

    def _check_model(self) -> None:
        if self.model.training:
            raise CaptureError(
                "the model is in training mode",
                got="model.training is True",
                expected="a model that runs without dropout",
                advice="model.eval()",
            )
        hook = hooks_inside(self.model)
        if hook is not None:
            raise CaptureError(
                "a graph would not run the Python code of hooks",
                got=hook,
                expected="no forward hooks inside of the model but accelerate's",
                advice="remove the hooks, then recapture()",
            )
        placed = getattr(self.model, "hf_device_map", None) or {}
        devices = {str(each) for each in placed.values()}
        mesh = getattr(self.model, "_device_mesh", None)
        if len(devices) > 1 or mesh is not None:
            raise CaptureError(
                "the model is on several devices",
                got=", ".join(sorted(devices)) if mesh is None else f"tensor parallelism: {mesh}",
                expected="all of it on one device",
                advice='device_map={"": 0}, or leave with_graphs() out',
            )

    def _look_at_model(self, *, captures: bool = False) -> None:
        """Find out whether the model has changed. Other adapters may have graphs too; with
        `captures` they get some where they are first used."""
        captured = self._captured
        if captured is None:
            return
        self._changed = self._first_change(captured)
        if self._changed is not None:
            with self._using:
                self._follow_adapters(captured, captures)

    def _first_change(self, captured: Captured) -> str | None:
        changed = next(iter(self._look(captured.model).names), None)
        if changed is None and captured.adapters.saw_idle:
            # The picture would keep deleted adapters alive, and has nothing of new ones.
            captured.adapters = Adapters(self.model)
            captured.model = self._as_now(captured.adapters)
        return changed

    def _look(self, model: SameModel) -> Look:
        return model.look()

    def _follow_adapters(self, captured: Captured, captures: bool) -> None:
        """Go over to the graphs of the adapters that are active now, if they are others."""
        adapters = Adapters(self.model)
        active = adapters.active()
        if active == captured.active:
            return
        other = self._by_adapters.get(active)
        if other is None and captures and not self.model.training:
            other = self._by_adapters[active] = self._capture_beside(captured, adapters)
        if isinstance(other, Captured):
            self._captured, self._changed = other, self._first_change(other)
        else:
            self._changed = other or "its adapters"

    def _capture_beside(self, captured: Captured, adapters: Adapters) -> Captured | str:
        """Capture for adapters that are used for the first time; or say why that failed. Graphs of
        deleted adapters are destroyed before."""
        for active, each in [*self._by_adapters.items()]:
            if not adapters.has(active):
                del self._by_adapters[active]
                if isinstance(each, Captured):
                    each.graphs.close()
        if len(self._by_adapters) >= MOST:
            return f"its adapters, where {MOST} sets have graphs"
        try:
            return self._capture_for(captured)
        except Exception as error:
            advise(error)
            return f"its adapters, which have no graphs: {error_line(error)}{_line_of(error)}"

    def _why_other_model(self) -> str | None:
        """Why graphs do not stand for the model as it is now; None if they do."""
        if self.model.training:
            return "the model is in training mode"
        if torch.is_grad_enabled():
            return "gradients are on"
        if self._changed is not None:
            return f"the model is not as it was captured ({self._changed}): recapture()"
        return None


class _Installed:
    """A method in place of a model's own, whose name and signature it has."""

    def __init__(self, method: Callable[..., Any], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the model calls its own method: ours would run the first model's weights.
        seam = self._method.__self__  # type: ignore[attr-defined]
        method = getattr(type(seam.model), self.__name__)  # type: ignore[attr-defined]
        return types.MethodType(method, memo.get(id(seam.model)))


class _InstalledForward(_Installed):
    """The one of them that walks look through: no step reads what `generate` does."""

    def unwrap(self) -> Callable[..., Any]:
        """The model's own forward."""
        original: Callable[..., Any] = self.__wrapped__  # type: ignore[attr-defined]
        return original


def _line_of(error: Exception) -> str:
    """The line of the model's code that raised an error, as text; empty for graphrt's errors."""
    if isinstance(error, GraphRTError):
        return ""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith(_NOT_A_MODELS)
    ]
    if not lines:
        return ""
    path, line = lines[-1]
    return f" ({Path(path).name}:{line}: {linecache.getline(path, line).strip()})"
