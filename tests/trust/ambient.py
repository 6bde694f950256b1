"""Settings of torch that are on at capture and off later, or the other way round; random numbers
and clocks; work on other threads."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from tests.trust.scenario import Net, Scenario, at_change, defect


@defect("autocast", "named")
def autocast_turned_on(device):
    return Scenario(Net(nn.Linear(8, 8)), between=at_change(lambda: autocast(device, True)))


@defect("autocast", "named")
def autocast_on_at_capture_and_off_later(device):
    autocast(device, True)
    return Scenario(Net(nn.Linear(8, 8)), between=at_change(lambda: autocast(device, False)))


@defect("autocast", "named")
def autocast_on_at_every_other_step(device):
    return Scenario(Net(nn.Linear(8, 8)), between=lambda step: autocast(device, step % 2 == 1))


@defect("autocast", "named", on_cuda="right")
def autocast_to_another_dtype(device):
    autocast(device, True)

    def change():
        torch.set_autocast_dtype(device, torch.float16)
        torch.clear_autocast_cache()

    return Scenario(Net(nn.Linear(8, 8)), between=at_change(change))


@defect("autocast", "late")
def autocast_inside_by_a_flag(device):
    model = SimpleNamespace(linear=nn.Linear(8, 8), half=False)

    def forward(x):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=model.half):
            return model.linear(x)

    return Scenario(forward, between=at_change(lambda: setattr(model, "half", True)))


def autocast(device: str, enabled: bool) -> None:
    """Turn autocast on or off for all that follows, as a host's `with` around its loop does."""
    torch.set_autocast_enabled(device, enabled)
    torch.clear_autocast_cache()


@defect("default dtype", "named")
def default_dtype_changed(device):
    def forward(x):
        return x + torch.full((8,), 0.1, device=x.device)

    return Scenario(forward, between=at_change(lambda: torch.set_default_dtype(torch.float64)))


@defect("default dtype", "named")
def default_dtype_of_a_conversion(device):
    def forward(x):
        return x.to(torch.get_default_dtype()) * 1.1

    return Scenario(forward, between=at_change(lambda: torch.set_default_dtype(torch.bfloat16)))


@defect("numerics", "named")
def deterministic_algorithms_turned_on(device):
    def forward(x):
        return x * 2 if torch.are_deterministic_algorithms_enabled() else x * 2.1

    return Scenario(forward, between=at_change(lambda: torch.use_deterministic_algorithms(True)))


@defect("numerics", "named")
def tf32_flag_that_a_forward_reads(device):
    torch.backends.cuda.matmul.allow_tf32 = False

    def forward(x):
        return x * (2 if torch.backends.cuda.matmul.allow_tf32 else 2.1)

    def change():
        torch.backends.cuda.matmul.allow_tf32 = True

    return Scenario(forward, between=at_change(change))


@defect("numerics", "named", devices=("cuda",))
def tf32_of_a_matrix_product(device):
    torch.backends.cuda.matmul.allow_tf32 = False
    weight = torch.randn(8, 512) @ torch.randn(512, 512)

    def change():
        torch.backends.cuda.matmul.allow_tf32 = True

    forward = lambda x: x @ weight  # noqa: E731
    return Scenario(forward, between=at_change(change), tolerance=1e-5)


@defect("random", "named")
def seed_set_inside(device):
    def forward(x):
        torch.manual_seed(0)
        return x + torch.rand(1, device=x.device)

    return Scenario(forward)


@defect("random", "named")
def generator_built_at_each_call(device):
    def forward(x):
        generator = torch.Generator(x.device).manual_seed(3)
        return x + torch.rand(1, generator=generator, device=x.device)

    return Scenario(forward)


@defect("random", "named", told="named")
def generator_of_a_request_replaced(device):
    model = SimpleNamespace(generator=torch.Generator(device).manual_seed(3))

    def forward(x):
        return x + torch.rand(1, generator=model.generator, device=x.device)

    def change():
        model.generator = torch.Generator(device).manual_seed(4)

    return Scenario(forward, between=at_change(change))


@defect("random", "named", drifts=True)
def python_random(device):
    return Scenario(lambda x: x * random.random())


@defect("random", "named", drifts=True)
def numpy_random(device):
    return Scenario(lambda x: x * float(np.random.rand()))


@defect("random", "named", drifts=True)
def own_random_object(device):
    dice = random.Random(3)
    return Scenario(lambda x: x * dice.randint(1, 100))


@defect("random", "named")
def wall_clock(device):
    began = time.perf_counter()
    last = [0.0]

    def forward(x):
        return (x * 0).double() + (time.perf_counter() - began)

    def between(step):
        last[0] = time.perf_counter() - began

    def judge(step, values, out):
        return out.min().item() >= last[0]

    return Scenario(forward, between=between, judge=judge)


@defect("thread", "named")
def operators_issued_on_another_thread(device):
    weight = torch.randn(8, 8)

    def forward(x):
        found = []
        thread = threading.Thread(target=lambda: found.append(x @ weight))
        thread.start()
        thread.join()
        return found[0] + 1

    return Scenario(forward)


@defect("thread", "named")
def result_written_by_another_thread(device):
    weight, out = torch.randn(8, 8), torch.zeros(8, 8)

    def forward(x):
        y = out[: len(x)]
        thread = threading.Thread(target=lambda: y.copy_(x @ weight))
        thread.start()
        thread.join()
        return y * 2

    return Scenario(forward)


@defect("thread", "named")
def branch_by_the_thread_that_calls(device):
    main = threading.get_ident()

    def forward(x):
        return x * 2 if threading.get_ident() == main else x * 3

    # At capture it is the thread of the host, at a step one of its workers.
    return Scenario(forward, in_new_threads=True)


@defect("thread", "named")
def autocast_of_the_thread_that_calls(device):
    # On where graphs are captured, and in no other thread.
    autocast(device, True)
    return Scenario(Net(nn.Linear(8, 8)), in_new_threads=True)
