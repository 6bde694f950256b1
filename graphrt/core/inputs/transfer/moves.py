"""The moves of a slot: which bytes of a step come from where, if not all come from the host."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphrt.core.device import RingFormat
from graphrt.core.inputs.layout import FieldMove
from graphrt.core.inputs.transfer.writes import PadSource

_COPY, _PAYLOAD, _FILL = RingFormat.COPY, RingFormat.PAYLOAD, RingFormat.FILL
_VECTOR = 16
_ONE_OF_EACH = {1: 0x0101010101010101, 2: 0x0001000100010001, 4: 0x0000000100000001, 8: 1}
"""What makes a word of a number of so many bytes, by which it is multiplied."""

Move = tuple[int, int, int, int]
Packed = tuple[int, bytes, bytes]
"""How many moves there are, their words, and which of these are known at a step alone."""


def packed(rows: Iterable[Sequence[int]]) -> bytes:
    """Numbers as words of 8 bytes, for `NativeWriter`."""
    words = array("Q")
    for row in rows:
        words.extend(row)
    return words.tobytes()


class MoveTable:
    """The moves of a step whose inputs come from the same kinds of places as the last such one's.

    `kinds` has a letter for each field: "h" comes from the host, "d" is somewhere on the device,
    "k" is kept, as it is in place already.
    """

    __slots__ = ("_places", "_words", "count")

    def __init__(
        self,
        moves: Sequence[FieldMove],
        kinds: str,
        slab: int,
        pads: Mapping[str, PadSource],
    ) -> None:
        """`slab` is its address; the padding of fields that are not on the host has a pattern."""
        words = array("Q")
        # Where in `words` an address goes, of which field, and how far after its start it is.
        self._places: list[tuple[int, int, int]] = []
        for number, move, at in _moves(moves, kinds, slab, pads):
            if number >= 0:
                self._places.append((len(words) + 1, number, at))
            words.extend(move)
        self.count = len(words) // RingFormat.MOVE_WORDS
        self._words = memoryview(words)

    def write(
        self, words: memoryview, word: int, addresses: Mapping[int, int] | Sequence[int]
    ) -> None:
        """Write the moves to `words` from place `word` on; `addresses` are those of the fields that
        are somewhere on the device, by number."""
        own = self._words
        for place, number, at in self._places:
            own[place] = addresses[number] + at
        words[word : word + len(own)] = own

    def packed(self) -> Packed:
        """The same for `NativeWriter`."""
        late = [(place, number, at, 0) for place, number, at in self._places]
        return self.count, self._words.tobytes(), packed(late)


class Fills:
    """The padding of a step whose inputs all come from the host, as moves: `count` of them.
    `others` are fields that are not among them, for the host to pad.

    A row that is repeated is a pattern too, if a word is one or more of it: it is read where the
    inputs wait to be fetched.
    """

    __slots__ = ("_rows", "_words", "count", "others")

    def __init__(
        self,
        moves: Sequence[FieldMove],
        pads: Mapping[str, PadSource],
        memory: Mapping[int, memoryview],
        most: int,
    ) -> None:
        """`memory` is where inputs wait, as numbers, by the bytes of one."""
        words = array("Q")
        # Where in `words` a row goes, of which numbers it is one, where, its bytes, and what makes
        # a word of it.
        self._rows: list[tuple[int, memoryview, int, int, int]] = []
        self.others: list[FieldMove] = []
        self.count = 0
        for move in moves:
            size_of_row = move.field.row_bytes
            pattern = pads[move.name].word
            if move.repeats:
                pattern = 0 if size_of_row in memory else None
            spans = move.pads or [(to, size) for _, to, size in move.repeats]
            if pattern is None or self.count + len(spans) > most:
                self.others += [move] if spans else []
                continue
            for place, (row, _, _) in enumerate(move.repeats):
                numbers = memory[size_of_row]
                at = len(words) + place * RingFormat.MOVE_WORDS + 1
                self._rows.append((at, numbers, row, size_of_row, _ONE_OF_EACH[size_of_row]))
            for to, size in spans:
                words.extend((to, pattern, size, _FILL))
                self.count += 1
        self._words = memoryview(words)

    def write(self, words: memoryview, word: int, payload: int) -> None:
        """Write the moves to `words` from place `word` on; `payload` is where the inputs are, in
        bytes from the start of the memory."""
        own = self._words
        for at, numbers, row, size, one_of_each in self._rows:
            own[at] = numbers[(payload + row) // size] * one_of_each
        words[word : word + len(own)] = own

    def packed(self, whole: int) -> Packed:
        """The same for `NativeWriter`; `whole` says that the payload comes first."""
        late = [(at, row, size, one_of_each) for at, _, row, size, one_of_each in self._rows]
        return whole + self.count, self._words.tobytes(), packed(late)


def _moves(
    moves: Sequence[FieldMove], kinds: str, slab: int, pads: Mapping[str, PadSource]
) -> Iterator[tuple[int, Move, int]]:
    """The moves; with a number of a field >= 0 they start so many bytes after its address."""
    start = end = -1
    for number, (move, kind) in enumerate(zip(moves, kinds, strict=True)):
        field = move.field
        if kind == "h":
            start = field.offset if start < 0 else start
            end = field.end
            continue
        if start >= 0:
            yield -1, _payload(start, end), 0
        start = -1
        if kind == "d":
            for to, at, size in move.copies:
                # Vectors as far as they go.
                whole = size // _VECTOR * _VECTOR if size % 4 else size
                for begin, part in ((0, whole), (whole, size - whole)):
                    if part:
                        yield number, (to + begin, 0, part, _COPY | part << 8), at + begin
        if move.pads:
            pattern = pads[move.name].word
            assert pattern is not None
            for to, size in move.pads:
                yield -1, (to, pattern, size, _FILL), 0
        # Of each block, if its last row is repeated.
        for (row, to, size), (first, at, _) in zip(move.repeats, move.copies, strict=False):
            how = _COPY | field.row_bytes << 8
            if kind == "d":
                yield number, (to, 0, size, how), at + row - first
            else:
                yield -1, (to, slab + row, size, how), 0
    if start >= 0:
        yield -1, _payload(start, end), 0


def _payload(start: int, end: int) -> Move:
    # Up to the next vector nothing is anybody's.
    size = -(-(end - start) // _VECTOR) * _VECTOR
    return start, start, size, _PAYLOAD | size << 8
