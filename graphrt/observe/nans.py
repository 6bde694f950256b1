"""The first operator of a step that makes a NaN: `verify(nan=True)`, `GraphOptions(find_nan=True)`.

1. `first_nan` runs a step eagerly on its live rows. Each operator whose result has a NaN and whose
   arguments have none begins one; what is computed of it, or a view of it, has the same origin. The
   origin of the NaN in an output is the answer. State is put back.
2. With `find_nan` a `NanWatch` stands before each step. It copies what the graph writes, and the
   inputs; tests the outputs on the device after the step; and reads the answer at the next step, or
   later: it waits only where 16 answers are missing. A step with a NaN runs again as in 1, on what
   was copied.

Which memory a graph writes is told by one watched eager run, before its first step. Whole tensors
are copied up to the limit of saved state, of larger ones (a KV cache) only rows whose numbers an
index input gives. Others are as later steps have left them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import InvalidOptionError, VerificationError, warn_caller
from graphrt.core.base.thread_mode import ThreadMode, unseen
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import checked_batch, unpadded
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.operators import facts_of, written
from graphrt.core.capture.refusals import Source, described, user_source
from graphrt.core.inputs.buffers import batch_of, reqs_of
from graphrt.core.replay.pool import in_turn
from graphrt.core.replay.recording import is_inside_capture, under_way
from graphrt.core.runner.contract import Step
from graphrt.core.runner.executor import StepExecutor

if TYPE_CHECKING:
    from graphrt.trust.watching.writes import Region

_MOST_WAITING = 16
"""Steps whose outputs the device has not tested yet; of more the oldest is waited for."""
_UNDEFINED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_ALLOCATES = frozenset(f"aten::{name}" for name in _UNDEFINED)


class NanError(VerificationError):
    """A step has returned a NaN; `op` and `source` are the operator that made it, and its line."""

    def __init__(self, what: str, *, op: str | None, source: str | None, **parts: Any) -> None:
        self.op, self.source = op, source
        super().__init__(what, **parts)


class NanWarning(UserWarning):
    """A step has returned a NaN, with `GraphOptions(find_nan=)`."""


class Origin(NamedTuple):
    """Where a NaN comes from: the operator that made it, or an argument that had it already."""

    op: str
    source: Source | None
    argument: str = ""
    """A tensor from outside in which the operator has found it: an input, a weight, a cache."""


def _bad(tensors: Iterable[torch.Tensor], *, inf: bool) -> torch.Tensor | None:
    """Whether any of these has a NaN, with `inf` or an infinity: on their device, without a wait.
    None if none can."""
    flags = []
    for each in tensors:
        is_float = each.is_floating_point() or each.is_complex()
        if is_float and each.numel() and each.layout is torch.strided:
            plain = each if each.element_size() > 1 else each.float()
            flags.append((~plain.isfinite() if inf else plain.isnan()).any())
    return None if not flags else flags[0] if len(flags) == 1 else torch.stack(flags).any()


class _Origins(ThreadMode):
    """Notes which operator each NaN of a run comes from, by the memory that it is in."""

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[int, str], *, inf: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._inf = names, inf
        # key of a storage -> (the storage, kept: no other gets the key; the origin).
        self.origins: dict[int, tuple[Any, Origin]] = {}
        self.first: Origin | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        flag = unseen(lambda: _bad([tensor], inf=self._inf))
        return flag is not None and bool(flag)

    def origin_of(self, tensor: torch.Tensor) -> Origin | None:
        noted = self.origins.get(tree.storage_key(tensor) or 0)
        return None if noted is None else noted[1]

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from graphrt.trust.watching.rows import overwrites

        facts = facts_of(func)
        given = tree.tensors(args, kwargs)
        targets = [*written(facts, args, kwargs)]
        # Where an operator fills a tensor, anything may have been there.
        fills = targets if overwrites(func) or not facts.is_aten else []
        filled = {id(each) for each in fills}
        before = [each for each in given if id(each) not in filled and self.has(each)]
        result = func(*args, **kwargs)
        if facts.name in _ALLOCATES or facts.is_view:
            return result
        made = [*tree.tensors(result), *targets]
        for tensor in made:
            key = tree.storage_key(tensor)
            if key is None or not self.has(tensor):
                continue
            origin = next(map(self.origin_of, before), None)
            if origin is None:
                outside = next(iter(before), None)
                argument = "" if outside is None else self._name(outside)
                origin = Origin(str(func), user_source(), argument)
                self.first = self.first or origin
            self.origins[key] = tensor.untyped_storage(), origin
        return result

    def _name(self, tensor: torch.Tensor) -> str:
        name = self._names.get(tensor.untyped_storage().data_ptr())
        return f"input {name!r}" if name else described(tensor)


def first_nan(
    executor: StepExecutor, step: Step, *, inf: bool = False, writes: _Writes | None = None
) -> Origin | None:
    """The origin of the NaN that an eager run of a step's live rows returns; None if it returns
    none. State is put back. `writes` is told what the run was about to write."""
    setup, inputs = executor.graphs.setup, executor.inputs
    # First: it says so by name where graphrt.trust is left out.
    checks: Any = executor.graphs.checks
    reads = (checks if checks.tried_by is None else checks.tried_by()).reads
    from graphrt.trust.snapshot import StateSnapshot
    from graphrt.trust.trials import watched
    from graphrt.trust.watching.watch import Watch

    batch, reqs = step.batch, reqs_of(inputs, step.batch, step.values)
    executor.pool.streams.follow()
    views = unseen(partial(inputs.copies, step.values, batch.num_tokens, reqs))
    names = {view.untyped_storage().data_ptr(): name for name, view in views.items()}
    platform = setup.pool.platform
    limit = setup.options.state_limit(platform)
    state = StateSnapshot(platform.device_type, limit, setup.host.state, sums=False)
    state.reach(reads.places())
    watch = Watch(frozenset(names), state.memory, generators=state.generators, compared=False)
    origins = _Origins(names, inf=inf)
    # Not the graph's, to which host arguments of tasks would be padded.
    descriptor = unpadded(batch)
    context = ForwardContext(
        GraphMode.NONE, descriptor, -1, step.updates, step.metadata, num_reqs=reqs, live=batch
    )
    try:
        if setup.host.bind is not None:
            setup.host.bind(views, descriptor, "eager")
        forward = partial(setup.run_forward, **inputs.nest(views))
        around = partial(watched, watch, None)
        outputs = executor._in_context(
            context, forward, lambda forward: around(lambda: origins.around(forward))
        )
        if writes is not None:
            unseen(partial(writes.note, state.memory.regions, views))
            return None
        bad = [each for each in tree.tensors(outputs) if origins.has(each)]
        found = next((o for o in map(origins.origin_of, bad) if o is not None), origins.first)
        return found if bad else None
    finally:
        state.restore()


def error_of(origin: Origin | None, step: Step, where: str, *, inf: bool) -> NanError:
    """The error for a step with a NaN of this origin, or with `inf` an infinity."""
    returned = f"a step has returned a NaN{' or an infinity' if inf else ''}, {where}"
    if origin is None:
        return NanError(
            f"{returned}; run eagerly on its live rows it returns none",
            op=None,
            source=None,
            got=str(step.batch),
            advice="runner.verify(...) compares both; or state that was not copied has changed",
        )
    if origin.argument:
        what = f"{returned}, which was there before: in {origin.argument}"
    else:
        what = f"{returned}: {origin.op} made it of arguments without one"
    at = origin.source or "an unknown line"
    return NanError(
        what,
        op=origin.op,
        source=None if origin.source is None else str(origin.source),
        got=f"{origin.op} at {at}",
        expected="numbers",
        advice="mend that line, or what its arguments come from",
    )


def verified(runner: Any, verify: Callable[[], Any], step: tuple[Any, ...], *, inf: bool) -> Any:
    """What `verify` returns; raises `NanError` if that has a NaN. `step` has its batch, values,
    updates and metadata."""
    batch, values, updates, metadata = step
    executor = runner._executor
    batch = checked_batch(batch_of(executor.inputs, values) if batch is None else batch)
    flat = tree.cloned(executor.inputs.declared.check(values, None, None))
    found = runner.dispatcher.peek(batch)
    tried = Step(batch, found, flat, executor.updates_of(updates), metadata)
    # First: the step that is verified leaves its effects.
    origin = runner._in_turn(partial(first_nan, executor, tried, inf=inf))
    outputs = verify()
    flag = unseen(lambda: _bad(tree.tensors(outputs), inf=inf))
    if flag is not None and bool(flag):
        raise error_of(origin, tried, "as verified", inf=inf)
    return outputs


# While steps run ---------------------------------------------------------------------------------


Saved: TypeAlias = "tuple[Region, torch.Tensor]"
"""Memory, and what was in it."""


class _Writes:
    """What a graph writes, as a watched run of one of its steps has shown."""

    def __init__(self, executor: StepExecutor) -> None:
        setup = executor.graphs.setup
        # Up to `_MOST_WAITING` steps have copies.
        self._left = setup.options.state_limit(setup.pool.platform) // _MOST_WAITING
        self._whole: list[Region] = []
        # Rows of larger tensors, and the index input that has their numbers.
        self._rows: list[tuple[Region, str]] = []

    def note(self, regions: Iterable[Region], views: Mapping[str, torch.Tensor]) -> None:
        """Note the regions of a run on these inputs."""
        from graphrt.trust.watching.rows import WHOLE
        from graphrt.trust.watching.writes import Region

        seen = set[object]()
        for region in regions:
            tensor = region.tensor()
            place = region.key, region.place
            if tensor is None or place in seen:
                continue
            if tensor.nbytes <= self._left:
                self._left -= tensor.nbytes
                seen.add(place)
                self._whole.append(Region(tensor, WHOLE, region.use))
                continue
            name = _input_of(region, views)
            if name is not None:
                self._rows.append((region, name))

    def saved(self, step: Step) -> list[Saved]:
        """Copies of what a step is about to write."""
        from graphrt.trust.watching.rows import Rows
        from graphrt.trust.watching.writes import Region

        saved = [(region, region.read()) for region in self._whole]
        for region, name in self._rows:
            tensor = region.tensor()
            if tensor is None:
                continue
            index = step.values[name].to(tensor.device).reshape(-1)
            at = [index if isinstance(each, torch.Tensor) else each for each in region.rows.at]
            now = Region(tensor, Rows((*at,), (index,)), region.use)
            saved.append((now, now.was))
        return saved


def _input_of(region: Region, views: Mapping[str, torch.Tensor]) -> str | None:
    """The input that has the row numbers of a region; None if none has, or several indices do."""
    chosen = region.rows.chosen
    for name, view in views.items() if len(chosen) == 1 else ():
        index = chosen[0].reshape(-1)
        is_index = not view.is_floating_point() and view.numel() == index.numel()
        if is_index and torch.equal(view.reshape(-1).to(index), index):
            return name
    return None


def _write(regions: Iterable[Region], values: Iterable[torch.Tensor]) -> None:
    for region, value in zip(regions, values, strict=True):
        region.write(value)


class _Waiting(NamedTuple):
    """A step whose outputs are tested on the device: the answer, an event behind it (None on the
    CPU), what was copied."""

    flag: torch.Tensor
    event: Any
    step: Step
    saved: Sequence[Saved]


class NanWatch:
    """Stands before the steps of a runner with `GraphOptions(find_nan=)`."""

    def __init__(self, runner: Any) -> None:
        # Not the runner itself: in that cycle its graphs would live until the collector runs.
        self.run: Callable[..., Any] = runner._run
        self._executor: StepExecutor = runner._executor
        self._engine = runner._engine
        setup = self._executor.graphs.setup
        if setup.host.ranks is not None:
            raise InvalidOptionError(
                "a rank alone cannot run a step again, as others would wait in its collectives",
                got=f"find_nan={setup.options.find_nan!r} and Host(ranks=)",
                expected="one of them",
                advice="leave find_nan out, and test the outputs of each rank",
            )
        self._inf = setup.options.find_nan == "inf"
        self._strict = setup.options.strict
        self._waiting: deque[_Waiting] = deque()
        # slot -> the memory that its graph writes.
        self._writes: dict[int, _Writes] = {}
        # Operators and lines that were warned of.
        self._warned = set[object]()

    def __call__(self, batch: Any, values: Any, updates: Any, metadata: Any, agreed: Any) -> Any:
        executor = self._executor
        if under_way and is_inside_capture():
            return self.run(batch, values, updates, metadata, agreed)
        self.look()
        batch, values = executor.inputs.completed(batch, values)
        known = batch if batch is not None else batch_of(executor.inputs, values)
        found = executor.graphs.dispatcher.peek(known)
        flat = tree.cloned(executor.inputs.declared.check(values, None, None))
        step = Step(known, found, flat, executor.updates_of(updates), metadata)
        saved: list[Saved] = []
        if found.slot >= 0:
            if found.slot not in self._writes:
                self._writes[found.slot] = writes = _Writes(executor)
                self._in_turn(partial(first_nan, executor, step, writes=writes))
            # The step may come on another stream than the one before it.
            executor.pool.streams.follow()
            saved = unseen(partial(self._writes[found.slot].saved, step))
        outputs = self.run(batch, values, updates, metadata, agreed)
        self._test(outputs, step, saved)
        return outputs

    def _in_turn(self, call: Callable[[], Any]) -> Any:
        pool = self._executor.pool
        with pool.on_device():
            return in_turn(pool, self._executor.graphs.setup.owner, call)

    def _test(self, outputs: Any, step: Step, saved: Sequence[Saved]) -> None:
        flag = unseen(lambda: _bad(tree.tensors(outputs), inf=self._inf))
        if flag is None:
            return
        event: Any = None
        if flag.device.type != "cpu":
            platform, on_device = self._executor.pool.platform, flag
            flag = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
            unseen(partial(flag.copy_, on_device, non_blocking=True))
            event = platform.new_event()
            event.record(platform.current_stream())
        self._waiting.append(_Waiting(flag, event, step, saved))

    def look(self) -> None:
        """Read the answers that are there, and find the operator of each NaN."""
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            if first.event is not None and not first.event.query():
                if len(waiting) < _MOST_WAITING:
                    return
                first.event.synchronize()
            waiting.popleft()
            if bool(first.flag):
                self._in_turn(partial(self._find, first))

    def _find(self, each: _Waiting) -> None:
        regions = [region for region, _ in each.saved]
        now = unseen(lambda: [region.read() for region in regions])
        try:
            unseen(partial(_write, regions, [was for _, was in each.saved]))
            origin = first_nan(self._executor, each.step, inf=self._inf)
        finally:
            unseen(partial(_write, regions, now))
        where = f"in a batch of {each.step.batch.num_tokens} tokens"
        error = error_of(origin, each.step, where, inf=self._inf)
        if self._strict:
            raise error
        key = None if origin is None else origin[:2]
        if key not in self._warned:
            self._warned.add(key)
            warn_caller(str(error), NanWarning)
