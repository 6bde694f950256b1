"""`graphed`: a module with graphs, from the inputs that it is called with.

1. The specs of the inputs are those of the tensors given: dimension 0 has the rows.
2. Two eager runs, of all rows given and of one fewer, show which dimensions of the results are
   rows, and whether an integer input addresses memory that lasts. Then the state is put back.
3. A `GraphRunner` captures the graphs and tries them on the given rows.

Limits: a kernel that torch does not know as an operator is not seen to write.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt._runner import GraphRunner
from graphrt.core.base import tree
from graphrt.core.base._undo import note
from graphrt.core.base.errors import (
    CaptureSyncError,
    InvalidInputError,
    InvalidOptionError,
    RowsMixedError,
    Uncopied,
)
from graphrt.core.base.option_values import check_callable, check_kind, choice, shown
from graphrt.core.base.texts import aligned
from graphrt.core.base.thread_mode import unseen, without_gradients
from graphrt.core.base.torch_names import runs_hooks, untraced
from graphrt.core.capture.operators import facts_of, written
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.refusals import OWN_GRAPHS, makes_graphs
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import current_platform, installed_platforms
from graphrt.core.inputs.declared import flat_of
from graphrt.core.inputs.outputs import OutputLayout
from graphrt.core.inputs.spec import InputSpec, specs_of
from graphrt.core.plan.resolution import compiled_in
from graphrt.core.replay.recording import without_inner_graphs
from graphrt.core.runner.capture_session import Progress
from graphrt.core.runner.findings import Look
from graphrt.core.runner.host import Example, Host
from graphrt.core.runner.report import GAIN_TITLES, RunnerReport, gain_of
from graphrt.core.runner.runner import R
from graphrt.trust.watching.rows import indexed_by
from graphrt.trust.watching.watch import Watch

InputAxes = Mapping[str, "InputSpec | Sequence[int | str | None]"]
"""Name of an input -> the axes of its first dimensions, or its whole spec."""


class Graphed(Uncopied, Generic[R]):
    """A callable with graphs, called like the one that it was made of: see `graphed`. It has the
    methods that messages advise; its `runner` has the rest, `close()` too."""

    def __init__(self, runner: GraphRunner[R], model: Callable[..., R], call: _Call) -> None:
        self.runner = runner
        self._model = model
        # The inputs that may be given by position, and how many were at the capture.
        self._names = tuple(call.places)
        self._given = len(call.first)

    @untraced
    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> R:
        """Returns the model's results. Inputs are given by position or by keyword; to a module with
        hooks as in `inputs=`, since hooks see the difference. Raises the errors of
        `GraphRunner.__call__`."""
        if len(args) != self._given and runs_hooks(self._model):
            raise InvalidInputError(
                "the model has hooks, which would see inputs by position that were captured by "
                "keyword, or the other way round",
                got=f"{len(args)} inputs by position",
                expected=f"{self._given}, as in inputs=",
                advice="call it as in inputs=, or capture it as it is called: inputs=(x, y) or "
                'inputs={"x": x, "y": y}',
            )
        if not args:
            return self.runner(**kwargs)
        if len(args) > len(self._names) or kwargs.keys() & {*self._names[: len(args)]}:
            raise InvalidInputError(
                "the inputs are not those that graphs were made for",
                got=f"{len(args)} positional inputs, and {', '.join(kwargs) or 'none'} by keyword",
                expected=f"by position at most ({', '.join(self._names)})",
                advice="give each input once, in this order or by name",
            )
        return self.runner(**dict(zip(self._names, args, strict=False)), **kwargs)

    def unwrap(self) -> Callable[..., R]:
        """The model that the graphs are of."""
        return self._model

    def recapture(
        self, progress: Progress | bool | None = None, *, only_outdated: bool = False
    ) -> None:
        """Capture graphs again: see `GraphRunner.recapture`."""
        self.runner.recapture(progress, only_outdated=only_outdated)

    def look(self) -> Look:
        """What has changed in Python since the capture: see `GraphRunner.look`."""
        return self.runner.look()

    def weights_changed(self) -> None:
        """Declare that weights were written or replaced: see `GraphRunner.weights_changed`."""
        self.runner.weights_changed()

    def measure(self, sizes: Collection[int] | None = None) -> None:
        """Time graphs of these sizes against eager: see `GraphRunner.measure`."""
        self.runner.measure(sizes)

    def report(self) -> RunnerReport:
        """Figures of the graphs and of the steps so far."""
        return self.runner.report()

    def __repr__(self) -> str:
        return f"Graphed({', '.join(self.runner.inputs.declared.specs)}: {self.runner!r})"

    def __str__(self) -> str:
        """What the graphs bring: a step by each that was timed, and its forward run eagerly."""
        graphs = self.runner.report().to_dict()["graphs"]
        rows = [("rows", *GAIN_TITLES)]
        rows += [(str(graph["tokens"]), *gain_of(graph)) for graph in graphs]
        return "\n".join([f"{self!r}", *aligned(rows)])


def graphed(
    model: Callable[..., R],
    inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any],
    sizes: Sequence[int] | None = None,
    *,
    axes: InputAxes | None = None,
    outputs: Literal["clone", "pool"] = "clone",
    mode: Literal["FULL", "PIECEWISE"] = "FULL",
    options: GraphOptions | None = None,
    platform: Platform | str | None = None,
) -> Graphed[R]:
    """Capture `model` for batches of up to the largest of `sizes` rows, and try its graphs.

    `inputs` are tensors that the model can be called with: one, a tuple of positional ones, or a
    mapping of names. Dimension 0 of each has the rows if all agree on its length and it is above 1;
    else `axes` names the dimensions (`axes={"mask": ("rows", None)}`; None keeps its size), or has
    the whole `InputSpec`. `sizes` are the numbers of rows that get a graph, by default the powers
    of two up to the rows given. A larger batch runs eagerly. Results are copies, which the caller
    may keep; with `outputs="pool"` they are readable until the next call. `mode="PIECEWISE"` cuts
    each graph at functions marked `@eager_break`. `options` and `platform` are those of
    `GraphRunner`; by default the platform is that of the model's device.

    Raises `InvalidInputError` for inputs that are no tensors or whose rows cannot be told, and for
    an integer input that addresses a write into memory which lasts, such as a cache: how padding
    must address it is nothing to be guessed. Raises `InvalidOptionError` for a module in training
    mode, or with gradients on, and what `GraphRunner` and its `capture()` raise.
    """
    check_callable("model", model)
    check_kind("axes", axes, Mapping)
    check_kind("options", options, GraphOptions)
    choice("clone", "pool")("outputs", outputs)
    choice("FULL", "PIECEWISE")("mode", mode)
    _refuse_training(model)
    call = _Call(model, inputs)
    device = _device_of(model, call.values)
    values = {name: value.detach().to(device) for name, value in flat_of(call.values)}
    specs = _specs_of(values, axes or {})
    rows, example = _rows_of(values, specs)
    runner: Callable[..., GraphRunner[R]] = partial(
        GraphRunner,
        call,
        inputs=_nested(call.values, specs),
        options=(options or GraphOptions()).merged({"outputs": outputs}),
        platform=_platform_of(device) if platform is None else platform,
        device=device,
        mode=mode,
        compiled=compiled_in(model),
    )
    guessed = {
        name: spec
        for name, spec in specs.items()
        if not isinstance((axes or {}).get(name), InputSpec)
    }
    with runner(sizes=[rows]) as plain:
        try:
            of_outputs = _try(plain, call, guessed, rows, example)
        except RuntimeError as error:
            if makes_graphs(error):
                raise OWN_GRAPHS() from error
            raise
    fast = runner(
        sizes=_powers_up_to(rows) if sizes is None else sizes,
        outputs=of_outputs,
        host=Host(example=lambda batch, _: Example(example(batch.num_tokens))),
    )
    try:
        fast.capture()
        fast.measure()
    except BaseException as error:
        fast.close()
        if isinstance(error, RowsMixedError):
            note(
                error,
                'graphed: where another dimension has the rows, axes={"x": (None, "rows")}; '
                "Host(mixes_rows=True) is given to a GraphRunner",
            )
        if isinstance(error, CaptureSyncError):
            _advise(error, rows, values)
        raise
    return Graphed(fast, model, call)


def _advise(error: CaptureSyncError, rows: int, values: Mapping[str, torch.Tensor]) -> None:
    """Put advice for transformers into the error: its code reads a mask on the host, and users
    cannot mark functions there."""
    package = getattr(sys.modules.get("transformers"), "__file__", None)
    if package is None or not str(error.source).startswith(os.path.dirname(package)):
        return
    lengths = [each.shape[1] for each in values.values() if each.dim() == 2]
    error.advice = (
        "pass attention_mask as an input. Where the model reads that: "
        f"graphed(masks_on_device(model), ...), or with_graphs(model, max_batch={rows}, "
        f"max_len={max(16, *lengths, 0)}), both of graphrt.hosts.transformers. A model that reads "
        "other data on the host runs without graphs"
    )
    error.args = (error._message(),)


class _Call:
    """What a model is called with: its inputs by name, and a forward that takes them by name."""

    def __init__(self, model: Callable[..., Any], inputs: object) -> None:
        given: tuple[Any, ...] = ()
        named: Mapping[str, Any] = {}
        if isinstance(inputs, Mapping):
            named = inputs
            wrong_names = [name for name in inputs if not isinstance(name, str)]
            if wrong_names:
                raise InvalidInputError(
                    "inputs= names no arguments",
                    got=shown(wrong_names[0]),
                    expected="the names of the model's arguments",
                    advice='inputs={"x": x}',
                )
        else:
            given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        # The model is called with `first` by position; a caller may give `places` by position.
        bound, self.first, self.places = _bound(model, given, named)
        self.values: dict[str, Any] = bound
        self._model = model
        wrong = [name for name, value in flat_of(bound) if not isinstance(value, torch.Tensor)]
        if wrong or not bound:
            got = dict(flat_of(bound))[wrong[0]] if wrong else inputs
            raise InvalidInputError(
                f"input {wrong[0]!r} is no tensor" if wrong else "there are no inputs",
                got=shown(got),
                expected="the tensors that the model is called with",
                advice="bind the rest: graphed(functools.partial(model, flag=True), ...)",
            )
        for name, value in flat_of(bound):
            if value.layout is not torch.strided or value.is_nested or value.is_meta:
                kind = "nested" if value.is_nested else f"{value.layout} on {value.device}"
                raise InvalidInputError(
                    f"input {name!r} has no rows in memory to capture with",
                    got=kind,
                    expected="a dense tensor with values",
                    advice="give such a tensor: value.to_dense(), or torch.zeros(...) on a device",
                )

    def __call__(self, **values: Any) -> Any:
        """Call the model, with its inputs by name."""
        first = [values.pop(name) for name in self.first]
        return self._model(*first, **values)

    def unwrap(self) -> Callable[..., Any]:
        """The model. Checks look for changes in it, and not in graphrt's own objects."""
        return self._model


def _bound(
    model: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Bind the inputs to the model's parameters. Returns them by name, in the order of the
    signature, and the names of those given by position, and of those that may be. Raises
    `InvalidInputError` where they do not fit."""
    if callable(getattr(type(model), "unwrap", None)):
        model = _inner(model)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    call: Any = model
    if isinstance(model, torch.nn.Module) and type(model).__call__ is torch.nn.Module.__call__:
        call = model.forward
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a builtin tells nothing
        first = {f"input_{at}": value for at, value in enumerate(given)}
        return {**first, **named}, [*first], [*first]
    try:
        arguments = signature.bind(*given, **named).arguments
    except TypeError as error:
        raise InvalidInputError(
            f"the model cannot be called with these inputs: {error}",
            got=f"{len(given)} by position, {', '.join(named) or 'none'} by name",
            expected=f"the arguments of {getattr(call, '__qualname__', call)}{signature}",
            advice="inputs=(x, y), or inputs={'x': x, 'y': y}, as the model is called",
        ) from None
    bound: dict[str, Any] = {}
    first_names: list[str] = []
    several = next((p for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(value)
            continue
        values = value if kind is inspect.Parameter.VAR_POSITIONAL else (value,)
        is_several = kind is inspect.Parameter.VAR_POSITIONAL
        names = [f"{name}_{at}" for at in range(len(values))] if is_several else [name]
        bound.update(zip(names, values, strict=True))
        # A hook of the model reads `args[0]`: an input given by position stays positional. In front
        # of `*inputs` all arguments are positional.
        is_first = len(first_names) < len(given) or several is not None
        if is_first or kind is inspect.Parameter.POSITIONAL_ONLY:
            first_names += names if kind is not inspect.Parameter.KEYWORD_ONLY else []
    places: list[str] = []
    for name, parameter in signature.parameters.items():
        # After a parameter without an input, as y in forward(x, y=None, z=None), none has a place.
        if name not in bound or parameter.kind is parameter.KEYWORD_ONLY:
            break
        places.append(name)
    return bound, first_names, max(places, first_names, key=len)


def _inner(model: Any) -> Any:
    """What a partial, a bound method, or a wrapper such as of `graphrt.compile`, calls."""
    if callable(getattr(type(model), "unwrap", None)):
        return model.unwrap()
    return getattr(model, "func", getattr(model, "__self__", model))


def _refuse_training(model: Any) -> None:
    """Raise `InvalidOptionError` for a module in training mode, or with gradients on."""
    module = _inner(model)
    if not isinstance(module, torch.nn.Module):
        return
    training = [name or type(module).__name__ for name, m in module.named_modules() if m.training]
    if training:
        raise InvalidOptionError(
            "a module in training mode has no graphs: it changes with every call",
            got=f"{training[0]}.training is True",
            expected="a module in eval mode",
            advice="model.eval() before graphed(model, ...)",
        )
    named = (name for name, weight in module.named_parameters() if weight.requires_grad)
    trained = next(named, None) if torch.is_grad_enabled() else None
    if trained is not None:
        raise InvalidOptionError(
            "results of graphs have no gradients, and the module asks for some",
            got=f"{trained}.requires_grad is True, with gradients on",
            expected="a module without gradients",
            advice="model.requires_grad_(False), or graphed(model, ...) under torch.no_grad()",
        )


def _device_of(model: Any, values: Mapping[str, Any]) -> torch.device:
    """The device of a module's weights; without weights that of the inputs."""
    module = _inner(model)
    tensors: Any = [value for _, value in flat_of(values)]
    if isinstance(module, torch.nn.Module):
        tensors = [*module.parameters(), *module.buffers(), *tensors]
    device: torch.device = tensors[0].device
    return device


def _platform_of(device: torch.device) -> Platform | None:
    """The platform of a device; None, the default one, where there is no other."""
    default = current_platform()
    if default.device_type == device.type:
        return default
    for found in installed_platforms():
        platform = found.platform
        if platform and platform.device_type == device.type and found.availability.available:
            return platform
    return None


def _specs_of(values: Mapping[str, torch.Tensor], axes: InputAxes) -> dict[str, InputSpec]:
    """The spec of each input. Raises `InvalidInputError` for axes of no input, and where the rows
    cannot be told."""
    unknown = [name for name in axes if name not in values]
    if unknown:
        raise InvalidInputError(
            "axes= names no input",
            got=unknown[0],
            expected=", ".join(values),
            advice="name an argument of the model",
        )
    told = {
        name: given if isinstance(given, InputSpec) else InputSpec.of(values[name], given)
        for name, given in axes.items()
    }
    others = {name: value for name, value in values.items() if name not in told}
    return {
        **told,
        **specs_of(
            others,
            'axes={{"{}": ("rows", None)}}',
        ),
    }


def _rows_of(
    values: Mapping[str, torch.Tensor], specs: Mapping[str, InputSpec]
) -> tuple[int, Callable[[int], dict[str, torch.Tensor]]]:
    """Returns the number of rows of the inputs, at least two, and a function that makes inputs of a
    number of rows by repeating those given. Raises `InvalidInputError` for inputs of several
    lengths, or without rows."""
    counts: dict[str, int] = {}
    for name, spec in specs.items():
        axis, dim = spec.batch_axis()
        if axis is not None and dim < values[name].dim():
            counts[name] = values[name].shape[dim] - axis.extra
    if len({*counts.values()}) != 1 or min(counts.values()) < 1:
        raise InvalidInputError(
            "the inputs do not say how many rows there are",
            got=", ".join(f"{name}: {rows}" for name, rows in counts.items()) or "no axis of rows",
            expected="the same number of rows, 1 or more, in every input with rows",
            advice='axes={"name": ("rows",)} for an input with rows, (None,) for one without',
        )
    (given,) = {*counts.values()}

    def of(rows: int) -> dict[str, torch.Tensor]:
        made = {}
        for name, value in values.items():
            axis, dim = specs[name].batch_axis()
            made[name] = value.clone()
            if axis is not None:
                size = value.shape[dim]
                at = torch.arange(rows + axis.extra, device=value.device) % size
                made[name] = value.index_select(dim, at)
        return made

    return max(given, 2), of


def _nested(like: Mapping[str, Any], flat: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What is flat by dotted names, in the mappings of `like`."""
    return {
        name: _nested(value, flat, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else flat[prefix + name]
        for name, value in like.items()
    }


def _powers_up_to(most: int) -> list[int]:
    return [*(1 << at for at in range(most.bit_length()) if 1 << at < most), most]


def _try(
    plain: GraphRunner[Any],
    call: _Call,
    guessed: Mapping[str, InputSpec],
    rows: int,
    example: Callable[[int], dict[str, torch.Tensor]],
) -> Any:
    """Run the model twice eagerly, and put its state back. Returns the axes of its results.
    Raises `OutputError`, and `InvalidInputError` for an input whose padding must be given."""
    layout, shapes = OutputLayout(), []
    # Number of rows -> each call of the forward.
    calls: dict[int, list[_AddressedWrites]] = {rows: [], rows - 1: []}
    watch = plain.graphs.checks.runs(plain.graphs.setup)

    def run(count: int) -> None:
        inputs = example(count)

        def forward() -> Any:
            calls[count].append(_AddressedWrites(inputs, guessed))
            model = partial(call, **_nested(call.values, inputs))
            return calls[count][-1].around(partial(without_inner_graphs, model))

        try:
            outputs = watch.run(None, count, inputs, lambda: forward)
        finally:
            watch.restore()
        layout.see(count, count, outputs)
        shapes.append(tree.map_leaves(lambda each: torch.empty_like(each, device="meta"), outputs))

    def both() -> None:
        run(rows)
        run(rows - 1)

    try:
        without_gradients(lambda: plain._in_turn(lambda: watch.settle(both)))
    finally:
        watch.state.generators.restore()
    for count, other in ((rows, rows - 1), (rows - 1, rows)):
        for writes in calls[count]:
            writes.refuse(calls[other][-1])
    return _axes_of(*shapes)


def _axes_of(large: Any, small: Any) -> Any:
    """The axes of results, where two sizes say that all are constant or rows."""
    if isinstance(large, torch.Tensor):
        sizes = zip(large.shape, small.shape, strict=True)
        return tuple(size if size == fewer else "rows" for size, fewer in sizes)
    if dataclasses.is_dataclass(large) and not isinstance(large, type):
        large, small = vars(large), vars(small)
    if isinstance(large, Mapping):
        axes = {name: _axes_of(value, small[name]) for name, value in large.items()}
        return axes if any(each is not None for each in axes.values()) else None
    if isinstance(large, tuple | list):
        several = tuple(map(_axes_of, large, small))
        return several if any(each is not None for each in several) else None
    return None


class _Written(NamedTuple):
    """One call of an operator whose rows, or values, depend on inputs."""

    tensor: tuple[int | None, StorageWeakRef, tuple[int, ...]]
    """The key of its storage, that, and its shape."""
    deciding: Mapping[str, int | None]
    """Input -> the last row that it can address; None if it holds no row numbers."""
    operator: str
    indexed: list[int]
    """The sizes of the dimensions along which it was given row numbers."""
    is_aten: bool


class _AddressedWrites(Watch):  # type: ignore[no-untyped-call]
    """Sees which inputs of a run decide where memory that outlives the run is written.

    An index computed from an input does. So does a mask, or a tensor with rows placed by an index,
    in what is written over such memory as a whole: `cache.copy_(torch.where(mask, new, cache))`.
    """

    def __init__(
        self, inputs: Mapping[str, torch.Tensor], guessed: Mapping[str, InputSpec]
    ) -> None:
        """`guessed` are the inputs of which nobody has said how they are padded."""
        super().__init__(frozenset(each.untyped_storage().data_ptr() for each in inputs.values()))
        self._given = inputs
        self._guessed = guessed
        # Storage -> the inputs that it was computed from, and those that decide where its rows are,
        # as in `_Written`. While there is the weak reference, no other storage gets the key.
        self._from: dict[
            int | None, tuple[StorageWeakRef, frozenset[str], dict[str, int | None]]
        ] = {}
        self._addressed: list[_Written] = []
        for name in guessed:
            self._note(inputs[name], frozenset({name}), {})

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator. Note the inputs that its results come from, and those that decide where
        it writes."""
        facts = facts_of(func)
        sources, placed = self._of((args, kwargs))
        at = _INDEX_AT.get(facts.name.removesuffix("_"))
        deciding, indexed = placed, []
        if at is not None or not facts.is_aten:
            operands = args[at : at + 1] if at is not None else (args, kwargs)
            indices = [each for each in tree.tensors(operands) if _is_whole(each)]
            deciding = dict.fromkeys(name for each in indices for name in self._sources(each))
            indexed = indexed_by(func, args) if at is not None else []
            for name in deciding:
                # In `cache[i // 4, i % 4]` the last value of neither is one of `i`.
                own = [(size, each) for size, each in indexed if name in self._sources(each)]
                if len(own) == 1 and self._is_as_given(name, own[0][1]):
                    deciding[name] = own[0][0] - 1
            placed = {**placed, **deciding}
        targets = [*written(facts, args, kwargs)]
        for each in (each for each in targets if deciding and tree.storage_key(each) is not None):
            tensor = tree.storage_key(each), _weak(each), tuple(each.shape)
            sizes = [size for size, _ in indexed]
            self._addressed.append(_Written(tensor, deciding, str(func), sizes, facts.is_aten))
        result = super().handle(func, types, args, kwargs)
        for tensor in (*tree.tensors(result), *targets) if sources else ():
            rows = placed
            if tensor.dtype is torch.bool:
                known = {name: row for name, row in placed.items() if row is not None}
                compared = {name: self._last_compared(name, args, tensor) for name in sources}
                rows = {**compared, **known}
            self._note(tensor, sources, rows)
        return result

    def _note(
        self, tensor: torch.Tensor, sources: frozenset[str], placed: dict[str, int | None]
    ) -> None:
        key = tree.storage_key(tensor)
        if key is not None:  # of a sparse tensor: a capture refuses the operator
            self._from[key] = _weak(tensor), sources, placed

    def _of(self, values: Any) -> tuple[frozenset[str], dict[str, int | None]]:
        """The inputs that tensors among `values` come from, and those that decide where their rows
        are."""
        keys = (tree.storage_key(each) for each in tree.tensors(values))
        found = [self._from[key] for key in keys if key in self._from]
        placed = {name: row for each in found for name, row in each[2].items()}
        return frozenset[str]().union(*(each[1] for each in found)), placed

    def _sources(self, tensor: torch.Tensor) -> list[str]:
        return sorted(self._of(tensor)[0])

    def _is_as_given(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the numbers of a tensor are those of an input, if repeated along others."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False

        def compare() -> bool:
            given = self._given[name].flatten()
            rows = tensor.flatten(), *(tensor.movedim(dim, -1) for dim in range(tensor.dim()))
            return any(
                each.shape[-1] == len(given) and bool((each == given).all()) for each in rows
            )

        return unseen(compare)

    def _last_compared(self, name: str, args: Any, result: torch.Tensor) -> int | None:
        """The last of the row numbers with which an input was compared, one by one, in `result`."""
        for each in tree.tensors(args):
            if name in self._sources(each) and self._is_as_given(name, each):
                shape = (1,) * (result.dim() - each.dim()) + tuple(each.shape)
                pairs = [*zip(result.shape, shape, strict=False)]
                wider = [size for size, own in pairs if size != own]
                return wider[0] - 1 if len(wider) == 1 and (wider[0], 1) in pairs else None
        return None

    def refuse(self, other: _AddressedWrites) -> None:
        """Raise `InvalidInputError` for an input that decided where memory was written that is
        still there, and is no input. `other` is a run of another number of rows.

        Rows of the batch in scratch memory are like those of memory that the forward makes.
        """
        inputs = {tree.storage_key(value) for value in self._given.values()}
        lasting = [
            ours
            for ours, theirs in zip_longest(self._addressed, other._addressed)
            if ours is not None
            and not (ours.tensor[1].expired() or ours.tensor[0] in inputs)
            and not self._is_scratch(ours, theirs)
        ]
        if not lasting:
            return
        first = lasting[0]
        # Numbers of rows and masks say more than values that were compared.
        names = sorted(first.deciding, key=lambda each: not _is_whole(self._given[each]))
        # The last row of each memory: in the shortest one the longest one's is out of bounds.
        ends = {
            name: [each.deciding[name] for each in lasting if name in each.deciding]
            for name in names
        }
        rows = {
            name: None if None in each else min(row for row in each if row is not None)
            for name, each in ends.items()
        }
        raise InvalidInputError(
            f"input {names[0]!r} addresses a write into memory that the model keeps, such as a "
            "cache; padding rows would write there too",
            got=f"no padding of {names[0]!r}, with which {first.operator} writes",
            expected=f"a value of {names[0]!r} for padding rows that writes over nothing live",
            advice=self._advice(
                rows,
                first.tensor[2],
                unlike=any(len({*each}) > 1 for each in ends.values()),
            ),
        )

    def _is_scratch(self, ours: _Written, theirs: _Written | None) -> bool:
        """Whether a write was into rows of the batch, in memory that the run has filled before; an
        index may choose among constant dimensions."""
        use = self.uses.get(ours.tensor[0] or 0)
        return (
            (ours.is_aten and use is not None and use.is_scratch and theirs is not None)
            and (ours.operator, ours.indexed) == (theirs.operator, theirs.indexed)
            and ours.tensor[2] != theirs.tensor[2]
        )

    def _advice(
        self, rows: Mapping[str, int | None], shape: tuple[int, ...], *, unlike: bool
    ) -> str:
        """How to declare the padding of these inputs, which write memory of a `shape`, or several
        of `unlike` lengths."""
        has_rows, specs, known = math.prod(shape) > 1, [], []
        has_whole = any(_is_whole(self._given[name]) for name in rows)
        for name, row in rows.items():
            spec, is_whole = self._guessed[name], _is_whole(self._given[name])
            pad = "False" if spec.dtype is torch.bool else "P" if row is None else str(row)
            index = "index=True, " if has_rows and is_whole and pad != "False" else ""
            axes = str(spec.shape).replace("'", '"')
            # Where integers or masks choose the rows, floats need no padding of their own.
            padding = f", {index}pad={pad}" if is_whole or not has_whole else ""
            specs.append(f'"{name}": InputSpec({spec.dtype}, {axes}{padding})')
            known += [pad] if is_whole else []
        axes = f"axes={{{', '.join(specs)}}}"
        if not has_whole:
            return (
                f"{axes}, with a P whose rows write nothing. If there is none: add a bool input "
                "that is True in each row, write where it is True alone, and declare it too: "
                '"live": InputSpec(torch.bool, ("rows",), pad=False)'
            )
        if {*known} == {"False"}:
            return f"{axes}, if rows of False write nothing; else pad=True"
        if not has_rows:
            return (
                f"{axes}, with a P that is not counted. If each value is: pass the count as an "
                "input, or a bool mask of the rows to count, with pad=False"
            )
        if "P" in known:
            unknown = [name for name, spec in zip(rows, specs, strict=True) if "pad=P" in spec]
            names = " and ".join(f"`{name}`" for name in unknown)
            return f"{axes}, with for P a value of {names} whose place in the memory is nobody's"
        spare = " and ".join(pad for pad in known if pad != "False")
        larger = "make the memory one longer in that dimension, and pad with the new index"
        if unlike:
            larger = f"give all memories one length, and {larger.replace('the memory', 'each')}"
        of_which = "all memories" if unlike else "the memory"
        return f"{axes}, if nothing live is at index {spare} of {of_which}; else {larger}"


_INDEX_AT = {
    **dict.fromkeys(("aten::index_put", "aten::_index_put_impl", "aten::put"), 1),
    **dict.fromkeys(
        (
            *("aten::index_copy", "aten::index_add", "aten::index_fill", "aten::index_reduce"),
            *("aten::scatter", "aten::scatter_add", "aten::scatter_reduce"),
        ),
        2,
    ),
}
"""Operator of torch, without the "_" of those that write in place -> which argument has the numbers
of the rows to write. In front of the second there is the dimension."""


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
