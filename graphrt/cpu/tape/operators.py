"""What the schema of an operator says about replaying it, read once per overload."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from graphrt.cpu.private_torch import (
    builtin_of,
    is_composite,
    schema_of,
)

_ALLOCATES = frozenset(
    "aten::" + name
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
# Their schemas do not say that they update running statistics.
_SILENT_MUTATION = ("batch_norm", "instance_norm", "fused_moving_avg_obs")
_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})
_BUILT_IN = frozenset({"aten", "prim", "prims"})


class Operator:
    """One overload with the facts that recording needs: how the tape treats its calls.

    `raw` is the C function that replays call; `label` names the overload in errors, `name` all
    overloads. `built_in`: torch's own, which runs no Python. `allocates`: its values are undefined.
    `metadata_only`: it changes the shape of a tensor in place (`t_`), and no data. `view`: it
    returns a view. `random`: it draws from a generator. `composite`: its parts are recorded.
    """

    __slots__ = (
        "allocates",
        "built_in",
        "composite",
        "func",
        "label",
        "metadata_only",
        "mutates",
        "name",
        "random",
        "raw",
        "repeatable",
        "schema",
        "tags",
        "view",
    )

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        self.func = func
        self.schema = schema
        self.name: str = schema.name
        self.label = str(func)
        self.tags: frozenset[Any] = frozenset(func.tags)
        self.raw: Callable[..., Any] = builtin_of(func)
        self.built_in = func.namespace in _BUILT_IN
        self.allocates = self.name in _ALLOCATES
        self.metadata_only = torch.Tag.inplace_view in self.tags
        self.mutates: bool = schema.is_mutable
        self.view = self.name in _VIEWS or any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        self.random = torch.Tag.nondeterministic_seeded in self.tags
        self.composite = is_composite(func)
        self.repeatable = (
            self.built_in
            and not self.mutates
            and not self.random
            and not any(word in self.name for word in _SILENT_MUTATION)
        )
        """Running it twice has the effect of running it once."""

    def written_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that a call may write, also where its schema does not say so."""
        if not self.mutates:
            return [] if self.repeatable or self.random else [args, kwargs]
        return [
            args[index] if index < len(args) else kwargs.get(argument.name)
            for index, argument in enumerate(self.schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    def returned_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """For an operator that returns what it mutates: those arguments, in order of return."""
        written: dict[frozenset[str], Any] = {}
        for position, argument in enumerate(self.schema.arguments):
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                written[frozenset(alias.before_set)] = value
        returned = []
        for result in self.schema.returns:
            alias = result.alias_info
            if alias is not None:
                returned.append(written.get(frozenset(alias.before_set)))
        return returned


@cache
def operator_of(func: Any) -> Operator:
    """The facts of `func`, read the first time it is seen."""
    return Operator(func)
