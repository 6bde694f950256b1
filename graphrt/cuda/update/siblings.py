"""Layers with equal tasks: one layer is issued again, and the others are patched from it.

A layer's *own* words (of four bytes) are those in which the captured parameters of layers differ:
addresses, as a rule. All other words are shared. To patch a layer is to give it the shared words of
the issued one. That must equal issuing it: for the first sets of host arguments all layers are
issued and compared bit for bit. Later, a set that changes an own word of the issued layer is still
issued for each layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from graphrt.core.device.contract import TaskUpdate
from graphrt.cuda.update.images import WORD, Image, Images, key_of, words
from graphrt.cuda.update.ladder import Ladder, TaskNode, UpdateCounts
from graphrt.cuda.update.node_parameters import PatchedSetting, Setting, SharedSetting

CHECKS = 2
"""Sets of host arguments, besides those of the capture, whose layers are all compared."""
REMEMBERED = 256
"""The most sets of host arguments whose parameters are remembered; fewer if a set has many images,
of which `REMEMBERED_IMAGES` are kept."""
REMEMBERED_IMAGES = 8192

Issue = Callable[[TaskUpdate], Images]


def own_words(bases: Sequence[Image]) -> frozenset[int]:
    """The words in which images of equal sizes differ."""
    first = words(bases[0])
    return frozenset(
        index
        for other in bases[1:]
        if other.data != bases[0].data
        for index, (a, b) in enumerate(zip(first, words(other), strict=True))
        if a != b
    )


def patched(base: Image, unshared: frozenset[int], source: Image) -> Image | None:
    """`source` with the own words of `base`; None if their arguments have other sizes."""
    if source.sizes != base.sizes:
        return None
    data = bytearray(source.data)
    for word in unshared:
        data[word * WORD : (word + 1) * WORD] = base.data[word * WORD : (word + 1) * WORD]
    return source._replace(data=bytes(data))


class Known:
    """The parameters for one set of host arguments, as issuing gave them: either `patched`, those
    of the layer `issuer`, from which all layers are patched; or `whole`, those of each issued
    layer, by its number."""

    __slots__ = ("issuer", "patched", "whole")

    def __init__(self) -> None:
        self.issuer = 0
        self.patched: Images | None = None
        self.whole: dict[int, Images] = {}


class Family:
    """Updates tasks of one graph that were issued alike and captured as the same launches.

    For each step `prepare` finds the parameters, and `give` passes the changed ones to the driver.

    A layer is one task: `layers` are the nodes of each, `indices` their indices among the tasks of
    the graph. Methods name a layer by its number in `layers`. `alike` says whether layers may be
    patched; None until enough sets were compared.
    """

    def __init__(
        self, layers: Sequence[Sequence[TaskNode]], indices: Sequence[int], counts: UpdateCounts
    ) -> None:
        self.indices = list(indices)
        self.alike: bool | None = None if len(layers) > 1 else False
        self._layers = layers
        self._counts = counts
        # The numbers of all layers.
        self._everyone = list(range(len(layers)))
        # For each layer the captured image of each of its nodes.
        self._bases: list[Images] = [tuple(map(_base, nodes)) for nodes in layers]
        # For each node of a layer its own words.
        self._own = [own_words(bases) for bases in zip(*self._bases, strict=True)]
        # The first layer's images: at the capture, and for each set that changed them and for which
        # all layers were compared.
        self._compared: list[Images] = [self._bases[0]]
        # The images that layers were patched from last. `give` skips a node by identity, so equal
        # images of the next set become these objects.
        self._source: Images = self._bases[0]
        # For each node of a layer: that node of every layer, with the buffer that patches it. Empty
        # until `alike` is true.
        self._columns: list[list[tuple[TaskNode, Setting]]] = []
        # A set of host arguments, by `key_of`, -> its parameters.
        self._known: OrderedDict[Hashable, Known] = OrderedDict()

    def prepare(self, updates: Sequence[TaskUpdate], issue: Issue) -> list[tuple[Known, list[int]]]:
        """The parameters of all layers, with the numbers of the layers that they are for. Layers
        without remembered parameters are issued."""
        first = updates[self.indices[0]].values
        for index in self.indices:
            if updates[index].values is not first:
                return [
                    (self._find(values, numbers, updates, issue), numbers)
                    for values, numbers in self._by_values(updates)
                ]
        return [(self._find(first, self._everyone, updates, issue), self._everyone)]

    def give(self, prepared: Sequence[tuple[Known, list[int]]], ladder: Ladder) -> None:
        """Give the layers their prepared parameters, unless they have them already."""
        for remembered, numbers in prepared:
            if remembered.patched is not None:
                self._give_patched(remembered.patched, remembered.issuer, numbers, ladder)
                continue
            for number in numbers:
                for node, image in zip(self._layers[number], remembered.whole[number], strict=True):
                    if node.applied is not image:
                        ladder.give(node, node.whole(image), image)

    def _give_patched(
        self, images: Images, issuer: int, numbers: Sequence[int], ladder: Ladder
    ) -> None:
        for column, image in zip(self._columns, images, strict=True):
            issuer_patched = issuer in numbers and column[issuer][0].applied is not image
            patched_nodes = ladder.give_all(column, numbers, image)
            self._counts.shared_patches += patched_nodes - (issuer_patched and patched_nodes > 0)

    def _by_values(
        self, updates: Sequence[TaskUpdate]
    ) -> list[tuple[Mapping[str, Any], list[int]]]:
        groups: dict[Hashable, tuple[Mapping[str, Any], list[int]]] = {}
        for number, index in enumerate(self.indices):
            values = updates[index].values
            key = key_of(values)
            # An id cannot equal a key: keys are tuples.
            groups.setdefault(id(values) if key is None else key, (values, []))[1].append(number)
        return list(groups.values())

    def _find(
        self,
        values: Mapping[str, Any],
        numbers: list[int],
        updates: Sequence[TaskUpdate],
        issue: Issue,
    ) -> Known:
        key = key_of(values)
        remembered = None if key is None else self._known.get(key)
        if remembered is None:
            remembered = Known()
        missing = []
        if remembered.patched is None:
            missing = [number for number in numbers if number not in remembered.whole]
        self._counts.memo_hits += len(numbers) - len(missing)
        if missing:
            self._fill(remembered, missing, updates, issue)
            self._remember(key, remembered)
        return remembered

    def _fill(
        self, remembered: Known, missing: list[int], updates: Sequence[TaskUpdate], issue: Issue
    ) -> None:
        """Issue one of the `missing` layers if the rest may be patched from it, else all."""
        if self.alike and not remembered.whole:
            issuer, missing = missing[0], missing[1:]
            images = issue(updates[self.indices[issuer]])
            if self._keeps_own_words(issuer, images):
                self._source = remembered.patched = tuple(map(_same_if_equal, self._source, images))
                remembered.issuer = issuer
                return
            self._counts.self_check_failures += 1
            remembered.whole[issuer] = images
        for number in missing:
            images = issue(updates[self.indices[number]])
            remembered.whole[number] = tuple(map(_same_if_equal, self._bases[number], images))
        if self.alike is None and len(remembered.whole) == len(self._layers):
            self._check(remembered)

    def _keeps_own_words(self, number: int, images: Images) -> bool:
        """Whether the images have the layer's own words of the capture. If not, other layers may
        not be patched from them: their own words may have to change too."""
        return self._predicted(number, images) == images

    def _predicted(self, number: int, images: Images) -> tuple[Image | None, ...]:
        """The images to which `images` of another layer would patch this one."""
        return tuple(map(patched, self._bases[number], self._own, images))

    def _check(self, remembered: Known) -> None:
        """Compare the images that all layers were issued with to those that patching would give."""
        source = remembered.whole[0]
        self._counts.self_checks += 1
        for number, images in remembered.whole.items():
            if self._predicted(number, source) != images:
                self._counts.self_check_failures += 1
                self.alike = False
                return
        # A set that changes nothing proves nothing.
        if source not in self._compared:
            self._compared.append(source)
            if len(self._compared) > CHECKS:
                self._join(remembered)

    def _join(self, checked: Known) -> None:
        """From now on one layer is issued for all."""
        self.alike = True
        for bases, unshared in zip(zip(*self._bases, strict=True), self._own, strict=True):
            shared = SharedSetting(bases[0], unshared)
            index = len(self._columns)
            self._columns.append(
                [
                    (nodes[index], PatchedSetting(base, shared))
                    for nodes, base in zip(self._layers, bases, strict=True)
                ]
            )
        for remembered in (checked, *self._known.values()):
            if len(remembered.whole) == len(self._layers):
                remembered.patched = remembered.whole[0]
                remembered.whole = {}
        self._source = checked.patched or self._source

    def _remember(self, key: Hashable | None, remembered: Known) -> None:
        if key is None:
            return
        self._known[key] = remembered
        images = len(self._own) * (1 if self.alike else len(self._layers))
        most = max(8, min(REMEMBERED, REMEMBERED_IMAGES // max(images, 1)))
        while len(self._known) > most:
            self._known.popitem(last=False)


def _base(node: TaskNode) -> Image:
    assert node.base is not None
    return node.base


def _same_if_equal(existing: Image, image: Image) -> Image:
    # Images and launches are compared by identity later, so equal ones become one object.
    if image == existing:
        return existing
    return image._replace(launch=existing.launch) if image.launch == existing.launch else image
