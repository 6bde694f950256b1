"""Many programs in a row, in this process or in others that may crash; and what came of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from tests.fuzz.program import Program
from tests.fuzz.running import Verdict, judge, program_of

_CHUNK = 250


@dataclass
class Counts:
    """What came of programs: how many of each outcome and reason, and the numbers of defects."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    defects: dict[int, Verdict] = field(default_factory=dict)
    hits: int = 0

    def add(self, number: int, verdict: Verdict) -> None:
        """Note one more."""
        self.outcomes[verdict.outcome] += 1
        self.hits += verdict.hits
        if verdict.reason:
            self.reasons[verdict.outcome, verdict.reason] += 1
        if verdict.is_defect:
            self.defects[number] = verdict

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())

    @property
    def refused_share(self) -> float:
        """How many of all were refused at a capture, or named before they replayed anything."""
        return (self.outcomes["refused"] + self.outcomes["named"]) / max(1, self.total)


def counted(
    numbers: range,
    platform: str = "cpu",
    mode: str | None = None,
    progress: Callable[[int, Counts], None] | None = None,
) -> Counts:
    """Run the programs of these numbers in this process."""
    counts = Counts()
    for number in numbers:
        counts.add(number, judge(program_of(number, mode), platform))
        if progress is not None:
            progress(number, counts)
    return counts


def counted_apart(
    numbers: range,
    platform: str = "cpu",
    mode: str | None = None,
    progress: Callable[[int, Counts], None] | None = None,
) -> Counts:
    """The same in processes of their own: one that dies is a crash of the program it was at."""
    counts = Counts()
    at = numbers.start
    while at < numbers.stop:
        stop = min(at + _CHUNK, numbers.stop)
        for number, verdict in _chunk(at, stop, platform, mode):
            counts.add(number, verdict)
            at = number + 1
            if progress is not None:
                progress(number, counts)
        if at < stop:
            counts.add(at, Verdict("crash", "process", "the process ended in this program"))
            at += 1
    return counts


def _chunk(start: int, stop: int, platform: str, mode: str | None) -> Iterator[tuple[int, Verdict]]:
    command = [sys.executable, "-m", "tests.fuzz", "--work", f"--seed={start}"]
    command += [f"--count={stop - start}", f"--platform={platform}"]
    command += [] if mode is None else [f"--mode={mode}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                record = json.loads(line)
                yield record.pop("number"), Verdict(**record)


def work(numbers: range, platform: str, mode: str | None) -> None:
    """Run programs and print a line of JSON for each, as `counted_apart` reads them."""
    for number in numbers:
        verdict = judge(program_of(number, mode), platform)
        print(json.dumps({"number": number, **asdict(verdict)}), flush=True)


def judged_on(platform: str) -> Callable[[Program], Verdict]:
    """`judge` on a platform."""
    return lambda program: judge(program, platform)
