"""What a guard of Dynamo's that does not hold says, in words of the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from graphrt.compile.trace._side_effects import readable_name

AS_TRACED = "what the trace has baked in"

_OF_CLASS = re.compile(r"dict\(type\(([^()]+)\)\.__dict__\)\['(\w+)'\]")
_SOURCE = re.compile(r"\b[GL]\['\w+'\](?:\.\w+|\[[^\]]*\])*")
_LENGTH = re.compile(r"(len\(.*\)) != (\d+)")
_CONTAINS = re.compile(r"(not )?___dict_contains\('(\w+)', (.*)\)")
_KIND = re.compile(r"___check_(type|obj)_id\(.*type=<(?:class )?'?([\w.]+)'?>")
_TENSOR = re.compile(r"tensor '.*?' (.*?) mismatch.*?expected (.*?),? actual")


@dataclass(frozen=True)
class Broken:
    """`name` of the model is `got` now; a guard wants `expected`."""

    name: str
    got: str
    expected: str


def explained(said: str, text_of: Callable[[str], str]) -> Broken:
    """`said` is the guard as Dynamo writes it; `text_of` tells what something is now, by its name
    there."""
    said = _OF_CLASS.sub(r"\1.\2", said)
    source = _SOURCE.search(said)
    if source is None:
        return Broken("the module", said, AS_TRACED)
    name, now = readable_name(source.group()), text_of(source.group())
    said = said.replace(source.group(), name)
    if found := _CONTAINS.search(said):
        name = f"{name.removesuffix('.__dict__')}.{found[2]}"
        there = "an attribute of the object", "no attribute of the object"
        return Broken(name, *(there if found[1] else there[::-1]))
    if found := _KIND.search(said):
        kind = found[2].removeprefix("builtins.")
        return Broken(name, now, f"the same {kind}" if found[1] == "obj" else f"a {kind}")
    if found := _TENSOR.search(said):
        return Broken(name, now, f"{found[1]} {found[2]}")
    length = _LENGTH.fullmatch(said)
    if length and not now.endswith(f" of {length[2]}"):
        said = f"{length[1]} == {length[2]}"  # some guards say what is wrong
    if "___" in said or "Accessor" in said:
        said = AS_TRACED
    return Broken(name, now, said)
