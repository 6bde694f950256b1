"""`CompileOptions`: how modules are traced, split and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from graphrt.core.modes import PieceProvider
from graphrt.core.options import CompileOptions as CoreOptions
from graphrt.core.options import (
    GraphOptions,
    _check_fields,
    _check_keys,
    _choice,
    _flag,
    _operators,
    _optional,
)

BACKED = "backed"
UNBACKED = "unbacked"
BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"


@dataclass(frozen=True)
class CompileOptions(CoreOptions):
    """Settings of one compiled module; those of `graphrt.CompileOptions` and the following.

    `backend` is "eager" or "inductor". `dynamic_shapes` says how a batch dimension is traced:
    "backed" by a number that branches may look at, "unbacked" (a branch that does is an error), or
    "backed_size_oblivious" (backed, and as if it were never 0 or 1). `compile_sizes` are sizes of
    the first batch axis.

    `splitting_ops` are the operators at which the graph is split, "ns::op" or "ns::op.overload";
    None stands for `DEFAULT_SPLITTING_OPS` and every operator tagged `cudagraph_unsafe`, an empty
    list for one piece that is the whole graph. `save_format` is how the cache keeps compiled
    pieces; None: as `GRAPHRT_COMPILE_CACHE_SAVE_FORMAT` says, else "binary". `autotune` searches
    for fast kernels where a size is compiled for itself.
    """

    splitting_ops: tuple[str, ...] | None = None
    use_inductor_graph_partition: bool = False
    save_format: Literal["binary", "unpacked"] | None = None
    autotune: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fields(self, _CHECKS, prefix="compile.")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> CompileOptions:
        """Options from names and values; raises `InvalidOptionError`."""
        _check_keys(options, cls, prefix="compile.")
        return cls(**options)

    @classmethod
    def of(cls, options: GraphOptions, **more: Any) -> CompileOptions:
        """What `GraphOptions` say about compiling; no splitting_ops are the default ones."""
        core = {each.name: getattr(options.compile, each.name) for each in fields(options.compile)}
        return cls(**{"splitting_ops": options.splitting_ops or None, **core, **more})

    @property
    def whole_graph(self) -> bool:
        """Whether nothing splits the graph."""
        return self.splitting_ops == ()

    @property
    def pieces(self) -> PieceProvider | None:
        """What to tell a `GraphRunner` as `pieces=`: None where nothing provides them."""
        return None if self.whole_graph else PieceProvider.FX


_CHECKS = {
    "splitting_ops": _optional(_operators),
    "use_inductor_graph_partition": _flag,
    "save_format": _optional(_choice("binary", "unpacked")),
    "autotune": _flag,
}
