"""The host's side of the ring from which graphs fetch their inputs."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable

import torch

from graphrt.core.base.errors import StaleInputError
from graphrt.cuda.ring.format import RingDevice, RingFormat

_PROGRESS, _GIVEN = RingFormat.PROGRESS, RingFormat.GIVEN
_FAULT, _FOUND = RingFormat.FAULT, RingFormat.FOUND
_PATIENCE_S, _NAP_S = 5.0, 20e-6
_LEAST_BYTES = 4 << 10
_TRIES = 7

# Memory of rings that are gone. The device may still read it, so it cannot be freed at once.
_retired: list[tuple[torch.Tensor, memoryview]] = []


class SlotRing:
    """The host's view of the ring: which slot the next step writes, and how far the device is.

    `count` is how many steps the device was given. While a step is being given the ring is
    `unsure`. If that fails or is interrupted, the next step asks the device for the count: without
    that each later step would write the slot of another one.
    """

    __slots__ = (
        "__weakref__",
        "_nbytes",
        "count",
        "device",
        "free_until",
        "moves",
        "pending",
        "places",
        "rows",
        "unsure",
        "waits",
        "words",
    )

    def __init__(self, device: RingDevice, nbytes: int, moves: int) -> None:
        """`nbytes` of payload and so many moves are what a slot can hold. Raises `StaleInputError`
        if the device does not fetch a first one."""
        self.device = device
        self._nbytes = nbytes
        self.moves = moves
        address, size = device.memory.data_ptr(), device.memory.nbytes
        octets = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        # bytes of a number -> all of the memory as such numbers.
        self.rows = {1: octets, 2: octets.cast("H"), 4: octets.cast("I"), 8: octets.cast("Q")}
        words = self.words = self.rows[RingFormat.WORD_BYTES]
        starts = [RingFormat.CONTROL_BYTES + slot * device.stride for slot in range(device.slots)]
        # For each slot: its first word, and where its payload begins in the memory.
        self.places = [(start // RingFormat.WORD_BYTES, start + device.payload) for start in starts]
        for word, _ in self.places:
            words[word] = RingFormat.NO_STEP
        self.count = 0
        # For steps before this number the device has fetched what was in the slot before.
        self.free_until = device.slots
        self.waits = 0
        # What fetches the slot of a step whose graph has not done so yet.
        self.pending: Callable[[], None] | None = None
        self.unsure = False
        weakref.finalize(self, _retire, device.memory, words).atexit = False
        # The driver may put loading a kernel off until its first launch, which a capture
        # does not allow.
        self.give(device.prepare(0, 0), self.take()[0], 0, False)
        device.wait()
        if words[_PROGRESS] != 1:
            raise StaleInputError(
                "the device did not fetch the first slot of its input ring",
                got=f"{words[_PROGRESS]} steps fetched",
                expected=1,
                advice="GraphOptions(inputs_in_graph=False)",
            )

    def limit(self, seconds: float) -> None:
        """Let graphs fetch only payloads that take at most so many seconds longer than an empty
        slot, or 4 KiB: how fast devices read the host's memory differs tenfold."""
        longer = self._time_of(self._nbytes) - self._time_of(0)
        if longer > seconds:
            fitting = int(self._nbytes * seconds / longer) // 1024 * 1024
            self._nbytes = min(self._nbytes, max(_LEAST_BYTES, fitting))

    def _time_of(self, nbytes: int) -> float:
        """Seconds until a slot with so much payload, which goes nowhere, is fetched."""
        fetch, times = self.device.prepare(nbytes, 0), []
        for _ in range(_TRIES):
            word, _ = self.take()
            began = time.perf_counter()
            self.give(fetch, word, 0, False)
            self.device.wait()
            times.append(time.perf_counter() - began)
        return min(times)

    def fetch_of(self, nbytes: int) -> Callable[[], None] | None:
        """What fetches a slot with so many bytes of payload; None where that is not worth it."""
        return self.device.prepare(nbytes, self.moves) if 0 < nbytes <= self._nbytes else None

    def settle(self) -> None:
        """Forget a pending fetch, and ask the device for the count if the ring is unsure: else the
        next step would wait for the answer."""
        self.pending = None
        if self.unsure:
            self.resync()

    def take(self) -> tuple[int, int]:
        """The first word of the next step's slot, which may be written until it is given, and
        where its payload begins in the memory.

        Raises `StaleInputError` if the device found a slot that was not its step's.
        """
        words = self.words
        if self.unsure:
            self.resync()
        if words[_FAULT]:
            raise self._fault()
        count = self.count
        if count >= self.free_until:
            self._wait_for(count)
        return self.places[count % len(self.places)]

    def give(self, fetch: Callable[[], None], word: int, count: int, in_graph: bool) -> None:
        """Have the slot that was taken fetched, which begins at `word` and has `count` moves: now,
        or by the graph that is launched next; after that launch the caller calls `launched`."""
        words, step = self.words, self.count
        words[word] = step
        words[word + 1] = count
        words[_GIVEN] = step + 1
        self.unsure = True
        if in_graph:
            self.pending = fetch
        else:
            self.pending = None
            fetch()
            self.count = step + 1
            self.unsure = False

    def launched(self) -> None:
        """The graph that fetches the slot was launched."""
        self.pending = None
        self.count += 1
        self.unsure = False

    def give_nothing(self, fetch: Callable[[], None]) -> None:
        """Let the graph that is launched next fetch nothing: what is in the slab stays."""
        word, _ = self.take()
        self.give(fetch, word, 0, True)

    def expect_capture(self, fetch: Callable[[], None]) -> None:
        """The same for the graph that is captured next. A fault of an earlier step is left to the
        next `take`."""
        self.resync()
        self.give(fetch, self.places[self.count % len(self.places)][0], 0, True)

    def fetch_pending(self) -> None:
        """Put the fetch that no graph has done on the current stream, which may be captured."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def resync(self) -> None:
        """Ask the device how many steps it was given, once it is done with them."""
        self.pending = None
        self.device.wait()
        self.count = self.words[_PROGRESS]
        self.words[_GIVEN] = self.count
        self.unsure = False

    def _wait_for(self, count: int) -> None:
        """Look, or wait, until the oldest slot is free."""
        words, until, waited = self.words, time.monotonic() + _PATIENCE_S, False
        while True:
            self.free_until = words[_PROGRESS] + len(self.places)
            if count < self.free_until:
                self.waits += waited
                return
            waited = True
            if words[_FAULT]:
                raise self._fault()
            if time.monotonic() > until:
                # Raises what the device has died of, if it has.
                self.device.wait()
                until = time.monotonic() + _PATIENCE_S
            time.sleep(_NAP_S)

    def _fault(self) -> StaleInputError:
        words = self.words
        step, number = words[_FAULT] - 1, words[_FOUND]
        words[_FAULT] = 0
        self.unsure = True
        return StaleInputError(
            "a graph ran on the inputs of an earlier step: it found another step's slot in its "
            "ring, as when a graph of a runner is replayed without its runner",
            got="a slot that was never written"
            if number == RingFormat.NO_STEP
            else f"step {number}",
            expected=f"step {step}",
            advice="run steps by the runner; what it returned since its last step may be wrong",
        )


def _retire(memory: torch.Tensor, words: memoryview) -> None:
    """Keep the memory of a ring that is gone until the device has fetched what it was given."""
    _retired.append((memory, words))
    _retired[:] = [each for each in _retired if each[1][_PROGRESS] < each[1][_GIVEN]]
