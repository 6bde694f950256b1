"""`places_of`: from a forward to every tensor and plain value that its Python side can reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrt.core.trust.places import code, contents
from graphrt.core.trust.places.kinds import Kind
from graphrt.core.trust.places.links import Link, SlotLink, TensorLink
from graphrt.core.trust.places.slots import Fixed, Place
from graphrt.core.trust.places.walk import Walk

_READERS = {
    Kind.MODULE: contents.module,
    Kind.SCRIPT: contents.script,
    Kind.OBJECT: contents.attributes,
    Kind.TENSOR: contents.attributes,
    Kind.DICT: contents.items,
    Kind.LIST: contents.elements,
    Kind.DEQUE: contents.elements,
    Kind.TUPLE: contents.tuple_items,
    Kind.SET: contents.members,
    Kind.FROZENSET: contents.members,
    Kind.PROXY: contents.proxied,
    Kind.REF: contents.target,
    Kind.CONTEXT_VARIABLE: contents.context_value,
    Kind.FUNCTION: code.function,
    Kind.BOUND: code.bound,
    Kind.PARTIAL: code.partial,
    Kind.CLASS: code.class_attributes,
    Kind.DESCRIPTOR: code.descriptor,
    Kind.CACHED: code.cached,
    Kind.WRAPPER: code.wrapper,
}


@dataclass(frozen=True)
class Places:
    """What the Python side of a forward holds.

    It keeps the containers and tensors that it lists alive for as long as it lives itself.

    A slot is looked up where the walk found it. Where a container was replaced since, a place still
    looks into the old one: its link does not hold any more, and a new walk is needed.
    """

    tensors: list[tuple[Place, torch.Tensor]]
    """Every slot with a tensor; a tensor with several places is in it several times."""

    packed: list[tuple[Place, object]]
    """Every slot with an object of C++ that operators may be given in place of tensors."""

    links: tuple[Link, ...]
    """Every slot between the forward and a tensor, or what is packed; of the containers there their
    length, or which attributes, submodules and hooks they have; and the code that was read."""

    number_links: tuple[Link, ...]
    """The same for containers that lead to no tensor, but to numbers or nowhere yet."""

    numbers: tuple[Place, ...]
    """Every slot with a plain value: a number, text, None, dtype, device, size, member of an enum,
    or a tuple of such. A set of them is one place, and its value a frozenset."""

    arrays: list[tuple[Place, Any]]
    """Every slot with an array of NumPy's."""

    generators: list[Any]
    """What random numbers are drawn from: generators of torch's, Python's and NumPy's."""

    opaque: list[tuple[str, str]]
    """(path, type) of what could not be looked into: generators, arrays, very long containers."""

    complete: bool
    """Whether everything was seen; False if the limit was reached."""

    def values(self) -> list[object]:
        """The numbers as they are now, in the order of `numbers`; compare with `same_value`."""
        return [place.get() for place in self.numbers]


def places_of(forward: Any, *, limit: int = 20_000) -> Places:
    """Walk from `forward` to the tensors and plain values that it can reach.

    `forward` is a function, method, module, partial or other callable. Nothing of it is called,
    and no code of a user runs. At most about `limit` slots are looked at, nearest first.

    Seen are attributes, closures, defaults, what code names of globals and of modules, class
    attributes, hooks, and what all these hold. Not entered are torch, NumPy and the standard
    library, methods whose name no code says that was read, and code more than a few calls away.
    Paths read like `model.layers[0].scale`, `closure scale`, `global SCALE`, `default scale`.
    """
    walk = Walk(_READERS, limit)
    while walk.shape(type(forward)).kind is Kind.WRAPPER:
        forward = forward.unwrap()
    path = _name_of_root(walk, forward)
    walk.slot(0, Fixed(path, forward), forward)
    walk.run()
    return _sorted_out(walk)


def _name_of_root(walk: Walk, forward: Any) -> str:
    kind = walk.shape(type(forward)).kind
    if kind is Kind.FUNCTION:
        return str(forward.__name__)
    if kind is Kind.BOUND:
        return _name_of_root(walk, forward.__self__)
    names = {Kind.MODULE: "model", Kind.SCRIPT: "model", Kind.PARTIAL: "partial"}
    return names.get(kind, "self")


def _sorted_out(walk: Walk) -> Places:
    holders: dict[int, list[int]] = {}
    for holder, held in walk.held_by:
        holders.setdefault(held, []).append(holder)
    leading: set[int] = set()
    left = [owner for owner, _, _ in (*walk.tensors, *walk.packed)]
    while left:
        found = left.pop()
        if found not in leading:
            leading.add(found)
            left += holders.get(found, ())
    links: list[Link] = [*walk.code_links]
    others: list[Link] = []
    for held, place, value in walk.slots:
        (links if held in leading else others).append(SlotLink(place, value))
    for owner, link in walk.guards:
        (links if owner in leading else others).append(link)
    links += [TensorLink(place, tensor) for _, place, tensor in walk.tensors]
    links += [SlotLink(place, value) for _, place, value in walk.packed]
    return Places(
        tensors=[(place, tensor) for _, place, tensor in walk.tensors],
        packed=[(place, value) for _, place, value in walk.packed],
        links=tuple(links),
        number_links=tuple(others),
        numbers=tuple(walk.numbers),
        arrays=walk.arrays,
        generators=walk.generators,
        opaque=walk.opaque,
        complete=not walk.queue and walk.left > 0,
    )
