"""Values that no argument is meant for, and the public calls that are given them."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import graphrt.attention
import graphrt.compile
from graphrt import (
    UNCHANGED,
    AttentionSupport,
    Batch,
    BatchDescriptor,
    Budget,
    Example,
    ForwardContext,
    GraphCost,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    Host,
    HostArg,
    InputSpec,
    KeyedGraphs,
    Plan,
    Reason,
    State,
    UpdatableTask,
    WrapperTrials,
    carry_context,
    eager_break,
    forward_context,
    get_platform,
    graphed,
    wrapper_class,
)
from graphrt.platforms import (
    PlatformRegistry,
    resolve_platform,
)
from graphrt.types import Axis


class Refuses(Exception):
    """What hostile values raise themselves."""


class Unequal:
    """Whatever is compared with it raises."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise Refuses("no comparison")


class Unprintable:
    def __repr__(self) -> str:
        raise Refuses("no text")


class Words(str):
    """A string of another class."""


class Whole(int):
    """An int of another class."""


class Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def nested(depth: int) -> list[Any]:
    nest: list[Any] = []
    for _ in range(depth):
        nest = [nest]
    return nest


GARBAGE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "7": lambda: 7,
    "-1": lambda: -1,
    "0": lambda: 0,
    "True": lambda: True,
    "False": lambda: False,
    "2**70": lambda: 2**70,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "empty text": lambda: "",
    "x": lambda: "x",
    "surrogate": lambda: "\udc80",
    "NUL": lambda: "a\0b",
    "bytes": lambda: b"",
    "list": list,
    "dict": dict,
    "set": set,
    "tuple": tuple,
    "object": object,
    "class": lambda: object,
    "type of values": lambda: int,
    "lambda": lambda: lambda: 3,
    "tensor": lambda: torch.tensor(1),
    "rows": lambda: torch.ones(2, 4),
    "meta": lambda: torch.ones(2, 4, device="meta"),
    "nested": lambda: {"x": [({"y": [None]},)]},
    "deep": lambda: nested(2000),
    "int keys": lambda: {1: 2, 3: 4},
    "list of None": lambda: [None],
    "list of lists": lambda: [[]],
    "list of text": lambda: ["x"],
    "generator": lambda: (each for each in (1, 2)),
    "endless": Endless,
    "unequal": Unequal,
    "list of unequal": lambda: [Unequal()],
    "unprintable": Unprintable,
    "str subclass": lambda: Words("x"),
    "int subclass": lambda: Whole(7),
    "module": lambda: torch,
    "dtype": lambda: torch.float32,
    "Ellipsis": lambda: ...,
    "error": lambda: ValueError("x"),
}


@dataclasses.dataclass
class Target:
    """A public call: `make()` gives what is called, and the right arguments for it."""

    make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
    shared: bool = False
    """Whether what is called is used for all values, as a host uses one runner."""
    own: tuple[type[Exception], ...] = ()
    """What the host's own functions among the arguments may raise."""
    skipped: tuple[str, ...] = ()
    """Parameters that take whatever there is: it is handed through."""


SPEC = InputSpec(torch.float32, ("tokens", 4))
D = BatchDescriptor(2, 2, uniform=True, query_len=1)


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def constructor(
    owner: Callable[..., Any], /, *, own: tuple[type[Exception], ...] = (), **right: Any
) -> Target:
    return Target(lambda: (owner, dict(right)), shared=True, own=own)


def runner(**more: Any) -> GraphRunner:
    arguments: dict[str, Any] = {"inputs": {"x": SPEC}, "mode": "FULL", "sizes": [2, 4]}
    return GraphRunner(plus, **{**arguments, "platform": "cpu", **more})


RUNNERS: dict[str, GraphRunner] = {}


def captured() -> GraphRunner:
    """One runner for all calls, as hosts have."""
    if "one" not in RUNNERS:
        RUNNERS["one"] = runner()
        RUNNERS["one"].capture()
    return RUNNERS["one"]


def of_runner(name: str, /, **right: Any) -> Target:
    return Target(lambda: (getattr(captured(), name), dict(right)), shared=True)


def dispatcher() -> GraphDispatcher:
    target = GraphDispatcher("FULL")
    target.publish("FULL", D)
    return target


def of_dispatcher(name: str, /, **right: Any) -> Target:
    return Target(lambda: (getattr(dispatcher(), name), dict(right)))


def batch_field(call: Callable[[Batch], Any], own: tuple[type[Exception], ...] = ()) -> Target:
    """The fields of a batch, which are looked at where it is used."""

    def with_batch(
        num_tokens: Any,
        num_reqs: Any = None,
        query_len: Any = None,
        bounds: Any = (),
        num_active_loras: Any = 0,
        variant: Any = None,
        exclude: Any = frozenset(),
    ) -> Any:
        return call(
            Batch(num_tokens, num_reqs, query_len, bounds, num_active_loras, variant, exclude)
        )

    return Target(lambda: (with_batch, {"num_tokens": 2}), shared=True, own=own)


def step_of(**right: Any) -> Target:
    def step(batch: Any, x: Any, updates: Any = None, metadata: Any = None) -> Any:
        return captured()(batch, x=x, updates=updates, metadata=metadata)

    return Target(lambda: (step, dict(right)), shared=True, skipped=("metadata",))


def wrapper() -> GraphWrapper:
    return GraphWrapper(plus, "FULL", pool=GraphPool("cpu"))


def wrapped_step(
    mode: Any, descriptor: Any = None, slot: Any = -1, updates: Any = None, live: Any = None
) -> Any:
    """What the context says is looked at by the wrapper that reads it."""
    with forward_context(mode, descriptor, slot=slot, updates=updates, live=live):
        return wrapper()(torch.ones(2, 4))


def keyed() -> KeyedGraphs:
    graphs = KeyedGraphs(GraphPool("cpu"))
    graphs.capture("one", lambda: torch.ones(2) + 1)
    return graphs


def of_keyed(name: str, /, *, own: tuple[type[Exception], ...] = (), **right: Any) -> Target:
    return Target(lambda: (getattr(keyed(), name), dict(right)), own=own)


def plan() -> Plan:
    return Plan(mode="FULL", sizes=[2, 4], platform="cpu")


def task() -> UpdatableTask:
    return UpdatableTask("group", lambda out, lens: None, {"lens": HostArg()})


def tasked_step(updates: Any) -> Any:
    """A step whose forward has a task."""
    if "tasks" not in RUNNERS:
        fill = UpdatableTask(
            "fill",
            lambda out, lens: out.fill_(len(lens)),
            {"lens": HostArg("reqs")},
            at_capture=lambda descriptor: {"lens": [1] * (descriptor.num_reqs or 1)},
        )

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            fill(out)
            return out + x

        RUNNERS["tasks"] = GraphRunner(
            forward,
            inputs={"x": InputSpec(torch.float32, ("reqs", 4))},
            outputs=("reqs", 4),
            mode="FULL",
            sizes=[2],
            platform="cpu",
            options=GraphOptions(check="off"),
        )
        RUNNERS["tasks"].capture()
    return RUNNERS["tasks"](Batch(2, 2, 1), x=torch.ones(2, 4), updates=updates)


def slot_get(name: Any) -> Any:
    return captured().slot(Batch(2))[name]


def compiled_call(x: Any) -> Any:
    if "compiled" not in RUNNERS:
        made = graphrt.compile.compile_module(plus, {"x": 0}, graphs=False)
        made(torch.ones(3, 4))
        RUNNERS["compiled"] = made  # type: ignore[assignment]
    return RUNNERS["compiled"](x)


def break_of(function: Any) -> Any:
    return eager_break(function)


_NUMBERS = itertools.count()


def opaque_of(function: Any) -> Any:
    return graphrt.compile.opaque(f"garbage::of_{next(_NUMBERS)}", mutates=["out"])(function)


def written(out: torch.Tensor) -> None:
    out.zero_()


def registry() -> PlatformRegistry:
    return PlatformRegistry({"cpu": "graphrt.cpu.platform:CpuPlatform"}, group=None)


def of_registry(name: str, /, **right: Any) -> Target:
    return Target(lambda: (getattr(registry(), name), dict(right)))


TARGETS: dict[str, Target] = {
    # What describes steps.
    "Batch in dispatch": batch_field(lambda batch: dispatcher().dispatch(batch)),
    "Batch in planned_for": batch_field(lambda batch: dispatcher().planned_for(batch)),
    "Batch in a step": batch_field(lambda batch: captured()(batch, x=torch.ones(2, 4))),
    "Batch in slot": batch_field(
        # Of torch: no memory for so many rows.
        lambda batch: captured().slot(batch),
        own=(RuntimeError, TypeError),
    ),
    "Batch in verify": batch_field(lambda batch: captured().verify(batch, x=torch.ones(2, 4))),
    "BatchDescriptor": constructor(BatchDescriptor, num_tokens=2),
    "ForwardContext": constructor(ForwardContext, mode="FULL", descriptor=D),
    "forward_context": constructor(wrapped_step, mode="FULL", descriptor=D),
    "GraphMode.parse": constructor(GraphMode.parse, value="FULL"),
    "AttentionSupport.parse": constructor(AttentionSupport.parse, value="ALWAYS"),
    "Axis.parse": constructor(Axis.parse, text="tokens"),
    "InputSpec": constructor(InputSpec, dtype=torch.float32, shape=("tokens", 4)),
    "State": constructor(State, tensor=torch.ones(2)),
    "State of functions": constructor(State, save=lambda: 1, restore=lambda saved: None),
    "Host": constructor(Host),
    "HostArg": constructor(HostArg),
    "Example": constructor(Example, values={}),
    "UpdatableTask": constructor(
        UpdatableTask, group="group", issue=lambda out: None, host_args={}
    ),
    "HostArg.fitted": Target(
        lambda: (
            HostArg().fitted,
            {"key": "lens", "value": [1, 1], "tokens": 2, "reqs": 2},
        ),
        skipped=("tokens", "reqs", "query_len", "live"),
    ),
    "GraphOptions": constructor(GraphOptions),
    "GraphOptions.from_dict": constructor(GraphOptions.from_dict, options={}),
    "GraphOptions.merged": constructor(GraphOptions().merged, changes={}),
    "GraphOptions.checks": constructor(GraphOptions().checks, level="off"),
    # Plans.
    "Plan": constructor(Plan, mode="FULL", sizes=[2, 4], platform="cpu"),
    "Plan.replace": Target(lambda: (plan().replace, {"platform": "cpu", "sizes": [2]})),
    "Plan.save": Target(lambda: (plan().save, {"path": "plan.json"})),
    "Plan.load": Target(
        lambda: (
            plan().save("plan.json"),
            (Plan.load, {"path": "plan.json", "platform": "cpu"}),
        )[1]
    ),
    "Plan.differences": Target(lambda: (plan().differences, {"other": plan()})),
    "Plan.fitted_to": Target(
        lambda: (plan().fitted_to, {"platform": get_platform("cpu"), "compiled": ()})
    ),
    "GraphCost": constructor(GraphCost),
    "Budget": constructor(Budget),
    "Budget.cost_of": constructor(Budget().cost_of, mode=GraphMode.FULL),
    # The parts.
    "GraphPool": constructor(GraphPool, platform="cpu"),
    "GraphPool.capture_session": Target(lambda: (GraphPool("cpu").capture_session, {})),
    "GraphDispatcher": constructor(GraphDispatcher, mode="FULL"),
    "GraphDispatcher.dispatch": of_dispatcher("dispatch", batch=Batch(2)),
    "GraphDispatcher.peek": of_dispatcher("peek", batch=Batch(2)),
    "GraphDispatcher.planned_for": of_dispatcher("planned_for", batch=Batch(2)),
    "GraphDispatcher.publish": of_dispatcher("publish", mode="FULL", descriptor=D),
    "GraphDispatcher.reserve": of_dispatcher("reserve", mode="FULL", descriptor=D),
    "GraphDispatcher.withdraw": of_dispatcher("withdraw", mode="FULL", descriptor=D),
    "GraphDispatcher.step": of_dispatcher("step", batch=Batch(2)),
    "GraphDispatcher.hits": of_dispatcher("hits", announced=False),
    "GraphWrapper": constructor(GraphWrapper, runnable=plus, runtime_mode="FULL"),
    "WrapperTrials": constructor(WrapperTrials),
    "GraphWrapper.move_to": Target(lambda: (wrapper().move_to, {"pool": GraphPool("cpu")})),
    "GraphWrapper.drop": Target(lambda: (wrapper().drop, {"descriptor": D})),
    "KeyedGraphs": constructor(KeyedGraphs),
    "KeyedGraphs.capture": of_keyed("capture", key="two", forward=lambda: torch.ones(2) + 1),
    # Python's own error of a mapping.
    "KeyedGraphs.run": of_keyed("run", key="two", forward=lambda: torch.ones(2) + 1),
    "KeyedGraphs.replay": of_keyed("replay", own=(KeyError, TypeError), key="one"),
    "KeyedGraphs.drop": of_keyed("drop", key="one"),
    "KeyedGraphs[]": of_keyed("__getitem__", own=(KeyError, TypeError), key="one"),
    "KeyedGraphs.in": of_keyed("__contains__", own=(TypeError,), key="one"),
    "KeyedGraph.replay": Target(lambda: ((found := keyed())["one"].replay, {}) and _kept(found)),
    "wrapper_class": constructor(wrapper_class, platform=get_platform("cpu")),
    "get_platform": constructor(get_platform, name="cpu"),
    "resolve_platform": constructor(resolve_platform, platform="cpu"),
    "eager_break": constructor(break_of, function=plus),
    "carry_context": constructor(carry_context, function=plus),
    "PlatformRegistry.get": of_registry("get", name="cpu"),
    "PlatformRegistry.current": of_registry("current"),
    # Runners.
    "GraphRunner": Target(
        lambda: (
            GraphRunner,
            {
                "forward": plus,
                "inputs": {"x": SPEC},
                "mode": "FULL",
                "sizes": [2],
                "platform": "cpu",
            },
        )
    ),
    "graphed": constructor(
        graphed, model=plus, inputs=torch.ones(2, 4), sizes=[2], axes={"x": ("rows",)}
    ),
    "GraphRunner.measure": of_runner("measure", sizes=[2]),
    "GraphRunner()": step_of(batch=Batch(2), x=torch.ones(2, 4)),
    "GraphRunner() by shapes": step_of(batch=None, x=torch.ones(2, 4)),
    "GraphRunner() too large": step_of(batch=Batch(9), x=torch.ones(9, 4)),
    "GraphRunner() with tasks": constructor(tasked_step, updates={"fill": {"lens": [1, 1]}}),
    "GraphRunner.slot": of_runner("slot", batch=Batch(2)),
    "InputSlot[]": constructor(slot_get, own=(KeyError, TypeError), name="x"),
    "GraphRunner.verify": Target(
        lambda: (
            lambda batch, x, updates=None: captured().verify(batch, x=x, updates=updates),
            {"batch": Batch(2), "x": torch.ones(2, 4)},
        ),
        shared=True,
    ),
    "GraphRunner.run_padded_eagerly": Target(
        lambda: (
            captured().run_padded_eagerly,
            {
                "batch": Batch(2),
                "found": captured().dispatcher.dispatch(Batch(2)),
                "values": {"x": torch.ones(2, 4)},
            },
        ),
        shared=True,
    ),
    "GraphRunner.capture": of_runner("capture"),
    "GraphRunner.recapture": Target(
        lambda: (captured().recapture, {}), shared=True, own=(TypeError,)
    ),
    "GraphRunner.capture_next": Target(lambda: (runner().capture_next, {})),
    # Compiling.
    "CompileOptions": constructor(graphrt.compile.CompileOptions),
    "CompileOptions.from_dict": constructor(graphrt.compile.CompileOptions.from_dict, options={}),
    "compile": constructor(graphrt.compile.compile_module, module=plus, dynamic_dims={"x": 0}),
    "compiled()": constructor(compiled_call, own=(RecursionError,), x=torch.ones(3, 4)),
    "DynamicDims": constructor(graphrt.compile.DynamicDims, given={"x": 0}),
    "support_compile": constructor(graphrt.compile.support_compile, dynamic_dims={"x": 0}),
    "opaque": constructor(graphrt.compile.opaque, name="garbage::op", mutates=()),
    "opaque()": constructor(opaque_of, function=written),
    # Attention.
    "known_backend": constructor(graphrt.attention.known_backend, name="flashinfer"),
    "level_of": constructor(graphrt.attention.level_of, name="flashinfer"),
    "facts_of": constructor(
        graphrt.attention.facts_of, backend=graphrt.attention.known_backend("flashinfer")
    ),
}


def _kept(graphs: KeyedGraphs) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The graph's method, which keeps its graphs by this closure alone."""
    graph = graphs["one"]

    def replay(updates: Any = None) -> Any:
        assert graphs is not None
        return graph.replay(updates)

    return replay, {}


def parameters(call: Callable[..., Any], right: dict[str, Any]) -> list[str]:
    """The names of a call's parameters; of `**keywords` those that are right."""
    names: list[str] = []
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            names += [key for key in right if key not in names]
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names.append(name)
    return names


__all__ = ["GARBAGE", "TARGETS", "UNCHANGED", "Reason", "Refuses", "Target", "parameters"]
