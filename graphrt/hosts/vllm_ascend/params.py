"""`GraphParams`: where attention notes the sites of a graph, and finds them again to update them.

A *site* is one call of attention, which waits for new lengths. Sites are found by token count, as
in vllm-ascend, but only those of the graph that is captured or updated now: graphs of equal token
counts do not see each other's sites or workspaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphrt.core.base.errors import TaskContractError
from graphrt.core.replay.recording import current_capture
from graphrt.hosts.vllm_ascend.missing import logger
from graphrt.hosts.vllm_ascend.sites import Site, Sites, under_way


@dataclass(eq=False)
class GraphParams:
    """vllm-ascend's class of this name: four mappings by token count.

    `events`, `handles` and `attn_params` hold lists, `workspaces` tensors or None. Outside of
    graphrt's captures and updates they are ordinary dicts: so graphs that vllm-ascend captures
    without the wrapper (its second model runner) work as they do without graphrt, and the log says
    so.
    """

    events: dict[int, Any]
    workspaces: dict[int, Any]
    handles: dict[int, Any]
    attn_params: dict[int, Any]

    def __post_init__(self) -> None:
        self._captures: WeakKeyDictionary[Any, Sites] = WeakKeyDictionary()
        self.events = _ByTokens(self, self.events, Sites.begin, lambda site: site.event)
        self.handles = _ByTokens(
            self, self.handles, lambda sites, _, group: sites.end(group), lambda site: site.group
        )
        self.attn_params = _ByTokens(
            self,
            self.attn_params,
            lambda sites, _, params: sites.note(params),
            lambda site: site.params,
        )
        self.workspaces = _Workspaces(self, self.workspaces)

    def _capturing(self) -> Sites | None:
        """The sites of the capture that is under way in this thread."""
        recording = current_capture()
        if recording is None:
            return None
        if recording not in self._captures:
            self._captures[recording] = Sites(self, recording)
        return self._captures[recording]

    def _updating(self, tokens: int) -> list[Site] | None:
        """The sites of the graph that is updated now; None outside of updates. Raises
        `TaskContractError` if that graph has no sites here for so many tokens."""
        update = under_way.get()
        if update is None:
            return None
        sites = [s for s in update.sites if s.sites.params is self and s.tokens == tokens]
        if not sites:
            first = update.sites[0]
            raise TaskContractError(
                "an update asks for the sites of another graph than the one it is for",
                got=f"{tokens} tokens"
                + " of another GraphParams" * (first.sites.params is not self),
                expected=f"{first.tokens} tokens",
                advice="the GraphParams, and the number of tokens, of the graph that is replayed",
            )
        return sites


@functools.cache
def not_served(graphs: str) -> None:
    """Say once which graphs of vllm-ascend are left to its own code."""
    logger.warning("graphrt: not served: %s; vllm-ascend's own code replays them", graphs)


class _ByTokens(dict[int, Any]):
    """Lists by token count: of the capture or update under way, else those that the host put in."""

    def __init__(
        self,
        params: GraphParams,
        host_values: Mapping[int, Any],
        add: Callable[[Sites, int, Any], Any],
        read: Callable[[Site], Any],
    ) -> None:
        super().__init__(host_values)
        self._params = params
        self._add = add
        self._read = read

    def __getitem__(self, tokens: int) -> Any:
        sites = self._params._capturing()
        if sites is not None:
            return _Column(lambda value: self._add(sites, tokens, value))
        updated = self._params._updating(tokens)
        if updated is not None:
            return [self._read(site) for site in updated]
        if torch.npu.is_current_stream_capturing():  # type: ignore[attr-defined]
            not_served("graphs captured without its ACLGraphWrapper (as its V2 model runner does)")
        return super().__getitem__(tokens)

    def get(self, tokens: int, default: Any = None) -> Any:
        try:
            return self[tokens]
        except KeyError:
            return default


class _Column(list[Any]):
    """A list of a capture, to which the host can append only."""

    def __init__(self, add: Callable[[Any], Any]) -> None:
        super().__init__()
        self._add = add

    def append(self, value: Any) -> None:
        self._add(value)

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add(value)


class _Workspaces(dict[int, Any]):
    """Workspaces by token count: of the capture or update under way, else what the host put in."""

    def __init__(self, params: GraphParams, host_values: Mapping[int, Any]) -> None:
        super().__init__(host_values)
        self._params = params

    def _of_graph(self, tokens: int) -> dict[int, Any] | None:
        sites = self._params._capturing()
        if sites is not None:
            return sites.workspaces
        updated = self._params._updating(tokens)
        return None if updated is None else updated[0].sites.workspaces

    def __getitem__(self, tokens: int) -> Any:
        workspaces = self._of_graph(tokens)
        return super().__getitem__(tokens) if workspaces is None else workspaces.get(tokens)

    def get(self, tokens: int, default: Any = None) -> Any:
        workspaces = self._of_graph(tokens)
        return (
            super().get(tokens, default) if workspaces is None else workspaces.get(tokens, default)
        )

    def __setitem__(self, tokens: int, workspace: Any) -> None:
        sites = self._params._capturing()
        if sites is None:
            super().__setitem__(tokens, workspace)
        else:
            sites.workspaces[tokens] = workspace
