"""Streams of examples/engine/: tokens are those of eager, and readers may go away at any time."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from examples.engine.config import EngineConfig, Sampling
from examples.engine.engine import Engine
from examples.engine.model import Decoder, seeded
from examples.engine.requests import Request, RequestError, Scheduler
from examples.engine.streams import AsyncEngine, EngineStoppedError, QueueFullError, Stream
from graphrt import Reason
from tests.draws import rest_long
from tests.test_engine_example import LIMITS, PROMPTS, SHAPE, one_thread, plain_tokens
from tests.test_readme import blocks

__all__ = ["one_thread"]  # a fixture of each test

EAGER = replace(LIMITS, draft_tokens=0, mode="NONE")
T = TypeVar("T")
SHORT, LONG = Sampling(3), Sampling(30)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return seeded(SHAPE)


def serving(model: Decoder, limits: EngineConfig = EAGER, max_requests: int = 256) -> AsyncEngine:
    draft = model.first_layers(1) if limits.draft_tokens else None
    return AsyncEngine(lambda: Engine(model, limits, draft), max_requests)


class Steps:
    """Holds an engine's steps: so many may run, until `go_on`."""

    def __init__(self, engine: AsyncEngine, allowed: int = 0) -> None:
        self.begun = 0
        self._allowed = threading.Semaphore(allowed)
        self._step = engine.engine.step
        engine.engine.step = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.begun += 1
        assert self._allowed.acquire(timeout=60)
        self._step()

    def go_on(self) -> None:
        self._allowed.release(10_000)


def run(main: Coroutine[Any, Any, T]) -> T:
    """On a loop of its own. A reader that nobody tells anything fails the test, as does an error
    that only the loop's log would tell."""
    untold: list[str] = []

    async def in_time() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: untold.append(context["message"]))
        result = await asyncio.wait_for(main, 180)
        gc.collect()
        return result

    result = asyncio.run(in_time())
    assert untold == []
    return result


async def until(true: Callable[[], object]) -> None:
    for _ in range(60_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it was not so within a minute")


async def at_rest(engine: AsyncEngine) -> None:
    """All requests have ended. No page and no place in a batch is taken."""
    await until(lambda: not engine.engine.busy)
    config, scheduler = engine.engine.config, engine.engine.scheduler
    assert sorted(scheduler.free_pages) == list(range(1, config.num_pages))
    assert not scheduler.running and not scheduler.waiting


async def all_of(stream: AsyncIterator[int]) -> list[int]:
    return [token async for token in stream]


async def some_of(stream: AsyncIterator[int], count: int) -> list[int]:
    """At most so many tokens."""
    tokens: list[int] = []
    while len(tokens) < count:
        try:
            tokens.append(await stream.__anext__())
        except StopAsyncIteration:
            break
    return tokens


# How 200 readers behave: each gives the tokens it has read, and whether these must be all.
Outcome = tuple[list[int], bool]


async def reads_all(stream: Stream, chosen: random.Random) -> Outcome:
    return await all_of(stream), True


async def reads_slowly(stream: Stream, chosen: random.Random) -> Outcome:
    tokens = []
    async for token in stream:
        tokens.append(token)
        await asyncio.sleep(chosen.random() / 20)
    return tokens, True


async def stops_reading(stream: Stream, chosen: random.Random) -> Outcome:
    """It keeps the stream open until the engine has no other work, and reads the rest then."""
    tokens = await some_of(stream, 1)
    await until(lambda: stream.ended)
    return tokens + await all_of(stream), True


async def closes(stream: Stream, chosen: random.Random) -> Outcome:
    tokens = await some_of(stream, chosen.randint(0, 3))
    stream.close()
    assert await all_of(stream) == []
    return tokens, False


async def closes_its_generator(stream: Stream, chosen: random.Random) -> Outcome:
    async def server() -> AsyncIterator[int]:
        async with aclosing(stream) as tokens:
            async for token in tokens:
                yield token

    async with aclosing(server()) as generator:
        return await some_of(generator, chosen.randint(0, 3)), False


async def is_cancelled(stream: Stream, chosen: random.Random) -> Outcome:
    tokens: list[int] = []

    async def read() -> None:
        async for token in stream:
            tokens.append(token)

    task = asyncio.create_task(read())
    await asyncio.sleep(chosen.random() / 2)
    task.cancel()
    await asyncio.wait([task])
    return tokens, not task.cancelled()


async def has_no_time(stream: Stream, chosen: random.Random) -> Outcome:
    try:
        return await asyncio.wait_for(all_of(stream), chosen.random() / 2), True
    except asyncio.TimeoutError:
        return [], False


BEHAVIOURS = [
    reads_all,
    reads_slowly,
    stops_reading,
    closes,
    closes_its_generator,
    is_cancelled,
    has_no_time,
]


@pytest.mark.parametrize("drafted", rest_long([0, 2], 2))
def test_200_streams_with_readers_that_go_away_lose_no_token_and_leak_no_page(
    model: Decoder, drafted: int
):
    """With few pages, so that requests are preempted too. A reader that breaks drops its stream."""
    chosen = random.Random(0)
    numbers = [chosen.randrange(len(PROMPTS)) for _ in range(200)]
    tokens = [chosen.randint(1, 14) for _ in range(200)]
    limits = replace(LIMITS, draft_tokens=drafted, num_pages=13)

    async def reader(engine: AsyncEngine, index: int) -> Outcome:
        await asyncio.sleep(chosen.random() / 2)
        sampling = Sampling(tokens[index])
        if index % 8 == 7:
            async for token in engine.stream(PROMPTS[numbers[index]], sampling):
                return [token], False
        stream = engine.stream(PROMPTS[numbers[index]], sampling)
        return await BEHAVIOURS[index % 8](stream, chosen)

    async def main() -> list[Outcome]:
        async with serving(model, limits) as engine:
            outcomes = await asyncio.gather(*(reader(engine, index) for index in range(200)))
            await at_rest(engine)
            assert engine.engine.scheduler.preemptions > 0
            served = engine.engine.model.runner.report().reasons
            assert {reason for reason, count in served.items() if count} == {Reason.HIT}
        return outcomes

    expected = [plain_tokens(model, prompt, Sampling(14)) for prompt in PROMPTS]
    outcomes = run(main())
    for number, count, (read, complete) in zip(numbers, tokens, outcomes, strict=True):
        assert read == expected[number][: count if complete else len(read)]
    assert sum(complete for _, complete in outcomes) >= 75


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streams_of_graphs_captured_in_the_engines_thread_hit_and_equal_eager_on_a_gpu():
    """Devices and streams are settings of a thread in torch."""
    model = seeded(SHAPE).cuda()
    limits = replace(LIMITS, draft_tokens=0)

    async def main() -> list[list[int]]:
        async with serving(model, limits) as engine:
            streams = [engine.stream(PROMPTS[n % 5], Sampling(12)) for n in range(40)]
            dropped = [engine.stream(PROMPTS[0], LONG) for _ in range(10)]
            del dropped
            read = await asyncio.gather(*map(all_of, streams))
            await at_rest(engine)
            served = engine.engine.model.runner.report().reasons
            assert {reason for reason, count in served.items() if count} == {Reason.HIT}
        return read

    with pytest.MonkeyPatch.context() as patch:
        # Each step is compared with its padded eager step too.
        patch.setenv("GRAPHRT_CHECK", "always")
        read = run(main())
    with Engine(model, replace(limits, mode="NONE")) as engine:
        assert read == engine.generate([PROMPTS[n % 5] for n in range(40)], Sampling(12))


async def drops(engine: AsyncEngine, stream: list[Stream]) -> None:
    stream.clear()


async def calls_close(engine: AsyncEngine, stream: list[Stream]) -> None:
    stream[0].close()


async def is_cancelled_in_a_read(engine: AsyncEngine, stream: list[Stream]) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(all_of(stream[0]), 0.01)


async def leaves_its_loop(engine: AsyncEngine, stream: list[Stream]) -> None:
    async def read() -> None:
        async for _ in stream.pop():
            await asyncio.sleep(60)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("waits", [False, True], ids=["running", "waiting"])
@pytest.mark.parametrize("goes_away", [drops, calls_close, is_cancelled_in_a_read, leaves_its_loop])
def test_a_request_whose_reader_has_gone_ends_before_the_next_step(
    model: Decoder, goes_away: Callable[..., Coroutine[Any, Any, None]], waits: bool
):
    async def main() -> None:
        async with serving(model, replace(EAGER, max_num_reqs=1)) as engine:
            steps = Steps(engine, allowed=3)
            other = [engine.stream(PROMPTS[1], LONG)] if waits else []
            stream = [engine.stream(PROMPTS[0], LONG)]
            request = stream[0].request
            await until(lambda: steps.begun == 4)
            assert (request in engine.engine.scheduler.waiting) is waits
            await goes_away(engine, stream)
            before = request.generated
            steps.go_on()
            for each in other:
                assert await all_of(each) == plain_tokens(model, PROMPTS[1], LONG)
            await at_rest(engine)
            # The step under way ended, and it was the last one.
            assert len(request.generated) <= len(before) + 1 <= 4
            assert waits or steps.begun == 4

    run(main())


def test_a_reader_that_stops_holds_no_page_and_reads_all_tokens_later(model: Decoder):
    async def main() -> None:
        async with serving(model) as engine:
            streams = [engine.stream(prompt, Sampling(9)) for prompt in PROMPTS]
            await some_of(streams[0], 2)
            await at_rest(engine)
            for number, stream in enumerate(streams):
                expected = plain_tokens(model, PROMPTS[number], Sampling(9))
                assert await all_of(stream) == expected[2 * (number == 0) :]

    run(main())


def test_a_stream_that_another_task_closes_ends_for_its_reader(model: Decoder):
    async def main() -> None:
        async with serving(model) as engine:
            steps = Steps(engine, allowed=2)
            stream = engine.stream(PROMPTS[0], LONG)
            reader = asyncio.create_task(all_of(stream))
            await until(lambda: steps.begun == 3)
            await asyncio.sleep(0.01)
            stream.close()
            assert await reader == plain_tokens(model, PROMPTS[0], Sampling(2))
            steps.go_on()
            await at_rest(engine)

    run(main())


def test_the_loop_turns_while_a_step_runs(model: Decoder):
    """A step on the loop's thread would wait here for the loop, which waits for the step."""

    async def main() -> None:
        async with serving(model) as engine:
            steps = Steps(engine)
            reader = asyncio.create_task(all_of(engine.stream(PROMPTS[0], SHORT)))
            await until(lambda: steps.begun == 1)
            late = asyncio.create_task(all_of(engine.stream(PROMPTS[1], SHORT)))
            for _ in range(100):
                await asyncio.sleep(0)
            assert steps.begun == 1 and not reader.done()
            steps.go_on()
            assert await reader == plain_tokens(model, PROMPTS[0], SHORT)
            assert await late == plain_tokens(model, PROMPTS[1], SHORT)

    run(main())


def test_the_engine_is_made_stepped_and_closed_in_one_thread_that_ends(model: Decoder):
    threads = []

    class Watched(Engine):
        def __init__(self) -> None:
            threads.append(threading.current_thread())
            super().__init__(model, EAGER)

        def step(self) -> None:
            threads.append(threading.current_thread())
            super().step()

        def close(self) -> None:
            threads.append(threading.current_thread())
            super().close()

    async def main() -> None:
        async with AsyncEngine(Watched) as engine:
            await all_of(engine.stream(PROMPTS[0], SHORT))

    run(main())
    assert len(threads) == 5 and len(set(threads)) == 1
    assert threads[0] is not threading.main_thread() and not threads[0].is_alive()


def test_an_error_of_a_step_reaches_every_reader_by_name_and_ends_the_engine(model: Decoder):
    broken = seeded(SHAPE)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    async def main() -> None:
        async with serving(broken) as engine:
            steps = Steps(engine, allowed=2)
            # Two run, three wait.
            streams = [engine.stream(PROMPTS[0], LONG) for _ in range(5)]
            readers = [asyncio.create_task(all_of(stream)) for stream in streams[1:]]
            assert await some_of(streams[0], 2) == plain_tokens(model, PROMPTS[0], Sampling(2))
            broken.register_forward_pre_hook(fail)
            steps.go_on()
            for reader in readers:
                with pytest.raises(EngineStoppedError, match="no memory left") as caught:
                    await reader
                assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
            # A reader that comes late is told too, at every read.
            for _ in range(2):
                with pytest.raises(EngineStoppedError, match="no memory left"):
                    await streams[0].__anext__()
            with pytest.raises(EngineStoppedError, match="start another one"):
                engine.stream(PROMPTS[0])

    run(main())


def test_a_full_queue_refuses_by_name_until_a_request_has_ended(model: Decoder):
    async def main() -> None:
        async with serving(model, max_requests=2) as engine:
            streams = [engine.stream(PROMPTS[0], SHORT) for _ in range(2)]
            with pytest.raises(QueueFullError, match="2 requests are open, and max_requests is 2"):
                engine.stream(PROMPTS[1])
            expected = plain_tokens(model, PROMPTS[0], SHORT)
            assert [await all_of(stream) for stream in streams] == [expected] * 2
            assert await all_of(engine.stream(PROMPTS[0], SHORT)) == expected

    run(main())


def test_a_request_that_cannot_be_served_is_refused_and_others_go_on(model: Decoder):
    async def main() -> None:
        async with serving(model) as engine:
            good = engine.stream(PROMPTS[0], SHORT)
            with pytest.raises(RequestError, match="tokens are 0 to 255"):
                engine.stream([256])
            assert await all_of(good) == plain_tokens(model, PROMPTS[0], SHORT)

    run(main())


def test_shutdown_ends_open_streams_by_name_behind_the_tokens_they_have(model: Decoder):
    async def main() -> None:
        async with serving(model) as engine:
            steps = Steps(engine, allowed=3)
            ended, cut, unread = (engine.stream(PROMPTS[0], each) for each in (SHORT, LONG, LONG))
            waiting = engine.stream(PROMPTS[0], LONG)
            reader = asyncio.create_task(all_of(waiting))
            await until(lambda: steps.begun == 4)
            # The step under way ends first.
            asyncio.get_running_loop().call_later(0.05, steps.go_on)
        expected = plain_tokens(model, PROMPTS[0], Sampling(4))
        assert await all_of(ended) == expected[:3]
        for stream in (cut, unread):
            assert await some_of(stream, 4) == expected
            with pytest.raises(EngineStoppedError, match="was shut down"):
                await stream.__anext__()
        with pytest.raises(EngineStoppedError, match="was shut down"):
            await reader
        with pytest.raises(EngineStoppedError, match="was shut down"):
            engine.stream(PROMPTS[0])

    run(main())


def test_an_engine_that_cannot_be_made_raises_where_it_is_started(model: Decoder):
    async def main() -> None:
        with pytest.raises(ValueError, match="go together"):
            async with AsyncEngine(lambda: Engine(model, LIMITS)):
                raise AssertionError("it was made")

    run(main())


def test_an_aborted_request_gives_back_its_place_whatever_it_does():
    scheduler = Scheduler(LIMITS)
    running, waiting, ended = (Request([2] * 4, 4, Sampling()) for _ in range(3))
    scheduler.waiting += [running]
    scheduler.schedule()
    scheduler.waiting += [waiting]
    assert len(scheduler.free_pages) < LIMITS.num_pages - 1
    for request in (running, waiting, ended):
        scheduler.abort(request)
    assert not scheduler.running and not scheduler.waiting
    assert len(scheduler.free_pages) == LIMITS.num_pages - 1


# The page of HTTP: docs/how-to/serving.md.


class Client:
    """One request to the page's `answer`, over a socket."""

    def __init__(self, server: asyncio.Server) -> None:
        self._port = server.sockets[0].getsockname()[1]

    async def ask(self, body: object) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        text = json.dumps(body)
        self.writer.write(f"POST / HTTP/1.1\r\ncontent-Length: {len(text)}\r\n\r\n{text}".encode())
        return self

    async def answered(self) -> tuple[str, str]:
        """The first line, and the body."""
        text = (await self.reader.read()).decode()
        self.writer.close()
        head, _, body = text.partition("\r\n\r\n")
        return head.splitlines()[0], body


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    (block,) = blocks("docs/how-to/serving.md")
    assert len([line for line in block.code.splitlines() if line.strip()]) <= 40
    names: dict[str, Any] = {}
    exec(compile(block.code, "docs/how-to/serving.md", "exec"), names)
    return names


def over_http(
    page: dict[str, Any],
    model: Decoder,
    main: Callable[[AsyncEngine, Callable[[], Client]], Coroutine[Any, Any, None]],
    max_requests: int = 256,
) -> None:
    async def served() -> None:
        async with serving(model, max_requests=max_requests) as engine:
            handle = partial(page["answer"], engine)
            async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
                await main(engine, partial(Client, server))

    run(served())


def events(tokens: list[int]) -> str:
    return "".join(f"data: {token}\n\n" for token in tokens)


def test_the_documented_server_streams_the_tokens_of_eager_to_each_client(
    page: dict[str, Any], model: Decoder
):
    async def main(engine: AsyncEngine, client: Callable[[], Client]) -> None:
        clients = [await client().ask({"prompt": p, "max_tokens": 6}) for p in PROMPTS]
        for prompt, each in zip(PROMPTS, clients, strict=True):
            status, body = await each.answered()
            assert status == "HTTP/1.1 200 OK"
            assert body == events(plain_tokens(model, prompt, Sampling(6))) + "data: [DONE]\n\n"

    over_http(page, model, main)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt": [256]}, "RequestError"),
        ({"prompt": "a text"}, "RequestError"),
        ({"prompt": 5}, "RequestError"),
        ({"prompt": [1], "max_tokens": 99}, "RequestError"),
        ({}, "KeyError"),
        ([1, 2], "TypeError"),
    ],
)
def test_the_documented_server_answers_400_to_a_request_that_cannot_be_served(
    page: dict[str, Any], model: Decoder, body: object, name: str
):
    async def main(engine: AsyncEngine, client: Callable[[], Client]) -> None:
        status, text = await (await client().ask(body)).answered()
        assert status == "HTTP/1.1 400 Bad Request"
        assert text.startswith(name)
        assert not engine.engine.busy

    over_http(page, model, main)


def test_the_documented_server_answers_400_to_a_body_nested_too_deeply(
    page: dict[str, Any], model: Decoder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(json, "dumps", lambda body: "[" * 100_000)

    async def main(engine: AsyncEngine, client: Callable[[], Client]) -> None:
        status, text = await (await client().ask(None)).answered()
        assert status == "HTTP/1.1 400 Bad Request" and text.startswith("RecursionError")

    over_http(page, model, main)


def test_a_client_of_the_documented_server_that_resets_in_its_head_is_no_error(
    page: dict[str, Any], model: Decoder
):
    async def main(engine: AsyncEngine, client: Callable[[], Client]) -> None:
        unhandled: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: unhandled.append(told))
        each = client()
        _, writer = await asyncio.open_connection("127.0.0.1", each._port)
        writer.write(b"POST / HT")
        await asyncio.sleep(0.05)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.close()
        await asyncio.sleep(0.1)
        assert unhandled == []

    over_http(page, model, main)


@pytest.mark.parametrize("prompt", [torch.tensor([1, 2]), None, 5])
def test_a_prompt_that_is_no_list_is_a_request_error(model: Decoder, prompt: Any):
    async def main() -> None:
        async with serving(model) as engine:
            with pytest.raises(RequestError, match="a list of tokens"):
                engine.stream(prompt)

    run(main())


def test_the_documented_server_answers_503_to_requests_above_its_limit(
    page: dict[str, Any], model: Decoder
):
    async def main(engine: AsyncEngine, client: Callable[[], Client]) -> None:
        steps = Steps(engine)
        first = await client().ask({"prompt": PROMPTS[0], "max_tokens": 3})
        await until(lambda: steps.begun)
        status, text = await (await client().ask({"prompt": [1]})).answered()
        assert status == "HTTP/1.1 503 Service Unavailable" and "max_requests is 1" in text
        steps.go_on()
        assert (await first.answered())[1].endswith("data: [DONE]\n\n")

    over_http(page, model, main, max_requests=1)


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("allowed", [0, 3], ids=["before its first token", "while it reads"])
def test_a_client_of_the_documented_server_that_hangs_up_ends_its_request(
    page: dict[str, Any], model: Decoder, allowed: int, resets: bool
):
    async def main(engine: AsyncEngine, client: Callable[[], Client]) -> None:
        steps = Steps(engine, allowed)
        gone = await client().ask({"prompt": PROMPTS[0], "max_tokens": 30})
        await until(lambda: steps.begun == allowed + 1)
        (request,) = engine.engine.scheduler.running or engine.engine.scheduler.waiting
        if resets:
            linger = struct.pack("ii", 1, 0)
            gone.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger
            )
        gone.writer.close()
        await asyncio.sleep(0.1)
        steps.go_on()
        await at_rest(engine)
        assert len(request.generated) <= allowed + 1

    over_http(page, model, main)


def test_clients_of_the_documented_server_are_told_of_a_failed_step(page: dict[str, Any]):
    broken = seeded(SHAPE)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    async def main(engine: AsyncEngine, client: Callable[[], Client]) -> None:
        broken.register_forward_pre_hook(fail)
        status, body = await (await client().ask({"prompt": [1]})).answered()
        assert status == "HTTP/1.1 200 OK"
        assert body.startswith("event: error\ndata: the engine failed") and "no memory" in body
        status, body = await (await client().ask({"prompt": [1]})).answered()
        assert status == "HTTP/1.1 503 Service Unavailable" and "no memory" in body

    over_http(page, broken, main)


def test_the_documented_server_ends_when_its_task_is_cancelled(page: dict[str, Any]):
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serves = asyncio.create_task(page["serve"](port))
        for _ in range(600):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                assert not serves.done()
                await asyncio.sleep(0.1)
            else:
                writer.close()
                break
        serves.cancel()
        await asyncio.wait([serves])
        assert serves.cancelled()

    run(main())
