"""The forward of a denoiser, served by graphs: one for each signature of its calls.

1. A call is read: its tensors by name, and its signature (`arguments.py`).
2. What no graph can stand for runs eagerly, with a reason.
3. A signature has a `GraphRunner` of one size, made and captured at its first call. Nothing is
   padded, so an image equals the eager one bit for bit. All runners of a pipeline share a pool.
4. Beyond `max_signatures` the least recently used runner is closed.
5. Each call looks at all that the forward reaches in Python, whatever the level of checks. After a
   change (a LoRA, other processors, moved weights) all are closed, and captured again.

Outputs are copies: PNDM, UniPC and others keep what the denoiser returned over several steps.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import torch

from graphrt import (
    Batch,
    GraphOptions,
    GraphPool,
    GraphRunner,
    InputSpec,
    Reason,
    current_platform,
)
from graphrt.core.base.errors import warn_caller
from graphrt.core.base.texts import error_line
from graphrt.core.replay.recording import is_inside_capture
from graphrt.errors import GraphRTError
from graphrt.hosts.advice import advise
from graphrt.hosts.diffusers.arguments import (
    Call,
    Signature,
    Template,
    UnservedArgument,
    read_call,
    shapes_of,
)
from graphrt.hosts.diffusers.hooks import global_hook, hook_of
from graphrt.hosts.same_model import SameModel
from graphrt.platforms import Platform, get_platform

_ONE = Batch(1, 1)
"""The batch of every call: a runner here has one size, that of its signature."""
_CREDIT = 8.0
_HITS_FOR_A_CAPTURE = 8
"""A capture costs a handful of eager calls, so replays must earn it. The first ones are free, as a
pipeline begins with some resolutions, batches and prompts."""


class EagerReason(enum.Enum):
    """Why a call of a denoiser ran eagerly; what a runner itself runs eagerly has a `Reason`."""

    GRADIENTS = "gradients are on; call the pipeline under torch.no_grad()"
    HOOKS = "hooks run Python code inside of it"
    UNSEEN = "it holds an object that could change without a sign"
    ARGUMENT = "an argument is neither a tensor nor a plain value"
    TOO_LARGE = "its batch is larger than max_batch"
    CHANGING = "signatures, or the denoiser itself, change too often to be worth a capture"
    FAILED = "its capture failed"
    BUSY = "another thread is in the denoiser"

    __hash__ = object.__hash__


class EagerDenoiserWarning(UserWarning):
    """Calls of a denoiser run eagerly; given once for each reason."""


@dataclass
class DenoiserReport:
    """How the calls of one denoiser ran, and the signatures that have graphs."""

    hits: int = 0
    """Calls that a graph served."""
    captures: int = 0
    dropped: int = 0
    """Signatures that made room for others, or whose denoiser changed."""
    eager: Counter[Reason | EagerReason] = field(default_factory=Counter)
    """Eager calls by reason."""
    signatures: tuple[str, ...] = ()
    """The shapes of the tensors of each, the least recently used first."""
    replaced: bool = False
    """Whether the pipeline has another denoiser, or it another forward, since `with_graphs`."""


class SharedPool:
    """What the denoisers of one pipeline share: a pool on each device, and one lock."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._pools: dict[torch.device, GraphPool] = {}

    def on(self, device: torch.device) -> GraphPool:
        """The pool on a device, made where it is first asked for."""
        if device not in self._pools:
            self._pools[device] = GraphPool(_platform_of(device), device=device)
        return self._pools[device]

    def close(self) -> None:
        """Destroy the pools, and all that is in them."""
        while self._pools:
            self._pools.popitem()[1].close()


class DenoiserForward:
    """Serves the calls of a denoiser by graphs, in place of `module.forward` on the instance."""

    def __init__(
        self, name: str, module: torch.nn.Module, pool: SharedPool, max_batch: int, most: int
    ) -> None:
        """`name` is that of the component, for messages; `most` is `max_signatures`."""
        self.module = module
        # A forward that the instance had already, in place of its class's; else None.
        self._before = vars(module).get("forward")
        self.eager: Callable[..., Any] = module.forward
        # `inspect.signature` follows it. Hooks that wrap this forward set the same attribute.
        self.__wrapped__ = self.eager
        self.counts = DenoiserReport()
        self._name = name
        # The names of the forward's positional arguments; the first has the latents.
        self._names = _positional(type(module).forward) or ["hidden_states"]
        self._pool = pool
        self._max_batch = max_batch
        self._most = most
        # Each capture takes one, and replays earn them back.
        self._credit = _CREDIT
        # The module as its graphs have seen it; None while there are no graphs.
        self._picture: SameModel | None = None
        # A hook that a replay would leave out: then there are no graphs.
        self._hook: str | None = None
        # A text in place of a runner says why its capture failed.
        self._runners: OrderedDict[Signature, GraphRunner[Any] | str] = OrderedDict()
        # Reasons of eager calls that a warning has named.
        self._warned_of: set[object] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The denoiser's outputs, from a graph if one can serve the call."""
        if torch.compiler.is_compiling() or is_inside_capture():
            # A trace or a capture around the denoiser needs its operators, not a replay.
            return self.eager(*args, **kwargs)
        if not self._pool.lock.acquire(blocking=False):
            return self._eagerly(EagerReason.BUSY, "", args, kwargs)
        try:
            return self._serve(args, kwargs)
        finally:
            self._pool.lock.release()

    def unwrap(self) -> Callable[..., Any]:
        """The forward of before, which is called inside of another one's capture."""
        return self.eager

    def report(self) -> DenoiserReport:
        """How calls ran so far."""
        captured = [key for key, runner in self._runners.items() if not isinstance(runner, str)]
        signatures = tuple(map(shapes_of, captured))
        return replace(self.counts, eager=self.counts.eager.copy(), signatures=signatures)

    def close(self) -> None:
        """Destroy the graphs; calls run eagerly from now on, wherever this is still called."""
        with self._pool.lock:
            self._drop_all()
            self._most = 0
            self._pool.close()

    def uninstall(self) -> None:
        """Give the denoiser the forward back that it had before."""
        del self.module.forward
        if self._before is not None:
            self.module.forward = self._before

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A copy of the denoiser, also a pickled one, has the forward of its class: graphs read the
        # weights of the original.
        return _bound, (type(self.module).forward, self.module)

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call under the lock: from the graph of its signature, captured if there is none yet;
        else eagerly, for a reason that is counted."""
        if not self._most:
            # `close` was called.
            return self.eager(*args, **kwargs)
        if torch.is_grad_enabled():
            return self._eagerly(EagerReason.GRADIENTS, "", args, kwargs)
        everywhere = global_hook()
        if everywhere is not None:
            return self._eagerly(EagerReason.HOOKS, everywhere, args, kwargs)
        picture = self._picture_now()
        if picture is None:
            return self._eagerly(EagerReason.HOOKS, str(self._hook), args, kwargs)
        if picture.unread:
            return self._eagerly(EagerReason.UNSEEN, picture.unread, args, kwargs)
        try:
            call = read_call(self._names, args, kwargs)
        except UnservedArgument as error:
            return self._eagerly(EagerReason.ARGUMENT, str(error), args, kwargs)
        rows = self._rows_of(call)
        if rows > self._max_batch:
            detail = f"{rows}, where max_batch is {self._max_batch}"
            return self._eagerly(EagerReason.TOO_LARGE, detail, args, kwargs)
        runner = self._runners.get(call.signature)
        is_new = runner is None
        if runner is None:
            if self._credit < 1:
                return self._eagerly(EagerReason.CHANGING, "", args, kwargs)
            runner = self._capture(call, Template(args, kwargs))
        self._runners.move_to_end(call.signature)
        if isinstance(runner, str):
            return self._eagerly(EagerReason.FAILED, runner, args, kwargs)
        outputs = self._run(runner, call)
        if is_new and self._has_changed():
            # The first step runs the forward once more after the warm-ups. If it changed the
            # denoiser even then (a list of attention maps that grows), it does so at each run.
            self._credit = 0
            self._drop_all()
        return outputs

    def _rows_of(self, call: Call) -> int:
        latents = call.tensors.get(self._names[0])
        return latents.shape[0] if latents is not None and latents.ndim else 1

    def _has_changed(self) -> bool:
        """Whether the denoiser has changed since its picture was taken."""
        return self._picture is not None and bool(self._picture.look())

    def _picture_now(self) -> SameModel | None:
        """The picture of the denoiser as it is now, None if it has hooks; if it has changed, its
        graphs are dropped."""
        if self._picture is None or self._has_changed():
            self._drop_all()
            self._hook = hook_of(self.module)
            self._picture = SameModel(self.eager) if self._hook is None else None
        return self._picture

    def _run(self, runner: GraphRunner[Any], call: Call) -> Any:
        outputs = runner(_ONE, **call.tensors)
        dispatch = runner.last_dispatch
        reason = Reason.FAILED if dispatch is None else dispatch.reason
        if reason is Reason.HIT:
            self.counts.hits += 1
            self._credit = min(self._credit + 1 / _HITS_FOR_A_CAPTURE, _CREDIT)
        else:
            self._count(reason, "")
        return outputs

    def _capture(self, call: Call, template: Template) -> GraphRunner[Any] | str:
        """The runner of a signature, captured; or why there is none."""
        while len(self._runners) >= self._most:
            self._drop(next(iter(self._runners)))
        try:
            runner: GraphRunner[Any] | str = self._captured(call, template)
            self.counts.captures += 1
        except Exception as error:
            # An error of the denoiser's own is raised again by the eager call that follows.
            advise(error)
            is_clear = isinstance(error, GraphRTError | torch.OutOfMemoryError)
            runner = str(error) if is_clear else error_line(error)
        self._credit -= 1
        self._runners[call.signature] = runner
        # Warm-ups may have filled caches of the module.
        self._picture = SameModel(self.eager)
        return runner

    def _captured(self, call: Call, template: Template) -> GraphRunner[Any]:
        example = next(self.module.parameters(), next(iter(call.tensors.values())))
        runner = GraphRunner[Any](
            partial(_call, self.eager, template, [*call.tensors]),
            mode="FULL",
            sizes=[1],
            inputs={
                name: InputSpec(tensor.dtype, tuple(tensor.shape))
                for name, tensor in call.tensors.items()
            },
            options=GraphOptions(outputs="clone"),
            pool=self._pool.on(example.device),
        )
        try:
            runner.capture()
        except BaseException:  # an interrupt too leaves no graphs behind
            runner.close()
            raise
        return runner

    def _drop_all(self) -> None:
        self._picture = None
        for signature in list(self._runners):
            self._drop(signature)

    def _drop(self, signature: Signature) -> None:
        runner = self._runners.pop(signature)
        if not isinstance(runner, str):
            runner.close()
            self.counts.dropped += 1

    def _eagerly(
        self, reason: EagerReason, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # First: a call that raises is not counted.
        outputs = self.eager(*args, **kwargs)
        self._count(reason, detail)
        return outputs

    def _count(self, reason: Reason | EagerReason, detail: str) -> None:
        self.counts.eager[reason] += 1
        if reason not in self._warned_of:
            self._warned_of.add(reason)
            why = f"{reason.value} ({detail})" if detail else reason.value
            warn_caller(f"calls of {self._name} run eagerly: {why}", EagerDenoiserWarning)


def _call(
    eager: Callable[..., Any], template: Template, names: Sequence[str], **tensors: Any
) -> Any:
    args, kwargs = template.filled([tensors[name] for name in names])
    return eager(*args, **kwargs)


def _bound(forward: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    return types.MethodType(forward, module)


def _positional(forward: Callable[..., Any]) -> list[str]:
    """The names of the positional arguments behind `self`, for messages."""
    parameters = [*inspect.signature(forward).parameters.values()][1:]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in by_place]


def _platform_of(device: torch.device) -> Platform:
    """The current platform; for a denoiser on the CPU of a machine with GPUs, the CPU's."""
    current = current_platform()
    return get_platform("cpu") if device.type == "cpu" != current.device_type else current
