"""Hosts that change much between steps, nothing of which makes a difference to their forward."""

from __future__ import annotations

import array
import collections
import concurrent.futures
import configparser
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import enum
import functools
import heapq
import io
import itertools
import logging
import os
import pathlib
import queue
import random
import re
import tempfile
import threading
import time
import types
import uuid
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from graphrt import GraphRunner, InputSpec

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.scale = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift + self.up(self.down(x)) * self.scale


class Host:
    """Its forward is a method, so that all it keeps is in reach; `seen` runs in each forward."""

    def __init__(self) -> None:
        self.net = Net()
        self.state: Any = None
        self.seen: Callable[[torch.Tensor], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is not None:
            self.seen(x)
        return self.net(x)


Between = Callable[[int], object]
HOSTS: dict[str, Callable[[Host], Between]] = {}


def host(build: Callable[[Host], Between]) -> Callable[[Host], Between]:
    HOSTS[build.__name__.replace("_", " ")] = build
    return build


def keeps(**states: Callable[[], tuple[Any, Callable[[Any, int], object]]]) -> None:
    """Hosts that keep one object, and what they do to it before each step."""

    def build(new: Callable[[], tuple[Any, Callable[[Any, int], object]]], of: Host) -> Between:
        of.state, change = new()
        return lambda step: change(of.state, step)

    for name, new in states.items():
        HOSTS[name.replace("_", " ")] = functools.partial(build, new)


@dataclasses.dataclass
class Stats:
    tokens: int = 0
    seconds: float = 0.0
    last: Any = None


class Phase(enum.Enum):
    PREFILL = 0
    DECODE = 1


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Meter:
    """As those of training loops."""

    def __init__(self) -> None:
        self.value = self.total = self.count = 0.0
        self.history: collections.deque[float] = collections.deque(maxlen=5)

    def update(self, value: float) -> None:
        self.value = value
        self.total += value
        self.count += 1
        self.history.append(value)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


class Registry:
    instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.instances.add(self)


def _set(name: str, value: Callable[[int], Any]) -> Callable[[Any, int], object]:
    return lambda state, step: setattr(state, name, value(step))


keeps(
    counter=lambda: (types.SimpleNamespace(steps=0), _set("steps", lambda step: step)),
    float_figure=lambda: (types.SimpleNamespace(loss=0.0), _set("loss", lambda step: step / 7)),
    text_status=lambda: (types.SimpleNamespace(text=""), _set("text", lambda step: f"step {step}")),
    flag_that_toggles=lambda: (types.SimpleNamespace(on=False), _set("on", lambda s: s % 2 == 0)),
    phase=lambda: (types.SimpleNamespace(phase=None), _set("phase", lambda s: Phase(s % 2))),
    time_stamp=lambda: (types.SimpleNamespace(at=0.0), _set("at", lambda _: time.perf_counter())),
    date=lambda: (types.SimpleNamespace(at=None), _set("at", lambda _: datetime.datetime.now())),
    request_id=lambda: (types.SimpleNamespace(id=None), _set("id", lambda _: uuid.uuid4())),
    new_object_each_step=lambda: (types.SimpleNamespace(o=None), _set("o", lambda _: object())),
    new_metadata=lambda: (
        types.SimpleNamespace(meta=None),
        _set("meta", lambda step: types.SimpleNamespace(step=step, rows=[step])),
    ),
    new_tensor_of_its_own=lambda: (
        types.SimpleNamespace(ids=None),
        _set("ids", lambda step: torch.full((3,), step)),
    ),
    nothing_or_a_tensor=lambda: (
        types.SimpleNamespace(mask=None),
        _set("mask", lambda step: torch.ones(2) if step % 2 else None),
    ),
    tuple_of_figures=lambda: (types.SimpleNamespace(t=()), _set("t", lambda s: (s, s / 2))),
    dataclass=lambda: (Stats(), _set("tokens", lambda step: 4 * step)),
    dataclass_replaced=lambda: (Stats(), _set("last", lambda step: Stats(tokens=step))),
    slots=lambda: (Slotted(), _set("count", lambda step: step)),
    nested_objects=lambda: (
        types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace(c=0))),
        lambda state, step: setattr(state.a.b, "c", step),
    ),
    attribute_deleted=lambda: (
        types.SimpleNamespace(),
        lambda state, step: (setattr(state, "a", step), delattr(state, "a")),
    ),
    list_grows=lambda: ([], lambda state, step: state.append(step)),
    list_is_cleared=lambda: ([], lambda s, step: s.append(step) if step % 3 else s.clear()),
    list_is_sorted=lambda: ([3, 1, 2], lambda state, step: state.sort(reverse=bool(step % 2))),
    list_of_objects=lambda: ([], lambda s, step: s.append(types.SimpleNamespace(at=step))),
    queue=lambda: (collections.deque(), lambda s, step: (s.append(step), s.rotate(1))),
    heap=lambda: ([], lambda s, step: heapq.heappush(s, -step)),
    ring_of_figures=lambda: (collections.deque(maxlen=4), lambda s, step: s.append(step / 3)),
    dict_of_requests=lambda: (
        {},
        lambda s, step: (s.update({f"r{step}": step}), s.pop(f"r{step - 3}", None)),
    ),
    dict_of_objects=lambda: (
        {},
        lambda s, step: (
            s.update({f"r{step}": types.SimpleNamespace(done=0)}),
            [setattr(each, "done", each.done + 1) for each in s.values()],
            s.pop(f"r{step - 3}", None),
        ),
    ),
    dict_value=lambda: ({"tokens": 0}, lambda s, step: s.update(tokens=step)),
    nested_dicts=lambda: ({"a": {"b": 0}}, lambda s, step: s["a"].update(b=step)),
    ordered_dict=lambda: (
        collections.OrderedDict(a=1, b=2),
        lambda s, step: s.move_to_end("ab"[step % 2]),
    ),
    default_dict=lambda: (collections.defaultdict(int), lambda s, step: s.update({step % 5: step})),
    counter_of_kinds=lambda: (collections.Counter(), lambda s, step: s.update([step % 3])),
    chain_map=lambda: (collections.ChainMap({}, {}), lambda s, step: s.__setitem__("a", step)),
    set_of_names=lambda: (set(), lambda s, step: s.add(step % 4) or s.discard((step + 2) % 4)),
    meter=lambda: (Meter(), lambda s, step: s.update(step / 2)),
    several_meters=lambda: (
        {"loss": Meter(), "time": Meter()},
        lambda s, step: [each.update(step) for each in s.values()],
    ),
    histogram=lambda: (torch.zeros(4), lambda s, step: s[step % 4].add_(1)),
    tensor_of_figures=lambda: (torch.zeros(8), lambda s, step: s.copy_(torch.full((8,), step))),
    array_of_figures=lambda: (np.zeros(4), lambda s, step: s.fill(step)),
    new_array=lambda: (
        types.SimpleNamespace(lengths=None),
        _set("lengths", lambda step: np.arange(step % 3)),
    ),
    arrays_of_requests=lambda: (
        {},
        lambda s, step: (s.update({step: np.full(2, step)}), s.pop(step - 3, None)),
    ),
    random_generator=lambda: (random.Random(0), lambda s, step: s.random()),
    torch_generator=lambda: (torch.Generator(), lambda s, step: torch.rand(1, generator=s)),
    iterator=lambda: (itertools.count(), lambda s, step: next(s)),
    text_buffer=lambda: (io.StringIO(), lambda s, step: s.write(f"{step}\n")),
    lock=lambda: (threading.Lock(), lambda s, step: (s.acquire(), s.release())),
    event=lambda: (threading.Event(), lambda s, step: s.set() if step % 2 else s.clear()),
    thread_local=lambda: (threading.local(), lambda s, step: setattr(s, "step", step)),
    partial=lambda: (
        types.SimpleNamespace(call=None),
        _set("call", lambda step: functools.partial(print, step)),
    ),
    closures=lambda: (types.SimpleNamespace(call=None), _set("call", lambda step: lambda: step)),
    weak_ref=lambda: (types.SimpleNamespace(r=None), _set("r", lambda _: weakref.ref(Meter()))),
    weak_values=lambda: (
        weakref.WeakValueDictionary(),
        lambda s, step: s.__setitem__(step % 3, Meter()),
    ),
    instances_of_a_class=lambda: (Registry(), lambda s, step: Registry()),
    class_counter=lambda: (Registry(), lambda s, step: setattr(Registry, "made", step)),
    schedule=lambda: (
        types.SimpleNamespace(rate=1.0, history=[]),
        lambda s, step: (setattr(s, "rate", 0.9**step), s.history.append(s.rate)),
    ),
)  # fmt: skip


@host
def progress_bar(of: Host) -> Between:
    """As tqdm: a file, counts, times, and a lock that all bars share."""
    bar = types.SimpleNamespace(n=0, start=time.time(), last=0.0, text="", file=io.StringIO())
    of.state = bar

    def between(step: int) -> None:
        bar.n, bar.last = step, time.time()
        bar.text = f"{step}it, {bar.last - bar.start:.2f}s"
        bar.file.write("\r" + bar.text)

    return between


@host
def logger(of: Host) -> Between:
    of.state = logging.Logger("host")
    of.state.addHandler(logging.StreamHandler(io.StringIO()))
    return lambda step: of.state.info("step %d", step)


@host
def log_level(of: Host) -> Between:
    of.state = logging.Logger("host")
    return lambda step: of.state.setLevel((logging.INFO, logging.DEBUG)[step % 2])


@host
def counter_in_the_forward(of: Host) -> Between:
    of.state = collections.Counter()
    of.seen = lambda x: of.state.update(calls=1)
    return lambda step: None


@host
def shapes_kept_by_the_forward(of: Host) -> Between:
    of.state = []
    of.seen = lambda x: of.state.append(tuple(x.shape))
    return lambda step: None


@host
def time_of_the_last_forward(of: Host) -> Between:
    of.state = types.SimpleNamespace(at=0.0)
    of.seen = lambda x: setattr(of.state, "at", time.perf_counter())
    return lambda step: None


@host
def cached_function(of: Host) -> Between:
    @functools.lru_cache(maxsize=8)
    def blocks(tokens: int) -> int:
        return -(-tokens // 16)

    of.state = blocks
    of.seen = lambda x: blocks(len(x))
    return lambda step: blocks(step)


@host
def cached_property(of: Host) -> Between:
    class Table:
        @functools.cached_property
        def rows(self) -> list[int]:
            return [1, 2]

    of.state = types.SimpleNamespace(table=Table())

    def between(step: int) -> None:
        of.state.table.rows.append(step)
        if step % 4 == 0:
            of.state.table = Table()

    return between


@host
def array_that_the_forward_counts_in(of: Host) -> Between:
    of.state = np.zeros(2, np.int64)
    of.seen = lambda x: np.add(of.state, 1, out=of.state)
    return lambda step: None


@host
def array_that_the_forward_replaces(of: Host) -> Between:
    of.state = types.SimpleNamespace(last=np.zeros(1))
    of.seen = lambda x: setattr(of.state, "last", np.zeros(len(x)))
    return lambda step: setattr(of.state, "last", np.full(1, step))


@host
def arrays_that_share_memory_with_weights(of: Host) -> Between:
    of.state = of.net.shift.numpy(), of.net.scale.numpy()

    def between(step: int) -> None:
        of.net.shift.fill_(step)
        of.state[1].fill(step / 2)

    return between


@host
def optimizer(of: Host) -> Between:
    parameters = [nn.Parameter(torch.ones(2))]
    of.state = torch.optim.AdamW(parameters, lr=0.1)

    def between(step: int) -> None:
        parameters[0].grad = torch.ones(2)
        of.state.step()
        of.state.zero_grad()

    return between


@host
def optimizer_of_the_model(of: Host) -> Between:
    """In place, as RL does."""
    of.state = torch.optim.SGD(of.net.parameters(), lr=0.01)

    def between(step: int) -> None:
        for each in of.net.parameters():
            each.grad = torch.ones_like(each)
        of.state.step()
        of.state.zero_grad(set_to_none=True)

    return between


@host
def learning_rate_schedule(of: Host) -> Between:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        of.state = torch.optim.lr_scheduler.StepLR(inner, step_size=1)

    def between(step: int) -> None:
        inner.step()
        of.state.step()

    return between


@host
def moving_average_in_place(of: Host) -> Between:
    of.state = copy.deepcopy(of.net)

    def between(step: int) -> None:
        for mean, each in zip(of.state.parameters(), of.net.parameters(), strict=True):
            mean.lerp_(each, 0.1)

    return between


@host
def moving_average_of_torch(of: Host) -> Between:
    of.state = torch.optim.swa_utils.AveragedModel(of.net)
    return lambda step: of.state.update_parameters(of.net)


@host
def weights_written_in_place(of: Host) -> Between:
    return lambda step: [each.mul_(0.99) for each in of.net.parameters()]


@host
def adapters_in_place(of: Host) -> Between:
    of.state = {name: torch.randn(2, WIDTH) for name in "ab"}
    return lambda step: of.net.down.weight.copy_(of.state["ab"[step % 2]])


@host
def adapter_scale_in_a_tensor(of: Host) -> Between:
    return lambda step: of.net.scale.fill_(step / 2)


@host
def adapter_off_by_its_tensor(of: Host) -> Between:
    return lambda step: of.net.scale.fill_(step % 2)


@host
def adapter_names_of_the_host(of: Host) -> Between:
    of.state = types.SimpleNamespace(active="a", loaded={})

    def between(step: int) -> None:
        of.state.active = "ab"[step % 2]
        of.state.loaded[of.state.active] = step

    return between


@host
def state_dict_loaded(of: Host) -> Between:
    return lambda step: of.net.load_state_dict(of.net.state_dict())


@host
def hook_that_logs(of: Host) -> Between:
    of.state = []
    of.net.register_forward_hook(lambda module, args, out: of.state.append(len(args[0])))
    return lambda step: None


@host
def hook_added_and_removed(of: Host) -> Between:
    def between(step: int) -> None:
        of.net.linear.register_forward_hook(lambda module, args, out: out * 2).remove()

    return between


@host
def hooks_that_look_come_and_go(of: Host) -> Between:
    handles: list[Any] = []

    def between(step: int) -> None:
        if step % 2:
            handles.pop().remove()
        else:
            handles.append(of.net.register_forward_hook(lambda module, args, out: None))

    return between


@host
def hook_that_times(of: Host) -> Between:
    of.state = types.SimpleNamespace(began=0.0, took=0.0)
    of.net.register_forward_pre_hook(
        lambda module, args: setattr(of.state, "began", time.perf_counter())
    )
    of.net.register_forward_hook(
        lambda module, args, out: setattr(of.state, "took", time.perf_counter() - of.state.began)
    )
    return lambda step: None


@host
def train_and_eval(of: Host) -> Between:
    return lambda step: of.net.train(step % 2 == 0)


@host
def requires_grad_toggled(of: Host) -> Between:
    return lambda step: of.net.requires_grad_(step % 2 == 0)


@host
def gradients_come_and_go(of: Host) -> Between:
    def between(step: int) -> None:
        for each in of.net.parameters():
            each.grad = None if step % 2 else torch.zeros_like(each)

    return between


@host
def names_on_parameters(of: Host) -> Between:
    return lambda step: setattr(of.net.linear.weight, "version", step)


@host
def notes_on_modules(of: Host) -> Between:
    return lambda step: setattr(of.net.linear, "calls", step)


@host
def context_variable(of: Host) -> Between:
    of.state = contextvars.ContextVar("step", default=0)
    return lambda step: of.state.set(step)


@host
def exit_stack(of: Host) -> Between:
    of.state = contextlib.ExitStack()
    return lambda step: of.state.callback(lambda: None)


@host
def global_counter(of: Host) -> Between:
    of.seen = lambda x: FIGURES.append(len(x))
    return lambda step: globals().update(STEP=step)


FIGURES: list[int] = []
STEP = 0


@host
def eager_calls_of_its_own(of: Host) -> Between:
    of.state = []
    return lambda step: of.state.append(of.forward(torch.ones(1, WIDTH)).sum().item())


@host
def profiler_of_its_own(of: Host) -> Between:
    of.state = types.SimpleNamespace(events=[], depth=0)

    def between(step: int) -> None:
        of.state.depth = step % 3
        of.state.events.append((time.perf_counter_ns(), f"step {step}"))

    return between


@host
def copies_of_the_model(of: Host) -> Between:
    return lambda step: setattr(of, "state", copy.deepcopy(of.net))


@host
def swap_and_back(of: Host) -> Between:
    def between(step: int) -> None:
        before, of.net.linear = of.net.linear, nn.Linear(WIDTH, WIDTH)
        of.net.linear = before

    return between


@host
def environment_that_the_forward_reads(of: Host) -> Between:
    of.seen = lambda x: os.environ.get("SCALE_OF_A_QUIET_HOST")
    return lambda step: os.environ.update(STEP_OF_A_QUIET_HOST=str(step))


@host
def streams_that_the_forward_writes(of: Host) -> Between:
    of.state = io.StringIO()
    of.seen = lambda x: of.state.write("step")
    return lambda step: None


@host
def numbers_of_ctypes_and_arrays(of: Host) -> Between:
    of.state = ctypes.c_int(0), array.array("l", [0]), bytearray(2)

    def between(step: int) -> None:
        of.state[0].value = of.state[1][0] = of.state[2][0] = step

    return between


@host
def queue_of_requests(of: Host) -> Between:
    of.state = queue.Queue()
    return lambda step: (of.state.put(step), of.state.get() if step % 3 else None)


@host
def thread_pool(of: Host) -> Between:
    of.state = concurrent.futures.ThreadPoolExecutor(1)
    return lambda step: of.state.submit(len, "step").result()


@host
def condition(of: Host) -> Between:
    of.state = threading.Condition()

    def between(step: int) -> None:
        with of.state:
            of.state.notify_all()

    return between


@host
def gaussian_draws(of: Host) -> Between:
    of.state = random.Random(0)
    return lambda step: of.state.gauss(0, 1)


@host
def modes_that_the_forward_enters(of: Host) -> Between:
    of.state = torch.no_grad(), torch.autocast("cpu", enabled=False)

    def seen(x: torch.Tensor) -> None:
        with of.state[0], of.state[1]:
            x.sum()

    of.seen = seen
    return lambda step: None


@host
def gradient_scaler(of: Host) -> Between:
    of.state = torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def between(step: int) -> None:
        with torch.enable_grad():
            of.state.scale(parameter.sum()).backward()
        of.state.step(optimizer)
        of.state.update()

    return between


@host
def data_loader(of: Host) -> Between:
    of.state = torch.utils.data.DataLoader([1.0, 2.0, 3.0], shuffle=True)
    return lambda step: [*of.state]


@host
def config_file_read_again(of: Host) -> Between:
    of.state = configparser.ConfigParser()
    return lambda step: of.state.read_string("[model]\nscale = 1.0")


@host
def distribution_of_the_host(of: Host) -> Between:
    of.state = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    return lambda step: (of.state.sample(), of.state.log_prob(torch.ones(2)))


@host
def pattern_and_path(of: Host) -> Between:
    of.state = re.compile("step"), pathlib.Path("step")
    return lambda step: (of.state[0].match("step 1"), str(of.state[1]), hash(of.state[1]))


@host
def file_of_a_log(of: Host) -> Between:
    of.state = tempfile.TemporaryFile("w+")  # noqa: SIM115
    return lambda step: of.state.write("step")


@host
def runner_beside_the_model(of: Host) -> Between:
    layer = nn.Linear(WIDTH, WIDTH)
    inputs = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
    of.state = GraphRunner(
        lambda x: layer(x), mode="FULL", sizes=[2, 4], inputs=inputs, platform="cpu"
    )
    of.state.capture()
    return lambda step: of.state(x=torch.randn(step % 5 + 1, WIDTH))
