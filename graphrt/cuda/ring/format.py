"""The ring through which a graph fetches its own inputs: what host and device agree on.

All of it is words of 8 bytes in page-locked memory: first a control page, which the device writes,
then slots of `stride` bytes, which the host writes. Step number k uses slot k modulo `slots`:

    control page   PROGRESS: how many steps are fetched; FAULT: 1 + the number of a step that found
                   another one's slot, or 0; FOUND: the number in that slot; GIVEN: how many steps
                   the host has given, in another cache line than what the device writes
    slot           NUMBER: the step's; COUNT: how many moves follow, and the bit WHOLE; the moves,
                   of MOVE_WORDS each; from `payload` bytes on a copy of the slab as it is to be

With WHOLE the payload is brought to the slab first, and all moves are fills. Moves are (to, from,
bytes, how), and lie apart from each other: `to` counts from the start of the slab. `how` is COPY
(`from` is an address that the device can read), PAYLOAD (`from` counts from the start of the
payload) or FILL (`from` is the pattern, whose byte k goes to addresses that are k modulo 8), plus
`period << 8`: the byte at place p of a COPY or PAYLOAD is that at p modulo `period` of its source,
so a row can be repeated; a plain copy has its own size as period.

To fetch is one operation on a stream: compare NUMBER with the steps fetched so far, which the
device itself counts; if they are equal do what the slot says, count the step and store PROGRESS,
else move nothing, count nothing, and store FOUND and FAULT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class RingFormat:
    """The constants of the format, in words unless a name says bytes."""

    WORD_BYTES = 8
    PROGRESS, FAULT, FOUND = range(3)
    GIVEN = 16
    CONTROL_BYTES = 256
    COUNTER_BYTES = 256
    """What the device needs to count steps, in its own memory, zero at first."""
    NUMBER, COUNT, FIRST_MOVE = range(3)
    MOVE_WORDS = 4
    MAX_MOVES = 63
    COPY, PAYLOAD, FILL = range(3)
    WHOLE = 1 << 63
    NO_STEP = (1 << 64) - 1
    """The number in a slot that no step has written."""


class RingDevice(Protocol):
    """The device's side of a ring. `memory` is the page-locked uint8 [`CONTROL_BYTES` + `slots` *
    `stride`], zero at first; `payload` are the bytes from the start of a slot to its payload;
    `device_memory` is what it has on the device."""

    memory: torch.Tensor
    device_memory: Sequence[torch.Tensor]
    slots: int
    stride: int
    payload: int

    def prepare(self, nbytes: int, moves: int) -> Callable[[], None]:
        """What puts one fetch, of a slot with at most so many moves and bytes of payload, on the
        current stream: it is recorded where that is captured, and done anew at every replay."""

    def wait(self) -> None:
        """Wait on the host for what the current stream was given, and for nothing else: other
        threads may be capturing."""


def slot_bytes(nbytes: int, moves: int) -> tuple[int, int]:
    """The bytes before a slot's payload of `nbytes`, and those from one slot to the next."""
    words = RingFormat.FIRST_MOVE + RingFormat.MOVE_WORDS * moves
    payload = -(-RingFormat.WORD_BYTES * words // 256) * 256
    return payload, payload + -(-nbytes // 256) * 256
