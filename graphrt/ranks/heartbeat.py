"""Who is still there: each rank says so several times in a time-out, in a store of their own.

A collective that does not end says nothing of the rank that is missing. So a thread of each rank
counts up in a `TCPStore` of rank 0, with the step and what the rank does there, and whoever waits
too long reads which counts stand still. A process that is stopped, or holds Python's lock for
ever, stands still too. If rank 0 dies, the store is gone, and that is what the others say.
A host that waits for a device in a collective is in no vote: the thread tells it by `on_silence`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Sign:
    """The last that was heard of a rank."""

    rank: int
    beats: int = 0
    step: int = -1
    doing: str = "nothing was ever heard of it"
    error: str | None = None
    """Why it makes no more steps, if it has said so."""
    is_cause: bool = True
    """Whether that is its own error, and not what it says of another rank."""


class StoreLostError(Exception):
    """The store does not answer: the process that holds it is gone."""


class Heartbeat:
    """The signs of this rank, and those of the others."""

    def __init__(
        self, group: dist.ProcessGroup, timeout_s: float, on_silence: Callable[[str], object]
    ) -> None:
        """Collective: rank 0 of the group makes the store, and tells the others where it is.
        `on_silence` is called once, in the thread, with the name of a rank that has been silent
        for `timeout_s` seconds."""
        self._on_silence = on_silence
        self._timeout_s = timeout_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._interval = max(min(timeout_s / 10, 1.0), 0.02)
        self._patience = max(timeout_s / 4, 3 * self._interval)
        self._timeout = timedelta(seconds=max(timeout_s, 1.0))
        host: list[Any] = [None]
        if self.rank == 0:
            # The address of the first rank of all; of another one its host's name has to do.
            name = os.environ.get("MASTER_ADDR") if dist.get_rank() == 0 else None
            name = name or socket.gethostname()
            self._held = self._store(name, 0, holds=True)
            host = [(name, self._held.port)]
        dist.broadcast_object_list(host, group=group, group_src=0)
        # One for each thread: a client waits for its answers.
        self._writer, self._reader = self._store(*host[0]), self._store(*host[0])
        self._step, self._doing, self._beats = 0, "not stepping yet", 0
        self._error: str | None = None
        self._is_cause = True
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(
            target=self._run, name="graphrt ranks: heartbeat", daemon=True
        )
        self._thread.start()

    def _store(self, host: str, port: int, *, holds: bool = False) -> Any:
        store: Any = dist.TCPStore  # type: ignore[attr-defined]
        return store(host, port, is_master=holds, timeout=self._timeout, wait_for_workers=False)

    def now(self, step: int, doing: str) -> None:
        """What this rank does, said at its next beat."""
        self._step, self._doing = step, doing

    def say(self, error: str, *, is_cause: bool) -> None:
        """Say at once that this rank makes no more steps."""
        self._error, self._is_cause = error, is_cause
        # Without a store nobody is left to read it, and the caller raises what it says.
        with suppress(StoreLostError):
            _answered(self._beat, self._patience)

    def close(self, wait_s: float) -> None:
        """Beat no more. Rank 0, which holds the store, waits until the others have left too or are
        dead, for `wait_s` seconds at most: they read there why ranks have left."""
        ended = time.monotonic() + wait_s
        try:
            before = self.signs() if self.rank == 0 else []
            while before and time.monotonic() < ended:
                time.sleep(3 * self._interval)
                now = self.signs()
                left = [s.error or s.beats == before[s.rank].beats for s in now if s.rank]
                if all(left):
                    break
                before = now
        except StoreLostError:
            pass  # the process that waits for a store of its own is at its end
        self._ended.set()
        self._thread.join(timeout=self._interval)

    def missing(self, step: int, wait_s: float) -> list[Sign]:
        """The ranks that are why step `step` does not go on: those that say so, those whose beats
        stand still, and else those that have not come to it. Looks for at most `wait_s` seconds.

        Raises `StoreLostError`.
        """
        before = self.signs()
        ended = time.monotonic() + wait_s
        while True:
            time.sleep(3 * self._interval)
            now = self.signs()
            others = [sign for sign in now if sign.rank != self.rank]
            # A rank that has left because of another one says so later than that one.
            said = [sign for sign in others if sign.error is not None and sign.is_cause]
            still = [
                sign
                for sign in others
                if sign.beats == before[sign.rank].beats and sign.error is None
            ]
            behind = [s for s in others if s.step < step and s.error is None]
            for named in (said, still, behind):
                if named:
                    return named
            if time.monotonic() > ended:
                return [sign for sign in others if sign.error is not None]

    def signs(self) -> list[Sign]:
        """The last sign of each rank; raises `StoreLostError`."""
        return _answered(self._read, self._patience)

    def _read(self) -> list[Sign]:
        keys = [str(rank) for rank in range(self.size)]
        try:
            with self._lock:
                there = [key for key in keys if self._reader.check([key])]
                texts = self._reader.multi_get(there)
        except RuntimeError as error:  # torch's errors of the network are all of them
            raise StoreLostError(str(error)) from error
        signs = {key: Sign(**json.loads(text)) for key, text in zip(there, texts, strict=True)}
        return [signs.get(key, Sign(rank)) for rank, key in enumerate(keys)]

    def _beat(self) -> None:
        self._beats += 1
        sign = Sign(self.rank, self._beats, self._step, self._doing, self._error, self._is_cause)
        try:
            self._writer.set(str(self.rank), json.dumps(sign.__dict__))
        except RuntimeError as error:
            raise StoreLostError(str(error)) from error

    def _run(self) -> None:
        """Beat, and look now and then whether the others still do."""
        heard = [(0, time.monotonic())] * self.size
        looked = time.monotonic()
        while not self._ended.wait(self._interval):
            try:
                self._beat()
                if time.monotonic() - looked < self._timeout_s / 4:
                    continue
                looked = time.monotonic()
                for sign in self.signs():
                    if sign.beats != heard[sign.rank][0]:
                        heard[sign.rank] = sign.beats, looked
                    elif looked - heard[sign.rank][1] > self._timeout_s and sign.error is None:
                        self._on_silence(named([sign]))
                        return
            except StoreLostError:
                if not self._ended.is_set():
                    self._on_silence("rank 0: it holds the store, which does not answer")
                return


def _answered(call: Callable[[], T], limit_s: float) -> T:
    """Call what asks the store. A store whose process is stopped answers nothing, and torch's
    clients wait for it longer than their time-out."""
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except StoreLostError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="graphrt ranks: store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not answers:
        raise errors[0] if errors else StoreLostError(f"no answer for {limit_s:g} s")
    return answers[0]


def named(signs: Sequence[Sign]) -> str:
    """Ranks and what was last heard of them, for an error."""
    return "; ".join(
        f"rank {sign.rank}: {sign.error}"
        if sign.error is not None
        else f"rank {sign.rank}, last heard at step {sign.step}, {sign.doing}"
        if sign.step >= 0
        else f"rank {sign.rank}: {sign.doing}"
        for sign in signs
    )
