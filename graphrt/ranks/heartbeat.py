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
import platform as host_platform
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


_WITHOUT_STORE = Sign(0, doing="it holds the store of the heartbeats, which does not answer")


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
        self._interval = max(min(timeout_s / 20, 1.0), 0.02)
        # A machine with more to do than cores may keep a thread waiting for some beats.
        self._silence = timeout_s / 3
        self._patience = timeout_s / 4
        self._timeout = timedelta(seconds=max(timeout_s, 1.0))
        host: list[Any] = [None]
        if self.rank == 0:
            # The address of the first rank of all; of another one its host's name has to do.
            name = os.environ.get("MASTER_ADDR") if dist.get_rank() == 0 else None
            name = name or host_platform.node()
            self._held = self._store(name, 0, holds=True)
            host = [(name, self._held.port)]
        dist.broadcast_object_list(host, group=group, group_src=0)
        # One for each thread: a client waits for its answers.
        self._writer, self._reader = self._store(*host[0]), self._store(*host[0])
        self._step, self._doing, self._beats = 0, "not stepping yet", 0
        self._error: str | None = None
        self._is_cause = True
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._looked = time.monotonic()
        # The last sign of each rank, and when it was first seen.
        self._known = [(Sign(rank), self._looked) for rank in range(self.size)]
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
        silent, for `wait_s` seconds at most: they read there why ranks have left."""
        ended = time.monotonic() + wait_s
        while self.rank == 0 and time.monotonic() < ended:
            try:
                self._look()
            except StoreLostError:
                break
            if all(sign.error is not None or self._is_silent(sign) for sign in self._others()):
                break
            time.sleep(self._interval)
        self._ended.set()
        self._thread.join(timeout=self._interval)

    def missing(self, step: int, waited_s: float, wait_s: float) -> list[Sign]:
        """The ranks that are why step `step` does not go on, after `waited_s` seconds of waiting:
        those that say so, those whose beats stand still, and else those that have not come to it.
        Looks for at most `wait_s` seconds, and without a store at what it knew last."""
        now = time.monotonic()
        ended = now + wait_s
        # Before that nobody is called still: a rank that is only slow beats again, and one that has
        # just been killed does not stand still yet.
        least = now + max(self._silence + 2 * self._interval - waited_s, 0.0)
        while True:
            has_store = True
            try:
                self._look()
            except StoreLostError:
                has_store = False
            said, silent = self._said(), self._silent()
            if said:
                return said
            if time.monotonic() > least:
                if silent or not has_store:
                    return silent or [_WITHOUT_STORE]
                behind = [s for s in self._others() if s.step < step and s.error is None]
                if behind or time.monotonic() > ended:
                    return behind or [s for s in self._others() if s.error is not None]
            time.sleep(self._interval)

    def _others(self) -> list[Sign]:
        return [sign for sign, _ in self._known if sign.rank != self.rank]

    def _said(self) -> list[Sign]:
        # A rank that has left because of another one is no cause, and may end before that one does.
        return [sign for sign in self._others() if sign.error is not None and sign.is_cause]

    def _silent(self) -> list[Sign]:
        return [sign for sign in self._others() if sign.error is None and self._is_silent(sign)]

    def _is_silent(self, sign: Sign, longer_than_s: float = 0.0) -> bool:
        """Whether it had not beaten for some time when this rank looked last."""
        since = self._looked - self._known[sign.rank][1]
        return since > max(longer_than_s, self._silence)

    def _look(self) -> None:
        """Note the last sign of each rank, and when it was another one; raises `StoreLostError`."""
        signs = _answered(self._read, self._patience)
        with self._lock:
            self._looked = now = time.monotonic()
            self._known = [
                (sign, now if sign.beats != last.beats else since)
                for sign, (last, since) in zip(signs, self._known, strict=True)
            ]

    def _read(self) -> list[Sign]:
        keys = [str(rank) for rank in range(self.size)]
        try:
            # Two threads look: that of the beats, and who misses a rank.
            with self._reading:
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
        try:
            while not self._ended.wait(self._interval):
                self._beat()
                if time.monotonic() - self._looked < self._timeout_s / 4:
                    continue
                self._look()
                others = (sign for sign in self._others() if sign.error is None)
                silent = [sign for sign in others if self._is_silent(sign, self._timeout_s)]
                if silent:
                    self._on_silence(named(silent))
                    return
        except StoreLostError:
            if not self._ended.is_set():
                self._on_silence(named([_WITHOUT_STORE]))


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
