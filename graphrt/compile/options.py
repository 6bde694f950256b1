"""`CompileOptions`: how modules are traced, split and compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphrt.core.base.option_values import (
    Check,
    check_fields,
    check_keys,
    choice,
    flag,
    items_of,
    operators,
    optional,
    shown,
    wrong_type,
)


@dataclass(frozen=True)
class CompileOptions:
    """Settings of `graphrt.compile`.

    `backend` is "eager" or "inductor". `compile_sizes` are sizes of the first batch axis that get
    code of their own; "capture_sizes" stands for all capture sizes. `dynamic_shapes` says how a
    batch dimension is traced: "backed" by a number that branches may read, or "unbacked" (such a
    branch is an error). Both trace operators for sizes above 1; a size of 0, or of 1 if operators
    would do something else, is compiled by itself. "backed_size_oblivious" means "backed".

    `splitting_ops` are the operators at which the graph is split, "ns::op" or "ns::op.overload";
    None stands for `DEFAULT_SPLITTING_OPS` and every operator tagged `cudagraph_unsafe`, an empty
    list for one piece that is the whole graph. With `use_inductor_graph_partition` Inductor gets
    the whole graph, and splits its own code at those operators. `cache_dir` overrides
    `GRAPHRT_CACHE_DIR`. `save_format` is how the cache keeps compiled pieces: each in
    one file, or "unpacked" too, to be read. `autotune` searches for fast kernels
    where a size is compiled for itself. `full` is the code of FULL graphs: of the "whole" graph,
    compiled once more, or that of its "pieces", for shorter starts and slower steps.
    """

    backend: str = "eager"
    compile_sizes: tuple[int | str, ...] = ()
    dynamic_shapes: Literal["backed", "unbacked", "backed_size_oblivious"] = "backed"
    splitting_ops: tuple[str, ...] | None = None
    use_inductor_graph_partition: bool = False
    cache_dir: str | None = None
    save_format: Literal["binary", "unpacked"] = "binary"
    autotune: bool = True
    full: Literal["whole", "pieces"] = "whole"

    def __post_init__(self) -> None:
        check_fields(self, CHECKS, prefix="compile.")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> CompileOptions:
        """Options from names and values; raises `InvalidOptionError`."""
        check_keys(options, cls, prefix="compile.")
        return cls(**options)

    @property
    def whole_graph(self) -> bool:
        """Whether nothing splits the graph."""
        return self.splitting_ops == ()


def _sizes(key: str, value: object) -> object:
    example = '[1,8,"capture_sizes"]'
    sizes = items_of(key, value, example)
    for size in sizes:
        positive = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not positive and not (isinstance(size, str) and size == "capture_sizes"):
            expected = 'positive integers or "capture_sizes"'
            raise wrong_type(key, size, expected, f"{key}={example}")
    return sizes


def _text(key: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise wrong_type(key, value, "a string", f"quote it: {key}={json.dumps(shown(value))}")
    return value


CHECKS: dict[str, Check] = {
    "backend": _text,
    "compile_sizes": _sizes,
    "dynamic_shapes": choice("backed", "unbacked", "backed_size_oblivious"),
    "splitting_ops": optional(operators),
    "use_inductor_graph_partition": flag,
    "cache_dir": optional(_text),
    "save_format": choice("binary", "unpacked"),
    "autotune": flag,
    "full": choice("whole", "pieces"),
}
