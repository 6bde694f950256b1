"""A failing program made smaller, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Program, Setup, Statement
from tests.fuzz.running import Verdict

Judge = Callable[[Program], Verdict]


def minimised(program: Program, judge: Judge, *, most: int = 300) -> Program:
    """The smallest program found in at most so many runs with the same outcome and reason."""
    wanted = judge(program)
    runs, found = 0, True
    while found and runs < most:
        found = False
        for smaller in _smaller(program):
            runs += 1
            verdict = judge(smaller)
            if (verdict.outcome, verdict.reason) == (wanted.outcome, wanted.reason):
                program, found = smaller, True
                break
            if runs >= most:
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, those with much less first."""
    body, setup = program.body, program.setup
    for half in (body[: len(body) // 2], body[len(body) // 2 :]):
        if half and len(body) > 2:
            yield replace(program, body=half)
    for at in range(len(body) - 1, -1, -1):
        yield replace(program, body=body[:at] + body[at + 1 :])
        yield replace(program, body=_without(body, at))
    for at in range(2, len(program.returns)):
        yield replace(program, returns=program.returns[:at] + program.returns[at + 1 :])
    if program.returns != ("one", "x"):
        yield replace(program, returns=("one", "x"))
        yield replace(program, returns=("one", *program.returns[1:2]))
    for at, each in enumerate(body):
        for place in range(2, len(each.part) - 1):
            part = each.part[:place] + each.part[place + 1 :]
            yield replace(program, body=(*body[:at], replace(each, part=part), *body[at + 1 :]))
        if each.part:
            plain = replace(each, part=each.part[1:])
            if each.part[0].startswith("@"):
                yield replace(program, body=(*body[:at], plain, *body[at + 1 :]))
    for at in range(len(setup.steps)):
        if len(setup.steps) > 1:
            yield program.with_setup(steps=setup.steps[:at] + setup.steps[at + 1 :])
    for at in range(len(setup.sizes)):
        if len(setup.sizes) > 1:
            yield program.with_setup(sizes=setup.sizes[:at] + setup.sizes[at + 1 :])
    for at in range(1, len(setup.inputs)):
        if not setup.container:
            yield program.with_setup(inputs=setup.inputs[:at] + setup.inputs[at + 1 :])
    plain_setup = Setup()
    for name, value in vars(plain_setup).items():
        if name not in ("steps", "sizes", "inputs") and getattr(setup, name) != value:
            yield program.with_setup(**{name: value})


def _without(body: tuple[Statement, ...], at: int) -> tuple[Statement, ...]:
    """Without a statement and all that use what it defines."""
    gone = _defined(body[at])
    kept = list(body[:at])
    for each in body[at + 1 :]:
        used = set(re.findall(r"\bv\d+\b", "\n".join(each.lines)))
        if used & gone:
            gone |= _defined(each)
        else:
            kept.append(each)
    return tuple(kept)


def _defined(statement: Statement) -> set[str]:
    line = statement.lines[-1]
    left, equals, _ = line.partition(" = ")
    return set(re.findall(r"\bv\d+\b", left)) if equals else set()
