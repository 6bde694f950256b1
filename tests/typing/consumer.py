"""A host, as type checkers see it: never run, read by test_typing.py.

A line that a checker must refuse says so at its end: `# refused: mypy's code, pyright's rule`.
Everything else must pass both of them, in their strict modes.
"""

from typing import Any

import torch
from typing_extensions import Unpack, assert_type

import graphrt
from graphrt import (
    UNCHANGED,
    Batch,
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    Host,
    InputSpec,
    Plan,
    current_platform,
    eager_break,
    opaque,
    support_compile,
    wrapper_class,
)
from graphrt.compile import CompiledModule, CompileError, CompileOptions
from graphrt.errors import GraphRTError, InvalidOptionError
from graphrt.platforms import Platform, hookimpl
from graphrt.types import Phase, PlanArguments

INPUTS = {"x": InputSpec(torch.float32, ("tokens", 2))}


def forward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# Runners and plans -------------------------------------------------------------------------------

runner = GraphRunner(forward, sizes=[1, 2], mode="FULL", inputs=INPUTS, outputs=("tokens", 2))
assert_type(runner, GraphRunner[torch.Tensor])
assert_type(runner(x=torch.ones(2, 2)), torch.Tensor)
assert_type(runner.verify(x=torch.ones(2, 2)), torch.Tensor)
# A module says nothing of what it returns.
assert_type(GraphRunner(torch.nn.Linear(2, 2), sizes=[1], inputs=INPUTS), GraphRunner[Any])


def of_two(of: GraphRunner[tuple[torch.Tensor, int]], plain: GraphRunner) -> int:
    assert_type(plain(x=torch.ones(2, 2)), Any)
    return of(x=torch.ones(2, 2))[1]


GraphRunner(forward, max_size=8, inputs={**INPUTS, "y": {"z": InputSpec(torch.int64, ("reqs",))}})
GraphRunner(forward, size=[1], inputs=INPUTS)  # refused: call-arg, reportCallIssue
GraphRunner(forward, sizes="1,2", inputs=INPUTS)  # refused: arg-type, reportArgumentType
GraphRunner(forward, sizes=[1], mode=1, inputs=INPUTS)  # refused: arg-type, reportArgumentType
GraphRunner(forward, sizes=[1], mode="FUL", inputs=INPUTS)  # refused: arg-type, reportArgumentType
GraphRunner(forward, sizes=[1], mode=GraphMode.parse("full"), inputs=INPUTS)
GraphRunner(forward, sizes=[1])  # refused: call-arg, reportCallIssue
GraphRunner(forward, [1], inputs=INPUTS)  # refused: arg-type, reportArgumentType


def bind(buffers: object, descriptor: BatchDescriptor, phase: Phase) -> None:
    if phase == "replai":  # refused: comparison-overlap, reportUnnecessaryComparison
        return


def misbound(buffers: int, descriptor: BatchDescriptor, phase: Phase) -> None: ...


plan = Plan("FULL_AND_PIECEWISE", max_num_tokens=64, max_num_reqs=8, query_lens=(1, 4))
options = GraphOptions(outputs="clone", warmups=2)
with GraphRunner(
    forward, plan, inputs=INPUTS, host=Host(bind=bind), options=options, pool=GraphPool("cpu")
) as planned:
    planned.capture()
    planned(Batch(3, 1), x=torch.ones(3, 2), updates=UNCHANGED)
    planned(3, x=torch.ones(3, 2))  # refused: arg-type, reportArgumentType
    assert_type(planned.report().live_tokens, int)
Plan(modes="FULL")  # refused: call-arg, reportCallIssue
Host(bind=misbound)  # refused: arg-type, reportArgumentType
GraphOptions(outputs="copy")  # refused: arg-type, reportArgumentType

arguments: PlanArguments = {"mode": "FULL", "sizes": [1, 2]}
GraphRunner(forward, inputs=INPUTS, **arguments)
mistaken: PlanArguments = {"size": [1]}  # refused: typeddict-unknown-key, reportAssignmentType


def of_my_engine(**planning: Unpack[PlanArguments]) -> GraphRunner:
    return GraphRunner(forward, inputs=INPUTS, **planning)


of_my_engine(size=[1])  # refused: call-arg, reportCallIssue


# Compiled modules, breaks and operators ----------------------------------------------------------

module = torch.nn.Linear(2, 2)
compiled = graphrt.compile(
    module, pool=runner.pool, dynamic_dims=["input"], options=CompileOptions(backend="eager")
)
assert_type(compiled, CompiledModule)
GraphRunner(compiled, compiled=[compiled], sizes=[1], inputs=INPUTS)
graphrt.compile(module, dynamic_dim=["input"])  # refused: call-arg, reportCallIssue
graphrt.compile(module, pool="mine")  # refused: arg-type, reportArgumentType


@support_compile(dynamic_dims={"x": 0})
class Model(torch.nn.Module):
    def scale(self) -> float:
        return 2.0


assert_type(Model().scale(), float)


@opaque("engine::attention", mutates=["out"])
def attention(query: torch.Tensor, out: torch.Tensor) -> None: ...


attention(torch.ones(1), out=torch.ones(1))
attention(torch.ones(1))  # refused: call-arg, reportCallIssue
opaque("engine::other")  # refused: call-arg, reportCallIssue


@eager_break
def attend(query: torch.Tensor, layer: int) -> torch.Tensor:
    return query + layer


assert_type(attend(torch.ones(1), layer=2), torch.Tensor)
attend(torch.ones(1), layer="2")  # refused: arg-type, reportArgumentType


# Platforms and errors ----------------------------------------------------------------------------

platform = current_platform()
assert_type(platform, Platform)
assert_type(platform.get_static_graph_wrapper_cls(), str)
assert_type(wrapper_class(platform), type[GraphWrapper])
wrapper_class(platform)(forward, "FULL", pool=runner.pool, options=options)
wrapper_class(platform)(forward)  # refused: call-arg, reportCallIssue
assert_type(wrapper_class("cpu"), type[GraphWrapper])
wrapper_class(7)  # refused: arg-type, reportArgumentType


@hookimpl
def graphrt_platforms() -> list[Platform]:
    return []


try:
    runner.capture()
except InvalidOptionError as error:
    assert_type(error.what, str)
except (CompileError, GraphRTError):
    pass

print(graphrt.no_such_name)  # refused: attr-defined, reportAttributeAccessIssue
