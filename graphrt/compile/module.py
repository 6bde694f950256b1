"""`CompiledModule`: a module whose forward is traced once, split, compiled and stitched."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn

from graphrt.compile.errors import CompileSealedError, RetraceError, TraceError
from graphrt.compile.options import CompileOptions
from graphrt.compile.pieces.assembly import Built, Code, accept_state, build
from graphrt.compile.pieces.by_size import check_one_size, check_sizes, sizes_to_compile
from graphrt.compile.pieces.figures import Figures
from graphrt.compile.pieces.partition import partitions
from graphrt.compile.pieces.wrapping import ArgumentAddresses, Wrapping
from graphrt.compile.private_torch.operators import call_of
from graphrt.compile.split.graph import Piece
from graphrt.compile.trace.call import at_size
from graphrt.compile.trace.check import SmallAxes
from graphrt.compile.trace.dims import DynamicDims
from graphrt.compile.trace.parameters import Parameters, leaves, without_memory
from graphrt.compile.trace.subject import Holding, Subject
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import (
    check_callable,
    check_kind,
    check_takes,
    count_of,
    flag,
    items_of,
    shown,
)
from graphrt.core.base.thread_mode import outside_modes
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode, PieceProvider
from graphrt.core.capture.guard import check_traced
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.replay.entry import SegmentHooks
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import current_capture, warming_up

_MOST_RETRACES = 8
"""So many changes of a sealed module are traced, each a second or more for a large model. After
others it runs uncompiled."""


class CompiledModule:
    """Runs `module` by pieces that are compiled from one trace of its forward.

    1. The first call, or `ensure_compiled`, traces, splits and compiles. A later call compiles only
       if an axis has size 0 or 1, for which the first code may be wrong.
    2. A call that replays no graph checks its arguments and the module, and raises `RetraceError`
       if they are not as in the trace.
    3. After `seal` nothing is compiled. A step that no graph serves, and that the code does not
       fit, runs the module uncompiled, with one warning in the log for each cause. A trial of a
       changed module first traces it once more: if the code is the same, it serves on.

    Calls run without gradients. Attributes that it lacks are the module's.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        dynamic_dims: Mapping[str, Any] | Sequence[str],
        *,
        options: CompileOptions | None = None,
        pool: GraphPool | None = None,
        graphs: bool = True,
        read_context: Callable[[], ForwardContext | None] = current_context,
    ) -> None:
        """See `compile_module`."""
        check_callable("module", module)
        check_kind("options", options, CompileOptions)
        check_kind("pool", pool, GraphPool)
        flag("graphs", graphs)
        check_takes("read_context", read_context, "read_context()")
        self.module = module
        self.options = options or CompileOptions()
        call = forward = module
        if isinstance(module, nn.Module):
            call, forward = call_of(module), module.forward
        self._subject = Subject(module, call, Parameters(forward), DynamicDims(dynamic_dims))
        self._subject.dims.check_names(self._subject.parameters.names)
        if not self._subject.dims:
            check_one_size(self.options.compile_sizes)
        self._dynamic_dims = dynamic_dims
        self._pool = pool
        self._graphs = graphs
        self._capture_sizes: frozenset[int] | None = None
        self._wrapper_options: GraphOptions | None = None
        self._hooks: SegmentHooks | None = None
        self._read_context = read_context
        # The code for all calls but those of `_small`; None before the first call.
        self._built: Built | None = None
        # The modes of graphs for which plans want code. Nobody knows of a step without a plan
        # whether a host captures it: it runs pieces, which serve all modes.
        self._modes: set[GraphMode] = set()
        # The batch sizes of graphs of a mode, where plans have some.
        self._sizes_of: dict[GraphMode, set[int]] = {}
        # Code for calls with axes of size 0 or 1, where `_built` does not serve these.
        self._small: dict[SmallAxes, Built] = {}
        # The first call, its tensors without memory: `weights_changed` checks the state with it.
        self._example: inspect.BoundArguments | None = None
        self._sealed = False
        # The sizes of `compile_sizes`, as numbers, that have code of their own.
        self._static_sizes: tuple[int, ...] = ()
        self._argument_addresses = ArgumentAddresses()
        # The weights and submodules that the code was bound to last.
        self._weights_held: list[Holding] = []
        # What the module ran uncompiled for -> the first such error, as a line.
        self._uncompiled: dict[tuple[str, object], str] = {}
        # Changes for which a trial has traced the module once more: small axes, the error's text.
        self._retraced_for: set[tuple[SmallAxes, str]] = set()
        # Set by `unseal`: the next call looks the weights up again.
        self._weights_may_move = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._subject.call(*args, **kwargs)
        context = self._read_context()
        if context is not None and context.enlist is not None:
            context.enlist(self)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._step(context, args, kwargs)
        return self._step(context, args, kwargs)

    def _step(
        self, context: ForwardContext | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One call: compiles if nothing is compiled yet, else checks the call unless it replays."""
        built = self._built
        step = context if context is not None and context.mode is GraphMode.PIECEWISE else None
        if built is None:
            self._compile(args, kwargs, step)
            code = self._code_for(args, kwargs).code_of(_mode_of(context))
        elif step is not None and step.capture is None and step.announced:
            # No check: a replayed step reads its capture's buffers, which were checked then.
            if self._small:
                arguments = leaves(self._subject.parameters.bind(args, kwargs))
                built = self._small.get(built.checker.axes_needing_own_code(arguments), built)
            code = built.in_pieces or built.code_of(GraphMode.PIECEWISE)
        else:
            if step is not None and step.capture is not None:
                check_traced(built.codes)
            try:
                self._follow_weights()
                built = self._code_for(args, kwargs)
                if self._lacks_code(built, step):
                    self._compile(args, kwargs, step)
            except (RetraceError, CompileSealedError) as error:
                if context is None or not self._may_run_uncompiled(context, error):
                    raise
                return self._subject.call(*args, **kwargs)
            code = built.code_of(_mode_of(context))
        if step is not None and self._pool is not None:
            self._argument_addresses.check(step, self._pool, (args, kwargs))
        return code.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A module of its own that is not compiled yet; it captures in the same pool."""
        copied = CompiledModule(
            copy.deepcopy(self.module, memo),
            self._dynamic_dims,
            options=self.options,
            pool=self._pool,
            graphs=self._graphs,
            read_context=self._read_context,
        )
        for name in ("_capture_sizes", "_wrapper_options", "_hooks"):
            setattr(copied, name, getattr(self, name))
        return copied

    def __repr__(self) -> str:
        state = f"{len(self.pieces)} pieces" if self.compiled else "not compiled"
        return f"{type(self).__name__}({type(self.module).__name__}, {state})"

    @property
    def compiled(self) -> bool:
        """Whether all code is there that plans have asked for."""
        return self._built is not None and not self._built.lacking(self._modes)

    @property
    def graphs(self) -> bool:
        return self._graphs

    @property
    def pool(self) -> GraphPool | None:
        return self._pool

    @property
    def whole_graph(self) -> bool:
        return self.options.whole_graph

    @property
    def provides(self) -> PieceProvider | None:
        """Who splits it into pieces that are captured one by one; None if nothing does."""
        if self._pool is None or self.whole_graph:
            return None
        partitioned, _ = partitions(self.options, self._pool.platform.device_type)
        return PieceProvider.INDUCTOR if partitioned else PieceProvider.FX

    def code_line(self, mode: GraphMode) -> str:
        """Which code graphs of a plan in this mode run, for people."""
        whole = "pieces" if self.options.full == "pieces" else "the whole graph"
        if self.whole_graph:
            whole = "the whole graph"
        names = {GraphMode.FULL: whole, GraphMode.PIECEWISE: "pieces"}
        code = [f"{names[each]} for {each.name}" for each in mode.runtime_modes]
        option = f" (full={self.options.full!r})" if mode.has_full and not self.whole_graph else ""
        return f"Compiled {type(self.module).__name__}: {', '.join(code) or whole}{option}"

    @property
    def figures(self) -> Figures:
        """Counts and times of compiling; all zero before."""
        return Figures() if self._built is None else self._built.figures

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the graph in order, splitting ones too; the whole graph if FULL graphs
        alone were asked for."""
        return () if self._built is None else self._built.code_of(GraphMode.NONE).pieces

    @property
    def wrappers(self) -> tuple[GraphWrapper, ...]:
        """The wrappers of the compiled pieces; none without a pool."""
        return tuple(wrapper for code in self._all_code() for wrapper in code.wrappers)

    @property
    def codes(self) -> tuple[CodeType, ...]:
        """The code that Dynamo traced."""
        return () if self._built is None else self._built.codes

    @property
    def source(self) -> str:
        """The Python of the call that runs all pieces; "" before it is compiled."""
        return "" if self._built is None else self._built.code_of(GraphMode.NONE).stitched.source

    @property
    def computation_graph(self) -> str:
        """The traced graph and its pieces as Python; "" before it is compiled."""
        return "" if self._built is None else self._built.code_of(GraphMode.NONE).computation_graph

    @property
    def uncompiled(self) -> tuple[str, ...]:
        """Why steps ran the module uncompiled: a line for each cause, with its first step."""
        return tuple(self._uncompiled.values())

    def unwrap(self) -> Callable[..., Any]:
        """The module itself."""
        return self.module

    def ensure_compiled(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls like this one, if that has not been done; runs nothing of the forward.

        Raises `CompileSealedError` after `seal`.
        """
        if not self.compiled:
            self._compile(args, kwargs)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise `RetraceError` if the compiled code is not right for such a call."""
        if self._built is not None:
            with torch.no_grad():
                self._code_for(args, kwargs)

    def weights_changed(self) -> None:
        """Declare that the host changed the module, or Python state that its forward reads.

        Replaced weights, buffers and submodules are taken over. Raises `RetraceError` for changes
        that the code has baked in: attributes, hooks, `train()`, globals, closures, tied weights.
        Each call that replays no graph finds them too.
        """
        example = self._example
        if example is None:
            return
        with torch.no_grad():
            self._follow_weights()
            for code in self._all_code():
                code.stitched.check_weights()
            for built in self._all_built():
                built.outside.check_state(example.arguments, example.args, example.kwargs)

    def use_capture_sizes(self, sizes: Collection[int]) -> None:
        """Add sizes that batches are padded to, as a `GraphRunner` does with its own. Raises
        `CompileSizeError` for a compile size that is no capture size."""
        given = items_of("capture sizes", sizes, "[8, 16]")
        sizes = (self._capture_sizes or frozenset()) | {
            count_of("a capture size", size, least=1) for size in given
        }
        numbers = [size for size in self.options.compile_sizes if isinstance(size, int)]
        check_sizes({*numbers, *self._static_sizes}, sizes)
        self._capture_sizes = sizes

    def use_modes(self, keys: Collection[tuple[GraphMode, BatchDescriptor]]) -> None:
        """Compile for the graphs of a plan: the whole graph for FULL ones, and where the plan has
        no graphs; pieces for PIECEWISE ones."""
        for mode, descriptor in keys:
            self._sizes_of.setdefault(mode, set()).add(descriptor.num_tokens)
        self._modes |= {mode for mode, _ in keys} or {GraphMode.FULL}

    def use_wrapper_options(self, options: GraphOptions, hooks: SegmentHooks | None = None) -> None:
        """Capture pieces with these options, and these hooks around each graph, unless some were
        given before (a `GraphRunner` gives its own) or it is compiled already."""
        check_kind("options", options, GraphOptions)
        check_kind("hooks", hooks, SegmentHooks)
        if self._built is not None:
            return
        self._wrapper_options = self._wrapper_options or options
        if self._hooks is None:
            self._hooks = hooks

    def rebind_weights(self) -> None:
        """Take the module's weights as they are now; raises `RetraceError` if one has changed its
        shape, dtype or device."""
        if self._built is not None:
            for code in self._all_code():
                code.stitched.rebind(self._subject.weights())
            self._weights_held = self._subject.holdings()
            self._weights_may_move = False

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the module that compiled code reads, as they are now, and the constants of
        that code; nothing before it is compiled."""
        weights: dict[str, torch.Tensor] = {}
        for code in self._all_code():
            weights.update(code.stitched.in_use(self._subject.weights()))
        return weights

    def seal(self) -> None:
        """Compile nothing any more; capture nothing any more in the pieces.

        Raises `RetraceError` if the module has changed since it was compiled.
        """
        self.weights_changed()
        self._sealed = True
        for wrapper in self.wrappers:
            wrapper.seal()

    def unseal(self) -> None:
        """Allow compiling again, and capturing in the pieces; weights may move until the next
        call."""
        self._sealed = False
        self._weights_may_move = True
        self._argument_addresses.clear()
        for wrapper in self.wrappers:
            wrapper.unseal()

    def _follow_weights(self) -> None:
        """Rebind if a weight or submodule was replaced. Every call that is no replay does so."""
        if not self._weights_may_move:
            for held, name, value in self._weights_held:
                if held.get(name) is not value:
                    break
            else:
                return
        self.rebind_weights()

    def _may_run_uncompiled(
        self, context: ForwardContext, error: RetraceError | CompileSealedError
    ) -> bool:
        """Whether the module may run uncompiled in a step that its code does not fit.

        It may in each eager step of a sealed module, and before that in steps of live batches where
        the forward branches on their size. It may not in a warm-up or capture: graphs of planned
        batches are of compiled code, or refused.
        """
        of_sizes = isinstance(error, RetraceError) and error.of_sizes
        serves = self._sealed or (of_sizes and context.live is not None)
        if not serves or context.capture is not None:
            return False
        cause = error.what, error.expected
        # A trial runs without padding too: a branch on that size is nothing to tell.
        if cause not in self._uncompiled and not (of_sizes and warming_up.get()):
            name = type(self.module).__name__
            self._uncompiled[cause] = f"{name}: {error.what}: {error.got}, not {error.expected}"
            logger.warning("%s runs uncompiled: %s", name, error)
        return True

    def _code_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Built:
        """The code for a call, compiled now if its sizes of 0 or 1 need their own. Raises
        `RetraceError` if the call, the module or a setting is not as in the trace."""
        bound = self._subject.parameters.bind(args, kwargs)
        arguments, built = leaves(bound), self._built
        assert built is not None
        small = built.checker.check(arguments)
        if small:
            built = self._small.get(small) or self._compile_small(bound, small)
            built.checker.check(arguments)
        built.outside.check_settings()
        for code in built.all_code():
            code.stitched.check_weights()
        try:
            built.outside.check_state(bound.arguments, args, kwargs)
        except RetraceError as error:
            if not self._is_traced_alike(built, small, bound, error):
                raise
        if self.options.backend != "eager" and built.overlaps.matter:
            built.overlaps.check(arguments, self._subject.weights())
        return built

    def _is_traced_alike(
        self, built: Built, small: SmallAxes, bound: inspect.BoundArguments, error: RetraceError
    ) -> bool:
        """Whether the code of `built` is right though the module has changed, by a trace of it as
        it is now. Only a trial asks, once for each change: no other step waits for a trace.

        Uncompiled, the results differ by rounding: the trial would take a change that makes no
        difference for one that does.
        """
        change = small, str(error)
        if not (self._sealed and warming_up.get()) or change in self._retraced_for:
            return False
        if len(self._retraced_for) == _MOST_RETRACES:
            return False
        self._retraced_for.add(change)
        subject = self._subject.at(small)
        return outside_modes(partial(accept_state, built, subject, bound, self.options))

    def _all_built(self) -> list[Built]:
        return [] if self._built is None else [self._built, *self._small.values()]

    def _all_code(self) -> list[Code]:
        return [code for built in self._all_built() for code in built.all_code()]

    def _lacks_code(self, built: Built, step: ForwardContext | None) -> bool:
        """Whether code has to be compiled for a step: that of pieces for a PIECEWISE one, always;
        else what plans have asked for, unless that must wait for the capture of its runner."""
        if step is not None:
            return built.in_pieces is None
        return bool(built.lacking(self._modes)) and not (self._sealed or current_capture())

    def _compile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], step: ForwardContext | None = None
    ) -> None:
        """Compile the code of all modes that plans have; with a PIECEWISE `step` the pieces too."""
        check_may_compile(self, sealed=self._sealed)
        bound = self._subject.parameters.bind(args, kwargs)
        if step is not None:
            self._modes.add(GraphMode.PIECEWISE)
        self._static_sizes = sizes_to_compile(self.options.compile_sizes, self._capture_sizes)
        built = self._built
        if built is not None:
            # By traces of their own: to keep the first would keep its call, and replaced weights.
            built.take(self._build(self._subject, bound, built))
            for small, each in self._small.items():
                example = at_size(self._subject, bound, small)
                each.take(self._build(self._subject.at(small), example, each))
            return
        self._built = built = self._build(self._subject, bound)
        self._weights_held = self._subject.holdings()
        self._example = without_memory(bound)
        for small in built.small:
            try:
                self._compile_small(at_size(self._subject, bound, small), small)
            except TraceError as error:
                # The forward may not run at this size; a call with it will raise.
                logger.info("no code for a size of %s: %s", dict(small), error)

    def _compile_small(self, bound: inspect.BoundArguments, small: SmallAxes) -> Built:
        check_may_compile(self, sealed=self._sealed, small=small)
        built = self._build(self._subject.at(small), bound)
        assert self._built is not None
        self._built.figures.add(built.figures)
        self._small[small] = built
        return built

    def _build(
        self, subject: Subject, bound: inspect.BoundArguments, has: Built | None = None
    ) -> Built:
        """The code for a subject; of one that `has` some the rest."""
        wrapping, modes = None, self._modes
        if self._pool is not None:
            graph_options = self._wrapper_options or GraphOptions()
            wrapping = Wrapping(self._pool, graph_options, self._read_context, self._hooks)
        return build(
            subject,
            bound,
            self.options,
            modes=modes if has is None else has.lacking(modes),
            static_sizes=self._sizes_for,
            wrapping=wrapping,
            graphs=self._graphs,
        )

    def _sizes_for(self, modes: Collection[GraphMode]) -> list[int]:
        """The sizes with code of their own, of graphs of these modes where plans have told any."""
        known = [self._sizes_of[mode] for mode in modes if mode in self._sizes_of]
        sizes = set().union(*known) if known else self._static_sizes
        return [size for size in self._static_sizes if size in sizes]


def _mode_of(context: ForwardContext | None) -> GraphMode:
    """The mode of the graph that a step is for; NONE for none."""
    if context is None:
        return GraphMode.NONE
    return context.graph_mode if context.mode is GraphMode.NONE else context.mode


def check_may_compile(module: object, *, sealed: bool, small: SmallAxes = ()) -> None:
    """Raise `CompileSealedError` after `seal()`, and inside of an open capture. `small` are the
    axes of size 0 or 1 that need code of their own."""
    if sealed:
        when, advice = "after seal()", "before serving, or capture() with this forward"
    elif current_capture() is not None:
        when, advice = "inside of an open capture", "before capture(), or leave warm-ups on"
    else:
        return
    got, expected, advice = shown(module), "a module that was", f"call ensure_compiled() {advice}"
    if small:
        # Neither compiles a size that no graph has.
        sizes = " and ".join(f"size {size} of {axis}" for axis, size in small)
        got, expected = f"{sizes}, in {got}", "sizes for which it was"
        advice = "call the module with this size once, before capture()"
    raise CompileSealedError(
        f"a module would have to be compiled {when}",
        got=got,
        expected=f"{expected} compiled before",
        advice=advice,
    )
