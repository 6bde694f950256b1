"""The moves of a slot: which bytes of a step come from where, and which are padding."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from graphrt.core.inputs.layout import Field, FieldMove
from graphrt.cuda.ring.format import RingFormat

_COPY, _PAYLOAD, _FILL = RingFormat.COPY, RingFormat.PAYLOAD, RingFormat.FILL
_VECTOR = 16
_ONE_OF_EACH = {1: 0x0101010101010101, 2: 0x0001000100010001, 4: 0x0000000100000001, 8: 1}
"""bytes of a row -> the factor that repeats it in a word of 8 bytes"""

Move = tuple[int, int, int, int]


class MoveTable:
    """The moves of steps whose inputs come from the same kinds of places.

    `kinds` has a letter for each field: "h" comes from the host, "d" is somewhere on the device,
    "k" is kept, as it is in place already. `count` is the slot's word of that name. If it does not
    `fit` a slot cannot hold it: there are too many moves, or padding that no move can write.

    Where all come from the host the whole payload is moved, and the other moves are padding. A row
    that is repeated is filled as a pattern if 8 bytes are one or more rows: the row is read from
    the payload. `by_host` are the fields whose padding the host writes into the payload.
    """

    __slots__ = ("_addresses", "_rows", "_words", "by_host", "count", "fits")

    def __init__(self, moves: Sequence[FieldMove], kinds: str, slab: int, most: int) -> None:
        """`slab` is its address; a slot has room for `most` moves."""
        words = array("Q")
        # The words that each step works out. (word, field, offset, 0): the field's address plus the
        # offset. (word, row, bytes, factor): the payload's row of so many bytes times the factor.
        self._addresses: list[tuple[int, int, int, int]] = []
        self._rows: list[tuple[int, int, int, int]] = []
        self.by_host: list[FieldMove] = []
        self.fits = True
        if kinds.count("h") == len(kinds):
            whole = RingFormat.WHOLE
            for move in moves:
                self._fill(move, words, most)
        else:
            whole = 0
            patterns = [_word_of(m.field) for m, kind in zip(moves, kinds, strict=True)
                        if kind != "h" and m.pads]  # fmt: skip
            self.by_host = [move for move, kind in zip(moves, kinds, strict=True) if kind == "h"]
            self.fits = None not in patterns
            for number, each, at in _moves(moves, kinds, slab) if self.fits else ():
                if number >= 0:
                    self._addresses.append((len(words) + 1, number, at, 0))
                words.extend(each)
        moved = len(words) // RingFormat.MOVE_WORDS
        self.fits = self.fits and moved <= most
        self.count = whole + moved
        self._words = memoryview(words)

    def _fill(self, move: FieldMove, words: array[int], most: int) -> None:
        """Have the padding of an input filled by moves, if that can be; else by the host."""
        size_of_row = move.field.row_bytes
        pattern = _word_of(move.field)
        if move.repeats:
            pattern = 0 if size_of_row in _ONE_OF_EACH else None
        spans = move.pads or [(to, size) for _, to, size in move.repeats]
        if pattern is None or len(words) // RingFormat.MOVE_WORDS + len(spans) > most:
            self.by_host += [move] if spans else []
            return
        for index, (row, _, _) in enumerate(move.repeats):
            at = len(words) + index * RingFormat.MOVE_WORDS + 1
            self._rows.append((at, row, size_of_row, _ONE_OF_EACH[size_of_row]))
        for to, size in spans:
            words.extend((to, pattern, size, _FILL))

    def write(
        self, rows: Mapping[int, memoryview], word: int, addresses: Sequence[int], payload: int
    ) -> None:
        """Write the moves to the slot that begins at `word`. `rows` are the ring's memory as
        numbers, by the bytes of one; `addresses` are those of the fields; `payload` is where the
        slot's payload begins in the memory."""
        words = self._words
        for index, number, at, _ in self._addresses:
            words[index] = addresses[number] + at
        for index, row, size, one_of_each in self._rows:
            words[index] = rows[size][(payload + row) // size] * one_of_each
        start = word + RingFormat.FIRST_MOVE
        rows[RingFormat.WORD_BYTES][start : start + len(words)] = words

    def packed(self) -> tuple[int, bytes, bytes]:
        """For `NativeWriter`: the count, the words, and which of them each step works out."""
        return self.count, self._words.tobytes(), packed(self._addresses or self._rows)


def _word_of(field: Field) -> int | None:
    """Eight bytes of an input's padding as a number; None where it is no repetition of eight."""
    word = (field.octets * 8)[:8]
    return int.from_bytes(word, "little") if word * 2 == (field.octets * 16)[:16] else None


def packed(rows: Iterable[Sequence[int]]) -> bytes:
    """Numbers as words of 8 bytes, for `NativeWriter`."""
    words = array("Q")
    for row in rows:
        words.extend(row)
    return words.tobytes()


def _moves(moves: Sequence[FieldMove], kinds: str, slab: int) -> Iterator[tuple[int, Move, int]]:
    """(field, move, offset) of each move. Its source is that field's address plus the offset; field
    -1: the move has its source in itself."""
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
                # Whole vectors first, then the rest.
                whole = size // _VECTOR * _VECTOR if size % 4 else size
                for begin, part in ((0, whole), (whole, size - whole)):
                    if part:
                        yield number, (to + begin, 0, part, _COPY | part << 8), at + begin
        for to, size in move.pads:
            yield -1, (to, _word_of(field) or 0, size, _FILL), 0
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
    # Up to whole vectors: the bytes after the last field are unused.
    size = -(-(end - start) // _VECTOR) * _VECTOR
    return start, start, size, _PAYLOAD | size << 8
