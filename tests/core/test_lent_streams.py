"""A stream is lent to a single holder at a time and returned when the last reference ends."""

from __future__ import annotations

import gc
import itertools

from graphrt.core.device.lent_streams import LentStreams


class Stream:
    def __init__(self, handle: int) -> None:
        self.handle = handle


def streams() -> LentStreams[int]:
    made = itertools.count(1)
    return LentStreams(lambda: next(made), Stream)


def test_no_stream_is_lent_twice_at_once_and_returned_streams_are_reused():
    lent = streams()
    held = [lent.lend(0) for _ in range(33)]
    assert [stream.handle for stream in held] == list(range(1, 34))
    del held[4]
    assert lent.lend(0).handle == 5
    held.append(lent.lend(0))
    assert held[-1].handle == 5 and lent.lend(0).handle == 34


def test_a_stream_of_a_device_is_not_lent_on_another_device():
    lent = streams()
    assert lent.lend(0).handle == 1
    assert [lent.lend(1).handle, lent.lend(0).handle] == [2, 1]


def test_a_loan_keeps_a_stream_after_its_stream_object_is_collected():
    lent = streams()
    stream = lent.lend(0)
    loan = lent.loan_of(0, stream.handle)
    del stream
    gc.collect()
    assert loan is not None and lent.lend(0).handle == 2
    del loan
    assert lent.loan_of(0, 1) is None and lent.loan_of(0, 7) is None
    # The last one that came back.
    assert lent.lend(0).handle == 1
