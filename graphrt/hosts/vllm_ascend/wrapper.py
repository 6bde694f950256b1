"""vllm-ascend's `ACLGraphWrapper`, with graphrt's captures, replays and updates inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from graphrt.ascend import AscendPlatform
from graphrt.ascend.waiting import DeferrableEntry
from graphrt.core.base import tree
from graphrt.core.base.errors import GraphRTError, InvalidModeError, TaskContractError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.replay.entry import Entry, Segment
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import current_capture
from graphrt.core.replay.tasks import DEFERRED
from graphrt.hosts.vllm_ascend.engine import Engine
from graphrt.hosts.vllm_ascend.entries import ACLGraphEntry, Entries
from graphrt.hosts.vllm_ascend.missing import pools, refuse_waiting, watch
from graphrt.hosts.vllm_ascend.params import not_served
from graphrt.hosts.vllm_ascend.sites import ExternalWaits, HostUpdate, Site, under_way


class NoModeError(InvalidModeError, AssertionError):
    """A wrapper for mode NONE; also the kind of error that vllm-ascend raises for it."""


class ACLGraphWrapper:
    """Captures and replays `runnable` in steps of `runtime_mode`, with the engine's own contexts.

    What vllm-ascend reads of its wrapper is here; a subclass names its `engine`. Attributes that it
    lacks are the runnable's.
    """

    engine: ClassVar[Engine]

    def __init__(
        self,
        runnable: Callable[..., Any],
        vllm_config: Any,
        runtime_mode: Any,
        cudagraph_options: Any = None,
        *,
        use_eagle: bool = False,
        enable_enpu: bool = False,
    ) -> None:
        """`runtime_mode` is vLLM's; raises `InvalidModeError` for NONE. `use_eagle` and
        `enable_enpu` say in which steps vllm-ascend waits for the device. graphrt lets the device
        wait in all steps.
        """
        self.runnable = runnable
        self.vllm_config = vllm_config
        self.runtime_mode = runtime_mode
        self.compilation_config = vllm_config.compilation_config
        if getattr(self.compilation_config, "cudagraph_mm_encoder", False) is True:
            not_served("graphs of encoders (cudagraph_mm_encoder)")
        self.first_run_finished = False
        self.is_debugging_mode = self.engine.is_debugging()
        self._runnable_str = str(runnable) if self.is_debugging_mode else None
        self._mode = GraphMode.parse(runtime_mode.name)
        if self._mode is GraphMode.NONE:
            raise NoModeError(
                "a wrapper captures in one runtime mode",
                got="NONE",
                expected="FULL or PIECEWISE",
                advice="call the runnable itself in steps of mode NONE",
            )
        self.graph_pool = self.engine.graph_pool()
        self.aclgraph_options = (
            self.engine.default_options() if cudagraph_options is None else cudagraph_options
        )
        self.use_eagle = use_eagle
        self.enable_enpu = enable_enpu
        # graphrt's wrapper, made at the first call that captures; the context of its last call.
        self._graphs: GraphWrapper | None = None
        self._context: ForwardContext | None = None
        # A graph that was updated before its call, and the engine's context for which it was.
        self._ahead: tuple[Segment, Any] | None = None
        # vLLM's descriptor of a captured graph -> graphrt's.
        self._descriptors: dict[Any, BatchDescriptor] = {}
        self._entries = Entries(self._check_idle, self._drop)
        self.engine.wrappers().add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay the runnable, as the engine's forward context says.

        A replay of a graph with sites waits on the device for `update_full_graph_params`, unless
        that was called before; for one that never comes see `graphrt.hosts.vllm_ascend.missing`.
        Raises what `GraphWrapper` raises, and the engine where it captures no more.
        """
        host = self.engine.forward_context()
        # By !=, as the engine compares modes: its tests use stand-ins for them.
        if host.cudagraph_runtime_mode != self.runtime_mode:
            if self._graphs is not None and self._graphs.pool.owner is not None:
                refuse_waiting()
            return self.runnable(*args, **kwargs)
        key = host.batch_descriptor
        descriptor = self._descriptors.get(key)
        if descriptor is None:
            descriptor = BatchDescriptor(key.num_tokens, variant=key)
        graphs = self._graphs or self._new_graphs()
        self._context = ForwardContext(self._mode, descriptor, updates=DEFERRED)
        if key in self._entries:
            if self._ahead is not None:
                self._take_ahead(graphs, host, graphs.entries[descriptor])
            return graphs(*args, **kwargs)
        self.engine.check_capturing_enabled()
        if self.aclgraph_options.debug_log_enable:
            self.engine.log_capture(self._mode.name, key)
        # Stays set: the engine asks afterwards, whether there is anything to update.
        host.capturing = True
        output = graphs(*args, **kwargs)
        self._note(key, descriptor, args)
        return output

    def __getattr__(self, name: str) -> Any:
        runnable = self.__dict__.get("runnable")
        if runnable is not None and hasattr(runnable, name):
            return getattr(runnable, name)
        shown = self.__dict__.get("_runnable_str")
        if shown is not None:
            raise AttributeError(f"Attribute {name} not exists in the runnable: {shown}")
        raise AttributeError(
            f"Attribute {name} not found. VLLM_LOGGING_LEVEL=DEBUG shows the runnable."
        )

    @property
    def concrete_aclgraph_entries(self) -> dict[Any, ACLGraphEntry]:
        """The captured graphs by vLLM's descriptor. One that is taken out is destroyed."""
        return self._entries

    @concrete_aclgraph_entries.setter
    def concrete_aclgraph_entries(self, entries: dict[Any, Any]) -> None:
        self._entries.clear()
        if entries:
            raise GraphRTError(
                "graphs cannot be put into a wrapper",
                got=f"{len(entries)} entries",
                expected="an empty dict, which destroys those that there are",
                advice="wrapper.concrete_aclgraph_entries = {}, and capture again",
            )

    def unwrap(self) -> Callable[..., Any]:
        """The runnable."""
        return self.runnable

    def clear_graphs(self) -> None:
        """Destroy every graph; the wrapper can capture again."""
        self._entries.clear()

    def update_by(
        self, host: Any, update: Callable[[Any], object], *, if_launched: bool = False
    ) -> bool:
        """Have `update(stream)` update the graph of the engine's context `host`, launched or not.

        Returns False, and does nothing, if this wrapper has no such graph with sites in `host`'s
        `GraphParams`; with `if_launched` also if that graph waits for no update.
        """
        graphs, entry = self._graphs, self._entry_of(host)
        if graphs is None or entry is None or not entry.tasks:
            return False
        sites = [task.handle.record for task in entry.tasks]
        if not isinstance(sites[0], Site):
            return False
        if sites[0].sites.params is not self.engine.params_of(host):
            return False

        waiting = entry.waiting
        is_launched = waiting is not None and waiting is graphs.pool.owner
        if if_launched and not is_launched:
            return False

        def apply(segment: Segment) -> None:
            platform = cast(AscendPlatform, graphs.pool.platform)
            updating = platform.updating(segment.graph, segment.tasks)
            try:
                with updating as window:
                    served = HostUpdate(sites, window)
                    token = under_way.set(served)
                    try:
                        served.watch.around(lambda: update(window.stream))
                    finally:
                        under_way.reset(token)
            except BaseException as error:
                # Once more, which changes nothing: an interrupt may have kept it from beginning,
                # and then the stream is locked until the traceback goes.
                updating.__exit__(type(error), error, None)
                raise

        if waiting is not None and is_launched:
            waiting.end_by(graphs.pool, apply)
        else:
            (segment,) = (part for part in entry.parts if isinstance(part, Segment) and part.tasks)
            if self._ahead is not None:
                self._take_ahead(graphs, host, entry)
            # First: after an interrupt behind the update the next call takes it back.
            self._ahead = segment, host
            apply(segment)
        return True

    def _entry_of(self, host: Any) -> DeferrableEntry | None:
        """The graph of the engine's context `host`."""
        descriptor = self._descriptors.get(getattr(host, "batch_descriptor", None))
        if self._graphs is None or descriptor is None:
            return None
        return cast("DeferrableEntry | None", self._graphs.entries.get(descriptor))

    def _take_ahead(self, graphs: GraphWrapper, host: Any, called: Entry) -> None:
        """Use up an update that came before its call. If this call is for another context or graph,
        take the update back."""
        assert self._ahead is not None
        segment, updated_for = self._ahead
        self._ahead = None
        if updated_for is not host or segment not in called.parts:
            platform = cast(AscendPlatform, graphs.pool.platform)
            platform.forget_update(segment.graph, segment.tasks)

    def _new_graphs(self) -> GraphWrapper:
        pool = pools.get(self.graph_pool)
        if pool is None:
            pool = pools[self.graph_pool] = GraphPool()
        watch(cast(AscendPlatform, pool.platform).options.hang_timeout_s)
        options = GraphOptions(lazy=True, check="always" if self.is_debugging_mode else "capture")
        self._graphs = wrapper_class(pool.platform)(
            self._forward,
            self._mode,
            pool=pool,
            read_context=lambda: self._context,
            options=options,
            hooks=self.engine.hooks(),
        )
        return self._graphs

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        if capture is None:
            return self.runnable(*args, **kwargs)
        with ExternalWaits() as waits:
            output = self.runnable(*args, **kwargs)
        noted = capture.task_count
        if waits.count > noted:
            raise TaskContractError(
                "a captured graph waits for updates that graphrt does not see, so it would never "
                "end",
                got=f"{waits.count} waits in the graph of {self._context}, {noted} of them in "
                "GraphParams",
                expected="each event of an attention call in vllm-ascend's GraphParams",
                advice="uninstall() graphrt, or a vllm-ascend whose attention fills GraphParams",
            )
        if self.aclgraph_options.weak_ref_output:
            # No other graph reads the output, so graphs captured later may use its memory.
            output = tree.map_leaves(capture.captured_ref, output)
        return output

    def _note(self, key: Any, descriptor: BatchDescriptor, args: tuple[Any, ...]) -> None:
        assert self._graphs is not None
        entry = self._graphs.entries.get(descriptor)
        if entry is None:
            return  # GRAPHRT_MODE=NONE: it ran eagerly
        for sites in {site.sites for site in _sites_of(entry)}:
            sites.captured()
        self.engine.count_capture()
        addresses = [x.data_ptr() for x in args if isinstance(x, torch.Tensor)]
        self._descriptors[key] = descriptor
        self._entries.add(key, ACLGraphEntry(key, entry, addresses))

    def _check_idle(self) -> None:
        """Raise while a step is under way; one that waits for its update is ended by that."""
        if self._graphs is not None:
            self._graphs.pool.check_idle()

    def _drop(self, key: Any) -> None:
        descriptor = self._descriptors.pop(key, None)
        if self._graphs is not None and descriptor is not None:
            self._graphs.drop(descriptor)


def _sites_of(entry: Entry) -> list[Site]:
    records = [task.handle.record for task in entry.tasks]
    return [record for record in records if isinstance(record, Site)]
