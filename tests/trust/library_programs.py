"""Programs whose forward reads objects of libraries, runners, and environment variables, which the
host changes. Importing this adds them to the table of host_programs.py."""

from __future__ import annotations

import argparse
import array
import configparser
import contextlib
import ctypes
import fractions
import functools
import importlib
import importlib.util
import io
import os
import statistics
import string
import sys
import tempfile
import types
import warnings
from collections import ChainMap, Counter, UserDict, UserList, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributions, nn
from torch.utils._pytree import tree_structure

from graphrt import GraphPool, GraphRunner, GraphWrapper, InputSpec, KeyedGraphs
from tests.trust.host_programs import HANDLES, PROGRAMS, WIDTH, Change, Program, program

INPUTS = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}


def holds(
    seen: str,
    make: Callable[[], Any],
    read: Callable[[Any], Any],
    change: Callable[[Any], object],
    name: str,
) -> None:
    """A program whose forward multiplies by what it reads of an object that it holds."""

    def build() -> Change:
        held = make()
        return lambda x: x * read(held), lambda: change(held)

    PROGRAMS.append(Program(name, seen, build))


# Objects of torch ---------------------------------------------------------------------------------


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(WIDTH))], lr=0.5)


def stepped() -> torch.optim.lr_scheduler.StepLR:
    optimizer = sgd()
    optimizer.step()
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


holds(
    "dict",
    lambda: distributions.Normal(torch.ones(WIDTH), torch.ones(WIDTH)),
    lambda held: held.loc,
    lambda held: setattr(held, "loc", torch.full((WIDTH,), 3.0)),
    "location of a distribution",
)
holds(
    "dict",
    lambda: distributions.Independent(distributions.Normal(torch.ones(WIDTH), 1.0), 1),
    lambda held: held.base_dist.loc,
    lambda held: setattr(held.base_dist, "loc", torch.full((WIDTH,), 3.0)),
    "location of a nested distribution",
)
holds(
    "dict",
    lambda: distributions.AffineTransform(1.0, 2.0),
    lambda held: held.scale,
    lambda held: setattr(held, "scale", 3.0),
    "scale of a transform of distributions",
)
holds(
    "dict",
    sgd,
    lambda held: held.param_groups[0]["lr"],
    lambda held: held.param_groups[0].update(lr=3.0),
    "learning rate of an optimizer",
)


def compiled_by_torchscript(make: Callable[[nn.Module], nn.Module], name: str) -> None:
    """A program whose host puts another module of TorchScript in the place of one."""

    def built() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return make(nn.Linear(WIDTH, WIDTH))

    def build() -> Change:
        model = nn.Sequential(built())
        return lambda x: model(x), lambda: setattr(model, "0", built())

    PROGRAMS.append(Program(name, "dict", build))


@program("dict")
def structure_of_a_tree() -> Change:
    held = types.SimpleNamespace(structure=tree_structure([0]))
    return (
        lambda x: x * held.structure.num_leaves,
        lambda: setattr(held, "structure", tree_structure([0, 0, 0])),
    )


compiled_by_torchscript(torch.jit.script, "scripted module replaced")
compiled_by_torchscript(
    lambda module: torch.jit.trace(module, torch.ones(1, WIDTH)), "traced module replaced"
)
holds(
    "dict",
    stepped,
    lambda held: held.get_last_lr()[0],
    lambda held: setattr(held, "_last_lr", [3.0]),
    "rate of a scheduler",
)
holds(
    "dict",
    stepped,
    lambda held: held.last_epoch + 1,
    lambda held: setattr(held, "last_epoch", 3),
    "epoch of a scheduler",
)
holds(
    "dict",
    lambda: torch.utils.data.TensorDataset(torch.ones(4, WIDTH)),
    lambda held: held[1][0],
    lambda held: setattr(held, "tensors", (torch.full((4, WIDTH), 3.0),)),
    "tensors of a dataset",
)
holds(
    "dict",
    lambda: torch.utils.data.Subset([1.0, 2.0], [0]),
    lambda held: held[0],
    lambda held: setattr(held, "indices", [1]),
    "indices of a subset",
)
holds(
    "dict",
    lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(WIDTH, WIDTH)),
    lambda held: held.n_averaged,
    lambda held: setattr(held, "n_averaged", torch.tensor(3)),
    "count of an averaged model",
)


@program("dict")
def learning_rate_that_a_scheduler_sets() -> Change:
    scheduler = stepped()
    return (
        lambda x: x * scheduler.optimizer.param_groups[0]["lr"],
        scheduler.step,
    )


# Objects of Python --------------------------------------------------------------------------------


def parser() -> configparser.ConfigParser:
    held = configparser.ConfigParser()
    held.read_string("[model]\nscale = 1.0")
    return held


def rewritten(held: Any, text: str) -> None:
    held.seek(0)
    held.truncate()
    held.write(text)


def read_again(held: Any) -> float:
    held.seek(0)
    return float(held.read())


class Pair(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("shift", ctypes.c_float))


class Stream(io.StringIO):
    scale = 1.0


holds(
    "dict",
    parser,
    lambda held: held.getfloat("model", "scale"),
    lambda held: held.set("model", "scale", "3.0"),
    "option of a config parser",
)
holds(
    "dict",
    parser,
    lambda held: float(held["model"]["scale"]),
    lambda held: held.read_string("[model]\nscale = 3.0"),
    "config parser that reads a file again",
)
holds(
    "glance",
    lambda: io.StringIO("1.0"),
    read_again,
    lambda held: rewritten(held, "3.0"),
    "text of a stream",
)
holds(
    "glance",
    lambda: io.BytesIO(b"1.0"),
    lambda held: float(held.getvalue()),
    lambda held: rewritten(held, b"3.0"),
    "bytes of a stream",
)
holds(
    "dict",
    Stream,
    lambda held: held.scale,
    lambda held: setattr(held, "scale", 3.0),
    "attribute of a subclass of a stream",
)
holds(
    "glance",
    lambda: ctypes.c_double(1.0),
    lambda held: held.value,
    lambda held: setattr(held, "value", 3.0),
    "number of ctypes",
)
holds(
    "glance",
    lambda: (ctypes.c_float * 2)(1.0, 1.0),
    lambda held: held[1],
    lambda held: held.__setitem__(1, 3.0),
    "array of ctypes",
)
holds(
    "glance",
    lambda: Pair(1.0, 0.0),
    lambda held: held.scale,
    lambda held: setattr(held, "scale", 3.0),
    "structure of ctypes",
)
holds(
    "glance",
    lambda: array.array("d", [1.0, 2.0]),
    lambda held: held[0],
    lambda held: held.__setitem__(0, 3.0),
    "array of Python",
)
holds(
    "dict",
    lambda: types.SimpleNamespace(scales=np.array([1.0, 2.0])),
    lambda held: float(held.scales[0]),
    lambda held: setattr(held, "scales", np.array([3.0, 2.0])),
    "array of NumPy in the place of another",
)
holds(
    "glance",
    lambda: np.array([1.0, 2.0]),
    lambda held: float(held[0]),
    lambda held: held.__setitem__(0, 3.0),
    "element of an array of NumPy",
)
holds(
    "glance",
    lambda: [np.array([1.0]), np.array([1.0])],
    lambda held: float(held[1][0]),
    lambda held: held.__setitem__(1, np.array([3.0])),
    "array of NumPy in a list",
)
holds(
    "glance",
    lambda: np.array([{"scale": 1.0}, None], dtype=object),
    lambda held: held[0]["scale"],
    lambda held: held[0].__setitem__("scale", 3.0),
    "dict in an array of NumPy",
)
holds(
    "glance",
    lambda: np.array([[[1.0], None]], dtype=object)[:, ::-1],
    lambda held: held[0][1][0],
    lambda held: held[0][1].__setitem__(0, 3.0),
    "list in a view of an array of NumPy",
)
holds(
    "glance",
    lambda: bytearray(b"\x01\x02"),
    lambda held: held[0],
    lambda held: held.__setitem__(0, 3),
    "bytearray",
)
holds(
    "glance",
    lambda: ctypes.pointer(ctypes.c_double(1.0)),
    lambda held: held.contents.value,
    lambda held: setattr(held.contents, "value", 3.0),
    "what a pointer of ctypes leads to",
)
holds(
    "glance",
    lambda: ctypes.cast((ctypes.c_float * 2)(1.0, 1.0), ctypes.POINTER(ctypes.c_float)),
    lambda held: held[1],
    lambda held: held.__setitem__(1, 3.0),
    "array behind a cast pointer of ctypes",
)
holds(
    "dict",
    lambda: argparse.Namespace(scale=1.0),
    lambda held: held.scale,
    lambda held: setattr(held, "scale", 3.0),
    "namespace of arguments",
)
holds(
    "dict",
    lambda: types.SimpleNamespace(scale=1.0),
    lambda held: held.scale,
    lambda held: setattr(held, "scale", 3.0),
    "simple namespace",
)
holds(
    "glance",
    lambda: statistics.NormalDist(1.0, 1.0),
    lambda held: held.mean,
    lambda held: setattr(held, "_mu", 3.0),
    "mean of a distribution of Python",
)
holds(
    "dict",
    lambda: string.Template("1.0$x"),
    lambda held: float(held.template[:3]),
    lambda held: setattr(held, "template", "3.0"),
    "text of a template",
)
holds(
    "dict",
    lambda: contextlib.nullcontext(1.0),
    lambda held: held.enter_result,
    lambda held: setattr(held, "enter_result", 3.0),
    "result of a null context",
)
holds(
    "dict",
    lambda: types.SimpleNamespace(of=fractions.Fraction(1, 2)),
    lambda held: float(held.of),
    lambda held: setattr(held, "of", fractions.Fraction(3, 2)),
    "fraction",
)
holds(
    "dict",
    lambda: UserDict(scale=1.0),
    lambda held: held["scale"],
    lambda held: held.update(scale=3.0),
    "user dict",
)
holds(
    "glance",
    lambda: UserList([1.0]),
    lambda held: held[0],
    lambda held: held.__setitem__(0, 3.0),
    "user list",
)
holds(
    "dict",
    lambda: ChainMap({}, {"scale": 1.0}),
    lambda held: held["scale"],
    lambda held: held.update(scale=3.0),
    "chain of maps",
)
holds(
    "dict",
    lambda: Counter(scale=1),
    lambda held: held["scale"],
    lambda held: held.update(scale=2),
    "counter of collections",
)
holds(
    "dict",
    lambda: defaultdict(lambda: 1.0),
    lambda held: held["scale"],
    lambda held: held.update(scale=3.0),
    "dict with defaults",
)
holds(
    "dict",
    lambda: functools.partial(torch.mul, other=1.0),
    lambda held: held.keywords["other"],
    lambda held: held.keywords.update(other=3.0),
    "keyword of a partial",
)


# Modules ------------------------------------------------------------------------------------------


NAMES_OF_LIBRARIES = (
    "code", "cuda", "platform", "profile", "queue", "statistics", "test", "token", "triton",
    "types",
)  # fmt: skip


def of_user_module(name: str, text: str, *, package: bool = False) -> types.ModuleType:
    """A user's module or package that is named as one of Python's."""
    folder = Path(tempfile.mkdtemp()) / name if package else Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    file = folder / ("__init__.py" if package else f"{name}.py")
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    spec.loader.exec_module(module)

    class Handle:
        def remove(self) -> None:
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before

    HANDLES.append(Handle())
    return module


CONSTANT = """
SCALE = 1.0

def forward(x):
    return x * SCALE
"""
CLASS = """
class Model:
    scale = 1.0

    def __init__(self):
        self.inner = 1.0

    def __call__(self, x):
        return x * self.scale * self.inner
"""


def named_as_a_library(name: str, package: bool) -> None:
    kind = "package" if package else "module"

    def constant() -> Change:
        module = of_user_module(name, CONSTANT, package=package)
        return module.forward, lambda: setattr(module, "SCALE", 3.0)

    def attribute() -> Change:
        module = of_user_module(name, CLASS, package=package)
        model = module.Model()
        return model, lambda: setattr(model, "inner", 3.0)

    def class_attribute() -> Change:
        module = of_user_module(name, CLASS, package=package)
        return module.Model(), lambda: setattr(module.Model, "scale", 3.0)

    def named_from_elsewhere() -> Change:
        module = of_user_module(name, CONSTANT, package=package)
        forward = eval(f"lambda x: x * {name}.SCALE", {name: module})
        return forward, lambda: setattr(module, "SCALE", 3.0)

    for build in (constant, attribute, class_attribute, named_from_elsewhere):
        what = f"{build.__name__.replace('_', ' ')} of a {kind} named {name}"
        PROGRAMS.append(Program(what, "dict", build))


for library in NAMES_OF_LIBRARIES:
    named_as_a_library(library, package=library in ("cuda", "profile", "test"))


def settings_module(name: str) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    module.SCALE = 1.0  # type: ignore[attr-defined]
    return module


@program("dict")
def module_looked_up_in_sys_modules() -> Change:
    settings = settings_module("settings_in_sys_modules")
    return (
        lambda x: x * sys.modules["settings_in_sys_modules"].SCALE,
        lambda: setattr(settings, "SCALE", 3.0),
    )


@program("dict")
def module_imported_by_its_name() -> Change:
    settings = settings_module("settings_by_name")
    return (
        lambda x: x * importlib.import_module("settings_by_name").SCALE,
        lambda: setattr(settings, "SCALE", 3.0),
    )


@program("dict")
def attribute_of_a_module_by_getattr() -> Change:
    settings = settings_module("settings_by_getattr")
    return (
        lambda x: x * getattr(sys.modules["settings_by_getattr"], "SCALE"),  # noqa: B009
        lambda: setattr(settings, "SCALE", 3.0),
    )


SETTINGS = """
import types

SCALE = 1.0
TABLE = {"scale": 1.0}
config = types.SimpleNamespace(scale=1.0)
UNREAD = 1.0

def forward(x):
    return x * SCALE
"""


class HasModule(nn.Module):
    """A model that keeps a module of a user, and one of a library, as attributes."""

    def __init__(self, settings: types.ModuleType, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.settings, self.functional, self.read = settings, nn.functional, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.functional.relu(x) * self.read(self.settings)


def in_closure(settings: Any, read: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x: x * read(settings)


def in_dict(settings: Any, read: Callable[[Any], Any]) -> Callable[..., Any]:
    held = {"a": settings}
    return lambda x: x * read(held["a"])


def in_default(settings: Any, read: Callable[[Any], Any]) -> Callable[..., Any]:
    def forward(x: torch.Tensor, held: Any = settings) -> torch.Tensor:
        product: torch.Tensor = x * read(held)
        return product

    return forward


def in_object(settings: Any, read: Callable[[Any], Any]) -> Callable[..., Any]:
    held = types.SimpleNamespace(settings=settings)
    return lambda x: x * read(held.settings)


def in_module(settings: Any, read: Callable[[Any], Any]) -> Callable[..., Any]:
    outer = of_user_module("outer_settings_of_a_test", "")
    outer.inner = settings  # type: ignore[attr-defined]
    return lambda x: x * read(outer.inner)


def module_held(
    name: str, seen: str, read: Callable[[Any], Any], change: Callable[[Any], object]
) -> None:
    """Programs that hold a user's module as an object."""
    for hold in (in_closure, in_dict, in_default, in_object, in_module, HasModule):

        def build(hold: Callable[..., Any] = hold) -> Change:
            settings = of_user_module("settings_of_a_test", SETTINGS)
            return hold(settings, read), lambda: change(settings)

        PROGRAMS.append(Program(f"{name} of a module {hold.__name__}", seen, build))


module_held("number", "dict", lambda m: m.SCALE, lambda m: setattr(m, "SCALE", 3.0))
module_held("table", "dict", lambda m: m.TABLE["scale"], lambda m: m.TABLE.update(scale=3.0))
module_held("object", "dict", lambda m: m.config.scale, lambda m: setattr(m.config, "scale", 3.0))
module_held("function", "dict", lambda m: m.forward(1.0), lambda m: setattr(m, "SCALE", 3.0))
module_held(
    "new function", "dict", lambda m: m.forward(1.0), lambda m: setattr(m, "forward", lambda x: 3.0)
)
module_held("unread number", "none", lambda m: m.SCALE, lambda m: setattr(m, "UNREAD", 3.0))


@program("dict")
def module_held_that_is_replaced() -> Change:
    def settings(scale: float) -> types.ModuleType:
        return of_user_module("settings_of_a_test", f"SCALE = {scale}")

    held = HasModule(settings(1.0), lambda m: m.SCALE)
    return held, lambda: setattr(held, "settings", settings(3.0))


@program("glance")
def command_line() -> Change:
    argv = sys.argv
    sys.argv = [argv[0], "1.0"]

    class Handle:
        def remove(self) -> None:
            sys.argv = argv

    HANDLES.append(Handle())
    return lambda x: x * float(sys.argv[1]), lambda: sys.argv.__setitem__(1, "3.0")


# Environment variables ----------------------------------------------------------------------------


def environment(name: str, read: Callable[[], str], *, was: str | None = "1.0") -> None:
    def build() -> Change:
        os.environ.pop("SCALE_OF_A_TEST", None)
        if was is not None:
            os.environ["SCALE_OF_A_TEST"] = was
        return (
            lambda x: x * float(read()),
            lambda: os.environ.update(SCALE_OF_A_TEST="3.0"),
        )

    PROGRAMS.append(Program(f"environment variable {name}", "dict", build))


environment("by its key", lambda: os.environ["SCALE_OF_A_TEST"])
environment("by get", lambda: os.environ.get("SCALE_OF_A_TEST", "1.0"))
environment("by getenv", lambda: os.getenv("SCALE_OF_A_TEST", "1.0"))
environment("that is set later", lambda: os.getenv("SCALE_OF_A_TEST", "1.0"), was=None)
environment("by a getenv of its own", (lambda held: lambda: held("SCALE_OF_A_TEST"))(os.getenv))
environment(
    "by getenv in a dict", (lambda held: lambda: held[0]("SCALE_OF_A_TEST"))({0: os.getenv})
)
environment("by a partial", functools.partial(os.getenv, "SCALE_OF_A_TEST"))  # type: ignore[arg-type]
environment("by expandvars", lambda: os.path.expandvars("$SCALE_OF_A_TEST"))
environment(
    "by an expandvars of its own",
    (lambda held: lambda: held("$SCALE_OF_A_TEST"))(os.path.expandvars),
)
environment("by a key that is put together", lambda: os.environ["SCALE_OF_" + "A_TEST".upper()])


# Runners inside of a forward ----------------------------------------------------------------------


def inner_runner(forward: Callable[..., Any]) -> GraphRunner[Any]:
    runner = GraphRunner(forward, mode="FULL", sizes=[4], inputs=INPUTS, platform="cpu")
    runner.capture()
    runner(x=torch.randn(4, WIDTH))
    return runner


def inner_wrapper(forward: Callable[..., Any]) -> Any:
    return GraphWrapper(forward, "FULL", pool=GraphPool("cpu"))


class ScaledRunner(GraphRunner[Any]):
    """A user's subclass, with an attribute and code of its own."""

    factor = 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * self.factor


def scaled_runner(forward: Callable[..., Any]) -> ScaledRunner:
    runner = ScaledRunner(forward, mode="FULL", sizes=[4], inputs=INPUTS, platform="cpu")
    runner.capture()
    return runner


class Holder(nn.Module):
    """A module that keeps a runner, as engines do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x=x) + 1


def inside(name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Programs with an inner runner, whose model the host changes."""

    def add(what: str, seen: str, build: Callable[[], tuple[Any, Callable[[], object]]]) -> None:
        def both() -> Change:
            forward, change = build()
            return Holder(wrap(forward)), change

        PROGRAMS.append(Program(f"{what} in {name}", seen, both))

    def number() -> Change:
        held = types.SimpleNamespace(scale=1.0)
        return lambda x: x * held.scale, lambda: setattr(held, "scale", 3.0)

    def weight() -> Change:
        layer = nn.Linear(WIDTH, WIDTH)
        return (
            lambda x: layer(x),
            lambda: setattr(layer, "weight", nn.Parameter(layer.weight * 3)),
        )

    def data() -> Change:
        layer = nn.Linear(WIDTH, WIDTH)
        return lambda x: layer(x), lambda: setattr(layer.weight, "data", layer.weight.data * 3)

    def hook() -> Change:
        layer = nn.Linear(WIDTH, WIDTH)
        return (
            lambda x: layer(x),
            lambda: layer.register_forward_hook(lambda module, inputs, out: out * 3),
        )

    for build in (number, weight, hook):
        add(build.__name__, "dict", build)
    add("data", "glance", data)


inside("a runner", inner_runner)
inside("a bound method of a runner", lambda forward: inner_runner(forward).__call__)
inside("a partial of a runner", lambda forward: functools.partial(inner_runner(forward)))
inside("a runner in a runner", lambda forward: inner_runner(Holder(inner_runner(forward))))
inside("a wrapper", inner_wrapper)
inside("a runner of a user's subclass", scaled_runner)


@program("dict")
def attribute_of_a_users_subclass_of_a_runner() -> Change:
    layer = nn.Linear(WIDTH, WIDTH)
    runner = scaled_runner(lambda x: layer(x))
    return Holder(runner), lambda: setattr(runner, "factor", 3.0)


@program("dict")
def runner_replaced_by_another() -> Change:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    holder = Holder(inner_runner(lambda x: first(x)))
    return holder, lambda: setattr(holder, "inner", inner_runner(lambda x: second(x)))


def busy_inside(name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """The inner runner works by itself between two steps: that is no change."""

    def build() -> Change:
        layer = nn.Linear(WIDTH, WIDTH)
        inner = wrap(lambda x: layer(x))

        def work() -> None:
            for rows in (4, 3, 2, 4):
                inner(x=torch.randn(rows, WIDTH))
            if isinstance(inner, GraphRunner):
                inner.recapture()
                inner(x=torch.randn(4, WIDTH))
                inner.release()

        return Holder(inner), work

    PROGRAMS.append(Program(f"steps of {name}", "none", build))


busy_inside("an inner runner", inner_runner)
busy_inside("an inner wrapper", inner_wrapper)
busy_inside("an inner runner of a user's subclass", scaled_runner)


@program("none")
def keyed_graphs_beside_the_forward() -> Change:
    layer, graphs = nn.Linear(WIDTH, WIDTH), KeyedGraphs(GraphPool("cpu"))
    holder, x = Holder(lambda x: layer(x)), torch.ones(2, WIDTH)
    holder.graphs = graphs

    def work() -> None:
        graphs.capture("key", lambda: layer(x))
        for _ in range(3):
            graphs.replay("key")

    return holder, work
