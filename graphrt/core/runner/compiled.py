"""Compiled modules of a forward: what a runner tells them, and that none takes part unannounced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, cast

import torch

from graphrt.core.base.errors import InvalidOptionError, UnannouncedModuleError
from graphrt.core.base.option_values import check_callable, shown
from graphrt.core.capture.options import GraphOptions
from graphrt.core.device._devices import asked_device, check_memory
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import resolve_platform
from graphrt.core.plan.resolution import CompiledFacts, SavedFacts, compiled_in
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import SegmentHooks


class AnnouncedModule(CompiledFacts, Protocol):
    """Module of a forward that compiles itself at its first call, and must not do so any later.

    In a warm-up or a capture it calls `enlist(self)` of its context.
    """

    @property
    def compiled(self) -> bool: ...

    @property
    def pool(self) -> GraphPool | None:
        """Where its own pieces are captured; None where it captures nothing."""

    def use_capture_sizes(self, sizes: Collection[int]) -> None:
        """Which numbers of tokens batches are padded to."""

    def use_wrapper_options(self, options: GraphOptions, hooks: SegmentHooks | None) -> None:
        """How its pieces are captured, unless the host has said so itself."""

    def rebind_weights(self) -> None:
        """Weights may have moved since the last capture."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the module that compiled code reads, as they are now, and the constants of
        that code; nothing before it is compiled."""

    def weights_changed(self) -> None:
        """Raise an error that names what its code has baked in and is different now."""

    def seal(self) -> None: ...

    def unseal(self) -> None:
        """It may be compiled again; weights may move until its next call, which takes them over."""


class CompiledModules:
    """The announced compiled modules of one runner."""

    def __init__(self, modules: Iterable[CompiledFacts]) -> None:
        self.modules = [
            cast(AnnouncedModule, module)
            for module in modules
            if not isinstance(module, SavedFacts)
        ]

    def enlist(self, module: Any) -> None:
        """Let a module take part in a warm-up or capture.

        Raises `UnannouncedModuleError` for one that nobody named: its weights would not be
        followed, and it could be compiled while serving.
        """
        if not any(module is known for known in self.modules):
            raise UnannouncedModuleError(
                "a compiled module takes part in a capture and was not announced",
                got=shown(module),
                expected=", ".join(map(repr, self.modules)) or "no compiled module",
                advice="name it in the plan: compiled=[...]",
            )

    def check(self) -> None:
        """Raise the error of the first module that has changed since it was compiled."""
        for module in self.modules:
            module.weights_changed()

    def seal(self) -> None:
        """Compile and capture nothing any more."""
        for module in self.modules:
            module.seal()

    def unseal(self) -> None:
        """Allow it again."""
        for module in self.modules:
            module.unseal()

    def announce(
        self, sizes: Collection[int], options: GraphOptions, hooks: SegmentHooks | None
    ) -> None:
        """Say which numbers of tokens batches are padded to, and how pieces are captured."""
        for module in self.modules:
            module.use_capture_sizes(sizes)
            module.use_wrapper_options(options, hooks)

    def prepare(self) -> bool:
        """Take the weights as they are now; returns whether a module has yet to be compiled."""
        for module in self.modules:
            module.rebind_weights()
        pending = [module for module in self.modules if not module.compiled]
        for module in pending:
            module.unseal()
        return bool(pending)


def with_forward(forward: Any, announced: Iterable[Any]) -> list[Any]:
    """The announced modules, and those that the forward is or, as a module, has; each once.

    Raises `InvalidOptionError` for a forward that cannot be called.
    """
    check_callable("forward", forward)
    found = {id(module): module for module in (*compiled_in(forward), *announced)}
    real = [module for module in found.values() if not isinstance(module, SavedFacts)]
    # What a saved plan knows only stands in for modules that nobody named.
    return real or list(found.values())


def pool_for(
    modules: Iterable[Any],
    pool: GraphPool | None,
    platform: Platform | str | None,
    device: torch.device | str | None,
) -> tuple[GraphPool, torch.device, bool]:
    """The pool of a runner with these modules, theirs if none was given; the device of its buffers;
    and whether the pool is the runner's own.

    Raises `InvalidOptionError` for modules that capture somewhere else, for a pool of another
    platform or device, and for a device that there is not.
    """
    found = pool
    for module in modules:
        own = getattr(module, "pool", None)
        if own is not None and own is not found:
            if found is not None:
                # Nothing would know which of its results the next step overwrites.
                raise InvalidOptionError(
                    "a compiled module of the forward captures its pieces in another pool",
                    got=f"pool={found!r}",
                    expected=f"{own!r}, which it was compiled with",
                    advice="pass the same pool= to graphrt.compile and to GraphRunner",
                )
            found = own
    is_own = found is None
    if found is None:
        platform = resolve_platform(platform)
        asked = asked_device(platform.device_type, device)
        found = GraphPool(platform, device=asked if asked.type == platform.device_type else None)
    else:
        asked = asked_device(found.device.type, device)
        if platform is not None:
            found.check_platform(platform)
    if asked.type != found.device.type:
        check_memory(found.platform, asked)
        return found, asked, is_own
    if asked.index is not None:
        found._check_device(asked)
    return found, found.device, is_own
