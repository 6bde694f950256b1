"""The eager twin of a program: what every step is compared with."""

from __future__ import annotations

import warnings
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from tests.fuzz.comparing import alike, copied, cut
from tests.fuzz.prelude import Fields, Pair
from tests.fuzz.program import Program, built
from tests.fuzz.values import Values, blank, grad_mode, padded, values_of


class Seen(NamedTuple):
    """What a step leaves: its results, the state behind it, and the random numbers to come."""

    outputs: Any
    state: dict[str, torch.Tensor]
    random: torch.Tensor


def random_state(device: str) -> torch.Tensor:
    """Where the default generator is."""
    state: torch.Tensor = _generator(device).get_rng_state()
    return state


def set_random_state(device: str, state: torch.Tensor) -> None:
    """Put the default generator there."""
    _generator(device).set_rng_state(state)


def _generator(device: str) -> Any:
    return torch if device == "cpu" else torch.get_device_module(device)


class Twin:
    """A program without graphs."""

    def __init__(self, program: Program, device: str) -> None:
        self._program = program
        self._device = device
        self.forward, self.state, _ = built(program, device)

    def run(self, values: Values) -> Seen:
        """Run a step on copies of these inputs."""
        copies = {name: value.clone() for name, value in values.items()}
        outputs = self.forward(**packed(self._program, copies))
        return Seen(copied(outputs), saved(self.state), random_state(self._device))

    def tried(self, values: Values) -> Seen:
        """The same, put back afterwards."""
        before, random = saved(self.state), random_state(self._device)
        try:
            return self.run(values)
        finally:
            self.put(before)
            set_random_state(self._device, random)

    def put(self, state: dict[str, torch.Tensor]) -> None:
        """Give the state these values."""
        with torch.no_grad():
            for name, value in state.items():
                self.state[name].data = value.clone()


def saved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of all state."""
    return {name: value.detach().clone() for name, value in state.items()}


def packed(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward: all inputs but the first may be in a container."""
    kind, names = program.setup.container, list(values)
    if not kind:
        return values
    rest = [values[name] for name in names[1:]]
    container: Any = {
        "list": lambda: rest,
        "tuple": lambda: tuple(rest),
        "dict": lambda: dict(zip(names[1:], rest, strict=True)),
        "pair": lambda: Pair(*rest[:2]) if len(rest) == 2 else tuple(rest),
        "fields": lambda: Fields(*rest),
    }[kind]()
    return {names[0]: values[names[0]], "rest": container}


def usable(program: Program) -> Program | None:
    """The program, if it runs eagerly at every size and its results keep their form; with
    `mixes_rows` where its live rows depend on padding."""
    setup, specs = program.setup, program.specs()
    sizes = {(step.tokens, step.reqs) for step in setup.steps}
    sizes |= {(size, size) for size in setup.sizes} | {(size, 1) for size in setup.sizes}
    torch.manual_seed(0)
    mixes = False
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=setup.autocast)
    with warnings.catch_warnings(), grad_mode(setup.gradients), autocast:
        warnings.simplefilter("ignore")
        try:
            twin = Twin(program, "cpu")
            forms, shapes = set(), []
            for tokens, reqs in sorted(sizes):
                seen = twin.run(values_of(specs, tokens, reqs, 7, "cpu"))
                shapes.append([(t.shape, tokens, reqs) for t in tree.tensors(seen.outputs)])
                forms.add(tuple(tensor.dim() for tensor in tree.tensors(seen.outputs)))
            for tokens, reqs in sorted(sizes):
                twin.tried(blank(specs, tokens, reqs))
            if len(forms) > 1:
                return None
            if any(not _grows_plainly(*each) for each in zip(*shapes, strict=True)):
                return None
            for tokens, more in ((1, 2), (3, 4), (2, 8)):
                values = values_of(specs, tokens, tokens, 7, "cpu")
                live = twin.tried(values)
                wide = twin.tried(padded(specs, values, more, more, (tokens, tokens)))
                mixes = mixes or _mixes(live, wide)
        except Exception:
            return None  # of whatever kind: what eager raises is no program
    if mixes and Random(program.seed).random() < 0.75:
        return replace(program, setup=replace(setup, mixes_rows=True))
    return program


def _mixes(live: Seen, wide: Seen) -> bool:
    outputs = cut(wide.outputs, live.outputs)
    pairs = list(zip(tree.tensors(outputs), tree.tensors(live.outputs), strict=True))
    pairs += [(wide.state[name], live.state[name]) for name in live.state if name != "cache"]
    if "cache" in live.state:
        pairs.append((wide.state["cache"][:-1], live.state["cache"][:-1]))
    return not all(alike(a, b) for a, b in pairs)


def _grows_plainly(*seen: tuple[torch.Size, int, int]) -> bool:
    """Whether each dimension is constant, or so many times the tokens or requests: one that is cut
    off at some size (`[:3]`) is none that live rows could be told from."""
    for dim in range(len(seen[0][0])):
        sizes = [shape[dim] for shape, _, _ in seen]
        if len(set(sizes)) == 1:
            continue
        if all(
            len({size / each[of] for size, each in zip(sizes, seen, strict=True)}) > 1
            for of in (1, 2)
        ):
            return False
    return True
