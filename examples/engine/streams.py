"""The engine on an event loop: `async for token in engine.stream(prompt)`.

A server has one event loop and many readers. A step takes milliseconds, and a reader may go away
at any time. So there are two threads:

- **The engine's** makes the engine, runs its steps and closes it. The loop goes on meanwhile.
- **The loop's** does the rest between two steps (`AsyncEngine._settle`): new requests join,
  requests without a reader leave, readers see their tokens. No step runs then, so there is no lock.

A reader never holds the engine up. Its tokens stay in its request, at most `max_tokens` of them,
and the request gives its pages back at its end, read or not. A reader has gone away if it closed
its stream, was cancelled in it, or dropped it: the engine has a weak reference.

Not done: readers in other threads or processes, and another engine after a failed step.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from examples.engine.config import Sampling
from examples.engine.engine import Engine
from examples.engine.requests import Request

T = TypeVar("T")


class QueueFullError(RuntimeError):
    """`max_requests` are open. This one is not queued."""


class EngineStoppedError(RuntimeError):
    """The engine was shut down, or failed (`__cause__`). The request has not come to its end."""


class Stream:
    """The tokens of one request, for one reader."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ended = False
        self._error: EngineStoppedError | None = None
        self._read = self._shown = request.prompt_len
        self._changed = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> int:
        while self._read == self._shown:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        self._read += 1
        return self.request.tokens[self._read - 1]

    def close(self) -> None:
        """The reader has gone away: its request leaves before the next step."""
        self._shown, self._error, self.ended = self._read, None, True
        self._changed.set()

    async def aclose(self) -> None:
        """`close()`, for `contextlib.aclosing`."""
        self.close()

    def show(self, error: EngineStoppedError | None = None) -> None:
        """Called between steps: the next step appends tokens behind the shown ones."""
        if not self.ended:
            self._shown, self.ended = len(self.request.tokens), self.request.done
            if error is not None and not self.ended:
                self._error, self.ended = error, True
            self._changed.set()


class AsyncEngine:
    """`async with AsyncEngine(lambda: Engine(model)) as engine:`

    At most `max_requests` are open, waiting or running. After a failed step nothing is served.
    """

    def __init__(self, make: Callable[[], Engine], max_requests: int = 256) -> None:
        """`make` runs in the engine's thread: devices and torch have settings for each thread."""
        self.max_requests = max_requests
        self._make = make
        self._thread = ThreadPoolExecutor(1, "engine")
        self._arrived: list[Request] = []
        self._streams: dict[Request, weakref.ref[Stream]] = {}
        self._work = asyncio.Event()
        self._closing = False
        self._failure: Exception | None = None

    async def __aenter__(self) -> AsyncEngine:
        self.engine = await self._in_thread(self._make)
        self._steps = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends open streams with `EngineStoppedError`, after the step under way."""
        self._closing = True
        self._work.set()
        try:
            await self._steps
        finally:
            await self._in_thread(self.engine.close)
            self._thread.shutdown()

    def stream(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Stream:
        """Queues a request. Raises `EngineStoppedError`, `RequestError` or `QueueFullError`."""
        if self._closing:
            raise self._stopped()
        request = self.engine.request(prompt, sampling)
        if len(self._streams) >= self.max_requests:
            raise QueueFullError(
                f"{len(self._streams)} requests are open, and max_requests is {self.max_requests}: "
                "try again when one has ended"
            )
        stream = Stream(request)
        self._streams[request] = weakref.ref(stream)
        self._arrived.append(request)
        self._work.set()
        return stream

    async def _run(self) -> None:
        try:
            while not self._closing:
                if self.engine.busy:
                    await self._in_thread(self.engine.step)
                else:
                    await self._work.wait()
                    self._work.clear()
                self._settle()
        except Exception as error:
            self._failure = error
        finally:
            self._closing = True
            for stream in filter(None, (each() for each in self._streams.values())):
                stream.show(self._stopped())

    def _settle(self) -> None:
        self.engine.scheduler.waiting += self._arrived
        self._arrived.clear()
        for request, reader in tuple(self._streams.items()):
            stream = reader()
            if stream is not None:
                stream.show()
            if stream is None or stream.ended:
                self.engine.scheduler.abort(request)
                del self._streams[request]

    def _stopped(self) -> EngineStoppedError:
        why = "was shut down" if self._failure is None else f"failed: {self._failure!r}"
        error = EngineStoppedError(f"the engine {why}; start another one, and send requests again")
        error.__cause__ = self._failure
        return error

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
