"""Cases tried in processes of their own, so that one that dies is a line and not the end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.operators.samples import Case, dtype_name
from tests.operators.table import Row, rows_of
from tests.operators.trial import RAW, Verdict


def tried(cases: Sequence[Case], limit: int, jobs: int) -> Iterator[list[Row]]:
    """The rows of each case, as they come, from `jobs` processes."""
    left = list(reversed(cases))
    workers = [_Worker(limit) for _ in range(min(jobs, len(left)))]
    for worker in workers:
        worker.give(left.pop())
    try:
        while busy := [w for w in workers if w.case is not None]:
            ready = wait([w.connection for w in busy])
            for worker in busy:
                if worker.connection in ready:
                    yield worker.take()
                    if left:
                        worker.give(left.pop())
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    def __init__(self, limit: int) -> None:
        self.case: Case | None = None
        self._limit = limit
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: Any = context.Process(target=_serve, args=(theirs, self._limit), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, case: Case) -> None:
        self.case = case
        self.connection.send(case)

    def take(self) -> list[Row]:
        case, self.case = self.case, None
        assert case is not None
        try:
            rows: list[Row] = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            why = f"the process died, exit status {self._process.exitcode}"
            self._start()
            crash = Verdict(RAW, "crash", why=why)
            return [Row(case.name, dtype_name(case.dtype), "call", [crash])]
        return rows

    def stop(self) -> None:
        self.connection.close()
        self._process.join(5)
        self._process.terminate()


def _serve(connection: Connection, limit: int) -> None:
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        try:
            rows = rows_of(case, limit)
        except Exception as error:
            verdict = Verdict(RAW, type(error).__name__, why=f"the harness: {error}")
            rows = [Row(case.name, dtype_name(case.dtype), "call", [verdict])]
        connection.send(rows)
