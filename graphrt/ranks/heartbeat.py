"""Heartbeats, which tell the ranks that are missing.

A collective that does not end does not tell which rank is missing. So a thread of each rank beats
several times in a time-out: it writes a growing count, the step and what the rank does there to a
`TCPStore` of rank 0. A rank that waits too long reads which counts do not grow: those of ranks that
are dead, stopped, or never release the GIL. If rank 0 dies, the store is gone, and the others name
rank 0. A host that waits for a device is in no vote: the thread calls `on_silence` for it.
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
    """The last heartbeat of a rank."""

    rank: int
    beats: int = 0
    """How many there were: a rank whose count does not grow is silent."""
    step: int = -1
    """The number of its last vote; -1: there was none."""
    doing: str = "nothing was ever heard of it"
    error: str | None = None
    """Why the rank makes no more steps, if it has said so."""
    is_cause: bool = True
    """Whether `error` is its own error, and not one about another rank."""


_WITHOUT_STORE = Sign(0, doing="it holds the store of the heartbeats, which does not answer")


class StoreLostError(Exception):
    """The store does not answer: the process that holds it is gone."""


class Heartbeat:
    """Writes the signs of this rank in a thread, and reads those of the other ranks."""

    def __init__(
        self, group: dist.ProcessGroup, timeout_s: float, on_silence: Callable[[str], object]
    ) -> None:
        """Collective: rank 0 of the group makes the store, and tells the others where it is.
        `on_silence` is called once, in the thread, with the name of a rank that has been silent
        for `timeout_s` seconds."""
        self._on_silence = on_silence
        self._timeout_s = timeout_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Seconds between beats.
        self._interval = max(min(timeout_s / 20, 1.0), 0.02)
        # Seconds without a beat after which a rank is silent. Not a few beats: a machine with more
        # to do than cores may keep a thread waiting for so long.
        self._silence = timeout_s / 3
        # Seconds in which the store must answer.
        self._patience = timeout_s / 4
        self._timeout = timedelta(seconds=max(timeout_s, 1.0))
        host: list[Any] = [None]
        if self.rank == 0:
            # MASTER_ADDR is the address of global rank 0; for another rank its host's name is used.
            name = os.environ.get("MASTER_ADDR") if dist.get_rank() == 0 else None
            name = name or host_platform.node()
            self._held = self._store(name, 0, holds=True)
            host = [(name, self._held.port)]
        dist.broadcast_object_list(host, group=group, group_src=0)
        # Two clients: one that waits for an answer must not block the beats.
        self._writer, self._reader = self._store(*host[0]), self._store(*host[0])
        self._step, self._doing, self._beats = 0, "not stepping yet", 0
        # As in `Sign`.
        self._error: str | None = None
        self._is_cause = True
        self._lock, self._reading = threading.Lock(), threading.Lock()
        # When the signs were last read.
        self._updated = time.monotonic()
        # The last sign of each rank, and when it was first read.
        self._last_signs = [(Sign(rank), self._updated) for rank in range(self.size)]
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
        """Set the step and activity that the next beats of this rank tell."""
        self._step, self._doing = step, doing

    def say(self, error: str, *, is_cause: bool) -> None:
        """Say at once that this rank makes no more steps."""
        self._error, self._is_cause = error, is_cause
        # Without a store no rank can read it; the caller raises its own error anyway.
        with suppress(StoreLostError):
            _answered(self._beat, self._patience)

    def close(self, wait_s: float) -> None:
        """Stop beating. Rank 0, which holds the store, waits until the others have left too or are
        silent, for `wait_s` seconds at most: they read in the store why ranks have left."""
        deadline = time.monotonic() + wait_s
        while self.rank == 0 and time.monotonic() < deadline:
            try:
                self._update()
            except StoreLostError:
                break
            if all(sign.error is not None or self._is_silent(sign) for sign in self._others()):
                break
            time.sleep(self._interval)
        self._ended.set()
        self._thread.join(timeout=self._interval)

    def missing(self, step: int, waited_s: float, wait_s: float) -> list[Sign]:
        """The ranks that hold up step `step`, for which this rank has waited `waited_s` seconds:
        those that say they stopped; else those without beats; else those that have not reached the
        step. Takes at most `wait_s` seconds. Without a store, the last signs count."""
        now = time.monotonic()
        deadline = now + wait_s
        # No rank is called silent earlier: a slow one beats again, and one that was just killed has
        # not missed enough beats yet.
        verdict_from = now + max(self._silence + 2 * self._interval - waited_s, 0.0)
        while True:
            has_store = True
            try:
                self._update()
            except StoreLostError:
                has_store = False
            stopped, silent = self._stopped(), self._silent()
            if stopped:
                return stopped
            if time.monotonic() > verdict_from:
                if silent or not has_store:
                    return silent or [_WITHOUT_STORE]
                behind = [s for s in self._others() if s.step < step and s.error is None]
                if behind or time.monotonic() > deadline:
                    return behind or [s for s in self._others() if s.error is not None]
            time.sleep(self._interval)

    def _others(self) -> list[Sign]:
        return [sign for sign, _ in self._last_signs if sign.rank != self.rank]

    def _stopped(self) -> list[Sign]:
        # Not a rank that left because of another one: it may have ended before that one did.
        return [sign for sign in self._others() if sign.error is not None and sign.is_cause]

    def _silent(self) -> list[Sign]:
        return [sign for sign in self._others() if sign.error is None and self._is_silent(sign)]

    def _is_silent(self, sign: Sign, longer_than_s: float = 0.0) -> bool:
        """Whether at the last update the rank had not beaten for some time."""
        since = self._updated - self._last_signs[sign.rank][1]
        return since > max(longer_than_s, self._silence)

    def _update(self) -> None:
        """Read the signs of all ranks, and note which have new beats; raises `StoreLostError`."""
        signs = _answered(self._read, self._patience)
        with self._lock:
            self._updated = now = time.monotonic()
            self._last_signs = [
                (sign, now if sign.beats != last.beats else since)
                for sign, (last, since) in zip(signs, self._last_signs, strict=True)
            ]

    def _read(self) -> list[Sign]:
        keys = [str(rank) for rank in range(self.size)]
        try:
            # Two threads read: that of the beats, and one that waits for a rank.
            with self._reading:
                present = [key for key in keys if self._reader.check([key])]
                texts = self._reader.multi_get(present)
        except RuntimeError as error:  # all network errors of torch are of this class
            raise StoreLostError(str(error)) from error
        signs = {key: Sign(**json.loads(text)) for key, text in zip(present, texts, strict=True)}
        return [signs.get(key, Sign(rank)) for rank, key in enumerate(keys)]

    def _beat(self) -> None:
        self._beats += 1
        sign = Sign(self.rank, self._beats, self._step, self._doing, self._error, self._is_cause)
        try:
            self._writer.set(str(self.rank), json.dumps(sign.__dict__))
        except RuntimeError as error:
            raise StoreLostError(str(error)) from error

    def _run(self) -> None:
        """Beat until `close`, and now and then check that the other ranks still beat."""
        try:
            while not self._ended.wait(self._interval):
                self._beat()
                if time.monotonic() - self._updated < self._timeout_s / 4:
                    continue
                self._update()
                others = (sign for sign in self._others() if sign.error is None)
                silent = [sign for sign in others if self._is_silent(sign, self._timeout_s)]
                if silent:
                    self._on_silence(named(silent))
                    return
        except StoreLostError:
            if not self._ended.is_set():
                self._on_silence(named([_WITHOUT_STORE]))


def _answered(call: Callable[[], T], limit_s: float) -> T:
    """The result of `call`, which asks the store; raises `StoreLostError` after `limit_s`. If the
    store's process is stopped, torch's clients wait longer than their time-out."""
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
    """Ranks and their last signs, as text for an error."""
    return "; ".join(
        f"rank {sign.rank}: {sign.error}"
        if sign.error is not None
        else f"rank {sign.rank}, last heard at step {sign.step}, {sign.doing}"
        if sign.step >= 0
        else f"rank {sign.rank}: {sign.doing}"
        for sign in signs
    )
