"""Functions of Inductor that are replaced in blocks, for the whole process: callers take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

from graphrt.compile.private_torch.names import NAMES, private_attribute
from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.log import logger
from graphrt.core.base.private_torch import PrivateName

_TUNED_AGAIN = "kernels are tuned again at every start, after a warning"
_NO_PARTITION = "Inductor does not split the graph, and the figures say why"
_LOAD_LIBRARY = NAMES.declare(
    "torch._inductor.codecache.CppCodeCache.load_async",
    without="C++ libraries are not kept beside pieces, and built again elsewhere, after a warning",
)
_TUNE = NAMES.declare(
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.generate_and_run_autotune_block",
    without=_TUNED_AGAIN,
)
_FORGET_CODE = NAMES.declare(
    "torch._inductor.codecache.PyCodeCache.cache_clear", without=_TUNED_AGAIN
)
_LOAD_KERNELS = NAMES.declare(
    "torch._inductor.triton_bundler.TritonBundler.load_autotuners", without=_TUNED_AGAIN
)
_NO_ORDER = "FULL graphs run the code of pieces, after a warning"
_ORDER = NAMES.declare(
    "torch._inductor.scheduler.Scheduler.compute_dependencies", without=_NO_ORDER
)
_GRAPH = NAMES.declare("torch._inductor.virtualized.V", without=_NO_ORDER)
_PARTITION_HOOK = NAMES.declare(
    "torch._inductor.utils._unstable_customized_partition_wrapper", without=_NO_PARTITION
)
_PARTITION = NAMES.declare("torch._inductor.config.graph_partition", without=_NO_PARTITION)
_PARTITION_OPS = NAMES.declare(
    "torch._inductor.config.custom_should_partition_ops", without=_NO_PARTITION
)
_INDUCTOR_PATCH = NAMES.declare("torch._inductor.config.patch", without=_NO_PARTITION)

Load = Callable[[], Any]
PartitionFunction = Callable[[list[Any]], Any]


Replace = Callable[..., Any]
"""From torch's function, and the arguments of the block, to the function of the block."""


def _patch(name: PrivateName) -> Callable[[Replace], Callable[..., AbstractContextManager[None]]]:
    """Turn a function that makes a replacement into a block in which the attribute `name` of a
    class is replaced. A warning where this torch has none."""

    def block_of(replace: Replace) -> Callable[..., AbstractContextManager[None]]:
        @contextmanager
        @wraps(replace)
        def patched(*arguments: Any) -> Iterator[None]:
            path, _, attribute = name.path.rpartition(".")
            with ExitStack() as undo:
                try:
                    name.find()
                    owner = PrivateName(path, name.without, name.seen).find()
                    # From `vars`, so that a class method is put back with its decorator.
                    original = vars(owner)[attribute]
                    setattr(owner, attribute, replace(original, *arguments))
                    undo.callback(setattr, owner, attribute, original)
                except (MissingTorchNameError, KeyError) as error:
                    _warn_once(name, str(error))
                yield

        return patched

    return block_of


@cache
def _warn_once(name: PrivateName, why: str) -> None:
    logger.warning("torch lacks %s (%s): %s", name.path, why.partition("\n")[0], name.without)


@_patch(_LOAD_LIBRARY)
def library_loads(
    original: Any,
    instead: Callable[[type, Callable[[], Load], tuple[Any, ...], dict[str, Any]], Load],
) -> Any:
    """Inductor asks `instead(kind, build, args, kwargs)` for a C++ library. `kind` is the class of
    its cache, `args` and `kwargs` are its arguments, and `build` is torch's own way."""

    def load_async(cls: type, *args: Any, **kwargs: Any) -> Load:
        build = original.__get__(None, cls)
        return instead(cls, lambda: build(*args, **kwargs), args, kwargs)

    return classmethod(load_async)


def load_library(kind: type, path: Path, key: str) -> Any:
    """A C++ library as Inductor's cache of that kind has it."""
    return private_attribute(kind, "_load_library", _LOAD_LIBRARY.without)(str(path), key)


@_patch(_TUNE)
def code_forgotten_after_tuning(original: Any) -> Any:
    """Inductor forgets the code that it tuned kernels with in the block."""
    forget = _FORGET_CODE.find()

    def tune(self: Any) -> None:
        original(self)
        forget()

    return tune


@_patch(_LOAD_KERNELS)
def kernels_loaded_as_tuned(original: Any) -> Any:
    """Triton kernels with one configuration left count as tuned when they are loaded."""

    def load_autotuners(cls: type, kernels: Any) -> Any:
        for each in kernels or ():
            if len(each.kernel.compile_results) == 1:
                each.kernel.compile_results[0].config.found_by_coordesc = True
        return original.__get__(None, cls)(kernels)

    return classmethod(load_autotuners)


_BUILT_IN = frozenset({"aten", "prim", "prims", "inductor", "quantized", "mkldnn", "mkl"})
"""Namespaces of operators that keep no state."""


@_patch(_ORDER)
def operators_in_order(original: Any) -> Any:
    """Inductor's code calls operators that are not torch's own in the order of the graph. They may
    share state that is no argument of theirs, such as a cache; Inductor knows of arguments alone.
    """

    def compute_dependencies(self: Any) -> None:
        dependencies = _GRAPH.find().graph.additional_buffer_deps
        before = ""
        for node in self.nodes:
            operator = getattr(node.node, "op_overload", None)
            if getattr(operator, "namespace", "aten") in _BUILT_IN:
                continue
            if before:
                dependencies[node.get_name()].add(before)
            before = node.get_outputs()[0].get_name()
        original(self)

    return compute_dependencies


def lacks_order() -> bool:
    """Whether this torch lacks what `operators_in_order` needs."""
    try:
        _ORDER.find()
        _GRAPH.find()
    except MissingTorchNameError:
        return True
    return False


def lacks_partitions() -> bool:
    """Whether this torch lacks a hook for Inductor's partitions."""
    try:
        for name in (_PARTITION_HOOK, _PARTITION, _PARTITION_OPS, _INDUCTOR_PATCH):
            name.find()
    except MissingTorchNameError:
        return True
    return False


@contextmanager
def partitions_taken(
    take: Callable[[PartitionFunction, int], PartitionFunction], splitting_ops: Sequence[str]
) -> Iterator[None]:
    """Inductor splits graphs at `splitting_ops`, and calls `take(partition, number)` in place of
    each partition."""
    hook = _PARTITION_HOOK.find()
    settings = {"graph_partition": True, "custom_should_partition_ops": list(splitting_ops)}
    with _INDUCTOR_PATCH.find()(settings):
        before = hook.wrapper
        hook.wrapper = lambda function, metadata: take(function, metadata.partition_index)
        try:
            yield
        finally:
            hook.wrapper = before


def without_kept_headers() -> AbstractContextManager[None]:
    """Inductor compiles C++ without precompiled headers in the block."""
    block: AbstractContextManager[None] = _INDUCTOR_PATCH.find()(
        {"cpp_cache_precompile_headers": False}
    )
    return block
