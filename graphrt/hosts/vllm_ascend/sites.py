"""The sites of a graph at which attention waits for new lengths, as graphrt's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from threading import get_ident
from typing import Any

import torch

from graphrt.ascend import TaskHandle, UpdateWindow
from graphrt.core.base import tree
from graphrt.core.base.errors import TaskContractError
from graphrt.core.replay.recording import Recording
from graphrt.core.replay.tasks import CapturedTask, UpdatableTask
from graphrt.hosts.vllm_ascend.operators import Issued, OperatorWatch


class Site:
    """One attention call of a graph: the event, parameters and task group that the host noted for
    it, and its task in graphrt."""

    def __init__(self, sites: Sites, tokens: int, event: Any) -> None:
        self.sites = sites
        self.tokens = tokens
        """The token count under which the host finds the site."""
        self.event = SiteEvent(self, event)
        self.params: Any = None
        self.group: Any = None
        self.issued: Issued | None = None
        """The attention operator with its last arguments; None if it was not seen."""
        self.task: CapturedTask | None = None
        # The arguments of the replay before, kept alive as the device may still read them.
        self.before: Issued | None = None


class SiteEvent:
    """The host's event of a site, which the host may signal only inside of an update by graphrt."""

    def __init__(self, site: Site, event: Any) -> None:
        self.site = site
        self.event = event

    def record(self, stream: Any = None) -> None:
        """Let the graph run behind this site; raises `TaskContractError` outside of an update."""
        update = under_way.get()
        if update is None:
            raise TaskContractError(
                "a site of a captured graph was signalled outside of its update",
                got=f"{self.site.tokens} tokens",
                expected="a call of vllm_ascend.compilation.acl_graph.update_full_graph_params",
                advice="call that function, which graphrt serves, or uninstall() graphrt",
            )
        update.signal(self.site, stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


class Sites:
    """The sites that one capture fills of one `GraphParams`, in the order of its calls."""

    def __init__(self, params: Any, recording: Recording) -> None:
        self.params = params
        self.workspaces: dict[int, Any] = {}
        """Token count -> the scratch memory that the host has put there."""
        self.issued: list[Site] = []
        """The sites that have ended, in order."""
        self._recording = recording
        # `workspaces` for after the capture: references that keep none of the graph's memory.
        self._kept: dict[int, Any] = {}
        # The site that has begun and not ended.
        self._open: Site | None = None
        self._watch = OperatorWatch()

    def begin(self, tokens: int, event: Any) -> SiteEvent:
        """The host waits for `event` in the graph: a site begins."""
        if self._open is not None:
            raise TaskContractError(
                "a site of a graph began inside of another one",
                got=f"{tokens} tokens",
                expected="one event, one tuple of parameters and one handle for each call",
                advice="end the site of one operator before that of the next one begins",
            )
        self._open = site = Site(self, tokens, event)
        self._watch.__enter__()
        return site.event

    def note(self, params: Any) -> None:
        """The host keeps `params` for the update of the open site."""
        self._of_open("parameters").params = params

    def end(self, group: Any) -> None:
        """The host closed the task group of the open site: it is a task of the graph now."""
        site = self._of_open("a handle")
        self._open = None
        self._watch.__exit__(None, None, None)
        issued = self._watch.take()
        site.group = group
        if issued:
            function, args, kwargs = issued[-1]
            args, kwargs = tree.map_leaves(self._recording.captured_ref, (args, kwargs))
            site.issued = Issued(function, args, kwargs)
        spec = UpdatableTask("vllm-ascend", site.issued.function if site.issued else _unknown, {})
        name = f"call {len(self.issued)} of {site.tokens} tokens"
        handle = TaskHandle(group, site.event.event, site)
        args, kwargs = (site.issued.args, site.issued.kwargs) if site.issued else ((), {})
        site.task = CapturedTask(spec, name, handle, args, kwargs, {})
        self._recording.add_task(site.task)
        self.issued.append(site)
        for tokens, workspace in self.workspaces.items():
            if isinstance(workspace, torch.Tensor):
                self._kept[tokens] = self._recording.captured_ref(workspace)

    def captured(self) -> None:
        """The capture is over: workspaces in the graph's memory are held by the graph alone."""
        self.workspaces = self._kept
        del self._recording

    def workspace(self) -> torch.Tensor | None:
        """The largest scratch memory that a site was captured with."""
        workspaces = [site.issued.workspace for site in self.issued if site.issued is not None]
        tensors = [each for each in workspaces if each is not None]
        return max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size(), default=None)

    def _of_open(self, what: str) -> Site:
        if self._open is None:
            raise TaskContractError(
                f"{what} of a site that has not begun",
                expected="the site's event first, then its parameters and its handle",
                advice="append the event to GraphParams.events before the other two",
            )
        return self._open


class ExternalWaits:
    """Counts the waits for external events that this thread captures."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> ExternalWaits:
        events: Any = torch.npu.ExternalEvent  # type: ignore[attr-defined]
        self._wait, thread = events.wait, get_ident()

        def wait(event: Any, stream: Any = None) -> None:
            self.count += get_ident() == thread
            self._wait(event, stream)

        events.wait = wait
        return self

    def __exit__(self, *error: object) -> None:
        events: Any = torch.npu.ExternalEvent  # type: ignore[attr-defined]
        events.wait = self._wait


class HostUpdate:
    """The update of a graph by its host: checks the operators that it issues for each site."""

    def __init__(self, sites: Sequence[Site], window: UpdateWindow) -> None:
        self.sites = sites
        self.watch = OperatorWatch(sites[0].sites.workspace())
        self._window = window

    def signal(self, site: Site, stream: Any) -> None:
        """Keep the arguments that `site` was issued with, and let the graph run behind it.

        Raises `TaskContractError` for another operator than the captured one or another stream.
        """
        if stream is not None and stream != self._window.stream:
            raise TaskContractError(
                "a site was updated on another stream than it was given",
                got=stream,
                expected=self._window.stream,
                advice="update on the stream that was given to the updating function",
            )
        issued = self.watch.take()
        if issued and site.issued is not None:
            # Before it others may have been issued, such as one that computes the workspace.
            same_operator = [each for each in issued if each.function is site.issued.function]
            if len(same_operator) != 1 or same_operator[0] is not issued[-1]:
                raise TaskContractError(
                    "a site was updated with other operators than it was captured with",
                    got=", ".join(str(each.function) for each in issued),
                    expected=str(site.issued.function),
                    advice="issue the captured operator once, between update_begin and update_end",
                )
            site.before, site.issued = site.issued, same_operator[0]
        assert site.task is not None
        self._window.signal(site.task)


def _unknown(*args: Any, **kwargs: Any) -> None:
    raise TaskContractError(
        "the operator of this site was not seen when it was captured, so graphrt cannot issue it",
        expected="an operator of torch that writes to what it is given",
        advice="let the host update it",
    )


under_way: ContextVar[HostUpdate | None] = ContextVar("graphrt_vllm_ascend_update", default=None)
