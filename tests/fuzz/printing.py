"""A program as a file that runs by itself in a checkout."""

from __future__ import annotations

from dataclasses import fields

from tests.fuzz.program import Program, Setup

_FORWARD = '''"""Random program {seed}: {said}"""

import torch
import torch.nn.functional as F

from graphrt import InputSpec, eager_break
from tests.fuzz.prelude import Fields, Pair, tensor
from tests.fuzz.program import Program, Setup, Statement, Step
from tests.fuzz.running import judge

# What is built, once with graphs and once without:


{source}

# How it is captured and run:

SETUP = Setup(
{setup}
)

if __name__ == "__main__":
    body = (
{body}
    )
    print(judge(Program({seed}, body, {returns}, SETUP), {device!r}))
'''


def printed(program: Program, said: str = "", device: str = "cpu") -> str:
    """The program: its forward as Python, its setup, and what runs and judges it."""
    plain = Setup()
    setup = "\n".join(
        f"    {each.name}={getattr(program.setup, each.name)!r},"
        for each in fields(Setup)
        if getattr(program.setup, each.name) != getattr(plain, each.name)
    )
    return _FORWARD.format(
        seed=program.seed,
        said=said.replace('"', "'").replace("\n", " ")[:300],
        source=program.source(),
        setup=setup,
        body="\n".join(f"        {each!r}," for each in program.body),
        returns=repr(program.returns),
        device=device,
    )
